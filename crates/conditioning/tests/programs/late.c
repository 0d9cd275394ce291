/* A server that goes to the background and whose first process ends late: not before it is sent SIGHUP, which is not for it. */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "listens.h"

static volatile sig_atomic_t hangups;

static void count(int signal)
{
	(void)signal;
	hangups++;
}

static void end(int signal)
{
	(void)signal;
	_exit(0);
}

int main(int arguments, char **argument)
{
	int listener;

	if (arguments < 2)
		return 2;
	signal(SIGHUP, end);
	if (fork() > 0)
		for (;;)
			pause();
	setsid();
	signal(SIGHUP, count);
	listener = listens_at(argument[1], SOCK_STREAM);
	if (listener < 0)
		return 1;
	for (;;) {
		int fd = accept(listener, NULL, NULL);
		char text[4096];

		if (fd < 0)
			continue;
		if (read(fd, text, sizeof(text)) > 0) {
			snprintf(text, sizeof(text), "HTTP/1.1 200 OK\r\nContent-Length: 8\r\n\r\nhung %2d\n", (int)hangups);
			if (write(fd, text, strlen(text)) < 0)
				return 4;
		}
		close(fd);
	}
}
