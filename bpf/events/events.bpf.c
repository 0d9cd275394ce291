// SPDX-License-Identifier: GPL-2.0-only OR Apache-2.0
/* What TCP goes through on the ports where HTTP is spoken: retransmissions, changes of state, resets, and clients whose
 * window is shut, each with the round-trip time. Only of this network namespace: tracepoints see the whole host. */
#include "address.h"
#include "maps.h"

#include <bpf/bpf_endian.h>

char LICENSE[] SEC("license") = "GPL";

#define AF_INET 2
#define AF_INET6 10

/* Only the fields that are read; the loader finds their offsets in the running kernel. */
struct in6_addr {
	__u8 bytes[16];
};
struct net {
	__u64 net_cookie;
} __attribute__((preserve_access_index));
typedef struct {
	struct net *net;
} __attribute__((preserve_access_index)) possible_net_t;
struct sock_common {
	__be32 skc_daddr;
	__be16 skc_dport;
	__u16 skc_num;
	unsigned short skc_family;
	possible_net_t skc_net;
	struct in6_addr skc_v6_daddr;
} __attribute__((preserve_access_index));
struct sock {
	struct sock_common __sk_common;
} __attribute__((preserve_access_index));
struct inet_sock {
	__be16 inet_sport;
} __attribute__((preserve_access_index));
struct inet_connection_sock {
	struct inet_sock icsk_inet;
} __attribute__((preserve_access_index));
struct tcp_sock {
	struct inet_connection_sock inet_conn;
	__u32 srtt_us;
	__u32 snd_wnd;
	__u32 total_retrans;
} __attribute__((preserve_access_index));

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, TG_EVENTS_BYTES);
} events SEC(".maps");

/* Nobody waits for room: what does not fit is counted and lost. */
static __always_inline void offer(struct sock *sk, __u32 kind, __u32 old_state, __u32 new_state)
{
	struct tcp_sock *tcp = bpf_skc_to_tcp_sock(sk);
	struct tg_event *event;
	/* A socket that is closed has given its number back, and keeps the one that it sends from. */
	__u16 port = tcp ? bpf_ntohs(tcp->inet_conn.icsk_inet.inet_sport) : sk->__sk_common.skc_num;

	if (sk->__sk_common.skc_net.net->net_cookie != control_get(TG_CONTROL_NETNS))
		return;
	if (!(port_entry(generation(), port) & TG_PORT_HTTP))
		return;
	event = bpf_ringbuf_reserve(&events, sizeof(*event), 0);
	if (!event) {
		count(TG_COUNT_EVENT_LOST);
		return;
	}
	event->at_ns = bpf_ktime_get_ns();
	event->kind = kind;
	event->old_state = old_state;
	event->new_state = new_state;
	event->server_port = port;
	event->client_port = bpf_ntohs(sk->__sk_common.skc_dport);
	if (sk->__sk_common.skc_family == AF_INET6) {
		__builtin_memcpy(event->client, sk->__sk_common.skc_v6_daddr.bytes, 16);
	} else {
		map_v4(event->client, sk->__sk_common.skc_daddr);
	}
	event->srtt_us = 0;
	event->window = 0;
	event->retransmits = 0;
	event->reserved = 0;
	if (tcp) {
		/* The kernel keeps eighths. */
		event->srtt_us = tcp->srtt_us >> 3;
		event->window = tcp->snd_wnd;
		event->retransmits = tcp->total_retrans;
	}
	bpf_ringbuf_submit(event, 0);
	count(TG_COUNT_EVENT);
}

SEC("tp_btf/tcp_retransmit_skb")
int tidegate_retr(const __u64 *ctx)
{
	struct sock *sk = (void *)ctx[0];

	if (sk)
		offer(sk, TG_EVENT_RETRANSMIT, 0, 0);
	return 0;
}

SEC("tp_btf/inet_sock_set_state")
int tidegate_state(const __u64 *ctx)
{
	struct sock *sk = (void *)ctx[0];

	if (sk)
		offer(sk, TG_EVENT_STATE, ctx[1], ctx[2]);
	return 0;
}

SEC("tp_btf/tcp_send_reset")
int tidegate_rst_o(const __u64 *ctx)
{
	struct sock *sk = (void *)ctx[0];

	if (sk)
		offer(sk, TG_EVENT_RESET_SENT, 0, 0);
	return 0;
}

SEC("tp_btf/tcp_receive_reset")
int tidegate_rst_i(const __u64 *ctx)
{
	struct sock *sk = (void *)ctx[0];

	if (sk)
		offer(sk, TG_EVENT_RESET_RECEIVED, 0, 0);
	return 0;
}

/* With every segment of an established connection: only a shut window is worth a word. */
SEC("tp_btf/tcp_probe")
int tidegate_probe(const __u64 *ctx)
{
	struct sock *sk = (void *)ctx[0];
	struct tcp_sock *tcp;

	if (!sk)
		return 0;
	tcp = bpf_skc_to_tcp_sock(sk);
	if (tcp && !tcp->snd_wnd)
		offer(sk, TG_EVENT_ZERO_WINDOW, 0, 0);
	return 0;
}
