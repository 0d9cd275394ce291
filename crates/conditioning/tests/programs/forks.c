/* A server that answers each client in a child of its own, while threads of it close descriptors all the time. */
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "listens.h"

static void *close_nothing(void *unused)
{
	(void)unused;
	for (;;)
		close(-1);
	return NULL;
}

static void answer(int client)
{
	static const char response[] = "HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nok\n";
	char request[8192];

	if (read(client, request, sizeof(request)) > 0 && write(client, response, strlen(response)) < 0)
		perror("write");
	close(client);
}

int main(int argc, char **argv)
{
	int listener = listens_at(argc > 1 ? argv[1] : "0", SOCK_STREAM);
	if (listener < 0)
		return perror("listen"), 1;
	signal(SIGCHLD, SIG_IGN);
	for (int i = 0; i < 2; i++) {
		pthread_t thread;
		if (pthread_create(&thread, NULL, close_nothing, NULL))
			return 1;
	}
	for (;;) {
		int client = accept(listener, NULL, NULL);
		if (client < 0)
			continue;
		if (fork() == 0) {
			close(listener);
			answer(client);
			_exit(0);
		}
		close(client);
	}
}
