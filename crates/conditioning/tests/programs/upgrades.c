/*
 * server PORT WAY: changes to another protocol when it is asked to, in which what comes goes back. It takes as much as it can before
 * it answers, and waits for the rest in this way: blocking; edge, by an edge-triggered set that tells of news only, level likewise;
 * thread, which has waited in its read since before the answer; poll. A request for /no is
 * answered as any other, one for /h2c by changing to HTTP/2. CONNECT begins a tunnel, but to "ordinary:1", which it takes for a request
 * like any other.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include "listens.h"

static const char *way;

static int is(const char *name)
{
	return !strcmp(way, name);
}

static void answer(int client, const char *head)
{
	const char *response = !strncmp(head, "GET /no", 7) || !strncmp(head, "CONNECT ordinary", 16) ? "HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nno\n" :
			       !strncmp(head, "GET /h2c", 8) ? "HTTP/1.1 101 Switching Protocols\r\nUpgrade: h2c\r\n"
							      "Connection: upgrade\r\n\r\n" :
			       !strncmp(head, "CONNECT", 7) || !strncmp(head, "\r\nCONNECT", 9) ? "HTTP/1.1 200 OK\r\n\r\n" :
							      "HTTP/1.1 101 Switching Protocols\r\nUpgrade: echo\r\n"
							      "Connection: upgrade\r\n\r\n";
	if (write(client, response, strlen(response)) < 0)
		perror("write");
}

/* Sends back what comes, as long as there is something; waits for it or not. */
static int echo(int client)
{
	char bytes[65536];
	ssize_t got;

	while ((got = read(client, bytes, sizeof(bytes))) > 0)
		if (write(client, bytes, (size_t)got) < 0)
			return 0;
	return got < 0 && errno == EAGAIN;
}

static void *reads(void *argument)
{
	echo((int)(long)argument);
	return NULL;
}

static void converse(int client)
{
	struct epoll_event event = { .events = EPOLLIN | (is("edge") ? EPOLLET : 0u) };
	struct pollfd only = { .fd = client, .events = POLLIN };
	char head[8192];
	size_t length = 0;
	ssize_t got;
	int set, is_new = 1;
	pthread_t thread;

	if (is("blocking") || is("thread") || is("poll")) {
		while (!memmem(head, length, "\r\n\r\n", 4)) {
			got = read(client, head + length, sizeof(head) - length);
			if (got <= 0)
				return;
			length += (size_t)got;
		}
		if (!is("thread")) {
			answer(client, head);
			while (is("poll") && (poll(&only, 1, -1) < 0 || fcntl(client, F_SETFL, O_NONBLOCK) < 0 || echo(client)))
				;
			echo(client);
			return;
		}
		if (pthread_create(&thread, NULL, reads, (void *)(long)client))
			return;
		/* It has begun to wait, mostly; it must be told whether it has or not. */
		usleep(50000);
		answer(client, head);
		pthread_join(thread, NULL);
		return;
	}
	set = epoll_create1(EPOLL_CLOEXEC);
	fcntl(client, F_SETFL, O_NONBLOCK);
	epoll_ctl(set, EPOLL_CTL_ADD, client, &event);
	while (epoll_wait(set, &event, 1, -1) == 1) {
		if (!is_new) {
			if (!echo(client))
				break;
			continue;
		}
		do {
			got = read(client, head + length, sizeof(head) - length);
			length += got > 0 ? (size_t)got : 0;
		} while (got > 0 && length < sizeof(head));
		if (got == 0)
			break;
		if (memmem(head, length, "\r\n\r\n", 4)) {
			answer(client, head);
			is_new = 0;
		}
	}
	close(set);
}

int main(int argc, char **argv)
{
	int listener, client;

	if (argc != 3)
		return 2;
	way = argv[2];
	signal(SIGPIPE, SIG_IGN);
	listener = listens_at(argv[1], SOCK_STREAM);
	if (listener < 0)
		return 1;
	for (;;) {
		client = accept(listener, NULL, NULL);
		if (client < 0)
			return 3;
		converse(client);
		close(client);
	}
}
