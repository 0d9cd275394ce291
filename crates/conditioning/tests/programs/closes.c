/*
 * server PORT SEEN WAY: closes so many connections as programs do, and each further one in another way: by a system call of its
 * own, which no library sees (unseen), by syscall(2) (range, dup2), or in a child of which no handler hears (child). Behind each, a
 * file has the number that has become free, and the next request is answered with what was read there.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "listens.h"

static void close_unseen(int fd)
{
	long result;
#if defined(__x86_64__)
	__asm__ volatile("syscall" : "=a"(result) : "a"(SYS_close), "D"(fd) : "rcx", "r11", "memory");
#elif defined(__aarch64__)
	register long number __asm__("x8") = SYS_close, argument __asm__("x0") = fd;
	__asm__ volatile("svc 0" : "+r"(argument) : "r"(number) : "memory");
	result = argument;
#else
#error "how are system calls made here?"
#endif
	if (result < 0)
		_exit(3);
}

static int comm(void)
{
	return open("/proc/self/comm", O_RDONLY);
}

/* Reads a file that has the number of the connection, which is closed in this way. */
static void read_behind(int client, const char *way, char *content, size_t size)
{
	int file, pipes[2];
	ssize_t got;

	if (!strcmp(way, "child")) {
		if (pipe(pipes) < 0)
			_exit(8);
		if (_Fork() == 0) {
			close(client);
			got = comm() == client ? read(client, content, size - 1) : -1;
			_exit(got < 0 || write(pipes[1], content, (size_t)got) != got);
		}
		close(client);
		close(pipes[1]);
		got = read(pipes[0], content, size - 1);
		close(pipes[0]);
		content[got < 0 ? 0 : got] = 0;
		return;
	}
	if (!strcmp(way, "dup2")) {
		file = comm();
		if (syscall(SYS_dup3, file, client, 0) != client)
			_exit(9);
		close(file);
		file = client;
	} else {
		if (!strcmp(way, "range"))
			syscall(SYS_close_range, client, client, 0);
		else if (!strcmp(way, "unseen"))
			close_unseen(client);
		else
			close(client);
		file = comm();
	}
	if (file != client)
		_exit(7);
	got = read(file, content, size - 1);
	content[got < 0 ? 0 : got] = 0;
	close(file);
}

int main(int argc, char **argv)
{
	char request[8192], response[200], content[100] = "nothing yet";
	int listener, client, seen;

	if (argc != 4)
		return 2;
	seen = atoi(argv[2]);
	listener = listens_at(argv[1], SOCK_STREAM);
	if (listener < 0)
		return 4;
	for (;;) {
		client = accept(listener, NULL, NULL);
		if (client < 0 || read(client, request, sizeof(request)) < 0)
			return 5;
		snprintf(response, sizeof(response), "HTTP/1.1 200 OK\r\nContent-Length: %zu\r\n\r\n%s",
			 strlen(content), content);
		if (write(client, response, strlen(response)) < 0)
			return 6;
		read_behind(client, seen-- > 0 ? "seen" : argv[3], content, sizeof(content));
	}
}
