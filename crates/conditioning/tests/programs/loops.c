/* A server of several threads, each with an epoll set of its own: what a thread has closed must never be reported. */
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include "listens.h"

struct connection {
	int fd, is_closed;
};

static int listener;

static void answer(int epoll, struct connection *connection)
{
	static const char response[] = "HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nok\n";
	char request[8192];
	ssize_t got;

	if (connection->is_closed) {
		fprintf(stderr, "an event for a connection that was closed\n");
		_exit(3);
	}
	got = read(connection->fd, request, sizeof(request));
	if (got < 0 && errno == EAGAIN)
		return;
	if (got > 0 && write(connection->fd, response, sizeof(response) - 1) == sizeof(response) - 1)
		return;
	/* Not freed: whoever is told of it later can tell. */
	connection->is_closed = 1;
	if (epoll_ctl(epoll, EPOLL_CTL_DEL, connection->fd, NULL) < 0) {
		perror("EPOLL_CTL_DEL");
		_exit(4);
	}
	close(connection->fd);
}

static void *serve(void *unused)
{
	int epoll = epoll_create1(EPOLL_CLOEXEC);
	struct epoll_event event = {.events = EPOLLIN, .data.ptr = NULL}, events[64];

	(void)unused;
	epoll_ctl(epoll, EPOLL_CTL_ADD, listener, &event);
	for (;;) {
		int count = epoll_wait(epoll, events, 64, -1);
		for (int i = 0; i < count; i++) {
			struct connection *connection = events[i].data.ptr;
			int fd;
			if (connection) {
				answer(epoll, connection);
				continue;
			}
			fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
			if (fd < 0)
				continue;
			connection = calloc(1, sizeof(*connection));
			connection->fd = fd;
			event.events = EPOLLIN;
			event.data.ptr = connection;
			if (epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event) < 0) {
				perror("EPOLL_CTL_ADD");
				_exit(5);
			}
		}
	}
}

int main(int argc, char **argv)
{
	listener = listens_at(argc > 1 ? argv[1] : "0", SOCK_STREAM | SOCK_NONBLOCK);
	if (listener < 0)
		return perror("listen"), 1;
	for (int i = 0; i < 3; i++) {
		pthread_t thread;
		if (pthread_create(&thread, NULL, serve, NULL))
			return 1;
	}
	serve(NULL);
}
