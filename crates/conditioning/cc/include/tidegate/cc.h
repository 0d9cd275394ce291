/* Connection conditioning: accept clients' sockets together with whole requests from a chain of filter processes.
 *
 * Park and Pai, "Connection Conditioning: Architecture-Independent Support for Simple, Robust Servers", §3.2.
 * See tidegate_cc(3). Link with -ltidegate_cc. */
#ifndef TIDEGATE_CC_H
#define TIDEGATE_CC_H

#include <netinet/in.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/select.h>
#include <sys/socket.h>
#include <sys/types.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Starts the filters and returns a descriptor for cc_accept. `sin_port` is in network byte order, as in struct
 * sockaddr_in. `filters` ends with NULL and names the filter nearest to the server first, the one that listens last;
 * each may carry arguments: "prior=window=0"; one with a + before it shares the process of its neighbour towards the
 * clients. Errors: EINVAL for an unknown filter or a refused argument, EADDRINUSE,
 * EADDRNOTAVAIL and EACCES as bind(2), ENOENT if the filters are not installed, ECHILD if one ended at its start. */
int cc_createlsock(struct in_addr sin_addr, in_port_t sin_port, int backlog, char *filters[]);

/* The same for IPv6; in6addr_any serves IPv4 clients too, with mapped addresses. */
int cc_createlsock6(struct in6_addr sin6_addr, in_port_t sin6_port, int backlog, char *filters[]);

/* As accept(2): a client's socket, of which a whole request can be read with cc_read. */
int cc_accept(int s, struct sockaddr *addr, socklen_t *addrlen);

/* As read(2), up to the end of the request. Beyond it: EAGAIN on a non-blocking socket, and after as long as SO_RCVTIMEO says,
 * or 0 when the client has left. A server that changes the protocol (101, or 2xx to CONNECT) reads by read(2) from then on, and
 * closes with `closeAllFilters`. */
ssize_t cc_read(int fd, void *buf, size_t count);

/* As close(2). With `closeAllFilters` the connection ends; without, a persistent one may bring further requests. A
 * connection ends too if the rest of its request cannot be skipped, or its client does not want to keep it. */
int cc_close(int fd, int closeAllFilters);

/* As select(2), poll(2) and epoll(7); a request that has been read to its end is not reported as readable again. */
int cc_select(int n, fd_set *readfds, fd_set *writefds, fd_set *exceptfds, struct timeval *timeout);
int cc_poll(struct pollfd fds[], nfds_t nfds, int timeout);
int cc_epoll_ctl(int epfd, int op, int fd, struct epoll_event *event);
int cc_epoll_wait(int epfd, struct epoll_event *events, int maxevents, int timeout);

/* As dup(2), dup2(2) and fork(2): the chain is told that a request is over when its last descriptor in any process is
 * closed by cc_close. */
int cc_dup(int oldfd);
int cc_dup2(int oldfd, int newfd);
pid_t cc_fork(void);

#ifdef __cplusplus
}
#endif

#endif
