/* A thread for each request. usage: threads PORT */
#include "hello.h"

static void *work(void *c)
{
	serve((int)(long)c, "threads");
	return NULL;
}

int main(int argc, char **argv)
{
	int s = listen_on(argc > 1 ? argv[1] : "8080");
	for (;;) {
		pthread_t thread;
		int c = cc_accept(s, NULL, NULL);
		if (c < 0 && errno == EINVAL)
			return 1;
		if (c < 0)
			continue;
		if (pthread_create(&thread, NULL, work, (void *)(long)c) == 0)
			pthread_detach(thread);
		else
			cc_close(c, 1);
	}
}
