/* SPDX-License-Identifier: GPL-2.0-only OR Apache-2.0 */
#ifndef TIDEGATE_ADDRESS_H
#define TIDEGATE_ADDRESS_H

#include <linux/types.h>

/* Writes an IPv4 address as an IPv4-mapped one of 16 bytes (RFC 4291 section 2.5.5.2). */
static __always_inline void map_v4(__u8 *to, __be32 address)
{
	__builtin_memset(to, 0, 10);
	to[10] = 0xff;
	to[11] = 0xff;
	__builtin_memcpy(to + 12, &address, 4);
}

#endif
