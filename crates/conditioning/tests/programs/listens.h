/* What the programs have in common: how they listen. */
#include <arpa/inet.h>
#include <stdlib.h>
#include <sys/socket.h>

/* A socket of this type that listens at the loopback address, or -1. Unconditioned, it may follow a server whose connections are not
 * forgotten yet. */
static int listens_at(const char *port, int type)
{
	struct sockaddr_in address = { .sin_family = AF_INET, .sin_port = htons((unsigned short)atoi(port)) };
	int fd = socket(AF_INET, type, 0), one = 1;

	address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
	setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one));
	return bind(fd, (struct sockaddr *)&address, sizeof(address)) || listen(fd, 64) ? -1 : fd;
}
