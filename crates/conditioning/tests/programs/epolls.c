/*
 * Servers with one thread and a listening socket that waits, which is registered with an epoll set:
 *
 *   server PORT made-before FILE      the set is older than the child that waits in it while the parent changes it
 *   server PORT child-registers FILE  the set is older than the child that registers; the parent waits in it
 *   server PORT waits-in-child FILE   the set has the socket when the child is forked, which waits in it
 *   server PORT changes FILE          one process; FILE is what changes of the set have returned
 *
 * FILE is there once the process that does not serve has done its part.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include "listens.h"

static int listener, set;
static FILE *results;

static void fail(const char *what)
{
	perror(what);
	exit(3);
}

/* Waits for events, and answers each client with the data of the event that told of it. */
static void serve(void)
{
	struct epoll_event event;
	char request[8192], response[200], body[30];
	int client;

	for (;;) {
		if (epoll_wait(set, &event, 1, -1) != 1)
			fail("epoll_wait");
		client = accept(listener, NULL, NULL);
		if (client < 0)
			fail("accept");
		if (read(client, request, sizeof(request)) > 0) {
			snprintf(body, sizeof(body), "%d", event.data.fd);
			snprintf(response, sizeof(response), "HTTP/1.1 200 OK\r\nContent-Length: %zu\r\n\r\n%s",
				 strlen(body), body);
			if (write(client, response, strlen(response)) < 0)
				fail("write");
		}
		close(client);
	}
}

static int change(int in, int operation, int fd, unsigned int events, int data)
{
	struct epoll_event event = { .events = events, .data.fd = data };

	return epoll_ctl(in, operation, fd, &event);
}

static void done(const char *file)
{
	FILE *there = fopen(file, "w");

	if (!there || fclose(there))
		fail(file);
}

/* proc_pid_stat(5): waits until the process sleeps. */
static void await_sleep(pid_t process)
{
	char name[50], text[500];
	FILE *stat;

	snprintf(name, sizeof(name), "/proc/%d/stat", process);
	for (;;) {
		stat = fopen(name, "r");
		if (!stat || !fgets(text, sizeof(text), stat))
			fail(name);
		fclose(stat);
		if (strstr(text, ") S "))
			return;
		usleep(1000);
	}
}

static void note(const char *what, int result)
{
	fprintf(results, "%s: %s\n", what, result < 0 ? strerrorname_np(errno) : "done");
}

/* As epoll_ctl(2) says, whatever becomes of the registration meanwhile. */
static void changes(const char *file)
{
	struct epoll_event *nowhere = (struct epoll_event *)1;
	struct epoll_event event;
	int other = epoll_create1(EPOLL_CLOEXEC);

	results = fopen(file, "w");
	if (!results)
		fail(file);
	note("change what is not there", change(set, EPOLL_CTL_MOD, listener, EPOLLIN, 1));
	note("delete what is not there", change(set, EPOLL_CTL_DEL, listener, EPOLLIN, 1));
	note("add", change(set, EPOLL_CTL_ADD, listener, EPOLLIN, 1));
	note("add again", change(set, EPOLL_CTL_ADD, listener, EPOLLIN, 2));
	note("add to another set", change(other, EPOLL_CTL_ADD, listener, EPOLLIN, 2));
	note("change", change(set, EPOLL_CTL_MOD, listener, EPOLLIN | EPOLLET, 3));
	note("add what was changed", change(set, EPOLL_CTL_ADD, listener, EPOLLIN, 4));
	note("change without an event", epoll_ctl(set, EPOLL_CTL_MOD, listener, NULL));
	note("change by an event that is nowhere", epoll_ctl(set, EPOLL_CTL_MOD, listener, nowhere));
	note("make exclusive what is not", change(set, EPOLL_CTL_MOD, listener, EPOLLIN | EPOLLEXCLUSIVE, 1));
	note("do what there is not", change(set, 99, listener, EPOLLIN, 1));
	note("add to what is no set", change(listener, EPOLL_CTL_ADD, listener, EPOLLIN, 1));
	note("add a set to itself", change(set, EPOLL_CTL_ADD, set, EPOLLIN, 1));
	note("add what is closed", change(set, EPOLL_CTL_ADD, 999, EPOLLIN, 1));
	note("add to what is closed", change(999, EPOLL_CTL_ADD, listener, EPOLLIN, 1));
	note("delete by an event that is nowhere", epoll_ctl(set, EPOLL_CTL_DEL, listener, nowhere));
	note("delete again", change(set, EPOLL_CTL_DEL, listener, EPOLLIN, 1));
	note("change what was deleted", change(set, EPOLL_CTL_MOD, listener, EPOLLIN, 1));
	note("add exclusively", change(set, EPOLL_CTL_ADD, listener, EPOLLIN | EPOLLEXCLUSIVE, 5));
	note("change what is exclusive", change(set, EPOLL_CTL_MOD, listener, EPOLLIN, 6));
	note("delete it", epoll_ctl(set, EPOLL_CTL_DEL, listener, NULL));
	fprintf(results, "events without a registration: %d\n", epoll_wait(set, &event, 1, 0));
	note("close the other set", close(other));
	note("add once more", change(set, EPOLL_CTL_ADD, listener, 0, 7));
	note("change it", change(set, EPOLL_CTL_MOD, listener, EPOLLIN, 8));
	if (fclose(results))
		fail(file);
	serve();
}

int main(int argc, char **argv)
{
	const char *how = argv[2], *file = argv[3];
	pid_t child;

	if (argc != 4)
		return 2;
	listener = listens_at(argv[1], SOCK_STREAM);
	if (listener < 0)
		fail("listen");
	set = epoll_create1(EPOLL_CLOEXEC);
	if (!strcmp(how, "changes"))
		changes(file);
	if (strcmp(how, "child-registers") && change(set, EPOLL_CTL_ADD, listener, EPOLLIN, 1) < 0)
		fail("EPOLL_CTL_ADD");
	child = fork();
	if (child == 0)
		prctl(PR_SET_PDEATHSIG, SIGKILL);
	if (!strcmp(how, "made-before")) {
		if (child == 0)
			serve();
		await_sleep(child);
		if (change(set, EPOLL_CTL_MOD, listener, EPOLLIN, 2) < 0)
			fail("EPOLL_CTL_MOD");
		done(file);
	} else if (!strcmp(how, "child-registers")) {
		if (child != 0)
			serve();
		await_sleep(getppid());
		if (change(set, EPOLL_CTL_ADD, listener, EPOLLIN, 2) < 0)
			fail("EPOLL_CTL_ADD");
		done(file);
	} else {
		if (child == 0)
			serve();
		done(file);
	}
	for (;;)
		pause();
}
