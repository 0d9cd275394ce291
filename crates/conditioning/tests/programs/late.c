/* A server that goes to the background and whose first process ends late: not before it is sent SIGHUP, which is not for it. */
#include <arpa/inet.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

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
	struct sockaddr_in address = { .sin_family = AF_INET };
	int one = 1, listener = socket(AF_INET, SOCK_STREAM, 0);

	if (arguments < 2)
		return 2;
	signal(SIGHUP, end);
	if (fork() > 0)
		for (;;)
			pause();
	setsid();
	signal(SIGHUP, count);
	address.sin_port = htons(atoi(argument[1]));
	address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
	setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one));
	if (bind(listener, (struct sockaddr *)&address, sizeof(address)) || listen(listener, 64))
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
