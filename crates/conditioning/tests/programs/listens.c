/*
 * server PORT WAY ADDRESS...: listens at each address, of IPv6 ones for IPv6 alone unless it is "dual", and waits in this way:
 *
 *   poll       poll(2), and accepts once from each socket that is readable
 *   level      likewise by epoll
 *   edge       by edge-triggered epoll, and accepts as long as there is somebody
 *   exclusive  two processes, each with a set of its own (EPOLLEXCLUSIVE)
 *   threads    a thread for each socket, in accept(2)
 *   becomes    becomes the same program anew, without its environment, once it listens, and polls
 *
 * Each response says at which address it was accepted, and where the client is: "127.0.0.1 from 127.0.0.1".
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

enum { MOST = 16 };

static int listeners[MOST], count;

static const char *text_of(const struct sockaddr_storage *address, char *text)
{
	const void *ip = &((const struct sockaddr_in6 *)address)->sin6_addr;

	if (address->ss_family == AF_INET)
		ip = &((const struct sockaddr_in *)address)->sin_addr;
	return inet_ntop(address->ss_family, ip, text, INET6_ADDRSTRLEN) ? text : "nowhere";
}

static void listen_at(const char *address, unsigned short port)
{
	struct sockaddr_in6 six = { .sin6_family = AF_INET6, .sin6_port = htons(port) };
	struct sockaddr_in four = { .sin_family = AF_INET, .sin_port = htons(port) };
	int is_four = inet_pton(AF_INET, address, &four.sin_addr) == 1, one = 1;
	int is_dual = !strcmp(address, "dual"), fd = socket(is_four ? AF_INET : AF_INET6, SOCK_STREAM, 0);
	int only_six = !is_dual;

	if (!is_four && !is_dual && inet_pton(AF_INET6, address, &six.sin6_addr) != 1)
		exit(2);
	setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one));
	if (!is_four)
		setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &only_six, sizeof(only_six));
	if (is_four ? bind(fd, (struct sockaddr *)&four, sizeof(four)) : bind(fd, (struct sockaddr *)&six, sizeof(six)))
		exit(1);
	if (listen(fd, 64))
		exit(1);
	listeners[count++] = fd;
}

/* Whether there was somebody. */
static int serve_one(int listener)
{
	char request[4096], response[256], body[128], here[INET6_ADDRSTRLEN], there[INET6_ADDRSTRLEN];
	struct sockaddr_storage own = { 0 }, peer = { 0 };
	socklen_t own_length = sizeof(own), length = sizeof(peer);
	int fd = accept(listener, (struct sockaddr *)&peer, &length);

	if (fd < 0) {
		if (errno != EAGAIN && errno != EINTR)
			exit(3);
		return 0;
	}
	getsockname(listener, (struct sockaddr *)&own, &own_length);
	if (read(fd, request, sizeof(request)) > 0) {
		snprintf(body, sizeof(body), "%s from %s", text_of(&own, here), text_of(&peer, there));
		snprintf(response, sizeof(response), "HTTP/1.1 200 OK\r\nContent-Length: %zu\r\n\r\n%s", strlen(body), body);
		if (write(fd, response, strlen(response)) < 0)
			perror("write");
	}
	close(fd);
	return 1;
}

static void *accepts(void *listener)
{
	for (;;)
		serve_one(*(int *)listener);
	return NULL;
}

static void by_events(unsigned int how)
{
	int set = epoll_create1(0), i;
	struct epoll_event events[MOST];

	for (i = 0; i < count; i++) {
		struct epoll_event event = { .events = EPOLLIN | how, .data.fd = listeners[i] };

		if (epoll_ctl(set, EPOLL_CTL_ADD, listeners[i], &event))
			exit(1);
	}
	for (;;) {
		int ready = epoll_wait(set, events, MOST, -1);

		for (i = 0; i < ready; i++)
			while (serve_one(events[i].data.fd) && how & EPOLLET)
				;
	}
}

static void by_poll(void)
{
	struct pollfd watched[MOST];
	int i;

	for (;;) {
		for (i = 0; i < count; i++)
			watched[i] = (struct pollfd){ .fd = listeners[i], .events = POLLIN };
		poll(watched, count, -1);
		for (i = 0; i < count; i++)
			if (watched[i].revents)
				serve_one(listeners[i]);
	}
}

int main(int arguments, char **argument)
{
	const char *way = argument[2];
	int i;

	if (!strcmp(way, "became")) {
		for (i = 3; i < arguments; i++)
			listeners[count++] = atoi(argument[i]);
		by_poll();
	}
	for (i = 3; i < arguments; i++)
		listen_at(argument[i], atoi(argument[1]));
	if (!strcmp(way, "threads")) {
		pthread_t thread;

		for (i = 1; i < count; i++)
			pthread_create(&thread, NULL, accepts, &listeners[i]);
		accepts(&listeners[0]);
	}
	for (i = 0; i < count; i++)
		fcntl(listeners[i], F_SETFL, O_NONBLOCK);
	if (!strcmp(way, "becomes")) {
		char numbers[MOST][12], *again[MOST + 4] = { argument[0], argument[1], "became" }, *none[] = { NULL };

		for (i = 0; i < count; i++) {
			snprintf(numbers[i], sizeof(numbers[i]), "%d", listeners[i]);
			again[3 + i] = numbers[i];
		}
		execve(argument[0], again, none);
		return 1;
	}
	if (!strcmp(way, "poll"))
		by_poll();
	if (!strcmp(way, "exclusive") && fork() == 0)
		prctl(PR_SET_PDEATHSIG, SIGKILL);
	by_events(!strcmp(way, "edge") ? EPOLLET : !strcmp(way, "exclusive") ? EPOLLEXCLUSIVE : 0);
}
