/* A server that reads as long as there is something to read (FIONREAD), as languages' buffered readers do. */
#include <arpa/inet.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

int main(int arguments, char **argument)
{
	static const char response[] = "HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nok\n";
	struct sockaddr_in address = { .sin_family = AF_INET };
	int one = 1, listener = socket(AF_INET, SOCK_STREAM, 0);

	if (arguments < 2)
		return 2;
	address.sin_port = htons(atoi(argument[1]));
	address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
	setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one));
	if (bind(listener, (struct sockaddr *)&address, sizeof(address)) || listen(listener, 64))
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
