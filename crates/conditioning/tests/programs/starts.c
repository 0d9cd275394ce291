/* Starts a server, which it is itself, by one of the ways there are, with an environment that says nothing of what it was
   started with; or listens first and hands the socket on. The server says of what environment a program is that it starts. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

extern char **environ;

static int listening(const char *port)
{
	int s = socket(AF_INET, SOCK_STREAM, 0), one = 1;
	struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(atoi(port))};

	setsockopt(s, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one));
	if (bind(s, (struct sockaddr *)&address, sizeof(address)) < 0 || listen(s, 5) < 0) {
		perror("listen");
		exit(3);
	}
	return s;
}

static pid_t start_program(int output)
{
	char *arguments[] = {"env", NULL}, *nothing[] = {"A=b", NULL};
	pid_t child = vfork();

	if (child == 0) {
		dup2(output, 1);
		execve("/usr/bin/env", arguments, nothing);
		_exit(1);
	}
	return child;
}

static size_t environment_of_a_program(char *text, size_t room)
{
	int pipes[2];
	size_t length = 0;
	ssize_t got;
	pid_t child;

	if (pipe2(pipes, O_CLOEXEC) < 0)
		exit(4);
	child = start_program(pipes[1]);
	close(pipes[1]);
	while ((got = read(pipes[0], text + length, room - length)) > 0)
		length += got;
	close(pipes[0]);
	waitpid(child, NULL, 0);
	return length;
}

static int serve(int s)
{
	fcntl(s, F_SETFD, FD_CLOEXEC);
	for (;;) {
		char text[8192], answer[8192 + 128];
		int size, c = accept4(s, NULL, NULL, SOCK_CLOEXEC);

		if (c < 0)
			return 5;
		while (read(c, text, sizeof(text)) > 0) {
			size_t length = environment_of_a_program(text, sizeof(text));

			size = snprintf(answer, sizeof(answer), "HTTP/1.1 200 OK\r\nContent-Length: %zu\r\n\r\n%.*s", length,
				(int)length, text);
			if (write(c, answer, size) != size)
				perror("write");
		}
		close(c);
	}
}

static int wait_for(int failed, pid_t child)
{
	int status;

	if (failed || waitpid(child, &status, 0) != child)
		return 6;
	return WEXITSTATUS(status);
}

static int start_server(char *program, char **arguments, char **environment)
{
	pid_t child = vfork();

	if (child == 0) {
		execve("/none", arguments, environment);
		execve(program, arguments, environment);
		_exit(1);
	}
	return wait_for(child < 0, child);
}

int main(int argc, char **argv)
{
	char *way = argv[argc - 1], *program = "/proc/self/exe";
	char *arguments[] = {"server", argv[1], "serve", NULL};
	char *nothing[] = {NULL}, *other[] = {"B=c", "LD_PRELOAD=libm.so.6", NULL};
	static char *many[2001], *long_one[] = {NULL, NULL};
	char directory[4096], file[4096];
	pid_t child;
	int i;

	if (!strcmp(way, "serve"))
		return serve(listening(argv[1]));
	if (!strcmp(way, "handed"))
		return serve(5);
	/* By name, for those that look for it. */
	if (readlink(program, file, sizeof(file) - 1) < 0)
		return 7;
	strcpy(directory, file);
	*strrchr(directory, '/') = 0;
	setenv("PATH", directory, 1);
	if (!strcmp(way, "execve"))
		execve(program, arguments, nothing);
	if (!strcmp(way, "null"))
		execve(program, arguments, NULL);
	if (!strcmp(way, "other"))
		execve(program, arguments, other);
	if (!strcmp(way, "execvpe"))
		execvpe("server", arguments, nothing);
	if (!strcmp(way, "fexecve"))
		fexecve(open(program, O_RDONLY), arguments, nothing);
	if (!strcmp(way, "execveat"))
		execveat(open(program, O_RDONLY), "", arguments, nothing, AT_EMPTY_PATH);
	if (!strcmp(way, "execv")) {
		clearenv();
		execv(program, arguments);
	}
	if (!strcmp(way, "execvp")) {
		unsetenv("LD_PRELOAD");
		execvp("server", arguments);
	}
	if (!strcmp(way, "vfork"))
		return start_server(program, arguments, nothing);
	if (!strcmp(way, "posix_spawn"))
		return wait_for(posix_spawn(&child, file, NULL, NULL, arguments, nothing), child);
	if (!strcmp(way, "posix_spawnp"))
		return wait_for(posix_spawnp(&child, "server", NULL, NULL, arguments, nothing), child);
	if (!strcmp(way, "socket")) {
		arguments[2] = "handed";
		i = listening(argv[1]);
		if (dup2(i, 5) != 5 || close(i) < 0)
			return 8;
		execve("/none", arguments, nothing);
		execve(program, arguments, nothing);
	}
	if (!strcmp(way, "many")) {
		for (i = 0; i < 2000; i++)
			many[i] = "C=d";
		execve(program, arguments, many);
	}
	if (!strcmp(way, "long")) {
		long_one[0] = malloc(8192);
		memset(long_one[0], ' ', 8191);
		long_one[0][8191] = 0;
		memcpy(long_one[0], "LD_PRELOAD=", 11);
		execve(program, arguments, long_one);
	}
	return 9;
}
