/* SPDX-License-Identifier: GPL-2.0-only OR Apache-2.0 */
/* The headers of a segment at TC, where the packet need not lie in one piece. */
#ifndef TIDEGATE_SEGMENT_H
#define TIDEGATE_SEGMENT_H

#include "packet.h"

struct endpoints {
	__u32 v6;
	__u32 network;			/* offset of the IP header */
	__u32 tcp;			/* offset of the TCP header */
	__u32 payload;			/* offset and length of what it carries */
	__u32 length;
	__u8 source[16];		/* IPv4 as IPv4-mapped */
	__u8 destination[16];
	struct tcphdr header;
};

/* Where the TCP header is behind an IPv6 header and its extension headers; 0: nowhere. */
static __always_inline __u32 tcp_behind(struct __sk_buff *skb, __u32 network, __u8 next)
{
	__u32 at = network + sizeof(struct ipv6hdr);

	for (int i = 0; i < EXTENSION_HEADERS_MAX; i++) {
		struct fragment_header header;	/* the others begin alike, but for their length */

		if (!is_extension(next))
			break;
		if (bpf_skb_load_bytes(skb, at, &header, sizeof(header)))
			return 0;
		/* RFC 6946: a fragment that is all of its packet. */
		if (next == IPPROTO_FRAGMENT && header.offset & bpf_htons(IPV6_FRAGMENT_OFFSET | IPV6_MORE_FRAGMENTS))
			return 0;
		at += next == IPPROTO_FRAGMENT ? sizeof(header) : (header.reserved + 1) * 8;
		next = header.next;
	}
	return next == IPPROTO_TCP ? at : 0;
}

/* Of the tags the stack has taken off the first. What is behind the others; not IP: what no program looks at. */
static __always_inline __be16 behind_tags(struct __sk_buff *skb, struct endpoints *ends)
{
	__be16 protocol = skb->protocol;

	ends->network = ETH_HLEN;
	for (int i = 0; i < VLAN_TAGS_MAX && is_vlan(protocol); i++) {
		struct vlan_tag tag;

		if (bpf_skb_load_bytes(skb, ends->network, &tag, sizeof(tag)))
			return 0;
		protocol = tag.protocol;
		ends->network += sizeof(tag);
	}
	return protocol;
}

/* Reads the headers; 0 if the segment cannot carry a request. */
static __always_inline int read_headers(struct __sk_buff *skb, struct endpoints *ends)
{
	__be16 protocol = behind_tags(skb, ends);
	__u32 end;

	if (protocol == bpf_htons(ETH_P_IP)) {
		struct iphdr ip;

		if (bpf_skb_load_bytes(skb, ends->network, &ip, sizeof(ip)) || ip.protocol != IPPROTO_TCP || ip.ihl < 5 ||
		    ip.frag_off & bpf_htons(IP_MORE_FRAGMENTS | IP_FRAGMENT_OFFSET))
			return 0;
		ends->v6 = 0;
		ends->tcp = ends->network + ip.ihl * 4;
		end = ends->network + bpf_ntohs(ip.tot_len);
		__builtin_memset(ends->source, 0, 10);
		ends->source[10] = ends->source[11] = 0xff;
		__builtin_memset(ends->destination, 0, 10);
		ends->destination[10] = ends->destination[11] = 0xff;
		__builtin_memcpy(ends->source + 12, &ip.saddr, 4);
		__builtin_memcpy(ends->destination + 12, &ip.daddr, 4);
	} else if (protocol == bpf_htons(ETH_P_IPV6)) {
		struct ipv6hdr ip;

		if (bpf_skb_load_bytes(skb, ends->network, &ip, sizeof(ip)))
			return 0;
		/* It would pass for an IPv4 client, whose connection it cannot be of. The stack drops it. */
		if (!ip.saddr.s6_addr32[0] && !ip.saddr.s6_addr32[1] && ip.saddr.s6_addr32[2] == bpf_htonl(0xffff))
			return 0;
		ends->v6 = 1;
		ends->tcp = tcp_behind(skb, ends->network, ip.nexthdr);
		if (!ends->tcp)
			return 0;
		end = ends->network + sizeof(ip) + bpf_ntohs(ip.payload_len);
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
