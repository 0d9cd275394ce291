/* A statically linked server whose accept is interrupted after its first request: from then on the memory that the client's
   address was to be written to is used for something else. The answer says whether it was left alone. */
#include <arpa/inet.h>
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

static struct {
	struct sockaddr_in address;
	socklen_t length;
} slot, other, kept;

static void go_on(int signal)
{
	(void)signal;
}

int main(int argc, char **argv)
{
	int s = socket(AF_INET, SOCK_STREAM, 0), answered = 0, interrupted = 0;
	struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(atoi(argc > 1 ? argv[1] : "0"))};
	struct sigaction action = {.sa_handler = go_on};
	if (bind(s, (struct sockaddr *)&address, sizeof(address)) < 0 || listen(s, 5) < 0)
		return perror("listen"), 1;
	sigaction(SIGALRM, &action, NULL);
	for (;;) {
		struct itimerval often = {{0, 20000}, {0, 20000}}, never = {0};
		setitimer(ITIMER_REAL, answered && !interrupted ? &often : &never, NULL);
		slot.length = other.length = sizeof(other.address);
		if (interrupted)
			slot = kept;
		int c = interrupted ? accept(s, (struct sockaddr *)&other.address, &other.length)
				    : accept(s, (struct sockaddr *)&slot.address, &slot.length);
		if (c < 0 && errno == EINTR && answered) {
			setitimer(ITIMER_REAL, &never, NULL);
			interrupted = 1;
			memset(&kept, 0x55, sizeof(kept));
			kept.length = sizeof(kept.address);
			slot = kept;
			fprintf(stderr, "interrupted\n");
			struct pollfd waiting = {.fd = s, .events = POLLIN};
			/* A client is there; whoever would write has the time to. */
			poll(&waiting, 1, 5000);
			usleep(200000);
			if (memcmp(&slot, &kept, sizeof(slot)))
				fprintf(stderr, "overwritten\n");
			continue;
		}
		if (c < 0)
			continue;
		char text[8192];
		static const char answer[] = "HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nok\n";
		if (read(c, text, sizeof(text)) > 0 && write(c, answer, sizeof(answer) - 1) < 0)
			perror("write");
		close(c);
		answered = 1;
	}
}
