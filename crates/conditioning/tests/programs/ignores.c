/*
 * server PORT WAY: never reads content as such. It says which requests it has seen, and answers each with its first line; what
 * follows the head is its next request, unless the head said that there is none (polite) or even so (deaf; lines, if it writes an
 * empty line behind each response; or ahead, if it waits for what follows the head before it answers). Or it refuses each request as soon as it has its head, and closes the connection
 * (refuses). Or it answers so, shuts its side down and after a moment throws away what comes until the client's end (drains).
 */
#define _GNU_SOURCE
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "listens.h"

/* Answers the requests of one connection. */
static void serve(int client, const char *way)
{
	static char bytes[65536], response[66000];
	size_t have = 0, head, drained;
	ssize_t got;
	char *end;
	int is_last, refuses = !strcmp(way, "refuses"), drains = !strcmp(way, "drains");

	for (;;) {
		bytes[have] = 0;
		end = strstr(bytes, "\r\n\r\n");
		if (!end) {
			got = have < sizeof(bytes) - 1 ? read(client, bytes + have, sizeof(bytes) - 1 - have) : 0;
			if (got <= 0)
				return;
			have += (size_t)got;
			continue;
		}
		*end = 0;
		head = (size_t)(end + 4 - bytes);
		if (!strcmp(way, "ahead") && have == head) {
			got = read(client, bytes + have, sizeof(bytes) - 1 - have);
			have += got > 0 ? (size_t)got : 0;
			bytes[have] = 0;
		}
		is_last = !!strcasestr(bytes, "\r\nConnection: close");
		bytes[strcspn(bytes, "\r")] = 0;
		fprintf(stderr, "seen: %s\n", bytes);
		snprintf(response, sizeof(response), "HTTP/1.1 %sContent-Length: %zu\r\n\r\n%s%s",
			 refuses ? "413 Too Large\r\nConnection: close\r\n" :
			 drains ? "200 OK\r\nConnection: close\r\n" : "200 OK\r\n",
			 strlen(bytes), strncmp(bytes, "HEAD", 4) ? bytes : "", strcmp(way, "lines") ? "" : "\r\n");
		if (write(client, response, strlen(response)) < 0 || (is_last && !strcmp(way, "polite")))
			return;
		have -= head;
		if (drains) {
			shutdown(client, SHUT_WR);
			/* What is on its way to it fills what it goes through. */
			usleep(200000);
			for (drained = have; (got = read(client, bytes, sizeof(bytes))) > 0;)
				drained += (size_t)got;
			fprintf(stderr, "drained: %zu\n", drained);
		}
		if (refuses || drains)
			return;
		memmove(bytes, bytes + head, have);
	}
}

int main(int argc, char **argv)
{
	int listener, client;

	if (argc != 3)
		return 2;
	signal(SIGPIPE, SIG_IGN);
	listener = listens_at(argv[1], SOCK_STREAM);
	if (listener < 0)
		return 4;
	for (;;) {
		client = accept(listener, NULL, NULL);
		if (client < 0)
			return 5;
		serve(client, argv[2]);
		close(client);
	}
}
