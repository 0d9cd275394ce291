/* server PORT: accepts and closes by syscall(2), and keeps its connections; one after the other. */
#define _GNU_SOURCE
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include "listens.h"

int main(int count, char **arguments)
{
	static const char head[] = "HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\n";
	struct iovec parts[] = { { (void *)head, sizeof(head) - 1 }, { (void *)"ok\n", 3 } };
	char request[8192];
	long listener, client;

	if (count != 2)
		return 2;
	listener = listens_at(arguments[1], SOCK_STREAM);
	if (listener < 0)
		return 4;
	for (;;) {
		client = syscall(SYS_accept4, listener, NULL, NULL, SOCK_CLOEXEC);
		if (client < 0)
			return 5;
		while (read((int)client, request, sizeof(request)) > 0)
			if (writev((int)client, parts, 2) < 0)
				break;
		syscall(SYS_close, client);
	}
}
