// SPDX-License-Identifier: GPL-2.0-only OR Apache-2.0
/* Prioritized listen queue: gives a new connection to the listener of its class, so that each class has an accept queue
 * and a backlog of its own. */
#include "address.h"
#include "classify.h"
#include "queues.h"

#include <bpf/bpf_endian.h>
#include <linux/in.h>

#define AF_INET 2
#define AF_INET6 10

char LICENSE[] SEC("license") = "GPL";

static __always_inline __u32 *queue_of(struct tg_endpoint *endpoint)
{
	__u32 *queue = bpf_map_lookup_elem(&queues, endpoint);

	if (queue)
		return queue;
	__builtin_memset(endpoint->address, 0, sizeof(endpoint->address));
	return bpf_map_lookup_elem(&queues, endpoint);
}

SEC("sk_lookup")
int tidegate_steer(struct bpf_sk_lookup *ctx)
{
	struct tg_endpoint endpoint = {.port = ctx->local_port};
	__u32 set = generation(), source[4], destination[4], key, *queue;
	struct bpf_sock *listener;
	__u16 port_class;
	struct tg_rule *rule;
	long error;

	if (ctx->protocol != IPPROTO_TCP)
		return SK_PASS;
	if (ctx->family == AF_INET) {
		destination[0] = ctx->local_ip4;
		map_v4(endpoint.address, destination[0]);
	} else if (ctx->family == AF_INET6) {
		destination[0] = ctx->local_ip6[0];
		destination[1] = ctx->local_ip6[1];
		destination[2] = ctx->local_ip6[2];
		destination[3] = ctx->local_ip6[3];
		__builtin_memcpy(endpoint.address, destination, 16);
	} else {
		return SK_PASS;
	}
	queue = queue_of(&endpoint);
	if (!queue)
		return SK_PASS;
	port_class = port_entry(set, ctx->local_port) & TG_PORT_CLASS;
	if (ctx->family == AF_INET) {
		rule = classify4(set, ctx->remote_ip4, destination[0], port_class);
	} else {
		source[0] = ctx->remote_ip6[0];
		source[1] = ctx->remote_ip6[1];
		source[2] = ctx->remote_ip6[2];
		source[3] = ctx->remote_ip6[3];
		rule = classify6(set, source, destination, port_class);
	}
	key = *queue * TG_MAX_CLASSES + class_of(set, rule);
	listener = bpf_map_lookup_elem(&listeners, &key);
	if (!listener) {
		/* The holder is gone: whatever else listens there serves. */
		count(TG_COUNT_STEER_FAILED);
		return SK_PASS;
	}
	error = bpf_sk_assign(ctx, listener, BPF_SK_LOOKUP_F_NO_REUSEPORT);
	bpf_sk_release(listener);
	count(error ? TG_COUNT_STEER_FAILED : TG_COUNT_STEERED);
	return SK_PASS;
}
