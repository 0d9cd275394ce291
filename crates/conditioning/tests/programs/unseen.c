/*
 * server PORT WAY: waits for events by epoll, level-triggered (level) or edge-triggered (edge), or by poll (poll), and writes the content
 * of its responses by system calls of its own, which no library sees, one half after the other; or it waits by epoll, and writes whole
 * responses by splice(2) (splice). Of a path with "slow" the second half is a while late. Responses say whether a client has left by then.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "listens.h"

enum { MOST = 64, LATE_MS = 300 };

static const char *way;
static int set = -1, pipes[2];
static struct { int is_open, has_left; long due; } of[MOST];

static void write_unseen(int fd, const char *bytes)
{
	long result;
#if defined(__x86_64__)
	__asm__ volatile("syscall" : "=a"(result) : "a"(SYS_write), "D"(fd), "S"(bytes), "d"(strlen(bytes)) : "rcx", "r11", "memory");
#elif defined(__aarch64__)
	register long number __asm__("x8") = SYS_write, first __asm__("x0") = fd;
	register const char *second __asm__("x1") = bytes;
	register size_t third __asm__("x2") = strlen(bytes);
	__asm__ volatile("svc 0" : "+r"(first) : "r"(number), "r"(second), "r"(third) : "memory");
	result = first;
#else
#error "how are system calls made here?"
#endif
	/* Its client may have left. */
	if (result < 0 && result != -EPIPE && result != -ECONNRESET)
		_exit(3);
}

static int is(const char *name)
{
	return !strcmp(way, name);
}

static long now_ms(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

static void watch(int fd)
{
	struct epoll_event event = { .events = EPOLLIN | (is("edge") ? EPOLLET : 0), .data.fd = fd };

	if (fd >= MOST || (set >= 0 && epoll_ctl(set, EPOLL_CTL_ADD, fd, &event)))
		_exit(4);
	of[fd].is_open = 1;
	of[fd].has_left = of[fd].due = 0;
}

static void drop(int fd)
{
	close(fd);
	of[fd].is_open = of[fd].due = 0;
}

static void finish(int fd)
{
	of[fd].due = 0;
	write_unseen(fd, of[fd].has_left ? "left!\n" : "there\n");
	if (of[fd].has_left)
		drop(fd);
}

static void answer(int fd, const char *request)
{
	static const char head[] = "HTTP/1.1 200 OK\r\nContent-Length: 12\r\n\r\n", content[] = "first\nthere\n";
	char left[64];

	if (is("splice")) {
		if (write(pipes[1], head, strlen(head)) < 0 || write(pipes[1], content, strlen(content)) < 0)
			_exit(5);
		while (splice(pipes[0], NULL, fd, NULL, 20, SPLICE_F_NONBLOCK) > 0)
			;
		/* What its client did not take is nobody's. */
		while (read(pipes[0], left, sizeof(left)) > 0)
			;
		return;
	}
	send(fd, head, strlen(head), 0);
	write_unseen(fd, "first\n");
	if (strstr(request, "slow"))
		of[fd].due = now_ms() + LATE_MS;
	else
		finish(fd);
}

static void readable(int fd)
{
	char request[8192];
	ssize_t got;

	do {
		got = read(fd, request, sizeof(request) - 1);
		if (got > 0) {
			request[got] = 0;
			answer(fd, request);
		} else if (got == 0 && of[fd].due) {
			of[fd].has_left = 1;
			finish(fd);
		} else if (got == 0 || errno != EAGAIN) {
			drop(fd);
		}
	} while (got > 0 && is("edge"));
}

/* Waits, and says which are readable. */
static int wait_for_events(int *ready, int limit)
{
	struct epoll_event events[MOST];
	struct pollfd watched[MOST];
	int count = 0, fd, i, found = 0;

	if (set >= 0) {
		count = epoll_wait(set, events, MOST, limit);
		for (i = 0; i < count; i++)
			ready[found++] = events[i].data.fd;
		return found;
	}
	for (fd = 0; fd < MOST; fd++)
		if (of[fd].is_open)
			watched[count++] = (struct pollfd){ .fd = fd, .events = POLLIN };
	poll(watched, (nfds_t)count, limit);
	for (i = 0; i < count; i++)
		if (watched[i].revents)
			ready[found++] = watched[i].fd;
	return found;
}

int main(int count, char **arguments)
{
	int ready[MOST], listener, fd, found, i, limit;

	if (count != 3 || pipe2(pipes, O_NONBLOCK))
		return 2;
	signal(SIGPIPE, SIG_IGN);
	way = arguments[2];
	if (!is("poll"))
		set = epoll_create1(0);
	listener = listens_at(arguments[1], SOCK_STREAM | SOCK_NONBLOCK);
	if (listener < 0)
		return 1;
	watch(listener);
	for (;;) {
		limit = -1;
		for (fd = 0; fd < MOST; fd++) {
			if (of[fd].due && of[fd].due <= now_ms())
				finish(fd);
			if (of[fd].due)
				limit = 20;
		}
		found = wait_for_events(ready, limit);
		for (i = 0; i < found; i++) {
			if (ready[i] != listener)
				readable(ready[i]);
			else
				while ((fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK)) >= 0)
					watch(fd);
		}
	}
}
