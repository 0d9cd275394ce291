/* SPDX-License-Identifier: GPL-2.0-only OR Apache-2.0 */
/* From the end points of a connection to the rule that governs it (the paper's section 3.4). */
#ifndef TIDEGATE_CLASSIFY_H
#define TIDEGATE_CLASSIFY_H

#include "maps.h"

PAIR_OF_TRIES(destinations4, struct tg_prefix4, __u32, TG_MAX_DESTINATIONS);
PAIR_OF_TRIES(destinations6, struct tg_prefix6, __u32, TG_MAX_DESTINATIONS);
PAIR_OF_TRIES(sources4, struct tg_source4, struct tg_rule, TG_MAX_SOURCES);
PAIR_OF_TRIES(sources6, struct tg_source6, struct tg_rule, TG_MAX_SOURCES);

static __always_inline struct tg_rule *classify4(__u32 set, __u32 source, __u32 destination, __u16 port_class)
{
	struct tg_source4 key = {.length_bits = TG_SOURCE_CLASS_BITS + 32};
	void *tries = bpf_map_lookup_elem(&sources4, &set), *prefixes;

	if (!tries)
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
	__builtin_memcpy(key.address, &source, 4);
	return bpf_map_lookup_elem(tries, &key);
}

static __always_inline struct tg_rule *classify6(__u32 set, const void *source, const void *destination,
						__u16 port_class)
{
	struct tg_source6 key = {.length_bits = TG_SOURCE_CLASS_BITS + 128};
	void *tries = bpf_map_lookup_elem(&sources6, &set), *prefixes;

	if (!tries)
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
	__builtin_memcpy(key.address, source, 16);
	return bpf_map_lookup_elem(tries, &key);
}

/* The class of a connection that `rule` governs; without a rule, the lowest. */
static __always_inline __u32 class_of(__u32 set, const struct tg_rule *rule)
{
	struct tg_ports *table = port_table(set);
	__u32 last = table && table->classes ? table->classes - 1 : 0, class = rule ? rule->class : last;

	return class > last ? last : class;
}

#endif
