/* A server that reads as long as there is something to read (FIONREAD), as languages' buffered readers do. */
#include <stdlib.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include "listens.h"

int main(int arguments, char **argument)
{
	static const char response[] = "HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nok\n";
	int listener;

	if (arguments < 2)
		return 2;
	listener = listens_at(argument[1], SOCK_STREAM);
	if (listener < 0)
		return 1;
	for (;;) {
		int fd = accept(listener, NULL, NULL), more = 1;
		char request[64];

		while (more > 0 && read(fd, request, sizeof(request)) > 0)
			if (ioctl(fd, FIONREAD, &more) < 0)
				return 3;
		if (write(fd, response, sizeof(response) - 1) < 0)
			return 4;
		close(fd);
	}
}
