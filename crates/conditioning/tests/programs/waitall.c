/* server PORT WAY: looks at a request's head, and reads head and content by one call that waits for all of them (recv, recvfrom, recvmsg).
 * Answers with the content, or with how much it got of what it waited for. By "interrupted", a signal comes while it waits for a rest
 * that does not. */
#define _GNU_SOURCE
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "listens.h"

static char request[1 << 20];

static void heard(int number)
{
	(void)number;
}

/* One signal, once the process's first thread sleeps. */
static void *interrupts(void *thread)
{
	char path[64], line[512] = "", *state;
	FILE *file;

	snprintf(path, sizeof(path), "/proc/self/task/%d/stat", getpid());
	do {
		usleep(1000);
		file = fopen(path, "r");
		state = file && fgets(line, sizeof(line), file) ? strrchr(line, ')') : NULL;
		if (file)
			fclose(file);
	} while (!state || state[2] != 'S');
	pthread_kill(*(pthread_t *)thread, SIGUSR1);
	return NULL;
}

static ssize_t interrupted(int client, size_t length)
{
	struct sigaction action = { .sa_handler = heard };
	pthread_t self = pthread_self(), other;
	ssize_t got;

	sigaction(SIGUSR1, &action, NULL);
	if (pthread_create(&other, NULL, interrupts, &self))
		return -1;
	got = recv(client, request, length, MSG_WAITALL);
	pthread_join(other, NULL);
	return got;
}

static ssize_t receive(int client, const char *way, size_t length)
{
	/* The bounds are somewhere in the head and in the content. */
	struct iovec parts[] = { { request, 20 }, { request + 20, length - 25 }, { request + length - 5, 5 } };
	struct msghdr message = { .msg_iov = parts, .msg_iovlen = 3 };

	if (!strcmp(way, "interrupted"))
		return interrupted(client, length);
	if (!strcmp(way, "recv"))
		return recv(client, request, length, MSG_WAITALL);
	if (!strcmp(way, "recvfrom"))
		return recvfrom(client, request, length, MSG_WAITALL, NULL, NULL);
	return recvmsg(client, &message, MSG_WAITALL);
}

int main(int count, char **arguments)
{
	int listener, client;
	char response[200];

	if (count != 3)
		return 2;
	listener = listens_at(arguments[1], SOCK_STREAM);
	if (listener < 0)
		return 4;
	while ((client = accept(listener, NULL, NULL)) >= 0) {
		char *end, *field;
		size_t length, content;
		ssize_t got = recv(client, request, sizeof(request) - 1, MSG_PEEK);

		request[got < 0 ? 0 : got] = 0;
		end = strstr(request, "\r\n\r\n");
		field = strstr(request, "Content-Length: ");
		if (!end)
			return 5;
		content = field ? strtoul(field + 16, NULL, 10) : 0;
		length = end + 4 - request + content;
		got = receive(client, arguments[2], length);
		if (got == (ssize_t)length)
			snprintf(response, sizeof(response), "HTTP/1.1 200 OK\r\nContent-Length: %zu\r\n\r\n", content);
		else
			snprintf(response, sizeof(response), "HTTP/1.1 500 %zd of %zu\r\nContent-Length: 0\r\n\r\n", got, length);
		send(client, response, strlen(response), MSG_NOSIGNAL);
		if (got == (ssize_t)length && content)
			send(client, request + length - content, content, MSG_NOSIGNAL);
		close(client);
	}
	return 6;
}
