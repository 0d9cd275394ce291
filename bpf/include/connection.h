/* SPDX-License-Identifier: GPL-2.0-only OR Apache-2.0 */
/* Whether a segment belongs to a connection of this host. Anybody can send a segment in another's name: before it costs
 * that other anything, it must fit a connection, as RFC 5961 asks of what would end one. */
#ifndef TIDEGATE_CONNECTION_H
#define TIDEGATE_CONNECTION_H

#include "segment.h"

enum connection {
	CONNECTION_NONE,	/* the stack answers with a reset, or forwards it */
	CONNECTION_OLD,		/* all of it was received before: the stack takes nothing from it but acknowledges it */
	CONNECTION_BEYOND,	/* behind the window */
	CONNECTION_FITS,
};

/* The largest window before a handshake has ended (RFC 7323 section 2.2: it is not scaled). */
#define HANDSHAKE_WINDOW 65535

/* Only the fields that are read; the loader finds their offsets in the running kernel. */
struct tcp_sock {
	__u32 rcv_nxt;
	__u32 rcv_wnd;
} __attribute__((preserve_access_index));
struct tcp_request_sock {
	__u32 rcv_nxt;
} __attribute__((preserve_access_index));

static __always_inline struct bpf_sock *socket_of(struct __sk_buff *skb, const struct endpoints *ends)
{
	struct bpf_sock_tuple tuple;

	if (ends->v6) {
		__builtin_memcpy(tuple.ipv6.saddr, ends->source, 16);
		__builtin_memcpy(tuple.ipv6.daddr, ends->destination, 16);
		tuple.ipv6.sport = ends->header.source;
		tuple.ipv6.dport = ends->header.dest;
		return bpf_skc_lookup_tcp(skb, &tuple, sizeof(tuple.ipv6), BPF_F_CURRENT_NETNS, 0);
	}
	__builtin_memcpy(&tuple.ipv4.saddr, ends->source + 12, 4);
	__builtin_memcpy(&tuple.ipv4.daddr, ends->destination + 12, 4);
	tuple.ipv4.sport = ends->header.source;
	tuple.ipv4.dport = ends->header.dest;
	return bpf_skc_lookup_tcp(skb, &tuple, sizeof(tuple.ipv4), BPF_F_CURRENT_NETNS, 0);
}

/* A listener that has sent cookies knows the connection by the segment alone. */
static __always_inline int has_cookie_of(struct bpf_sock *listener, struct endpoints *ends)
{
	if (ends->v6) {
		struct ipv6hdr ip = {.version = 6};

		__builtin_memcpy(&ip.saddr, ends->source, 16);
		__builtin_memcpy(&ip.daddr, ends->destination, 16);
		return !bpf_tcp_check_syncookie(listener, &ip, sizeof(ip), &ends->header, sizeof(ends->header));
	}
	struct iphdr ip = {.version = 4, .ihl = 5};

	__builtin_memcpy(&ip.saddr, ends->source + 12, 4);
	__builtin_memcpy(&ip.daddr, ends->destination + 12, 4);
	return !bpf_tcp_check_syncookie(listener, &ip, sizeof(ip), &ends->header, sizeof(ends->header));
}

/* RFC 9293 section 3.10.7.4: a segment is acceptable if some of it is in the window. */
static __always_inline enum connection fits(const struct endpoints *ends, __u32 next, __u32 window)
{
	__u32 seq = bpf_ntohl(ends->header.seq);

	if ((__s32)(seq + ends->length - next) <= 0)
		return CONNECTION_OLD;
	return (__s32)(seq - next - window) > 0 ? CONNECTION_BEYOND : CONNECTION_FITS;
}

static __noinline enum connection connection_of(struct __sk_buff *skb, struct endpoints *ends)
{
	enum connection found = CONNECTION_NONE;
	struct bpf_sock *socket = socket_of(skb, ends);

	if (!socket)
		return CONNECTION_NONE;
	/* Barrier: the compiler must not fold the read into one that the verifier does not know. */
	asm volatile("" : "+r"(socket));
	if (socket->state == BPF_TCP_LISTEN) {
		if (has_cookie_of(socket, ends))
			found = CONNECTION_FITS;
	} else if (socket->state == BPF_TCP_NEW_SYN_RECV) {
		/* TCP_DEFER_ACCEPT leaves a connection here until its first request. */
		struct tcp_request_sock *request = bpf_skc_to_tcp_request_sock(socket);

		if (request)
			found = fits(ends, request->rcv_nxt, HANDSHAKE_WINDOW);
	} else {
		struct tcp_sock *tcp = bpf_skc_to_tcp_sock(socket);

		if (tcp)
			found = fits(ends, tcp->rcv_nxt, tcp->rcv_wnd);
	}
	bpf_sk_release(socket);
	return found;
}

#endif
