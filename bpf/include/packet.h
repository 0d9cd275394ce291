/* SPDX-License-Identifier: GPL-2.0-only OR Apache-2.0 */
/* Bounds-checked parsing of Ethernet, VLAN tags, IPv4, IPv6 and TCP. */
#ifndef TIDEGATE_PACKET_H
#define TIDEGATE_PACKET_H

#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <linux/tcp.h>

#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#define VLAN_TAGS_MAX 2
#define EXTENSION_HEADERS_MAX 4
#define IP_MORE_FRAGMENTS 0x2000
#define IP_FRAGMENT_OFFSET 0x1fff
#define IPV6_FRAGMENT_OFFSET 0xfff8
#define IPV6_MORE_FRAGMENTS 1

struct vlan_tag {
	__be16 tci;
	__be16 protocol;
};

struct extension_header {
	__u8 next;
	__u8 length;
};

struct fragment_header {
	__u8 next;
	__u8 reserved;		/* the length in other extension headers */
	__be16 offset;
	__be32 id;
};

struct packet {
	void *end;
	struct iphdr *v4;	/* one of these two, or neither */
	struct ipv6hdr *v6;
	struct tcphdr *tcp;	/* only in a packet or a fragment that shows all of it */
	__u32 partial;		/* not 0: a fragment, and not one that is all of its packet (RFC 6946) */
};

/* These give not 0 for a fragment, or a chain of extension headers, that hides a TCP header. */
static __always_inline int parse_tcp(struct packet *packet, void *cursor, int fragment)
{
	struct tcphdr *tcp = cursor;

	if ((void *)(tcp + 1) <= packet->end)
		packet->tcp = tcp;
	else if (fragment)
		return 1;
	return 0;
}

static __always_inline int parse_ip4(struct packet *packet, void *cursor)
{
	struct iphdr *ip = cursor;
	__u16 fragment;

	if ((void *)(ip + 1) > packet->end)
		return 0;
	packet->v4 = ip;
	if (ip->protocol != IPPROTO_TCP || ip->ihl < 5)
		return 0;
	fragment = bpf_ntohs(ip->frag_off);
	/* RFC 3128: a second fragment at offset 8 would rewrite the flags of the first. */
	if (fragment & IP_FRAGMENT_OFFSET)
		return (fragment & IP_FRAGMENT_OFFSET) == 1;
	packet->partial = fragment & IP_MORE_FRAGMENTS;
	return parse_tcp(packet, cursor + ip->ihl * 4, packet->partial);
}

/* Of the extension headers those that the stack looks behind. */
static __always_inline int is_extension(__u8 next)
{
	return next == IPPROTO_HOPOPTS || next == IPPROTO_ROUTING || next == IPPROTO_DSTOPTS ||
	       next == IPPROTO_FRAGMENT;
}

static __always_inline int parse_ip6(struct packet *packet, void *cursor)
{
	struct ipv6hdr *ip = cursor;
	int fragment = 0;
	__u8 next;

	if ((void *)(ip + 1) > packet->end)
		return 0;
	packet->v6 = ip;
	next = ip->nexthdr;
	cursor = ip + 1;
#pragma unroll
	for (int i = 0; i < EXTENSION_HEADERS_MAX; i++) {
		if (is_extension(next) && next != IPPROTO_FRAGMENT) {
			struct extension_header *header = cursor;

			/* The stack takes no first fragment that does not show all headers (RFC 7112). */
			if ((void *)(header + 1) > packet->end)
				return 0;
			next = header->next;
			cursor += (header->length + 1) * 8;
		} else if (next == IPPROTO_FRAGMENT) {
			struct fragment_header *header = cursor;

			if ((void *)(header + 1) > packet->end)
				return 0;
			/* RFC 3128 again, whatever follows. */
			if (header->offset & bpf_htons(IPV6_FRAGMENT_OFFSET))
				return bpf_ntohs(header->offset) >> 3 == 1 && header->next == IPPROTO_TCP;
			fragment = 1;
			packet->partial |= header->offset & bpf_htons(IPV6_MORE_FRAGMENTS);
			next = header->next;
			cursor += sizeof(*header);
		} else {
			break;
		}
	}
	if (next == IPPROTO_TCP)
		return parse_tcp(packet, cursor, fragment);
	/* RFC 8504 section 5.3: a host may limit the number of extension headers. Nobody needs that many to connect. */
	return is_extension(next);
}

static __always_inline int is_vlan(__be16 protocol)
{
	return protocol == bpf_htons(ETH_P_8021Q) || protocol == bpf_htons(ETH_P_8021AD);
}

static __always_inline int parse(struct packet *packet, void *cursor)
{
	struct ethhdr *ethernet = cursor;
	__be16 protocol;

	if ((void *)(ethernet + 1) > packet->end)
		return 0;
	protocol = ethernet->h_proto;
	cursor = ethernet + 1;
#pragma unroll
	for (int i = 0; i < VLAN_TAGS_MAX; i++) {
		struct vlan_tag *tag = cursor;

		if (!is_vlan(protocol))
			break;
		if ((void *)(tag + 1) > packet->end)
			return 0;
		protocol = tag->protocol;
		cursor = tag + 1;
	}
	if (protocol == bpf_htons(ETH_P_IP))
		return parse_ip4(packet, cursor);
	if (protocol == bpf_htons(ETH_P_IPV6))
		return parse_ip6(packet, cursor);
	/* The stack takes off any number of tags for VLAN 0. */
	return is_vlan(protocol);
}

#endif
