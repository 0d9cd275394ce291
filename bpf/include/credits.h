/* SPDX-License-Identifier: GPL-2.0-only OR Apache-2.0 */
/* Which requests were policed on their segments, so that the server that parses them does not ask again. Every credit
 * has cost a token: a client that repeats a segment gains nothing. */
#ifndef TIDEGATE_CREDITS_H
#define TIDEGATE_CREDITS_H

#include "maps.h"

/* The least recently seen makes room. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, TG_MAX_CREDITS);
	__type(key, struct tg_credit);
	__type(value, __u64);
} credits SEC(".maps");

#endif
