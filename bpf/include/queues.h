/* SPDX-License-Identifier: GPL-2.0-only OR Apache-2.0 */
/* Prioritized listen queues: one listening socket per class (the paper's section 3.2). */
#ifndef TIDEGATE_QUEUES_H
#define TIDEGATE_QUEUES_H

#include "maps.h"

/* From an address to the number of its queue. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, TG_MAX_QUEUES);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct tg_endpoint);
	__type(value, __u32);
} queues SEC(".maps");

/* The listener of each class: at queue * TG_MAX_CLASSES + class. An entry vanishes with its socket. */
struct {
	__uint(type, BPF_MAP_TYPE_SOCKMAP);
	__uint(max_entries, TG_MAX_QUEUES * TG_MAX_CLASSES);
	__type(key, __u32);
	__type(value, __u64);
} listeners SEC(".maps");

#endif
