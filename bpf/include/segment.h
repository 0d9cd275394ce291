/* SPDX-License-Identifier: GPL-2.0-only OR Apache-2.0 */
/* The headers of a segment at TC, where the packet need not lie in one piece. */
#ifndef TIDEGATE_SEGMENT_H
#define TIDEGATE_SEGMENT_H

#include "packet.h"

struct endpoints {
	__u32 v6;
	__u32 tcp;			/* offset of the TCP header */
	__u32 payload;			/* offset and length of what it carries */
	__u32 length;
	__u8 source[16];		/* IPv4 as IPv4-mapped */
	__u8 destination[16];
	struct tcphdr header;
};

/* Reads the headers; 0 if the segment cannot carry a request. */
static __always_inline int read_headers(struct __sk_buff *skb, struct endpoints *ends)
{
	__u32 end;

	if (skb->protocol == bpf_htons(ETH_P_IP)) {
		struct iphdr ip;

		if (bpf_skb_load_bytes(skb, ETH_HLEN, &ip, sizeof(ip)) || ip.protocol != IPPROTO_TCP || ip.ihl < 5 ||
		    ip.frag_off & bpf_htons(IP_MORE_FRAGMENTS | IP_FRAGMENT_OFFSET))
			return 0;
		ends->v6 = 0;
		ends->tcp = ETH_HLEN + ip.ihl * 4;
		end = ETH_HLEN + bpf_ntohs(ip.tot_len);
		__builtin_memset(ends->source, 0, 10);
		ends->source[10] = ends->source[11] = 0xff;
		__builtin_memset(ends->destination, 0, 10);
		ends->destination[10] = ends->destination[11] = 0xff;
		__builtin_memcpy(ends->source + 12, &ip.saddr, 4);
		__builtin_memcpy(ends->destination + 12, &ip.daddr, 4);
	} else if (skb->protocol == bpf_htons(ETH_P_IPV6)) {
		struct ipv6hdr ip;

		if (bpf_skb_load_bytes(skb, ETH_HLEN, &ip, sizeof(ip)) || ip.nexthdr != IPPROTO_TCP)
			return 0;
		ends->v6 = 1;
		ends->tcp = ETH_HLEN + sizeof(ip);
		end = ends->tcp + bpf_ntohs(ip.payload_len);
		__builtin_memcpy(ends->source, &ip.saddr, 16);
		__builtin_memcpy(ends->destination, &ip.daddr, 16);
	} else {
		return 0;
	}
	if (bpf_skb_load_bytes(skb, ends->tcp, &ends->header, sizeof(ends->header)))
		return 0;
	if (ends->header.syn || ends->header.rst || ends->header.doff < 5)
		return 0;
	ends->payload = ends->tcp + ends->header.doff * 4;
	/* Receive offload may have merged segments into one that no IP header can describe. */
	if (end > skb->len || end < ends->payload)
		end = skb->len;
	if (end <= ends->payload)
		return 0;
	ends->length = end - ends->payload;
	return 1;
}

#endif
