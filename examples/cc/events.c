/* Event-driven, with one of select, poll and epoll. usage: events PORT [select|poll|epoll] */
#include "hello.h"

enum { MOST = 512 };

static struct connection {
	int fd; /* -1: none */
	size_t length;
	char text[16384];
} connections[MOST];
static int s, epoll = -1;

static void finish(struct connection *connection, int good)
{
	cc_close(connection->fd, !good);
	connection->fd = -1;
}

static void readable(struct connection *connection)
{
	int head = read_head(connection->fd, connection->text, sizeof(connection->text), &connection->length);
	if (head != 0)
		finish(connection, head > 0 && answer(connection->fd, connection->text, "events"));
}

static void acceptable(void)
{
	for (int i = 0; i < MOST; i++) {
		struct connection *connection = &connections[i];
		if (connection->fd >= 0)
			continue;
		connection->fd = cc_accept(s, NULL, NULL);
		if (connection->fd < 0 && errno == EINVAL)
			exit(1);
		if (connection->fd < 0)
			return;
		connection->length = 0;
		fcntl(connection->fd, F_SETFL, O_NONBLOCK);
		struct epoll_event event = {.events = EPOLLIN, .data.ptr = connection};
		if (epoll >= 0 && cc_epoll_ctl(epoll, EPOLL_CTL_ADD, connection->fd, &event) < 0)
			finish(connection, 0);
	}
}

static void wait_with_select(void)
{
	fd_set set;
	int highest = s;
	FD_ZERO(&set);
	FD_SET(s, &set);
	for (int i = 0; i < MOST; i++) {
		if (connections[i].fd >= 0)
			FD_SET(connections[i].fd, &set);
		if (connections[i].fd > highest)
			highest = connections[i].fd;
	}
	if (cc_select(highest + 1, &set, NULL, NULL, NULL) <= 0)
		return;
	for (int i = 0; i < MOST; i++)
		if (connections[i].fd >= 0 && FD_ISSET(connections[i].fd, &set))
			readable(&connections[i]);
	if (FD_ISSET(s, &set))
		acceptable();
}

static void wait_with_poll(void)
{
	struct pollfd set[MOST + 1];
	for (int i = 0; i < MOST; i++)
		set[i] = (struct pollfd){.fd = connections[i].fd, .events = POLLIN};
	set[MOST] = (struct pollfd){.fd = s, .events = POLLIN};
	if (cc_poll(set, MOST + 1, -1) <= 0)
		return;
	for (int i = 0; i < MOST; i++)
		if (set[i].fd >= 0 && set[i].revents)
			readable(&connections[i]);
	if (set[MOST].revents)
		acceptable();
}

static void wait_with_epoll(void)
{
	struct epoll_event events[64];
	int count = cc_epoll_wait(epoll, events, 64, -1);
	for (int i = 0; i < count; i++) {
		if (events[i].data.ptr)
			readable(events[i].data.ptr);
		else
			acceptable();
	}
}

int main(int argc, char **argv)
{
	const char *with = argc > 2 ? argv[2] : "epoll";
	s = listen_on(argc > 1 ? argv[1] : "8080");
	fcntl(s, F_SETFL, O_NONBLOCK);
	for (int i = 0; i < MOST; i++)
		connections[i].fd = -1;
	if (!strcmp(with, "epoll")) {
		struct epoll_event event = {.events = EPOLLIN, .data.ptr = NULL};
		epoll = epoll_create1(EPOLL_CLOEXEC);
		if (cc_epoll_ctl(epoll, EPOLL_CTL_ADD, s, &event) < 0)
			return perror("epoll"), 1;
	}
	for (;;) {
		if (epoll >= 0)
			wait_with_epoll();
		else if (!strcmp(with, "poll"))
			wait_with_poll();
		else
			wait_with_select();
	}
}
