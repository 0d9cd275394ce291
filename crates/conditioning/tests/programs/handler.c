/* server PORT: a signal handler duplicates and closes descriptors, also in the middle of calls that look for a socket's name. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

static volatile sig_atomic_t rounds;

static void close_one(int signal)
{
	(void)signal;
	rounds++;
	close(dup(STDERR_FILENO));
}

int main(int argc, char **argv)
{
	static const char response[] = "HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nok\n";
	struct sigaction action = { .sa_handler = close_one, .sa_flags = SA_RESTART };
	struct itimerval often = { { 0, 50 }, { 0, 50 } }, never = { 0 };
	struct sockaddr_in address = { .sin_family = AF_INET }, name;
	int listener = socket(AF_INET, SOCK_STREAM, 0), client;
	char request[8192];

	address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
	address.sin_port = htons((unsigned short)(argc > 1 ? atoi(argv[1]) : 0));
	if (bind(listener, (struct sockaddr *)&address, sizeof(address)) < 0 || sigaction(SIGALRM, &action, NULL) < 0 ||
	    setitimer(ITIMER_REAL, &often, NULL) < 0)
		return perror("bind"), 1;
	while (rounds < 10000) {
		socklen_t length = sizeof(name);

		if (getsockname(listener, (struct sockaddr *)&name, &length) < 0)
			return perror("getsockname"), 2;
	}
	setitimer(ITIMER_REAL, &never, NULL);
	if (listen(listener, 64) < 0)
		return perror("listen"), 3;
	for (;;) {
		client = accept(listener, NULL, NULL);
		if (client >= 0 && read(client, request, sizeof(request)) > 0 &&
		    write(client, response, strlen(response)) < 0)
			perror("write");
		close(client);
	}
}
