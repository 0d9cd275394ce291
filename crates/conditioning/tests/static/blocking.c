/* A statically linked server that waits in accept and closes after each response; with a second argument, signals come
   so often that most calls are interrupted and begin anew. */
#include <arpa/inet.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

static void go_on(int signal)
{
	(void)signal;
}

int main(int argc, char **argv)
{
	int s = socket(AF_INET, SOCK_STREAM, 0);
	struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(atoi(argc > 1 ? argv[1] : "0"))};
	if (bind(s, (struct sockaddr *)&address, sizeof(address)) < 0 || listen(s, 5) < 0)
		return perror("listen"), 1;
	if (argc > 2) {
		struct sigaction action = {.sa_handler = go_on, .sa_flags = SA_RESTART};
		struct itimerval often = {{0, 300}, {0, 300}};
		if (sigaction(SIGALRM, &action, NULL) < 0 || setitimer(ITIMER_REAL, &often, NULL) < 0)
			return perror("signals"), 1;
	}
	for (;;) {
		struct sockaddr_in peer;
		socklen_t length = sizeof(peer);
		char text[8192], answer[256];
		int c = accept(s, (struct sockaddr *)&peer, &length);
		if (c < 0)
			continue;
		if (read(c, text, sizeof(text)) > 0) {
			char *name = inet_ntoa(peer.sin_addr);
			int size = snprintf(answer, sizeof(answer),
				"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %zu\r\n\r\n%s", strlen(name), name);
			if (write(c, answer, size) != size)
				perror("write");
		}
		close(c);
	}
}
