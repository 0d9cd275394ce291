/* SPDX-License-Identifier: GPL-2.0-only OR Apache-2.0 */
/* The maps. Each program declares those it uses; the loader makes maps of the same name one map.
 *
 * A rule set is one entry of each map of maps. There are two: user space fills the one that is not in force and then
 * writes TG_CONTROL_GENERATION, so that a packet sees the old set or the new one and never a mixture. */
#ifndef TIDEGATE_MAPS_H
#define TIDEGATE_MAPS_H

#include "abi.h"
#include <bpf/bpf_helpers.h>

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, TG_CONTROL_COUNT);
	__type(key, __u32);
	__type(value, __u64);
} control SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, TG_COUNT_COUNT);
	__type(key, __u32);
	__type(value, __u64);
} counters SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, TG_STATES);
	__type(key, __u32);
	__type(value, struct tg_state);
} states SEC(".maps");

/* The tokens of each rule, as the time at which its bucket was empty: it holds what came in since, and no more than fits.
 * One word, so that it takes no lock. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, TG_STATES);
	__type(key, __u32);
	__type(value, __s64);
} buckets SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, TG_MAX_SLOTS);
	__type(key, __u32);
	__type(value, struct tg_label);
} labels SEC(".maps");

/* Clients that were just reset, until when; the least recently seen makes room. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, TG_MAX_PENALTIES);
	__type(key, struct tg_client);
	__type(value, __u64);
} penalties SEC(".maps");

/* Why something is blocked; the least recently written makes room. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, TG_MAX_REASONS);
	__type(key, struct tg_target);
	__type(value, struct tg_reason);
} reasons SEC(".maps");

/* Inner maps give sizes, not types: clang describes what only a pointer leads to by its name alone. */
struct inner_ports {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__uint(key_size, sizeof(__u32));
	__uint(value_size, sizeof(struct tg_ports));
};
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY_OF_MAPS);
	__uint(max_entries, 2);
	__type(key, __u32);
	__array(values, struct inner_ports);
} ports SEC(".maps");

#define PAIR_OF(kind, name, key_type, value_type, bound)		\
	struct inner_##name {						\
		__uint(type, kind);					\
		__uint(max_entries, bound);				\
		__uint(map_flags, BPF_F_NO_PREALLOC);			\
		__uint(key_size, sizeof(key_type));			\
		__uint(value_size, sizeof(value_type));			\
	};								\
	struct {							\
		__uint(type, BPF_MAP_TYPE_ARRAY_OF_MAPS);		\
		__uint(max_entries, 2);					\
		__type(key, __u32);					\
		__array(values, struct inner_##name);			\
	} name SEC(".maps")
#define PAIR_OF_TRIES(name, key_type, value_type, bound)		\
	PAIR_OF(BPF_MAP_TYPE_LPM_TRIE, name, key_type, value_type, bound)
#define PAIR_OF_HASHES(name, key_type, value_type, bound)		\
	PAIR_OF(BPF_MAP_TYPE_HASH, name, key_type, value_type, bound)

static __always_inline __u64 control_get(__u32 key)
{
	__u64 *value = bpf_map_lookup_elem(&control, &key);

	return value ? *value : 0;
}

static __always_inline void control_set(__u32 key, __u64 value)
{
	__u64 *held = bpf_map_lookup_elem(&control, &key);

	if (held)
		*held = value;
}

static __always_inline __u32 generation(void)
{
	return control_get(TG_CONTROL_GENERATION) & 1;
}

static __always_inline void count(__u32 key)
{
	__u64 *value = bpf_map_lookup_elem(&counters, &key);

	if (value)
		*value += 1;
}

/* The ports of rule set `set`; none before the first set is in force. */
static __always_inline struct tg_ports *port_table(__u32 set)
{
	__u32 zero = 0;
	void *inner = bpf_map_lookup_elem(&ports, &set);

	return inner ? bpf_map_lookup_elem(inner, &zero) : 0;
}

/* The class and flag of a port. */
static __always_inline __u16 port_entry(__u32 set, __u16 port)
{
	struct tg_ports *table = port_table(set);

	return table ? table->class_of[port] : 0;
}

/* Whether a rule may refuse now. */
static __always_inline int acts_now(const struct tg_rule *rule)
{
	return rule->flags & (TG_RULE_LIMITED | TG_RULE_REFUSE) &&
	       (!(rule->flags & TG_RULE_ON_OVERLOAD) || control_get(TG_CONTROL_OVERLOAD));
}

/* How often a token is tried for that other CPUs take away. */
#define TAKE_TRIES 16

/* Takes one token: <rate, burst> of the paper's section 3.1. Not 0: there was one. */
static __always_inline int take_token(const struct tg_rule *rule, __u64 now_ns)
{
	__u32 slot = rule->slot;
	__s64 now = now_ns, full = now - (__s64)rule->fill_ns, token = rule->token_ns;
	__s64 *bucket = bpf_map_lookup_elem(&buckets, &slot);

	if (!bucket)
		return 1;
	for (int i = 0; i < TAKE_TRIES; i++) {
		__s64 empty = *(volatile __s64 *)bucket, after = (empty > full ? empty : full) + token;

		if (after > now)
			return 0;
		if (__sync_val_compare_and_swap(bucket, empty, after) == empty)
			return 1;
	}
	return 0;
}

/* Not 0: the connection or request is compliant. */
static __always_inline int take(const struct tg_rule *rule, __u64 now_ns)
{
	__u32 slot = rule->slot;
	struct tg_state *state = bpf_map_lookup_elem(&states, &slot);

	if (!state)
		return 1;
	if (!acts_now(rule) || (!(rule->flags & TG_RULE_REFUSE) && take_token(rule, now_ns))) {
		__sync_fetch_and_add(&state->passed, 1);
		return 1;
	}
	__sync_fetch_and_add(&state->refused, 1);
	return 0;
}

/* What `take` let pass is refused by another limit: the rule has its token back, and counts a refusal. */
static __always_inline void give_back(const struct tg_rule *rule)
{
	__u32 slot = rule->slot;
	struct tg_state *state = bpf_map_lookup_elem(&states, &slot);
	__s64 *bucket = bpf_map_lookup_elem(&buckets, &slot);

	if (!state || !bucket)
		return;
	__sync_fetch_and_add(&state->passed, -1);
	__sync_fetch_and_add(&state->refused, 1);
	if (acts_now(rule))
		__sync_fetch_and_add(bucket, -(__s64)rule->token_ns);
}

#endif
