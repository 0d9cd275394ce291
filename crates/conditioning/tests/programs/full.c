/*
 * server PORT WAY: has no descriptor left, and tries again to accept at once, until it has failed so often (WAY); then it serves, and
 * answers with the error that it was told.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include "listens.h"

int main(int argc, char **argv)
{
	struct rlimit limit = { 64, 64 };
	char request[8192], response[200], said[100] = "none";
	int listener, client, last, next, left;

	if (argc != 3)
		return 2;
	left = atoi(argv[2]);
	listener = listens_at(argv[1], SOCK_STREAM);
	if (listener < 0 || setrlimit(RLIMIT_NOFILE, &limit) < 0)
		return 4;
	for (last = -1; (next = open("/dev/null", O_RDONLY)) >= 0; last = next)
		;
	for (;;) {
		client = accept(listener, NULL, NULL);
		if (client < 0) {
			snprintf(said, sizeof(said), "%s", strerrorname_np(errno));
			if (--left == 0)
				close(last);
			continue;
		}
		if (read(client, request, sizeof(request)) < 0)
			return 5;
		snprintf(response, sizeof(response), "HTTP/1.1 200 OK\r\nContent-Length: %zu\r\n\r\n%s", strlen(said), said);
		if (write(client, response, strlen(response)) < 0)
			return 6;
		close(client);
	}
}
