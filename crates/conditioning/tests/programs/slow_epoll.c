/* A preload library: epoll_ctl(2) returns late after it has registered something, as where others get the processor. */
#define _GNU_SOURCE
#include <sys/epoll.h>
#include <sys/syscall.h>
#include <unistd.h>

int epoll_ctl(int epoll, int operation, int fd, struct epoll_event *event)
{
	int result = (int)syscall(SYS_epoll_ctl, epoll, operation, fd, event);

	if (operation == EPOLL_CTL_ADD)
		usleep(50000);
	return result;
}
