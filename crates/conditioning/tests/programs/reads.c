/*
 * server PORT WAY: one process of one thread that answers request by request, as long as there are any on a connection. It reads
 * in this way, for 64 KiB at a time whatever the request has; each response says how the request began, how many bytes it had,
 * and which of its connection it was: "GET /a HTTP/1.1, 40, 1". By "edge", it takes a read of less than it wanted for all that there
 * is, and waits for the next event of an edge-triggered set. By "preadv2", it writes by pwritev2.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include "listens.h"

static const char *way;
static int pipes[2];
/* The set, and whether something may be there. */
static int set, is_ready;

static int is(const char *name)
{
	return !strcmp(way, name);
}

static ssize_t edge(int fd, char *buffer, size_t size)
{
	struct epoll_event event;
	ssize_t got;

	for (;;) {
		if (!is_ready && epoll_wait(set, &event, 1, -1) != 1)
			return -1;
		got = read(fd, buffer, size);
		is_ready = got == (ssize_t)size;
		if (got >= 0 || errno != EAGAIN)
			return got;
	}
}

static ssize_t some(int fd, char *buffer, size_t size)
{
	struct iovec vectors[2] = { { buffer, 10 }, { buffer + 10, size - 10 } };
	struct mmsghdr messages[2] = { { .msg_hdr = { .msg_iov = vectors, .msg_iovlen = 1 } },
				       { .msg_hdr = { .msg_iov = vectors + 1, .msg_iovlen = 1 } } };
	struct msghdr *message = &messages[0].msg_hdr;
	struct sockaddr_storage from;
	socklen_t length = sizeof(from);
	ssize_t got, seen;

	if (is("edge"))
		return edge(fd, buffer, size);
	if (is("recv"))
		return recv(fd, buffer, size, 0);
	if (is("recvfrom"))
		return recvfrom(fd, buffer, size, 0, (struct sockaddr *)&from, &length);
	if (is("readv"))
		return readv(fd, vectors, 2);
	if (is("preadv2"))
		return preadv2(fd, vectors, 2, -1, 0);
	if (is("recvmmsg")) {
		got = recvmmsg(fd, messages, 2, MSG_WAITFORONE, NULL);
		return got <= 0 ? got : messages[0].msg_len + (got > 1 ? messages[1].msg_len : 0);
	}
	message->msg_iovlen = 2;
	if (is("recvmsg"))
		return recvmsg(fd, message, 0);
	if (is("peek")) {
		/* As much as it has seen, which is more than once. */
		seen = recv(fd, buffer, size, MSG_PEEK);
		if (seen > 0 && recv(fd, buffer, size, MSG_PEEK) < seen)
			return -1;
		return seen > 0 ? recv(fd, buffer, (size_t)seen, 0) : seen;
	}
	if (is("peekmsg")) {
		seen = recvmsg(fd, message, MSG_PEEK);
		if (seen > 0 && recvmsg(fd, message, MSG_PEEK) < seen)
			return -1;
		return seen > 0 ? recv(fd, buffer, (size_t)seen, 0) : seen;
	}
	if (is("splice")) {
		got = splice(fd, NULL, pipes[1], NULL, size < 60000 ? size : 60000, 0);
		if (got >= 0 || errno != EINVAL)
			return got > 0 ? read(pipes[0], buffer, (size_t)got) : got;
	}
	return read(fd, buffer, size);
}

/* How long the request is, as far as it is there; 0 if more must come. */
static size_t whole(const char *text, size_t length)
{
	const char *end = memmem(text, length, "\r\n\r\n", 4), *field;
	size_t head;

	if (!end)
		return 0;
	head = (size_t)(end + 4 - text);
	if (memmem(text, head, "chunked", 7)) {
		end = memmem(text + head - 2, length - head + 2, "\r\n0\r\n\r\n", 7);
		return end ? (size_t)(end + 7 - text) : 0;
	}
	field = memmem(text, head, "Content-Length:", 15);
	head += field ? (size_t)atol(field + 15) : 0;
	return head <= length ? head : 0;
}

static void serve(int client)
{
	static char text[4 << 20];
	char response[500], body[300];
	struct iovec whole_response = { .iov_base = response };
	size_t length = 0;
	ssize_t got;
	int number = 0;

	for (;;) {
		while (!whole(text, length)) {
			if (sizeof(text) - length < 65536)
				return;
			got = some(client, text + length, 65536);
			if (got <= 0)
				return;
			length += (size_t)got;
		}
		/* All that came, the next request included: nobody but this server would see that. */
		snprintf(body, sizeof(body), "%.*s, %zu, %d", (int)strcspn(text, "\r"), text, length, ++number);
		snprintf(response, sizeof(response), "HTTP/1.1 200 OK\r\nContent-Length: %zu\r\n\r\n%s", strlen(body), body);
		whole_response.iov_len = strlen(response);
		if ((is("preadv2") ? pwritev2(client, &whole_response, 1, -1, 0) : write(client, response, strlen(response))) < 0)
			return;
		length = 0;
	}
}

int main(int argc, char **argv)
{
	struct epoll_event event = { .events = EPOLLIN | EPOLLET };
	int listener, client;

	set = epoll_create1(EPOLL_CLOEXEC);
	if (argc != 3 || pipe(pipes) < 0)
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
		if (is("edge")) {
			is_ready = 0;
			fcntl(client, F_SETFL, O_NONBLOCK);
			epoll_ctl(set, EPOLL_CTL_ADD, client, &event);
		}
		serve(client);
		close(client);
	}
}
