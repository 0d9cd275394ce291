/*
 * server PORT HOW ADDRESS...: several listening sockets. An IPv6 address is for IPv6 only, unless "both=" stands before it; "idle=" before an
 * address: nobody accepts there. HOW is
 *
 *   poll       poll(2), and accepts once from each socket that is readable
 *   blocking   likewise, of sockets that wait when there is nobody
 *   level      as poll, by epoll
 *   edges      by edge-triggered epoll, and accepts as long as there is somebody
 *   exclusive  two processes, each with a set of its own (EPOLLEXCLUSIVE)
 *   threads    a thread for each socket, which waits in accept(2)
 *   becomes    becomes the same program anew, without its environment, once it listens, and polls
 *
 * The answer is the address that the listening socket was given, and the client's as accept, getpeername and the family of getsockname
 * have it. /close closes the last listening socket before it answers, /busy is busy for three seconds.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <unistd.h>

enum { MOST = 8 };

static struct listener {
	const char *name;
	int fd, is_idle;
} listeners[MOST];
static int count, blocks, is_inherited;

static void fatal(const char *what)
{
	perror(what);
	exit(1);
}

union address {
	struct sockaddr any;
	struct sockaddr_in v4;
	struct sockaddr_in6 v6;
};

static const char *shown(const union address *address, char *room, size_t size)
{
	char text[INET6_ADDRSTRLEN] = "?";
	int port = 0;

	if (address->any.sa_family == AF_INET) {
		inet_ntop(AF_INET, &address->v4.sin_addr, text, sizeof(text));
		port = ntohs(address->v4.sin_port);
	} else if (address->any.sa_family == AF_INET6) {
		inet_ntop(AF_INET6, &address->v6.sin6_addr, text, sizeof(text));
		port = ntohs(address->v6.sin6_port);
	}
	snprintf(room, size, "%s %d", text, port);
	return room;
}

static int option(int fd, int level, int name)
{
	int value = -1;
	socklen_t length = sizeof(value);

	return getsockopt(fd, level, name, &value, &length) < 0 ? -2 : value;
}

/* What listens is what was asked for. */
static void check(int fd, const union address *address, int v6_only)
{
	union address name = {0};
	socklen_t length = sizeof(name);
	int is_v6 = address->any.sa_family == AF_INET6;
	size_t expected = is_v6 ? sizeof(address->v6) : sizeof(address->v4);

	if (getsockname(fd, &name.any, &length) < 0 || length != expected || memcmp(&name, address, expected))
		fatal("getsockname");
	if (option(fd, SOL_SOCKET, SO_DOMAIN) != address->any.sa_family || option(fd, SOL_SOCKET, SO_ACCEPTCONN) != 1)
		fatal("getsockopt");
	if (is_v6 && option(fd, IPPROTO_IPV6, IPV6_V6ONLY) != v6_only)
		fatal("IPV6_V6ONLY");
	if (!!(fcntl(fd, F_GETFL) & O_NONBLOCK) == blocks || !!(fcntl(fd, F_GETFD) & FD_CLOEXEC) == is_inherited)
		fatal("flags");
}

static void start(char *name, int port)
{
	struct listener *listener = &listeners[count++];
	union address address = {0};
	int one = 1, v6_only = 1, fd;
	socklen_t length;

	listener->name = name;
	if (!strncmp(name, "idle=", 5)) {
		listener->is_idle = 1;
		name += 5;
	} else if (!strncmp(name, "both=", 5)) {
		v6_only = 0;
		name += 5;
	}
	if (strchr(name, ':')) {
		address.v6.sin6_family = AF_INET6;
		address.v6.sin6_port = htons(port);
		inet_pton(AF_INET6, name, &address.v6.sin6_addr);
		length = sizeof(address.v6);
	} else {
		address.v4.sin_family = AF_INET;
		address.v4.sin_port = htons(port);
		inet_pton(AF_INET, name, &address.v4.sin_addr);
		length = sizeof(address.v4);
	}
	fd = socket(address.any.sa_family, SOCK_STREAM | (is_inherited ? 0 : SOCK_CLOEXEC) | (blocks ? 0 : SOCK_NONBLOCK), 0);
	setsockopt(fd, SOL_SOCKET, SO_REUSEPORT, &one, sizeof(one));
	if (address.any.sa_family == AF_INET6)
		setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &v6_only, sizeof(v6_only));
	if (bind(fd, &address.any, length) < 0 || listen(fd, 50) < 0)
		fatal("listen");
	check(fd, &address, v6_only);
	listener->fd = fd;
}

/* Whether there was a connection. */
static int serve(struct listener *listener)
{
	union address peer = {0}, again = {0}, local = {0};
	char text[8192], body[512], response[1024], one[64], other[64];
	socklen_t length = sizeof(peer);
	int fd = accept4(listener->fd, &peer.any, &length, SOCK_CLOEXEC), size;
	ssize_t got;

	if (fd < 0)
		return errno != EAGAIN;
	length = sizeof(again);
	getpeername(fd, &again.any, &length);
	length = sizeof(local);
	getsockname(fd, &local.any, &length);
	got = read(fd, text, sizeof(text) - 1);
	if (got > 0) {
		text[got] = 0;
		if (!strncmp(text, "GET /close ", 11))
			close(listeners[--count].fd);
		if (!strncmp(text, "GET /busy ", 10))
			sleep(3);
		size = snprintf(body, sizeof(body), "%s, %s, %s, %d", listener->name, shown(&peer, one, sizeof(one)),
			shown(&again, other, sizeof(other)), local.any.sa_family == AF_INET6 ? 6 : 4);
		size = snprintf(response, sizeof(response),
			"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%s", size, body);
		if (write(fd, response, size) != size)
			perror("write");
	}
	close(fd);
	return 1;
}

static void *wait_in_accept(void *listener)
{
	while (serve(listener))
		;
	return NULL;
}

static void wait_by_poll(void)
{
	for (;;) {
		struct pollfd all[MOST];
		int at, watched = count;

		for (at = 0; at < watched; at++)
			all[at] = (struct pollfd){.fd = listeners[at].is_idle ? -1 : listeners[at].fd, .events = POLLIN};
		poll(all, watched, -1);
		for (at = 0; at < watched && at < count; at++)
			if (all[at].revents)
				serve(&listeners[at]);
	}
}

static void wait_for_events(unsigned int how)
{
	int epoll = epoll_create1(EPOLL_CLOEXEC), at;

	for (at = 0; at < count; at++) {
		struct epoll_event event = {.events = EPOLLIN | how, .data.ptr = &listeners[at]};
		epoll_ctl(epoll, EPOLL_CTL_ADD, listeners[at].fd, &event);
	}
	for (;;) {
		struct epoll_event events[MOST];
		int ready = epoll_wait(epoll, events, MOST, -1);

		for (at = 0; at < ready; at++)
			while (serve(events[at].data.ptr) && how & EPOLLET)
				;
	}
}

/* The program that this one becomes gets addresses as "DESCRIPTOR=ADDRESS". */
static void become(char **argv)
{
	char names[MOST][80], *again[MOST + 4] = {argv[0], argv[1], "became"}, *none[] = {NULL};
	int at;

	for (at = 0; at < count; at++) {
		snprintf(names[at], sizeof(names[at]), "%d=%s", listeners[at].fd, listeners[at].name);
		again[3 + at] = names[at];
	}
	execve(argv[0], again, none);
	fatal("execve");
}

static void inherit(char *name)
{
	listeners[count].fd = atoi(name);
	listeners[count++].name = strchr(name, '=') + 1;
}

int main(int argc, char **argv)
{
	const char *how = argv[2];
	int at;

	if (argc < 4 || argc > 3 + MOST)
		return 2;
	blocks = !strcmp(how, "threads") || !strcmp(how, "blocking");
	is_inherited = !strcmp(how, "becomes");
	for (at = 3; at < argc; at++) {
		if (!strcmp(how, "became"))
			inherit(argv[at]);
		else
			start(argv[at], atoi(argv[1]));
	}
	if (is_inherited)
		become(argv);
	if (!strcmp(how, "poll") || !strcmp(how, "blocking") || !strcmp(how, "became"))
		wait_by_poll();
	if (!strcmp(how, "exclusive") && fork() == 0)
		prctl(PR_SET_PDEATHSIG, SIGKILL);
	if (!blocks)
		wait_for_events(!strcmp(how, "edges") ? EPOLLET : !strcmp(how, "exclusive") ? EPOLLEXCLUSIVE : 0);
	for (at = 1; at < count; at++) {
		pthread_t thread;
		pthread_create(&thread, NULL, wait_in_accept, &listeners[at]);
	}
	wait_in_accept(&listeners[0]);
	return 1;
}
