/*
 * server PORT WAY: answers a connection's request with what a call said about it besides its bytes:
 *
 *   recvmsg, recvmmsg, recvfrom   reads the request: its length, and the lengths of address and control data, and the flags
 *   trunc, truncmsg               throws it away (MSG_TRUNC, tcp(7)), with nowhere to put it: its length
 *   null                          reads it to nowhere: the error, and the length when it is read again
 *   dup2, dup3, flags             has something take the connection's place that cannot: the error
 *   range                         closes it in a way that there is none: the error
 *   over                          answers: how the connection before was known after its answer, and whether it was before
 *   cloexec                       has it close on exec, by close_range(2): whether the one before did after its answer
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "listens.h"

#ifndef CLOSE_RANGE_CLOEXEC
#define CLOSE_RANGE_CLOEXEC 4
#endif

static const char *way;
static char said[200];
static int was_cloexec = -1;
static char was[200] = "nothing yet";

static int is(const char *name)
{
	return !strcmp(way, name);
}

static void reads(int client)
{
	char bytes[8192], control[256];
	struct sockaddr_storage from;
	socklen_t length = sizeof(from);
	struct iovec vectors[2] = { { bytes, 10 }, { bytes + 10, sizeof(bytes) - 10 } };
	struct iovec nowhere = { NULL, INT_MAX };
	struct mmsghdr messages[1] = { { .msg_hdr = { .msg_iov = vectors, .msg_iovlen = 2, .msg_flags = 0x7777,
						      .msg_name = &from, .msg_namelen = sizeof(from),
						      .msg_control = control, .msg_controllen = sizeof(control) } } };
	struct msghdr *message = &messages[0].msg_hdr;
	void *volatile none = NULL;
	ssize_t got;
	int failed = 0;

	memset(control, 0xff, sizeof(control));
	if (is("recvfrom")) {
		got = recvfrom(client, bytes, sizeof(bytes), 0, (struct sockaddr *)&from, &length);
		snprintf(said, sizeof(said), "%zd, %u", got, length);
		return;
	}
	if (is("recvmsg") || is("recvmmsg")) {
		if (is("recvmsg")) {
			got = recvmsg(client, message, MSG_CMSG_CLOEXEC);
		} else {
			got = recvmmsg(client, messages, 1, MSG_CMSG_CLOEXEC, NULL);
			got = got == 1 ? (ssize_t)messages[0].msg_len : -1;
		}
		snprintf(said, sizeof(said), "%zd, %u, %zu, %x", got, message->msg_namelen,
			 (size_t)message->msg_controllen, (unsigned)message->msg_flags);
		return;
	}
	if (is("truncmsg")) {
		message->msg_iov = &nowhere;
		message->msg_iovlen = 1;
		got = recvmsg(client, message, MSG_DONTWAIT | MSG_TRUNC);
	} else if (is("trunc")) {
		got = recv(client, none, INT_MAX, MSG_DONTWAIT | MSG_TRUNC);
	} else {
		if (is("null") && recv(client, none, sizeof(bytes), 0) < 0)
			failed = errno;
		got = recv(client, bytes, sizeof(bytes), 0);
	}
	snprintf(said, sizeof(said), "%zd, %s", got, failed ? strerrorname_np(failed) : "0");
}

static const char *error(int result)
{
	return result < 0 ? strerrorname_np(errno) : "0";
}

/* What tells a connection from others: its addresses, its kind. */
static void knows(int client, char *text, size_t size)
{
	struct sockaddr_in ends[2] = { 0 };
	socklen_t length = sizeof(ends[0]);
	int options[] = { SO_DOMAIN, SO_TYPE, SO_PROTOCOL }, values[3] = { 0 }, i;

	getpeername(client, (struct sockaddr *)&ends[0], &length);
	length = sizeof(ends[1]);
	getsockname(client, (struct sockaddr *)&ends[1], &length);
	for (i = 0; i < 3; i++) {
		length = sizeof(values[i]);
		getsockopt(client, SOL_SOCKET, options[i], &values[i], &length);
	}
	snprintf(text, size, "%d:%d to %d:%d, %d %d %d", ends[0].sin_family, ntohs(ends[0].sin_port), ends[1].sin_family,
		 ntohs(ends[1].sin_port), values[0], values[1], values[2]);
}

static void serve(int client)
{
	char response[400], now[200];

	reads(client);
	if (is("dup2"))
		snprintf(said, sizeof(said), "%s", error(dup2(999, client)));
	if (is("dup3"))
		snprintf(said, sizeof(said), "%s", error(dup3(999, client, 0)));
	if (is("flags"))
		snprintf(said, sizeof(said), "%s", error(dup3(1, client, O_APPEND)));
	if (is("range"))
		snprintf(said, sizeof(said), "%s", error(close_range((unsigned)client, (unsigned)client, 1 << 20)));
	if (is("cloexec")) {
		snprintf(said, sizeof(said), "%d", was_cloexec);
		close_range((unsigned)client, (unsigned)client, CLOSE_RANGE_CLOEXEC);
	}
	if (is("over")) {
		knows(client, now, sizeof(now));
		snprintf(said, sizeof(said), "%s", was);
	}
	snprintf(response, sizeof(response), "HTTP/1.1 200 OK\r\nContent-Length: %zu\r\n\r\n%s", strlen(said), said);
	send(client, response, strlen(response), MSG_NOSIGNAL);
	was_cloexec = fcntl(client, F_GETFD) & FD_CLOEXEC;
	if (is("over")) {
		knows(client, was, sizeof(was));
		strcat(was, strcmp(was, now) ? ": another" : ": the same");
	}
}

int main(int argc, char **argv)
{
	int listener, client;

	if (argc != 3)
		return 2;
	way = argv[2];
	listener = listens_at(argv[1], SOCK_STREAM);
	if (listener < 0)
		return 1;
	while ((client = accept(listener, NULL, NULL)) >= 0) {
		serve(client);
		close(client);
	}
	return 3;
}
