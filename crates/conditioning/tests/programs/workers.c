/*
 * server PORT WAY: a process that waits for nobody, and one that serves, a request on each connection. The latter "dies" of
 * its first request; or is "slow": it answers seconds later.
 */
#include <arpa/inet.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

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
	struct sockaddr_in address = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
	int listener = socket(AF_INET, SOCK_STREAM, 0), yes = 1;

	if (argc != 3)
		return 2;
	address.sin_port = htons((unsigned short)atoi(argv[1]));
	setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof(yes));
	if (bind(listener, (struct sockaddr *)&address, sizeof(address)) < 0 || listen(listener, 64) < 0)
		return perror("listen"), 1;
	if (fork() == 0)
		serve(listener, argv[2]);
	for (;;)
		pause();
}
