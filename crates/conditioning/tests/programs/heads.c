/*
 * server PORT: answers GET /WAY/MOST/REFUSES with an announcement of its connection's end and three bytes, written in this way. A write
 * takes MOST bytes at most (cuts.c), and with REFUSES some take none. What is left is written from the server's own buffer, as every
 * server does it. The bytes are "no" where the connection was corked when it was accepted. "words" is by a vector for each word, as
 * Varnish writes, and so are "mixed", where the last one holds the end of the head and the bytes, and "alone", where the bytes have a call
 * of their own. "long" is a head of more than 9000 bytes in a few vectors.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include "listens.h"

extern int cut_fd, cut_refuses;
extern size_t cut_most;

static const char head[] = "HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 3\r\n\r\n", *content;
enum { HEAD = sizeof(head) - 1, CONTENT = 3 };

/* What is left of the head, with a vector for each word. */
static int words(char *whole, size_t *done, struct iovec *parts)
{
	int count = 0;

	while (*done < HEAD) {
		size_t length = strcspn(whole + *done, " \n") + 1;

		parts[count++] = (struct iovec){ whole + *done, length };
		*done += length;
	}
	return count;
}

/* Nothing is cut here: the test is of what a call holds. */
static void respond_at_length(int client)
{
	static char field[9000];
	struct iovec parts[] = { { (char *)head, HEAD - 2 }, { "X: ", 3 }, { field, sizeof(field) }, { "\r\n\r\n", 4 },
				 { (char *)content, CONTENT } };

	memset(field, 'x', sizeof(field));
	if (writev(client, parts, 5) < (ssize_t)sizeof(field))
		_exit(7);
}

/* Writes what is left of head and content once, from `done` on. */
static ssize_t write_rest(int client, const char *way, size_t done)
{
	struct iovec parts[16];
	struct msghdr message = { .msg_iov = parts };
	struct mmsghdr messages = { .msg_hdr = message };
	char whole[HEAD + CONTENT];
	off_t offset;
	int count = 0, sent;

	memcpy(whole, head, HEAD);
	memcpy(whole + HEAD, content, CONTENT);
	if (!strcmp(way, "write"))
		return write(client, whole + done, sizeof(whole) - done);
	if (!strcmp(way, "send"))
		return send(client, whole + done, sizeof(whole) - done, MSG_NOSIGNAL);
	if (!strcmp(way, "zerocopy"))
		return send(client, whole + done, sizeof(whole) - done, MSG_ZEROCOPY);
	if (!strcmp(way, "sendto"))
		return sendto(client, whole + done, sizeof(whole) - done, MSG_NOSIGNAL, NULL, 0);
	if (done < HEAD && !strcmp(way, "sendfile"))
		return send(client, head + done, HEAD - done, MSG_MORE);
	if (!strcmp(way, "sendfile")) {
		offset = done - HEAD;
		return sendfile(client, fileno(stdin), &offset, CONTENT - offset);
	}
	if (!strcmp(way, "words") || !strcmp(way, "mixed") || !strcmp(way, "alone")) {
		count = words(whole, &done, parts);
		if (count && !strcmp(way, "mixed"))
			parts[count - 1].iov_len += CONTENT;
		else if (!count || !strcmp(way, "words"))
			parts[count++] = (struct iovec){ whole + done, sizeof(whole) - done };
		return writev(client, parts, count);
	}
	/* Once a part of the head has been taken, the rest of it lies in two. */
	if (done && done + 1 < HEAD) {
		parts[count++] = (struct iovec){ whole + done, 1 };
		done++;
	}
	if (done < HEAD)
		parts[count++] = (struct iovec){ whole + done, HEAD - done };
	if (done < HEAD)
		done = HEAD;
	parts[count++] = (struct iovec){ whole + done, sizeof(whole) - done };
	message.msg_iovlen = messages.msg_hdr.msg_iovlen = count;
	if (!strcmp(way, "writev"))
		return writev(client, parts, count);
	if (!strcmp(way, "sendmsg"))
		return sendmsg(client, &message, MSG_NOSIGNAL);
	sent = sendmmsg(client, &messages, 1, MSG_NOSIGNAL);
	return sent == 1 ? (ssize_t)messages.msg_len : -1;
}

static void respond(int client, const char *way)
{
	static const char *const ways[] = { "write", "writev", "send", "sendmsg", "sendto", "sendmmsg" };
	size_t done = 0;
	int round = 0, on = 1;

	if (!strcmp(way, "stream")) {
		FILE *out = fdopen(dup(client), "w");

		cut_fd = fileno(out);
		fprintf(out, "%s%s", head, content);
		fclose(out);
		return;
	}
	if (!strcmp(way, "long"))
		return respond_at_length(client);
	if (!strcmp(way, "cork")) {
		setsockopt(client, IPPROTO_TCP, TCP_CORK, &on, sizeof(on));
		way = "write";
	}
	if (!strcmp(way, "zerocopy"))
		setsockopt(client, SOL_SOCKET, SO_ZEROCOPY, &on, sizeof(on));
	while (done < HEAD + CONTENT) {
		ssize_t now = write_rest(client, strcmp(way, "any") ? way : ways[round++ % 6], done);

		if (now > 0)
			done += now;
		else if (errno != EAGAIN)
			_exit(6);
	}
}

int main(int count, char **arguments)
{
	int listener, client;
	char request[8192], way[16];
	FILE *file = tmpfile();

	if (count != 2 || !file || fputs("ok\n", file) < 0 || fflush(file) || dup2(fileno(file), 0))
		return 2;
	listener = listens_at(arguments[1], SOCK_STREAM);
	if (listener < 0)
		return 4;
	while ((client = accept(listener, NULL, NULL)) >= 0) {
		ssize_t got = read(client, request, sizeof(request) - 1);
		int corked = 0;
		socklen_t size = sizeof(corked);

		getsockopt(client, IPPROTO_TCP, TCP_CORK, &corked, &size);
		content = corked ? "no\n" : "ok\n";
		request[got < 0 ? 0 : got] = 0;
		strcpy(way, "write");
		cut_most = SIZE_MAX;
		cut_refuses = 0;
		sscanf(request, "GET /%15[a-z]/%zu/%d", way, &cut_most, &cut_refuses);
		cut_fd = client;
		respond(client, way);
		cut_fd = -1;
		close(client);
	}
	return 5;
}
