/* SPDX-License-Identifier: GPL-2.0-only OR Apache-2.0 */
/* From the end points of a connection to the rule that governs it (the paper's section 3.4). */
#ifndef TIDEGATE_CLASSIFY_H
#define TIDEGATE_CLASSIFY_H

#include "maps.h"

PAIR_OF_TRIES(destinations4, struct tg_prefix4, __u32, TG_MAX_DESTINATIONS);
PAIR_OF_TRIES(destinations6, struct tg_prefix6, __u32, TG_MAX_DESTINATIONS);
PAIR_OF_TRIES(sources4, struct tg_source4, struct tg_rule, TG_MAX_SOURCES);
PAIR_OF_TRIES(sources6, struct tg_source6, struct tg_rule, TG_MAX_SOURCES);
/* Of the same keys and values, where there are many sources of few lengths: a trie of thousands is deep. */
PAIR_OF_HASHES(hosts4, struct tg_source4, struct tg_rule, TG_MAX_SOURCES);
PAIR_OF_HASHES(hosts6, struct tg_source6, struct tg_rule, TG_MAX_SOURCES);

static __always_inline struct tg_rule *classify4(__u32 set, __u32 source, __u32 destination, __u16 port_class)
{
	struct tg_source4 key = {.length_bits = TG_SOURCE_CLASS_BITS + 32};
	struct tg_ports *table = port_table(set);
	void *prefixes, *sources;

	if (!table)
		return 0;
	key.port_class = port_class;
	/* A set without destinations has no trie for them. */
	prefixes = bpf_map_lookup_elem(&destinations4, &set);
	if (prefixes) {
		struct tg_prefix4 prefix = {.length_bits = 32};
		__u32 *class;

		__builtin_memcpy(prefix.address, &destination, 4);
		class = bpf_map_lookup_elem(prefixes, &prefix);
		if (class)
			key.destination_class = *class;
	}
	if (!table->lengths4.count) {
		sources = bpf_map_lookup_elem(&sources4, &set);
		__builtin_memcpy(key.address, &source, 4);
		return sources ? bpf_map_lookup_elem(sources, &key) : 0;
	}
	sources = bpf_map_lookup_elem(&hosts4, &set);
	if (!sources)
		return 0;
#pragma unroll
	for (__u32 i = 0; i < TG_LENGTHS_MAX; i++) {
		struct tg_rule *rule;
		__u32 masked = source & *(__u32 *)table->lengths4.mask[i];

		if (i >= table->lengths4.count)
			break;
		key.length_bits = table->lengths4.length_bits[i];
		__builtin_memcpy(key.address, &masked, 4);
		rule = bpf_map_lookup_elem(sources, &key);
		if (rule)
			return rule;
	}
	return 0;
}

static __always_inline struct tg_rule *classify6(__u32 set, const void *source, const void *destination,
						__u16 port_class)
{
	struct tg_source6 key = {.length_bits = TG_SOURCE_CLASS_BITS + 128};
	struct tg_ports *table = port_table(set);
	void *prefixes, *sources;

	if (!table)
		return 0;
	key.port_class = port_class;
	prefixes = bpf_map_lookup_elem(&destinations6, &set);
	if (prefixes) {
		struct tg_prefix6 prefix = {.length_bits = 128};
		__u32 *class;

		__builtin_memcpy(prefix.address, destination, 16);
		class = bpf_map_lookup_elem(prefixes, &prefix);
		if (class)
			key.destination_class = *class;
	}
	if (!table->lengths6.count) {
		sources = bpf_map_lookup_elem(&sources6, &set);
		__builtin_memcpy(key.address, source, 16);
		return sources ? bpf_map_lookup_elem(sources, &key) : 0;
	}
	sources = bpf_map_lookup_elem(&hosts6, &set);
	if (!sources)
		return 0;
#pragma unroll
	for (__u32 i = 0; i < TG_LENGTHS_MAX; i++) {
		struct tg_rule *rule;

		if (i >= table->lengths6.count)
			break;
		key.length_bits = table->lengths6.length_bits[i];
		for (int word = 0; word < 4; word++)
			((__u32 *)key.address)[word] =
				((const __u32 *)source)[word] & ((__u32 *)table->lengths6.mask[i])[word];
		rule = bpf_map_lookup_elem(sources, &key);
		if (rule)
			return rule;
	}
	return 0;
}

/* The class of a connection that `rule` governs; without a rule, the lowest. */
static __always_inline __u32 class_of(__u32 set, const struct tg_rule *rule)
{
	struct tg_ports *table = port_table(set);
	__u32 last = table && table->classes ? table->classes - 1 : 0, class = rule ? rule->class : last;

	return class > last ? last : class;
}

#endif
