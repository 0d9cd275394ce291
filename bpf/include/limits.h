/* SPDX-License-Identifier: GPL-2.0-only OR Apache-2.0 */
/* Limits of priority classes, which the adaptation agent sets, and what it watches. */
#ifndef TIDEGATE_LIMITS_H
#define TIDEGATE_LIMITS_H

#include "maps.h"

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, TG_MAX_CLASSES);
	__type(key, __u32);
	__type(value, struct tg_rule);
} class_limits SEC(".maps");

/* The least recently begun makes room. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, TG_MAX_FLOWS);
	__type(key, struct tg_flow);
	__type(value, struct tg_begun);
} begun SEC(".maps");

/* How many requests of each class took how long. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, TG_MAX_CLASSES * TG_LATENCY_BUCKETS);
	__type(key, __u32);
	__type(value, __u64);
} latencies SEC(".maps");

/* Not 0: the class may have one more. */
static __always_inline int class_take(__u32 class, __u64 now_ns)
{
	struct tg_rule *limit = bpf_map_lookup_elem(&class_limits, &class);

	if (!limit || take(limit, now_ns))
		return 1;
	count(TG_COUNT_CLASS_POLICED);
	return 0;
}

#endif
