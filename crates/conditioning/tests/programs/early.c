/*
 * Servers that register their socket with epoll before it listens, as Asio does when it opens one:
 *
 *   server PORT level   answers with the data of the event that told of the client
 *   server PORT edge    does so, told once of each (EPOLLET)
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

static void answer(int client, unsigned long long data)
{
	char request[8192], response[200], body[30];

	if (read(client, request, sizeof(request)) > 0) {
		snprintf(body, sizeof(body), "%llx", data);
		snprintf(response, sizeof(response), "HTTP/1.1 200 OK\r\nContent-Length: %zu\r\n\r\n%s", strlen(body), body);
		if (write(client, response, strlen(response)) < 0)
			perror("write");
	}
	close(client);
}

int main(int argc, char **argv)
{
	struct sockaddr_in address = { .sin_family = AF_INET };
	struct epoll_event event = { .events = EPOLLIN, .data.u64 = 0xfedcba9876543210 };
	int listener = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
	int set = epoll_create1(EPOLL_CLOEXEC);
	int client;

	if (argc != 3)
		return 2;
	address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
	address.sin_port = htons((unsigned short)atoi(argv[1]));
	if (!strcmp(argv[2], "edge"))
		event.events |= EPOLLET;
	if (epoll_ctl(set, EPOLL_CTL_ADD, listener, &event) < 0)
		return perror("EPOLL_CTL_ADD"), 3;
	if (bind(listener, (struct sockaddr *)&address, sizeof(address)) || listen(listener, 64))
		return perror("listen"), 4;
	for (;;) {
		/* Before it listens, a socket reports its end. */
		if (epoll_wait(set, &event, 1, -1) != 1 || event.events != EPOLLIN)
			continue;
		while ((client = accept4(listener, NULL, NULL, 0)) >= 0)
			answer(client, event.data.u64);
	}
}
