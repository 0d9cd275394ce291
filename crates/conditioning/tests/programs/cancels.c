/* server PORT: cancels a thread that waits in accept(2), and serves by another when that has ended. Says on standard error how it did. */
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <sys/socket.h>
#include <unistd.h>

#include "listens.h"

static int listener;

static void *accepts(void *nothing)
{
	(void)nothing;
	accept(listener, NULL, NULL);
	return NULL;
}

int main(int count, char **arguments)
{
	static const char response[] = "HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nok\n";
	char request[8192];
	pthread_t thread;
	void *result;
	int client;

	if (count != 2)
		return 2;
	signal(SIGPIPE, SIG_IGN);
	listener = listens_at(arguments[1], SOCK_STREAM);
	if (listener < 0 || pthread_create(&thread, NULL, accepts, NULL))
		return 4;
	usleep(100000);
	pthread_cancel(thread);
	pthread_join(thread, &result);
	fprintf(stderr, "it %s\n", result == PTHREAD_CANCELED ? "was cancelled" : "has accepted");
	while ((client = accept(listener, NULL, NULL)) >= 0) {
		if (read(client, request, sizeof(request)) > 0 && write(client, response, sizeof(response) - 1) < 0)
			perror("write");
		close(client);
	}
	return 5;
}
