/* Waits for events as libuv does: registers what it waits for by an io_uring if there is one, and by epoll_ctl(2) otherwise. Answers each
 * request with what came of the ring, and of other calls by syscall(2). */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "listens.h"

/* What libuv asks for: 64 entries, and in which state they are. */
static const char *ring(void)
{
	static unsigned char parameters[120];
	long ring = syscall(SYS_io_uring_setup, 64, parameters);

	if (ring < 0)
		return errno == ENOSYS ? "no ring" : strerror(errno);
	close((int)ring);
	return "a ring";
}

/* Six arguments, results beyond an int, and errors. */
static const char *calls(void)
{
	char *page = (char *)syscall(SYS_mmap, NULL, 4096L, (long)(PROT_READ | PROT_WRITE),
				     (long)(MAP_PRIVATE | MAP_ANONYMOUS), -1L, 0L);

	if (page == MAP_FAILED)
		return "no page";
	page[4095] = 1;
	if (syscall(SYS_munmap, page, 4096L) || syscall(SYS_getpid) != getpid())
		return "no process";
	errno = 0;
	return syscall(SYS_fcntl, -1L, F_GETFD) == -1 && errno == EBADF ? "calls" : "no error";
}

int main(int count, char **arguments)
{
	int listener, set = epoll_create1(EPOLL_CLOEXEC);
	struct epoll_event event = { .events = EPOLLIN };
	const char *with = ring();

	if (count != 2)
		return 2;
	listener = listens_at(arguments[1], SOCK_STREAM | SOCK_NONBLOCK);
	if (listener < 0)
		return 4;
	event.data.fd = listener;
	epoll_ctl(set, EPOLL_CTL_ADD, listener, &event);
	for (;;) {
		char request[8192], response[200], text[100];
		int client;

		if (epoll_wait(set, &event, 1, -1) != 1)
			continue;
		client = event.data.fd;
		if (client == listener) {
			client = accept4(listener, NULL, NULL, SOCK_NONBLOCK);
			event = (struct epoll_event){ .events = EPOLLIN, .data.fd = client };
			if (client >= 0)
				epoll_ctl(set, EPOLL_CTL_ADD, client, &event);
			continue;
		}
		if (read(client, request, sizeof(request)) <= 0) {
			close(client);
			continue;
		}
		snprintf(text, sizeof(text), "%s, %s\n", with, calls());
		snprintf(response, sizeof(response), "HTTP/1.1 200 OK\r\nContent-Length: %zu\r\n\r\n%s", strlen(text), text);
		if (write(client, response, strlen(response)) < 0)
			close(client);
	}
}
