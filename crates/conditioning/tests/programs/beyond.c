/*
 * server PORT WAY: reads beyond the end of each request, in one thread:
 *
 *   drains    answers, ends its sending side, and reads until the client has ended or a second has passed (SO_RCVTIMEO)
 *   ends      likewise, without a limit
 *   timeout   reads for more than the request before it answers, for a tenth of a second at most
 *   rest      likewise, for all of a request whose rest does not come
 *   dontwait  likewise, by recv(2) with MSG_DONTWAIT
 *   left      likewise, again and again until it reads the client's end, or has done so for half a second
 *   leaves    likewise, until the client has ended
 *   cancel    another thread reads, and is cancelled before the answer
 *   flags     answers three connections, of which it changes the flags afterwards, and keeps them
 *   shuts     shuts its listening socket down in a child, and closes it, before it serves
 *   range     closes all descriptors that it does not know, and becomes the same program anew before it listens
 *   each      likewise, one after the other
 *   cloexec   likewise, but has each close on exec
 *   ioctl     likewise, by ioctl(2)
 *
 * A response is what the last read before it returned, or the read behind the response before it.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

#include "listens.h"

static const char *way;
static char said[100] = "nothing";

static int is(const char *name)
{
	return !strcmp(way, name);
}

static void note(ssize_t result)
{
	if (result < 0)
		snprintf(said, sizeof(said), "%s", strerrorname_np(errno));
	else
		snprintf(said, sizeof(said), "%zd", result);
}

static ssize_t head(int client)
{
	char bytes[8192];
	size_t length = 0;
	ssize_t got;

	while (!memmem(bytes, length, "\r\n\r\n", 4)) {
		got = read(client, bytes + length, sizeof(bytes) - length);
		if (got <= 0)
			return got;
		length += (size_t)got;
	}
	return (ssize_t)length;
}

static void answer(int client)
{
	char response[300];

	snprintf(response, sizeof(response), "HTTP/1.1 200 OK\r\nContent-Length: %zu\r\n\r\n%s", strlen(said), said);
	if (write(client, response, strlen(response)) < 0)
		perror("write");
}

static void *reads(void *argument)
{
	char bytes[8192];

	while (read((int)(long)argument, bytes, sizeof(bytes)) > 0)
		;
	return NULL;
}

static void limit(int client, long milliseconds)
{
	struct timeval limit = { milliseconds / 1000, milliseconds % 1000 * 1000 };

	setsockopt(client, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
}

static void serve(int client)
{
	static int connections;
	char bytes[8192];
	pthread_t thread;
	void *result = NULL;
	ssize_t got;
	int looks;

	if (is("cancel")) {
		if (pthread_create(&thread, NULL, reads, (void *)(long)client))
			return;
		usleep(100000);
		pthread_cancel(thread);
		pthread_join(thread, &result);
		snprintf(said, sizeof(said), "%s", result == PTHREAD_CANCELED ? "cancelled" : "ended");
		return answer(client);
	}
	if (is("drains"))
		limit(client, 1000);
	if (is("timeout") || is("rest"))
		limit(client, 100);
	if (head(client) <= 0)
		return;
	if (is("timeout"))
		note(read(client, bytes, sizeof(bytes)));
	if (is("rest") || is("leaves")) {
		while ((got = read(client, bytes, sizeof(bytes))) > 0)
			;
		note(got);
	}
	if (is("dontwait"))
		note(recv(client, bytes, sizeof(bytes), MSG_DONTWAIT));
	for (looks = 0; is("left") && looks < 50; looks++) {
		got = recv(client, bytes, sizeof(bytes), MSG_DONTWAIT);
		note(got);
		if (got >= 0)
			break;
		usleep(10000);
	}
	answer(client);
	if (is("drains") || is("ends")) {
		shutdown(client, SHUT_WR);
		while ((got = read(client, bytes, sizeof(bytes))) > 0)
			;
		note(got);
	}
	if (is("flags") && connections++ < 3) {
		/* Of the first it changes them, of the others it looks at them. */
		if (connections == 1)
			fcntl(client, F_SETFL, 0);
		else
			snprintf(said, sizeof(said), "%s", fcntl(client, F_GETFL) & O_NONBLOCK ? "non-blocking" : "blocking");
		dup(client);
	}
}

int main(int argc, char **argv)
{
	int listener, client, status;
	pid_t child;

	if (argc != 3)
		return 2;
	way = argv[2];
	if (is("range") || is("each") || is("cloexec") || is("ioctl")) {
		for (client = 3; is("each") && client < 70000; client++)
			close(client);
		for (client = 3; is("cloexec") && client < 70000; client++)
			fcntl(client, F_SETFD, FD_CLOEXEC);
		for (client = 3; is("ioctl") && client < 70000; client++)
			ioctl(client, FIOCLEX);
		if (is("range"))
			close_range(3, ~0U, 0);
		execl(argv[0], argv[0], argv[1], "shuts", NULL);
		return 4;
	}
	signal(SIGPIPE, SIG_IGN);
	listener = listens_at(argv[1], SOCK_STREAM);
	if (listener < 0)
		return 1;
	if (is("shuts")) {
		child = fork();
		if (child == 0) {
			shutdown(listener, SHUT_RDWR);
			close(listener);
			_exit(0);
		}
		waitpid(child, &status, 0);
	}
	for (;;) {
		client = accept4(listener, NULL, NULL, 0);
		if (client < 0)
			return 3;
		if (is("flags")) {
			/* It is whole: nothing has to be waited for. */
			fcntl(client, F_SETFL, O_NONBLOCK);
		}
		serve(client);
		close(client);
	}
}
