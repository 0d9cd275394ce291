/* SPDX-License-Identifier: GPL-2.0-only OR Apache-2.0 */
/* Which requests were policed on their segments: the server that parses them does not ask again, and a segment that the
 * stack had no room for and that comes again costs no second token. */
#ifndef TIDEGATE_CREDITS_H
#define TIDEGATE_CREDITS_H

#include "maps.h"

/* The least recently seen makes room. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, TG_MAX_CREDITS);
	__type(key, struct tg_credit);
	__type(value, struct tg_credited);
} credits SEC(".maps");

#endif
