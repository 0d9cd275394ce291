/*
 * server PORT WAY: threads wait for clients, by accept, poll, select or epoll. At SIGTERM the listening socket is shut down to
 * end them, and the exit code is 7 once all have; of accept(2), signals interrupt most calls until then, and begin them
 * anew (SA_RESTART).
 */
#define _GNU_SOURCE
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/select.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include "listens.h"

/* More than may wait by the chain's link at a time. */
#define THREADS 40

static int listener, set;
static const char *way;

static void go_on(int signal)
{
	(void)signal;
}

/* Whether a client is there; not so: the socket is said to be shut down. */
static int waits(void)
{
	if (!strcmp(way, "poll")) {
		struct pollfd only = { .fd = listener, .events = POLLIN };

		return poll(&only, 1, -1) == 1 && !(only.revents & POLLHUP);
	}
	if (!strcmp(way, "epoll")) {
		struct epoll_event event;

		return epoll_wait(set, &event, 1, -1) == 1 && !(event.events & EPOLLHUP);
	}
	if (!strcmp(way, "select")) {
		fd_set read;

		FD_ZERO(&read);
		FD_SET(listener, &read);
		return select(listener + 1, &read, NULL, NULL, NULL) == 1;
	}
	return 1;
}

static void *serve(void *unused)
{
	static const char response[] = "HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nok\n";
	char request[8192];
	int client;

	(void)unused;
	while (waits()) {
		client = accept(listener, NULL, NULL);
		if (client < 0 && errno == EINVAL)
			break;
		if (client < 0 && errno != EAGAIN) {
			perror("accept");
			_exit(8);
		}
		if (client >= 0 && read(client, request, sizeof(request)) > 0 &&
		    write(client, response, strlen(response)) < 0)
			perror("write");
		if (client >= 0)
			close(client);
	}
	return NULL;
}

int main(int argc, char **argv)
{
	struct epoll_event event = { .events = EPOLLIN };
	struct sigaction action = { .sa_handler = go_on, .sa_flags = SA_RESTART };
	struct itimerval often = { { 0, 2000 }, { 0, 2000 } };
	pthread_t threads[THREADS];
	sigset_t signals;
	int count, got;

	if (argc != 3)
		return 2;
	way = argv[2];
	count = strcmp(way, "accept") ? 1 : THREADS;
	listener = listens_at(argv[1], SOCK_STREAM | (count == 1 ? SOCK_NONBLOCK : 0));
	set = epoll_create1(EPOLL_CLOEXEC);
	if (listener < 0 || epoll_ctl(set, EPOLL_CTL_ADD, listener, &event) < 0)
		return perror("listen"), 3;
	sigemptyset(&signals);
	sigaddset(&signals, SIGTERM);
	pthread_sigmask(SIG_BLOCK, &signals, NULL);
	for (int at = 0; at < count; at++)
		if (pthread_create(&threads[at], NULL, serve, NULL))
			return 4;
	if (count > 1 && (sigaction(SIGALRM, &action, NULL) < 0 || setitimer(ITIMER_REAL, &often, NULL) < 0))
		return perror("signals"), 5;
	while (sigwait(&signals, &got))
		;
	if (shutdown(listener, SHUT_RDWR) < 0)
		return perror("shutdown"), 6;
	for (int at = 0; at < count; at++)
		pthread_join(threads[at], NULL);
	return 7;
}
