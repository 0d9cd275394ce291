/*
 * server PORT WAY: a process that waits for nobody, and one that serves, a request on each connection. The latter "dies" of
 * its first request; or is "slow": it answers seconds later.
 */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "listens.h"

static const char response[] = "HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nok\n";

static void serve(int listener, const char *way)
{
	char request[8192];
	int client;

	for (;;) {
		client = accept(listener, NULL, NULL);
		if (client < 0)
			exit(1);
		if (read(client, request, sizeof(request)) <= 0)
			exit(1);
		if (!strcmp(way, "dies"))
			kill(getpid(), SIGKILL);
		sleep(4);
		if (write(client, response, strlen(response)) < 0)
			perror("write");
		close(client);
	}
}

int main(int argc, char **argv)
{
	int listener;

	if (argc != 3)
		return 2;
	listener = listens_at(argv[1], SOCK_STREAM);
	if (listener < 0)
		return perror("listen"), 1;
	if (fork() == 0)
		serve(listener, argv[2]);
	for (;;)
		pause();
}
