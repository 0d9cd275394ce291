/* A process for each request. usage: process PORT */
#include "hello.h"

int main(int argc, char **argv)
{
	int s = listen_on(argc > 1 ? argv[1] : "8080");
	signal(SIGCHLD, SIG_IGN);
	for (;;) {
		int c = cc_accept(s, NULL, NULL);
		if (c < 0 && errno == EINVAL)
			return 1;
		if (c < 0)
			continue;
		pid_t child = cc_fork();
		if (child == 0) {
			serve(c, "process");
			_exit(0);
		}
		/* Without a child the connection ends; with one, this is one handle of two. */
		cc_close(c, child < 0);
	}
}
