/* Processes that were forked before, all accepting from one descriptor. usage: prefork PORT */
#include <sys/prctl.h>
#include "hello.h"

int main(int argc, char **argv)
{
	int s = listen_on(argc > 1 ? argv[1] : "8080");
	for (int i = 0; i < 4; i++) {
		if (cc_fork() == 0) {
			/* Whoever ends the parent ends them all. */
			prctl(PR_SET_PDEATHSIG, SIGTERM);
			for (;;) {
				int c = cc_accept(s, NULL, NULL);
				if (c >= 0)
					serve(c, "prefork");
				else if (errno == EINVAL)
					_exit(1);
			}
		}
	}
	cc_close(s, 0);
	/* Ends with its children, which also end when the filters do. */
	while (wait(NULL) > 0)
		;
	return 0;
}
