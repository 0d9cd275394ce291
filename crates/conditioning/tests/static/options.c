/* A statically linked server that waits for events, asks what it has accepted and from whom, sets options of TCP, and takes
   none of it for granted: what fails is the answer. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

static char failed[256];

static void check(const char *what, int is_so)
{
	if (!is_so && !failed[0])
		snprintf(failed, sizeof(failed), "%s: %s", what, strerror(errno));
}

static int option(int fd, int level, int name)
{
	int value = -1;
	socklen_t length = sizeof(value);

	if (getsockopt(fd, level, name, &value, &length) < 0 || length != sizeof(value))
		return -2;
	return value;
}

static int set(int fd, int level, int name, int value)
{
	return setsockopt(fd, level, name, &value, sizeof(value)) == 0;
}

static void is_a_stream(int fd, int accepts)
{
	check("SO_TYPE", option(fd, SOL_SOCKET, SO_TYPE) == SOCK_STREAM);
	check("SO_DOMAIN", option(fd, SOL_SOCKET, SO_DOMAIN) == AF_INET);
	check("SO_PROTOCOL", option(fd, SOL_SOCKET, SO_PROTOCOL) == IPPROTO_TCP);
	check("SO_ACCEPTCONN", option(fd, SOL_SOCKET, SO_ACCEPTCONN) == accepts);
	check("SO_ERROR", option(fd, SOL_SOCKET, SO_ERROR) == 0);
}

static void names(int fd, const struct sockaddr_in *peer, int port)
{
	struct sockaddr_in name = {0};
	socklen_t length = sizeof(name);

	check("getpeername", getpeername(fd, (struct sockaddr *)&name, &length) == 0 && length == sizeof(name));
	check("the client's address", name.sin_family == AF_INET && name.sin_addr.s_addr == peer->sin_addr.s_addr);
	check("the client's port", name.sin_port == peer->sin_port);
	check("getsockname", getsockname(fd, (struct sockaddr *)&name, &length) == 0);
	check("the server's address", name.sin_port == htons(port));
}

static void options(int fd)
{
	struct tcp_info information = {0};
	socklen_t length = sizeof(information);
	char shorter = 0;
	socklen_t one = 1;

	check("TCP_NODELAY", set(fd, IPPROTO_TCP, TCP_NODELAY, 1) && option(fd, IPPROTO_TCP, TCP_NODELAY) == 1);
	check("a shorter value", !getsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &shorter, &one) && one == 1 && shorter == 1);
	check("no TCP_NODELAY", set(fd, IPPROTO_TCP, TCP_NODELAY, 0) && option(fd, IPPROTO_TCP, TCP_NODELAY) == 0);
	check("TCP_KEEPIDLE", set(fd, IPPROTO_TCP, TCP_KEEPIDLE, 77) && option(fd, IPPROTO_TCP, TCP_KEEPIDLE) == 77);
	check("IP_TOS", set(fd, IPPROTO_IP, IP_TOS, 16) && option(fd, IPPROTO_IP, IP_TOS) == 16);
	check("SO_KEEPALIVE", set(fd, SOL_SOCKET, SO_KEEPALIVE, 1) && option(fd, SOL_SOCKET, SO_KEEPALIVE) == 1);
	check("TCP_INFO", getsockopt(fd, IPPROTO_TCP, TCP_INFO, &information, &length) == 0);
	check("an established connection", information.tcpi_state == TCP_ESTABLISHED);
	check("TCP_CORK", set(fd, IPPROTO_TCP, TCP_CORK, 1));
	errno = 0;
	check("a short value", setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &shorter, 1) < 0 && errno == EINVAL);
	check("an unknown option", !set(fd, IPPROTO_TCP, 0x7fff, 1) && errno == ENOPROTOOPT);
	errno = 0;
	check("an option that is not the server's", !set(fd, IPPROTO_IP, IP_TRANSPARENT, 1) && errno == ENOPROTOOPT);
	errno = 0;
	check("one that others may set", !set(fd, IPPROTO_IP, IP_RECVTTL, 1) && errno == ENOPROTOOPT);
	check("no memory", setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, (void *)16, 4) < 0 && errno == EFAULT);
}

static void answer(int fd)
{
	char text[512], response[1024];

	snprintf(text, sizeof(text), "%s\n", failed[0] ? failed : "ok");
	snprintf(response, sizeof(response), "HTTP/1.1 200 OK\r\nContent-Length: %zu\r\n\r\n%s", strlen(text), text);
	if (write(fd, response, strlen(response)) < 0)
		perror("write");
}

int main(int argc, char **argv)
{
	static struct sockaddr_in peers[1024];
	int port = atoi(argc > 1 ? argv[1] : "0"), epoll = epoll_create1(0);
	int listener = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
	struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(port)};
	struct epoll_event event = {.events = EPOLLIN, .data.fd = listener};

	if (!set(listener, IPPROTO_TCP, TCP_NODELAY, 1) || !set(listener, IPPROTO_TCP, TCP_DEFER_ACCEPT, 1))
		return perror("options"), 1;
	if (bind(listener, (struct sockaddr *)&address, sizeof(address)) < 0 || listen(listener, 5) < 0)
		return perror("listen"), 1;
	check("an option of what listens", set(listener, IPPROTO_TCP, TCP_NODELAY, 1));
	is_a_stream(listener, 1);
	epoll_ctl(epoll, EPOLL_CTL_ADD, listener, &event);
	for (;;) {
		char text[8192];
		ssize_t got;
		int fd;

		if (epoll_wait(epoll, &event, 1, -1) < 1)
			continue;
		if (event.data.fd == listener) {
			struct sockaddr_in peer;
			socklen_t length = sizeof(peer);

			fd = accept4(listener, (struct sockaddr *)&peer, &length, SOCK_NONBLOCK);
			if (fd < 0 || fd >= 1024)
				continue;
			peers[fd] = peer;
			is_a_stream(fd, 0);
			options(fd);
			event = (struct epoll_event){.events = EPOLLIN, .data.fd = fd};
			epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event);
			continue;
		}
		fd = event.data.fd;
		got = read(fd, text, sizeof(text));
		names(fd, &peers[fd], port);
		if (got > 0) {
			answer(fd);
			continue;
		}
		/* The end: as servers do before they close. */
		check("TCP_NODELAY at the end", set(fd, IPPROTO_TCP, TCP_NODELAY, 1));
		is_a_stream(fd, 0);
		close(fd);
	}
}
