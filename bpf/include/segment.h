/* SPDX-License-Identifier: GPL-2.0-only OR Apache-2.0 */
/* The headers of a segment at TC, where the packet need not lie in one piece. They are read where they lie: each call of a
 * helper costs as much as all of this. */
#ifndef TIDEGATE_SEGMENT_H
#define TIDEGATE_SEGMENT_H

#include "address.h"
#include "packet.h"

struct endpoints {
	__u32 v6;
	__u32 network;			/* offset of the IP header */
	__u32 payload;			/* offset and length of what it carries */
	__u32 length;
	__u8 source[16];		/* IPv4 as IPv4-mapped */
	__u8 destination[16];
	struct tcphdr header;
};

/* Every header that is looked behind lies in so many bytes, or the stack drops the packet (RFC 7112). */
#define HEADERS_BYTES 2048

/* Whether a TCP header may be behind what was parsed, in a piece of the packet that was not. */
static __always_inline int may_be_behind(const struct packet *packet)
{
	if (packet->v4)
		return packet->v4->protocol == IPPROTO_TCP;
	return !packet->v6 || packet->v6->nexthdr == IPPROTO_TCP || is_extension(packet->v6->nexthdr);
}

static __always_inline void *find_headers(struct __sk_buff *skb, struct packet *packet)
{
	void *data = (void *)(long)skb->data;

	packet->end = (void *)(long)skb->data_end;
	packet->v4 = 0;
	packet->v6 = 0;
	packet->tcp = 0;
	packet->partial = 0;
	parse(packet, data);
	return data;
}

/* Reads the headers; 0 if the segment cannot carry a request. */
static __always_inline int read_headers(struct __sk_buff *skb, struct endpoints *ends)
{
	struct packet packet;
	void *data = find_headers(skb, &packet);
	__u32 end;

	if (!packet.tcp && packet.end - data < skb->len && may_be_behind(&packet)) {
		if (bpf_skb_pull_data(skb, skb->len < HEADERS_BYTES ? skb->len : HEADERS_BYTES))
			return 0;
		data = find_headers(skb, &packet);
	}
	if (!packet.tcp || packet.partial || packet.tcp->syn || packet.tcp->rst || packet.tcp->doff < 5)
		return 0;
	ends->header = *packet.tcp;
	ends->payload = (void *)packet.tcp - data + packet.tcp->doff * 4;
	if (packet.v4) {
		ends->v6 = 0;
		ends->network = (void *)packet.v4 - data;
		end = ends->network + bpf_ntohs(packet.v4->tot_len);
		map_v4(ends->source, packet.v4->saddr);
		map_v4(ends->destination, packet.v4->daddr);
	} else if (packet.v6) {
		const struct in6_addr *from = &packet.v6->saddr;

		/* It would pass for an IPv4 client, whose connection it cannot be of. The stack drops it. */
		if (!from->s6_addr32[0] && !from->s6_addr32[1] && from->s6_addr32[2] == bpf_htonl(0xffff))
			return 0;
		ends->v6 = 1;
		ends->network = (void *)packet.v6 - data;
		end = ends->network + sizeof(*packet.v6) + bpf_ntohs(packet.v6->payload_len);
		__builtin_memcpy(ends->source, from, 16);
		__builtin_memcpy(ends->destination, &packet.v6->daddr, 16);
	} else {
		return 0;
	}
	/* Receive offload may have merged segments into one that no IP header can describe. */
	if (end > skb->len || end < ends->payload)
		end = skb->len;
	if (end <= ends->payload)
		return 0;
	ends->length = end - ends->payload;
	return 1;
}

#endif
