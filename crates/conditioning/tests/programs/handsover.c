/* server PORT: one thread accepts and registers each connection with epoll, another serves and closes it. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include "listens.h"

static int set;

static void *serve(void *unused)
{
	static const char response[] = "HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nok\n";
	struct epoll_event event;
	char request[8192];

	(void)unused;
	for (;;) {
		if (epoll_wait(set, &event, 1, -1) != 1)
			continue;
		if (read(event.data.fd, request, sizeof(request)) > 0 &&
		    write(event.data.fd, response, strlen(response)) < 0)
			perror("write");
		close(event.data.fd);
	}
	return NULL;
}

int main(int argc, char **argv)
{
	int listener = argc > 1 ? listens_at(argv[1], SOCK_STREAM) : -1;
	pthread_t thread;

	set = epoll_create1(EPOLL_CLOEXEC);
	if (listener < 0 || set < 0 || pthread_create(&thread, NULL, serve, NULL))
		return 1;
	for (;;) {
		struct epoll_event event = { .events = EPOLLIN };

		event.data.fd = accept(listener, NULL, NULL);
		if (event.data.fd >= 0 && epoll_ctl(set, EPOLL_CTL_ADD, event.data.fd, &event) < 0)
			return perror("EPOLL_CTL_ADD"), 5;
	}
}
