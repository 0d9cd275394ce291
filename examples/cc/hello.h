/* What the four examples have in common: reads a request with cc_read and answers it. */
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <tidegate/cc.h>

static int listen_on(const char *port)
{
	static char *filters[] = {"prior", "persist", "package", NULL};
	signal(SIGPIPE, SIG_IGN);
	int s = cc_createlsock((struct in_addr){htonl(INADDR_LOOPBACK)}, htons(atoi(port)), 1024, filters);
	if (s < 0) {
		perror("cc_createlsock");
		exit(1);
	}
	return s;
}

/* Reads what is there of a request: 1 when its head is complete, 0 when more must come, -1 when none will. The filters
 * hand on whole requests, so that one read is enough in practice. */
static int read_head(int c, char *text, size_t room, size_t *length)
{
	while (*length < room - 1) {
		ssize_t got = cc_read(c, text + *length, room - 1 - *length);
		if (got < 0 && errno == EINTR)
			continue;
		if (got < 0 && errno == EAGAIN)
			return 0;
		if (got <= 0)
			return -1;
		*length += got;
		text[*length] = 0;
		if (strstr(text, "\r\n\r\n"))
			return 1;
	}
	return -1;
}

/* Says which process answers the request; true if all of it was taken. */
static int answer(int c, const char *request, const char *style)
{
	char text[256], body[128];
	int size = snprintf(body, sizeof(body), "%s %d\n", style, (int)getpid());
	int length = snprintf(text, sizeof(text), "HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s", size, body);
	if (!strncmp(request, "HEAD ", 5))
		length -= size;
	return send(c, text, length, MSG_NOSIGNAL) == length;
}

/* One request, on a blocking socket. */
static inline void serve(int c, const char *style)
{
	char text[16384];
	size_t length = 0;
	int good = read_head(c, text, sizeof(text), &length) > 0 && answer(c, text, style);
	cc_close(c, !good);
}
