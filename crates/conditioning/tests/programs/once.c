/*
 * server PORT WAY: takes what one call for 64 KiB returns for a whole request (read, recv, recvfrom, readv, recvmsg, recvmmsg), and
 * answers with what of it came behind the head.
 */
#define _GNU_SOURCE
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include "listens.h"

static char request[65536];

static ssize_t once(int client, const char *way)
{
	struct iovec parts[] = { { request, 20 }, { request + 20, 80 }, { request + 100, sizeof(request) - 100 } };
	struct mmsghdr message = { .msg_hdr = { .msg_iov = parts, .msg_iovlen = 3 } };

	if (!strcmp(way, "recv"))
		return recv(client, request, sizeof(request), 0);
	if (!strcmp(way, "recvfrom"))
		return recvfrom(client, request, sizeof(request), 0, NULL, NULL);
	if (!strcmp(way, "readv"))
		return readv(client, parts, 3);
	if (!strcmp(way, "recvmsg"))
		return recvmsg(client, &message.msg_hdr, 0);
	if (!strcmp(way, "recvmmsg"))
		return recvmmsg(client, &message, 1, 0, NULL) == 1 ? (ssize_t)message.msg_len : -1;
	return read(client, request, sizeof(request));
}

int main(int count, char **arguments)
{
	char response[200];
	int listener, client;

	if (count != 3)
		return 2;
	listener = listens_at(arguments[1], SOCK_STREAM);
	if (listener < 0)
		return 4;
	while ((client = accept(listener, NULL, NULL)) >= 0) {
		ssize_t got = once(client, arguments[2]);
		char *end = got > 0 ? memmem(request, (size_t)got, "\r\n\r\n", 4) : NULL;
		size_t content = end ? (size_t)(request + got - (end + 4)) : 0;

		snprintf(response, sizeof(response), "HTTP/1.1 %s\r\nContent-Length: %zu\r\n\r\n",
			 end ? "200 OK" : "400 Bad Request", content);
		send(client, response, strlen(response), MSG_NOSIGNAL);
		if (content)
			send(client, end + 4, content, MSG_NOSIGNAL);
		close(client);
	}
	return 6;
}
