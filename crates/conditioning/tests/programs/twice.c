/*
 * server PORT WAY: answers with what came of further sockets at its own address: in its process, in a child, in another program, at another
 * address, while a child alone has the listening socket, when that has ended, while another listens, when that was killed, and in a
 * process that becomes another program, which does not keep the socket and listens elsewhere first. With "says" it only says so; with "tries" and "renews" it is one
 * of those programs, of which the error is the status.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "listens.h"

static char said[300];
static const char *port;

/* A socket that listens at this address, or its error as a negative number. */
static int open_at(const char *host)
{
	struct sockaddr_in address = { .sin_family = AF_INET, .sin_port = htons((unsigned short)atoi(port)) };
	int fd = socket(AF_INET, SOCK_STREAM, 0), one = 1, error;

	inet_pton(AF_INET, host, &address.sin_addr);
	setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one));
	if (!bind(fd, (struct sockaddr *)&address, sizeof(address)) && !listen(fd, 1))
		return fd;
	error = errno;
	close(fd);
	return -error;
}

static int error_at(const char *host)
{
	int fd = open_at(host);

	if (fd < 0)
		return -fd;
	close(fd);
	return 0;
}

static void say(const char *what, int error)
{
	size_t length = strlen(said);

	snprintf(said + length, sizeof(said) - length, "%s%s: %s", length ? ", " : "", what, strerrorname_np(error));
}

static int status_of(pid_t child)
{
	int status;

	return waitpid(child, &status, 0) == child && WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

/* A child that has said that it is there, and that it listens if `opens`, and does nothing more. */
static pid_t idle(int opens)
{
	int ends[2];
	pid_t child;
	char byte;

	if (pipe(ends) || (child = fork()) < 0)
		_exit(7);
	if (!child) {
		if (opens && listens_at(port, SOCK_STREAM) < 0)
			_exit(8);
		if (write(ends[1], "", 1) == 1)
			pause();
		_exit(9);
	}
	if (read(ends[0], &byte, 1) != 1)
		_exit(10);
	close(ends[0]);
	close(ends[1]);
	return child;
}

static void end(pid_t child)
{
	kill(child, SIGKILL);
	waitpid(child, NULL, 0);
}

static void try_all(const char *self)
{
	int listener = listens_at(port, SOCK_STREAM);
	pid_t child;

	say("here", error_at("127.0.0.1"));
	if (!(child = fork()))
		_exit(error_at("127.0.0.1"));
	say("child", status_of(child));
	if (!(child = fork())) {
		close(listener);
		execl(self, self, port, "tries", NULL);
		_exit(11);
	}
	say("program", status_of(child));
	say("elsewhere", error_at("127.0.0.2"));
	child = idle(0);
	close(listener);
	say("held", error_at("127.0.0.1"));
	end(child);
	say("closed", error_at("127.0.0.1"));
	child = idle(1);
	say("another's", error_at("127.0.0.1"));
	end(child);
	say("killed", error_at("127.0.0.1"));
	if (!(child = fork())) {
		fcntl(open_at("127.0.0.1"), F_SETFD, FD_CLOEXEC);
		execl(self, self, port, "renews", NULL);
		_exit(11);
	}
	say("renewed", status_of(child));
}

int main(int argc, char **argv)
{
	char request[8192], response[500];
	int listener, client;

	if (argc != 3)
		return 2;
	port = argv[1];
	if (!strcmp(argv[2], "tries"))
		return error_at("127.0.0.1");
	if (!strcmp(argv[2], "renews")) {
		open_at("127.0.0.2");
		return error_at("127.0.0.1");
	}
	try_all(argv[0]);
	if (!strcmp(argv[2], "says"))
		return puts(said) < 0;
	listener = listens_at(port, SOCK_STREAM);
	while ((client = accept(listener, NULL, NULL)) >= 0) {
		if (read(client, request, sizeof(request)) > 0) {
			snprintf(response, sizeof(response), "HTTP/1.1 200 OK\r\nContent-Length: %zu\r\n\r\n%s", strlen(said), said);
			if (write(client, response, strlen(response)) < 0)
				perror("write");
		}
		close(client);
	}
	return 3;
}
