/*
 * server PORT: sets options of its listening socket before it is bound, before it listens and afterwards. A response says which of them
 * the connection has, and which the listening socket says that it has.
 */
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include <arpa/inet.h>

enum { BEFORE_BIND, BEFORE_LISTEN, AFTERWARDS };

static const struct { const char *text; int when, level, name, value; } options[] = {
	{ "user timeout", BEFORE_BIND, IPPROTO_TCP, TCP_USER_TIMEOUT, 7000 },
	{ "nodelay", BEFORE_BIND, IPPROTO_TCP, TCP_NODELAY, 1 },
	{ "receives", BEFORE_BIND, SOL_SOCKET, SO_RCVBUF, 150000 },
	{ "sends", BEFORE_LISTEN, SOL_SOCKET, SO_SNDBUF, 30000 },
	{ "keepalive", BEFORE_LISTEN, SOL_SOCKET, SO_KEEPALIVE, 1 },
	{ "tos", BEFORE_LISTEN, IPPROTO_IP, IP_TOS, 0x10 },
	{ "idle", AFTERWARDS, IPPROTO_TCP, TCP_KEEPIDLE, 77 },
	{ "ttl", AFTERWARDS, IPPROTO_IP, IP_TTL, 33 },
	{ "not sent", AFTERWARDS, IPPROTO_TCP, TCP_NOTSENT_LOWAT, 4096 },
	/* This one is refused. */
	{ "too many", AFTERWARDS, IPPROTO_TCP, TCP_KEEPCNT, 100000 },
};

enum { COUNT = sizeof(options) / sizeof(*options) };

static void set(int fd, int when)
{
	struct timeval limit = { 7, 0 };
	struct linger linger = { 1, 9 };
	int i;

	for (i = 0; i < COUNT; i++)
		if (options[i].when == when)
			setsockopt(fd, options[i].level, options[i].name, &options[i].value, sizeof(int));
	if (when == BEFORE_LISTEN)
		setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
	if (when == AFTERWARDS)
		setsockopt(fd, SOL_SOCKET, SO_LINGER, &linger, sizeof(linger));
}

static char *say(char *to, const char *of, int fd)
{
	struct timeval limit = { 0, 0 };
	struct linger linger = { 0, 0 };
	socklen_t length;
	int i, value;

	for (i = 0; i < COUNT; i++) {
		value = -1;
		length = sizeof(value);
		getsockopt(fd, options[i].level, options[i].name, &value, &length);
		to += sprintf(to, "%s %s: %d\n", of, options[i].text, value);
	}
	length = sizeof(limit);
	getsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, &length);
	length = sizeof(linger);
	getsockopt(fd, SOL_SOCKET, SO_LINGER, &linger, &length);
	return to + sprintf(to, "%s waits: %ld, lingers: %d %d\n", of, (long)limit.tv_sec, linger.l_onoff, linger.l_linger);
}

int main(int count, char **arguments)
{
	struct sockaddr_in address = { .sin_family = AF_INET };
	int listener = socket(AF_INET, SOCK_STREAM, 0), one = 1, client, refused;
	char request[8192], text[4096], response[8192];

	if (count != 2)
		return 2;
	address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
	address.sin_port = htons((unsigned short)atoi(arguments[1]));
	setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one));
	set(listener, BEFORE_BIND);
	if (bind(listener, (struct sockaddr *)&address, sizeof(address)))
		return 3;
	set(listener, BEFORE_LISTEN);
	if (listen(listener, 64))
		return 4;
	set(listener, AFTERWARDS);
	refused = setsockopt(listener, IPPROTO_TCP, TCP_KEEPCNT, &options[COUNT - 1].value, sizeof(int)) ? errno : 0;
	for (;;) {
		client = accept(listener, NULL, NULL);
		if (client < 0)
			continue;
		if (read(client, request, sizeof(request)) > 0) {
			sprintf(say(say(text, "connection", client), "listener", listener), "refused: %d\n", refused);
			snprintf(response, sizeof(response), "HTTP/1.1 200 OK\r\nContent-Length: %zu\r\n\r\n%s",
				 strlen(text), text);
			send(client, response, strlen(response), MSG_NOSIGNAL);
		}
		close(client);
	}
}
