/* A server that waits by poll, select or epoll, or their kin, and answers each request a while after it has read it, beside others. What has
 * arrived behind a request is not its turn: it must not be told of it again and again. Says how often it was woken. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/select.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "listens.h"

enum { MOST = 64, WORK_MS = 500 };

static struct pollfd watched[MOST];
static long due[MOST];
static int count, by_select, precisely, set = -1;
static unsigned long woken;

static long now_ms(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

static int wait_for_events(long most_ms)
{
	struct epoll_event events[MOST];
	int ready = epoll_wait(set, events, MOST, (int)most_ms), i, event;

	for (i = 0; i < count; i++) {
		watched[i].revents = 0;
		for (event = 0; event < ready; event++)
			if (events[event].data.fd == watched[i].fd)
				watched[i].revents = POLLIN;
	}
	return ready;
}

static void watch(int fd)
{
	struct epoll_event event = { .events = EPOLLIN | EPOLLRDHUP, .data.fd = fd };

	due[count] = 0;
	watched[count++] = (struct pollfd){ .fd = fd, .events = POLLIN };
	if (set >= 0 && epoll_ctl(set, EPOLL_CTL_ADD, fd, &event))
		exit(1);
}

static int wait_for(long most_ms)
{
	struct timeval most = { most_ms / 1000, most_ms % 1000 * 1000 };
	struct timespec precise = { most_ms / 1000, most_ms % 1000 * 1000000 }, *limit = most_ms < 0 ? NULL : &precise;
	fd_set readable;
	int i, highest = 0, ready;

	if (set >= 0)
		return wait_for_events(most_ms);
	if (!by_select)
		return precisely ? ppoll(watched, count, limit, NULL) : poll(watched, count, most_ms);
	FD_ZERO(&readable);
	for (i = 0; i < count; i++) {
		FD_SET(watched[i].fd, &readable);
		if (watched[i].fd > highest)
			highest = watched[i].fd;
	}
	if (precisely)
		ready = pselect(highest + 1, &readable, NULL, NULL, limit, NULL);
	else
		ready = select(highest + 1, &readable, NULL, NULL, most_ms < 0 ? NULL : &most);
	for (i = 0; i < count; i++)
		watched[i].revents = ready > 0 && FD_ISSET(watched[i].fd, &readable) ? POLLIN : 0;
	return ready;
}

static void drop(int i)
{
	close(watched[i].fd);
	count--;
	watched[i] = watched[count];
	due[i] = due[count];
}

static void answer(int i)
{
	char text[32], response[128];

	snprintf(text, sizeof(text), "woken %lu\n", woken);
	snprintf(response, sizeof(response), "HTTP/1.1 200 OK\r\nContent-Length: %zu\r\n\r\n%s", strlen(text), text);
	due[i] = 0;
	if (write(watched[i].fd, response, strlen(response)) < 0)
		drop(i);
}

int main(int arguments, char **argument)
{
	int listener = listens_at(argument[1], SOCK_STREAM | SOCK_NONBLOCK);

	by_select = arguments > 2 && strstr(argument[2], "select");
	precisely = arguments > 2 && argument[2][0] == 'p' && argument[2][1] != 'o';
	if (listener < 0)
		return 1;
	if (arguments > 2 && !strcmp(argument[2], "epoll"))
		set = epoll_create1(0);
	watch(listener);
	for (;;) {
		long now = now_ms(), most_ms = -1;
		int i;

		for (i = 1; i < count; i++)
			if (due[i] && (most_ms < 0 || due[i] - now < most_ms))
				most_ms = due[i] > now ? due[i] - now : 0;
		wait_for(most_ms);
		woken++;
		for (i = count - 1; i > 0; i--) {
			char request[8192];
			ssize_t got;

			if (due[i] && due[i] <= now_ms()) {
				answer(i);
				continue;
			}
			if (!watched[i].revents)
				continue;
			got = read(watched[i].fd, request, sizeof(request));
			if (got > 0)
				due[i] = now_ms() + WORK_MS;
			else if (got == 0 || errno != EAGAIN)
				drop(i);
		}
		if (watched[0].revents && count < MOST) {
			int fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK);

			if (fd >= 0)
				watch(fd);
		}
	}
}
