/* server PORT WAY: answers with what the calls of WAY on its listening socket have come to: options, or calls. */
#define _GNU_SOURCE
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "listens.h"

static void ask(int listener, const char *way, char *said, size_t room)
{
	struct tcp_info information;
	struct sockaddr_in peer;
	socklen_t length = sizeof(information), named = sizeof(peer);
	ssize_t sent, received;
	int got, error;

	memset(&information, 0xff, sizeof(information));
	got = getsockopt(listener, IPPROTO_TCP, TCP_INFO, &information, &length);
	error = getpeername(listener, (struct sockaddr *)&peer, &named) < 0 ? errno : 0;
	snprintf(said, room, "%d, all: %d, listens: %d, waiting: %u of %u, peer: %s", got, length == sizeof(information),
		 information.tcpi_state == TCP_LISTEN, information.tcpi_unacked, information.tcpi_sacked,
		 strerrorname_np(error));
	if (strcmp(way, "calls"))
		return;
	sent = send(listener, "lost", 4, MSG_NOSIGNAL);
	error = errno;
	received = recv(listener, said, 1, MSG_DONTWAIT);
	snprintf(said, room, "%zd %s, %zd %s", sent, strerrorname_np(error), received, strerrorname_np(errno));
}

int main(int argc, char **argv)
{
	int listener = argc > 2 ? listens_at(argv[1], SOCK_STREAM) : -1;
	char request[8192], response[500], said[200];
	int client;

	if (listener < 0)
		return 2;
	while ((client = accept(listener, NULL, NULL)) >= 0) {
		if (read(client, request, sizeof(request)) > 0) {
			ask(listener, argv[2], said, sizeof(said));
			snprintf(response, sizeof(response), "HTTP/1.1 200 OK\r\nContent-Length: %zu\r\n\r\n%s",
				 strlen(said), said);
			if (write(client, response, strlen(response)) < 0)
				perror("write");
		}
		close(client);
	}
	return 3;
}
