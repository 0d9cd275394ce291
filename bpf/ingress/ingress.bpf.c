// SPDX-License-Identifier: GPL-2.0-only OR Apache-2.0
/* Before the network stack: block list, then penalty after a reset, hold-back of low classes, SYN policing. */
#include "address.h"
#include "classify.h"
#include "limits.h"
#include "packet.h"
#include "queues.h"

char LICENSE[] SEC("license") = "GPL";

/* Not preallocated: an empty list costs no memory. Hashes for addresses, because a trie of a million is six times slower
 * when cold; for IPv4 a hash table of our own, which is twice as fast as the kernel's. It is made with its first entry. */
struct inner_blocked4 {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__uint(map_flags, BPF_F_MMAPABLE | BPF_F_INNER_MAP);
	__uint(key_size, sizeof(__u32));
	__uint(value_size, sizeof(struct tg_blocked4));
};
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY_OF_MAPS);
	__uint(max_entries, 1);
	__type(key, __u32);
	__array(values, struct inner_blocked4);
} blocked4 SEC(".maps");

#define BLOCK_LIST(name, kind, key_type, bound)				\
	struct {							\
		__uint(type, kind);					\
		__uint(max_entries, bound);				\
		__uint(map_flags, BPF_F_NO_PREALLOC);			\
		__type(key, key_type);					\
		__type(value, struct tg_block);				\
	} name SEC(".maps")

BLOCK_LIST(blocked6, BPF_MAP_TYPE_HASH, struct tg_client, TG_MAX_BLOCKED);
BLOCK_LIST(blocked_nets4, BPF_MAP_TYPE_LPM_TRIE, struct tg_prefix4, TG_MAX_BLOCKED_PREFIXES);
BLOCK_LIST(blocked_nets6, BPF_MAP_TYPE_LPM_TRIE, struct tg_prefix6, TG_MAX_BLOCKED_PREFIXES);

/* How many expired prefixes are looked past towards a shorter one that is not. */
#define EXPIRED_PREFIXES_MAX 4

/* Only the fields that are read; the loader finds their offsets in the running kernel. */
struct sock {
	__u32 sk_ack_backlog;
} __attribute__((preserve_access_index));

/* Whether the entry is in force; if so, counts the hit. */
static __always_inline int in_force(struct tg_block *entry, __u64 now_ns)
{
	if (entry->expires_ns && entry->expires_ns <= now_ns)
		return 0;
	__sync_fetch_and_add(&entry->hits, 1);
	entry->last_hit_ns = now_ns;
	return 1;
}

/* `key` is of either family and begins with `length_bits`. */
static __always_inline int blocked_by_prefix(void *prefixes, void *key, __u32 *length_bits, __u64 now_ns)
{
#pragma unroll
	for (int i = 0; i < EXPIRED_PREFIXES_MAX; i++) {
		struct tg_block *entry = bpf_map_lookup_elem(prefixes, key);

		if (!entry)
			return 0;
		if (in_force(entry, now_ns))
			return 1;
		if (!entry->length_bits)
			return 0;
		*length_bits = entry->length_bits - 1;
	}
	return 0;
}

static __always_inline int blocked_single4(__u32 source)
{
	__u32 at = 0;
	void *table = bpf_map_lookup_elem(&blocked4, &at);
	struct tg_blocked4 *bucket;
	__u64 mixed, now_ns;

	if (!table || !source)
		return 0;
	at = TG_BLOCKED4_BUCKETS;
	bucket = bpf_map_lookup_elem(table, &at);
	if (!bucket)
		return 0;
	mixed = (source ^ bucket->slot[0].address) * TG_BLOCKED4_MIX;
	mixed = (mixed ^ mixed >> 32) * TG_BLOCKED4_MIX;
	for (int choice = 0; choice < 2; choice++) {
		at = mixed >> (choice ? TG_BLOCKED4_SECOND_BIT : TG_BLOCKED4_FIRST_BIT) & (TG_BLOCKED4_BUCKETS - 1);
		bucket = bpf_map_lookup_elem(table, &at);
		if (!bucket)
			return 0;
#pragma unroll
		for (int i = 0; i < TG_BLOCKED4_SLOTS; i++) {
			struct tg_blocked4_slot *slot = &bucket->slot[i];

			if (slot->address != source)
				continue;
			now_ns = bpf_ktime_get_ns();
			if (slot->expires && slot->expires <= now_ns >> TG_EXPIRY_SHIFT)
				return 0;
			__sync_fetch_and_add(&slot->hits, 1);
			slot->last_hit = now_ns >> TG_HIT_SHIFT;
			return 1;
		}
	}
	return 0;
}

static __always_inline int blocked(const struct packet *packet)
{
	struct tg_block *entry;
	int singles = control_get(TG_CONTROL_BLOCK_SINGLES) != 0;
	int prefixes = control_get(TG_CONTROL_BLOCK_PREFIXES) != 0;

	if (!singles && !prefixes)
		return 0;
	if (packet->v4) {
		struct tg_prefix4 key = {.length_bits = 32};

		__builtin_memcpy(key.address, &packet->v4->saddr, 4);
		if (singles && blocked_single4(packet->v4->saddr))
			return 1;
		return prefixes && blocked_by_prefix(&blocked_nets4, &key, &key.length_bits, bpf_ktime_get_ns());
	}
	if (packet->v6) {
		struct tg_prefix6 key = {.length_bits = 128};

		__builtin_memcpy(key.address, &packet->v6->saddr, 16);
		entry = singles ? bpf_map_lookup_elem(&blocked6, key.address) : 0;
		if (entry && in_force(entry, bpf_ktime_get_ns()))
			return 1;
		return prefixes && blocked_by_prefix(&blocked_nets6, &key, &key.length_bits, bpf_ktime_get_ns());
	}
	return 0;
}

static __always_inline void map_address(__u8 *to, const struct packet *packet, int destination)
{
	if (packet->v6)
		__builtin_memcpy(to, destination ? &packet->v6->daddr : &packet->v6->saddr, 16);
	else if (packet->v4)
		map_v4(to, destination ? packet->v4->daddr : packet->v4->saddr);
}

/* The paper's section 4.5.1: after a reset the client's SYNs are dropped for a while. Reads the clock only if somebody was
 * reset. */
static __always_inline int in_penalty(const struct packet *packet, __u64 *now_ns)
{
	__u64 last_ns = control_get(TG_CONTROL_PENALIZED_NS), *until_ns;
	struct tg_client client = {};

	if (!last_ns)
		return 0;
	*now_ns = bpf_ktime_get_ns();
	if (last_ns <= *now_ns)
		return 0;
	map_address(client.address, packet, 0);
	until_ns = bpf_map_lookup_elem(&penalties, &client);
	if (!until_ns)
		return 0;
	if (*until_ns > *now_ns)
		return 1;
	bpf_map_delete_elem(&penalties, &client);
	return 0;
}

static __always_inline __u32 depth(struct bpf_sock *socket)
{
	struct tcp_sock *tcp = bpf_skc_to_tcp_sock(socket);

	return tcp ? ((struct sock *)tcp)->sk_ack_backlog : 0;
}

/* Whether a class above `class` waits in the prioritized listen queue with this number. */
static __always_inline int higher_class_waits(__u32 queue, __u32 class, __u64 limit)
{
	for (__u32 i = 0; i < TG_MAX_CLASSES - 1; i++) {
		__u32 key = queue * TG_MAX_CLASSES + i, waiting;
		struct bpf_sock *listener;

		if (i >= class)
			break;
		listener = bpf_map_lookup_elem(&listeners, &key);
		if (!listener)
			continue;
		waiting = depth(listener);
		bpf_sk_release(listener);
		if (waiting >= limit)
			return 1;
	}
	return 0;
}

/* For a server with one accept queue: how deep is it? */
static __always_inline int listener_is_deep(struct xdp_md *ctx, const struct packet *packet, __u64 limit)
{
	struct bpf_sock_tuple tuple = {};
	struct bpf_sock *socket;
	__u32 waiting = 0;

	if (packet->v4) {
		tuple.ipv4.saddr = packet->v4->saddr;
		tuple.ipv4.daddr = packet->v4->daddr;
		tuple.ipv4.sport = packet->tcp->source;
		tuple.ipv4.dport = packet->tcp->dest;
		socket = bpf_skc_lookup_tcp(ctx, &tuple, sizeof(tuple.ipv4), BPF_F_CURRENT_NETNS, 0);
	} else if (packet->v6) {
		__builtin_memcpy(tuple.ipv6.saddr, &packet->v6->saddr, 16);
		__builtin_memcpy(tuple.ipv6.daddr, &packet->v6->daddr, 16);
		tuple.ipv6.sport = packet->tcp->source;
		tuple.ipv6.dport = packet->tcp->dest;
		socket = bpf_skc_lookup_tcp(ctx, &tuple, sizeof(tuple.ipv6), BPF_F_CURRENT_NETNS, 0);
	} else {
		return 0;
	}
	if (!socket)
		return 0;
	/* Barrier: the compiler must not fold the read into one that the verifier does not know. */
	asm volatile("" : "+r"(socket));
	if (socket->state == BPF_TCP_LISTEN)
		waiting = depth(socket);
	bpf_sk_release(socket);
	return waiting >= limit;
}

/* Hold-back for accept loops that cannot change: a low-class SYN waits, by the client's retransmission, while the high
 * class waits in the accept queue. */
static __always_inline int held_back(struct xdp_md *ctx, const struct packet *packet, __u32 set,
					const struct tg_rule *rule)
{
	__u64 limit = control_get(TG_CONTROL_HOLD_DEPTH);
	struct tg_endpoint endpoint = {};
	__u32 class, *queue;

	if (!limit)
		return 0;
	class = class_of(set, rule);
	if (!class)
		return 0;
	map_address(endpoint.address, packet, 1);
	endpoint.port = bpf_ntohs(packet->tcp->dest);
	queue = bpf_map_lookup_elem(&queues, &endpoint);
	if (!queue) {
		__builtin_memset(endpoint.address, 0, sizeof(endpoint.address));
		queue = bpf_map_lookup_elem(&queues, &endpoint);
	}
	return queue ? higher_class_waits(*queue, class, limit) : listener_is_deep(ctx, packet, limit);
}

/* "frags": drivers refuse other programs where a packet may lie in several pieces (jumbo frames). The headers are in the first. */
SEC("xdp.frags")
int tidegate_in(struct xdp_md *ctx)
{
	struct packet packet = {.end = (void *)(long)ctx->data_end};
	struct tg_rule *rule;
	__u64 now_ns = 0;
	__u16 port_class;
	__u32 set;
	int by_class;

	if (parse(&packet, (void *)(long)ctx->data)) {
		count(TG_COUNT_MALFORMED);
		return XDP_DROP;
	}
	if (blocked(&packet)) {
		count(TG_COUNT_BLOCKED);
		return XDP_DROP;
	}
	if (!packet.tcp || !packet.tcp->syn || packet.tcp->ack)
		return XDP_PASS;
	if (in_penalty(&packet, &now_ns)) {
		count(TG_COUNT_PENALTY);
		return XDP_DROP;
	}
	set = generation();
	port_class = port_entry(set, bpf_ntohs(packet.tcp->dest)) & TG_PORT_CLASS;
	if (port_class == TG_PORT_OUTSIDE)
		return XDP_PASS;
	if (packet.v4)
		rule = classify4(set, packet.v4->saddr, packet.v4->daddr, port_class);
	else if (packet.v6)
		rule = classify6(set, &packet.v6->saddr, &packet.v6->daddr, port_class);
	else
		return XDP_PASS;
	if (held_back(ctx, &packet, set, rule)) {
		count(TG_COUNT_SYN_HELD);
		return XDP_DROP;
	}
	by_class = control_get(TG_CONTROL_CLASSES) & TG_CLASSES_SYNS;
	/* The clock is among the dearest of all this. */
	if (!now_ns && (rule || by_class))
		now_ns = bpf_ktime_get_ns();
	if (rule && !take(rule, now_ns)) {
		count(TG_COUNT_SYN_POLICED);
		return XDP_DROP;
	}
	if (by_class && !class_take(class_of(set, rule), now_ns)) {
		if (rule)
			give_back(rule);
		return XDP_DROP;
	}
	count(TG_COUNT_SYN_PASSED);
	return XDP_PASS;
}
