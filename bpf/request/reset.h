/* SPDX-License-Identifier: GPL-2.0-only OR Apache-2.0 */
/* Ending a connection at both ends. */
#ifndef TIDEGATE_RESET_H
#define TIDEGATE_RESET_H

#include "maps.h"
#include "segment.h"

/* Ones' complement sum of `words` 16-bit words. */
static __always_inline __u32 sum(const void *data, int words)
{
	const __u16 *word = data;
	__u32 total = 0;

#pragma unroll
	for (int i = 0; i < words; i++)
		total += word[i];
	return total;
}

static __always_inline __u16 fold(__u32 total)
{
	total = (total & 0xffff) + (total >> 16);
	total = (total & 0xffff) + (total >> 16);
	return ~total;
}

struct reset4 {
	struct iphdr ip;
	struct tcphdr tcp;
} __attribute__((packed, aligned(4)));

struct reset6 {
	struct ipv6hdr ip;
	struct tcphdr tcp;
} __attribute__((packed, aligned(4)));

struct direction {
	const __u8 *source;
	const __u8 *destination;
	__be16 source_port;
	__be16 destination_port;
	__be32 seq;
	__be32 ack_seq;
	__u32 ack;
};

static __always_inline void fill_tcp(struct tcphdr *tcp, const struct direction *to, __u32 addresses)
{
	__builtin_memset(tcp, 0, sizeof(*tcp));
	tcp->source = to->source_port;
	tcp->dest = to->destination_port;
	tcp->seq = to->seq;
	tcp->ack_seq = to->ack_seq;
	tcp->doff = 5;
	tcp->rst = 1;
	tcp->ack = to->ack;
	tcp->check = fold(addresses + bpf_htons(IPPROTO_TCP) + bpf_htons(sizeof(*tcp)) + sum(tcp, 10));
}

static __always_inline int store_reset(struct __sk_buff *skb, int v6, const struct direction *to)
{
	if (v6) {
		struct reset6 reset = {};

		reset.ip.version = 6;
		reset.ip.payload_len = bpf_htons(sizeof(reset.tcp));
		reset.ip.nexthdr = IPPROTO_TCP;
		reset.ip.hop_limit = 64;
		__builtin_memcpy(&reset.ip.saddr, to->source, 16);
		__builtin_memcpy(&reset.ip.daddr, to->destination, 16);
		fill_tcp(&reset.tcp, to, sum(&reset.ip.saddr, 16));
		return bpf_skb_store_bytes(skb, ETH_HLEN, &reset, sizeof(reset), BPF_F_INVALIDATE_HASH);
	}
	struct reset4 reset = {};

	reset.ip.version = 4;
	reset.ip.ihl = 5;
	reset.ip.tot_len = bpf_htons(sizeof(reset));
	reset.ip.frag_off = bpf_htons(0x4000);
	reset.ip.ttl = 64;
	reset.ip.protocol = IPPROTO_TCP;
	__builtin_memcpy(&reset.ip.saddr, to->source + 12, 4);
	__builtin_memcpy(&reset.ip.daddr, to->destination + 12, 4);
	reset.ip.check = fold(sum(&reset.ip, 10));
	fill_tcp(&reset.tcp, to, sum(&reset.ip.saddr, 4));
	return bpf_skb_store_bytes(skb, ETH_HLEN, &reset, sizeof(reset), BPF_F_INVALIDATE_HASH);
}

static __always_inline int store_ethernet(struct __sk_buff *skb, const struct ethhdr *header, int swapped)
{
	struct ethhdr copy = *header;

	if (swapped) {
		__builtin_memcpy(copy.h_dest, header->h_source, ETH_ALEN);
		__builtin_memcpy(copy.h_source, header->h_dest, ETH_ALEN);
	}
	return bpf_skb_store_bytes(skb, 0, &copy, sizeof(copy), 0);
}

/* Resets the client by a clone of the segment and the local end by what is left of it, so that no process wakes and
 * the server's buffers are flushed (the paper's section 3.3). */
static __always_inline int reset_both(struct __sk_buff *skb, const struct endpoints *ends)
{
	__u32 size = ETH_HLEN + (ends->v6 ? sizeof(struct reset6) : sizeof(struct reset4));
	struct direction to_client = {
		.source = ends->destination,
		.destination = ends->source,
		.source_port = ends->header.dest,
		.destination_port = ends->header.source,
		.seq = ends->header.ack_seq,
		.ack_seq = bpf_htonl(bpf_ntohl(ends->header.seq) + ends->length),
		.ack = 1,
	};
	/* In the window, as if from the client (RFC 5961 §3.2 asks for exactly the next sequence number). */
	struct direction to_server = {
		.source = ends->source,
		.destination = ends->destination,
		.source_port = ends->header.source,
		.destination_port = ends->header.dest,
		.seq = ends->header.seq,
	};
	struct ethhdr ethernet;

	/* The reset has no room for tags. */
	if (ends->network != ETH_HLEN)
		return -1;
	if (bpf_skb_load_bytes(skb, 0, &ethernet, sizeof(ethernet)) || bpf_skb_change_tail(skb, size, 0) ||
	    store_ethernet(skb, &ethernet, 1) || store_reset(skb, ends->v6, &to_client))
		return -1;
	/* The local end is reset even if the client cannot be told. */
	if (bpf_clone_redirect(skb, skb->ifindex, 0))
		count(TG_COUNT_RESET_FAILED);
	return store_ethernet(skb, &ethernet, 0) || store_reset(skb, ends->v6, &to_server);
}

#endif
