/* A library behind the one that is tested, in front of libc: its writes take a part of what they are given, as on a socket that is nearly
 * full, and every other time nothing at all. */
#define _GNU_SOURCE
#include <errno.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

/* The descriptor whose writes are cut, the most bytes that one takes, and whether some of them take none. */
int cut_fd = -1;
size_t cut_most = SIZE_MAX;
int cut_refuses;

static int refuses(int fd)
{
	static int count;

	if (fd != cut_fd || !cut_refuses || ++count % 2)
		return 0;
	errno = EAGAIN;
	return 1;
}

static size_t cut(int fd, size_t length)
{
	return fd == cut_fd && length > cut_most ? cut_most : length;
}

ssize_t write(int fd, const void *from, size_t length)
{
	return refuses(fd) ? -1 : syscall(SYS_write, fd, from, cut(fd, length));
}

ssize_t sendto(int fd, const void *from, size_t length, int flags, const struct sockaddr *to, socklen_t size)
{
	return refuses(fd) ? -1 : syscall(SYS_sendto, fd, from, cut(fd, length), flags, to, size);
}

ssize_t send(int fd, const void *from, size_t length, int flags)
{
	return refuses(fd) ? -1 : syscall(SYS_sendto, fd, from, cut(fd, length), flags, NULL, 0);
}

/* Not by each other's names, which are those of the library that is tested. */
static ssize_t send_part(int fd, const struct msghdr *message, int flags)
{
	struct msghdr part = *message;
	struct iovec parts[16];
	size_t left = cut(fd, SIZE_MAX), i;

	if (refuses(fd))
		return -1;
	for (i = 0; i < part.msg_iovlen && i < 16 && left > 0; i++) {
		parts[i] = message->msg_iov[i];
		if (parts[i].iov_len > left)
			parts[i].iov_len = left;
		left -= parts[i].iov_len;
	}
	part.msg_iov = parts;
	part.msg_iovlen = i;
	return syscall(SYS_sendmsg, fd, &part, flags);
}

ssize_t sendmsg(int fd, const struct msghdr *message, int flags)
{
	return send_part(fd, message, flags);
}

ssize_t writev(int fd, const struct iovec *parts, int count)
{
	struct msghdr message = { .msg_iov = (struct iovec *)parts, .msg_iovlen = (size_t)count };

	return send_part(fd, &message, 0);
}

ssize_t sendfile(int to, int from, off_t *offset, size_t length)
{
	return refuses(to) ? -1 : syscall(SYS_sendfile, to, from, offset, cut(to, length));
}
