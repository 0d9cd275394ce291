/* The one-request-at-a-time web server of the connection conditioning paper (§4.1): static files, GET and HEAD.
 *
 * usage: ccserver PORT DIRECTORY [FILTER...]     the filter nearest to the server first
 *
 * There is no parallelism in it but for content that exceeds the socket buffer, which a child sends. Slow, incomplete and
 * persistent connections are the filters' business.
 * cc -o ccserver ccserver.c $(pkg-config --cflags --libs tidegate-cc) */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/openat2.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <tidegate/cc.h>

enum { REQUEST_SIZE = 64 * 1024, SEND_BUFFER = 128 * 1024, BACKLOG = 4096 };

struct request {
	char path[4096];
	bool is_head;
	bool is_1_0_kept;
};

static int root;

static const struct {
	const char *suffix, *type;
} types[] = {
	{".html", "text/html; charset=utf-8"}, {".htm", "text/html; charset=utf-8"}, {".txt", "text/plain; charset=utf-8"},
	{".css", "text/css"}, {".js", "text/javascript"}, {".json", "application/json"}, {".svg", "image/svg+xml"},
	{".png", "image/png"}, {".jpg", "image/jpeg"}, {".jpeg", "image/jpeg"}, {".gif", "image/gif"},
	{".webp", "image/webp"}, {".ico", "image/x-icon"}, {".pdf", "application/pdf"}, {".wasm", "application/wasm"},
};

static const char *type_of(const char *path)
{
	const char *suffix = strrchr(path, '.');
	for (size_t i = 0; suffix && i < sizeof(types) / sizeof(*types); i++)
		if (!strcasecmp(suffix, types[i].suffix))
			return types[i].type;
	return "application/octet-stream";
}

static int hex(char c)
{
	if (c >= '0' && c <= '9')
		return c - '0';
	c |= 0x20;
	return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

/* Decodes the target up to its query; false if it is none, or does not fit. */
static bool decode(const char *target, size_t length, char *path, size_t room)
{
	size_t used = 0;
	for (size_t i = 0; i < length && target[i] != '?' && target[i] != '#'; i++) {
		int c = (unsigned char)target[i];
		if (c == '%') {
			if (i + 2 >= length || hex(target[i + 1]) < 0 || hex(target[i + 2]) < 0)
				return false;
			c = hex(target[i + 1]) << 4 | hex(target[i + 2]);
			i += 2;
		}
		if (c == 0 || used + sizeof("index.html") >= room)
			return false;
		path[used++] = c;
	}
	path[used] = 0;
	if (used == 0 || path[0] != '/')
		return false;
	if (path[used - 1] == '/')
		strcpy(path + used, "index.html");
	return true;
}

/* Reads the request, which is there as a whole. Returns 0, or the status to answer. */
static int read_request(int c, struct request *request)
{
	static char text[REQUEST_SIZE];
	size_t length = 0;
	char *end = NULL;
	while (!end) {
		ssize_t got = cc_read(c, text + length, sizeof(text) - 1 - length);
		if (got < 0 && errno == EINTR)
			continue;
		if (got <= 0)
			return length == sizeof(text) - 1 ? 431 : 400;
		length += got;
		text[length] = 0;
		end = strstr(text, "\r\n\r\n");
	}
	char *target = strchr(text, ' ');
	char *version = target ? strpbrk(target + 1, " \r") : NULL;
	if (!version || strncmp(version, " HTTP/1.", 8))
		return 400;
	request->is_head = !strncmp(text, "HEAD ", 5);
	if (!request->is_head && strncmp(text, "GET ", 4))
		return 501;
	request->is_1_0_kept = version[8] == '0' && strcasestr(version, "\r\nConnection: keep-alive");
	target++;
	if (!strncasecmp(target, "http://", 7)) {
		char *slash = strchr(target + 7, '/');
		target = slash && slash < version ? slash : version;
	}
	return decode(target, version - target, request->path, sizeof(request->path)) ? 0 : 400;
}

/* Opens a regular file beneath the root: the kernel sees to it that no path leads out of it. */
static int open_file(const char *path, struct stat *file, int *status)
{
	struct open_how how = {.flags = O_RDONLY | O_CLOEXEC | O_NONBLOCK, .resolve = RESOLVE_BENEATH | RESOLVE_NO_MAGICLINKS};
	path += strspn(path, "/");
	int fd = syscall(SYS_openat2, root, *path ? path : ".", &how, sizeof(how));
	*status = 200;
	if (fd < 0) {
		*status = errno == EACCES ? 403 : errno == EMFILE || errno == ENFILE || errno == ENOMEM ? 503 : 404;
	} else if (fstat(fd, file) < 0 || !S_ISREG(file->st_mode)) {
		*status = S_ISDIR(file->st_mode) ? 403 : 404;
		close(fd);
		fd = -1;
	}
	return fd;
}

static const char *reason(int status)
{
	switch (status) {
	case 200: return "OK";
	case 400: return "Bad Request";
	case 403: return "Forbidden";
	case 404: return "Not Found";
	case 431: return "Request Header Fields Too Large";
	case 501: return "Not Implemented";
	default: return "Service Unavailable";
	}
}

static bool send_all(int c, const char *bytes, size_t length, int flags)
{
	while (length > 0) {
		ssize_t sent = send(c, bytes, length, flags | MSG_NOSIGNAL);
		if (sent < 0 && errno != EINTR)
			return false;
		if (sent > 0) {
			bytes += sent;
			length -= sent;
		}
	}
	return true;
}

static bool send_head(int c, int status, const struct request *request, const char *type, off_t size, bool more)
{
	char head[512], date[64];
	time_t now = time(NULL);
	strftime(date, sizeof(date), "%a, %d %b %Y %H:%M:%S GMT", gmtime(&now));
	int length = snprintf(head, sizeof(head),
		"HTTP/1.1 %d %s\r\nDate: %s\r\nServer: ccserver\r\nContent-Type: %s\r\nContent-Length: %lld\r\n%s\r\n", status,
		reason(status), date, type, (long long)size, request->is_1_0_kept ? "Connection: keep-alive\r\n" : "");
	return send_all(c, head, length, more ? MSG_MORE : 0);
}

static bool send_file(int c, int fd, off_t size)
{
	off_t offset = 0;
	while (offset < size) {
		ssize_t sent = sendfile(c, fd, &offset, size - offset);
		if (sent == 0 || (sent < 0 && errno != EINTR))
			return false; /* the file has shrunk, or the client is gone */
	}
	return true;
}

/* Answers one request; true if the connection can go on. `is_child` says that this process is to end. */
static bool serve(int c, bool *is_child)
{
	struct request request = {0};
	struct stat file;
	int status = read_request(c, &request);
	int fd = status ? -1 : open_file(request.path, &file, &status);
	if (fd < 0) {
		const char *text = reason(status);
		bool sent = send_head(c, status, &request, "text/plain", strlen(text), !request.is_head);
		return sent && (request.is_head || send_all(c, text, strlen(text), 0)) && status != 400;
	}
	bool has_content = !request.is_head && file.st_size > 0;
	setsockopt(c, SOL_SOCKET, SO_SNDBUF, &(int){SEND_BUFFER}, sizeof(int));
	bool good = send_head(c, 200, &request, type_of(request.path), file.st_size, has_content);
	if (good && has_content) {
		pid_t child = file.st_size > SEND_BUFFER / 2 ? cc_fork() : 0;
		*is_child = child == 0 && file.st_size > SEND_BUFFER / 2;
		if (child <= 0) /* in the child, without need of one, and where none can be had */
			good = send_file(c, fd, file.st_size);
	}
	close(fd);
	return good;
}

int main(int argc, char **argv)
{
	char *usual[] = {"prior", "persist", "package", NULL};
	if (argc < 3 || atoi(argv[1]) <= 0 || atoi(argv[1]) > 65535) {
		fprintf(stderr, "usage: %s PORT DIRECTORY [FILTER...]\n", argv[0]);
		return 2;
	}
	signal(SIGPIPE, SIG_IGN);
	signal(SIGCHLD, SIG_IGN);
	root = open(argv[2], O_PATH | O_DIRECTORY | O_CLOEXEC);
	if (root < 0)
		return perror(argv[2]), 1;
	int s = cc_createlsock((struct in_addr){INADDR_ANY}, htons(atoi(argv[1])), BACKLOG, argc > 3 ? argv + 3 : usual);
	if (s < 0)
		return perror("cc_createlsock"), 1;
	for (;;) {
		bool is_child = false;
		int c = cc_accept(s, NULL, NULL);
		if (c < 0 && errno == EINVAL)
			return fprintf(stderr, "the filters are gone\n"), 1;
		if (c < 0)
			continue;
		bool good = serve(c, &is_child);
		cc_close(c, !good);
		if (is_child)
			_exit(0);
	}
}
