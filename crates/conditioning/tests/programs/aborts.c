/*
 * server PORT: answers a part of a response and ends the connection by a reset for /close, /length and /chunked, which say how the
 * response is framed; for /, it ends it as usual. /whole and /timed get a whole response after what close is to do was set likewise, or to
 * a wait, and say whether it was set when the connection was accepted.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "listens.h"

static int is(const char *request, const char *path)
{
	return !strncmp(request, path, strlen(path)) && request[strlen(path)] == ' ';
}

int main(int count, char **arguments)
{
	int listener, client;

	if (count != 2)
		return 2;
	listener = listens_at(arguments[1], SOCK_STREAM);
	if (listener < 0)
		return 4;
	while ((client = accept(listener, NULL, NULL)) >= 0) {
		char request[8192] = "", response[200];
		struct linger before = { 0 }, close_is = { 0 };
		socklen_t size = sizeof(before);
		const char *fields = "";

		getsockopt(client, SOL_SOCKET, SO_LINGER, &before, &size);
		if (read(client, request, sizeof(request) - 1) < 0)
			return 5;
		memmove(request, request + 4, sizeof(request) - 4);
		if (is(request, "/length"))
			fields = "Content-Length: 100\r\n";
		if (is(request, "/chunked"))
			fields = "Transfer-Encoding: chunked\r\n";
		close_is.l_onoff = !is(request, "/");
		if (is(request, "/timed"))
			close_is.l_linger = 30;
		if (is(request, "/whole") || is(request, "/timed"))
			snprintf(response, sizeof(response), "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n%d\n", before.l_onoff);
		else
			snprintf(response, sizeof(response), "HTTP/1.1 200 OK\r\n%s\r\n64\r\na part", fields);
		setsockopt(client, SOL_SOCKET, SO_LINGER, &close_is, sizeof(close_is));
		if (write(client, response, strlen(response)) < 0)
			return 6;
		close(client);
	}
	return 7;
}
