/*
 * server PORT SEEN: closes so many connections as programs do, and each further one by its own system call, which no library
 * sees. Behind each, it opens a file by the number that has become free, and answers the next request with what it read there.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

static void close_unseen(int fd)
{
	long result;
#if defined(__x86_64__)
	__asm__ volatile("syscall" : "=a"(result) : "a"(SYS_close), "D"(fd) : "rcx", "r11", "memory");
#elif defined(__aarch64__)
	register long number __asm__("x8") = SYS_close, argument __asm__("x0") = fd;
	__asm__ volatile("svc 0" : "+r"(argument) : "r"(number) : "memory");
	result = argument;
#else
#error "how are system calls made here?"
#endif
	if (result < 0)
		_exit(3);
}

int main(int argc, char **argv)
{
	struct sockaddr_in address = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
	char request[8192], response[200], content[100] = "nothing yet";
	int listener, client, file, seen;
	ssize_t got;

	if (argc != 3)
		return 2;
	seen = atoi(argv[2]);
	address.sin_port = htons((unsigned short)atoi(argv[1]));
	listener = socket(AF_INET, SOCK_STREAM, 0);
	if (bind(listener, (struct sockaddr *)&address, sizeof(address)) < 0 || listen(listener, 10) < 0)
		return 4;
	for (;;) {
		client = accept(listener, NULL, NULL);
		if (client < 0 || read(client, request, sizeof(request)) < 0)
			return 5;
		snprintf(response, sizeof(response), "HTTP/1.1 200 OK\r\nContent-Length: %zu\r\n\r\n%s",
			 strlen(content), content);
		if (write(client, response, strlen(response)) < 0)
			return 6;
		if (seen-- > 0)
			close(client);
		else
			close_unseen(client);
		file = open("/proc/self/comm", O_RDONLY);
		if (file != client)
			return 7;
		got = read(file, content, sizeof(content) - 1);
		content[got < 0 ? 0 : got] = 0;
		close(file);
	}
}
