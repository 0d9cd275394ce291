// SPDX-License-Identifier: GPL-2.0-only OR Apache-2.0
/* Leads segments of Trickles to the AF_XDP socket of the queue they came on; everything else goes on to the kernel. */
#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <linux/tcp.h>

#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

char LICENSE[] SEC("license") = "GPL";

/* docs/protocol/trickles.md: kind 253, 4 bytes, experiment 0x5472. */
#define OPTION 0xfd045472
#define OPTION_WORDS_MAX 10

struct {
	__uint(type, BPF_MAP_TYPE_XSKMAP);
	__uint(max_entries, 64);
	__type(key, __u32);
	__type(value, __u32);
} sockets SEC(".maps");

/* The port, in host order. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u32);
} port SEC(".maps");

/* Writers align options to four bytes; AF_PACKET takes those that do not. */
static __always_inline int is_marked(struct tcphdr *tcp, void *end)
{
	__be32 *word = (void *)(tcp + 1);
	__u32 words = tcp->doff - 5;

	for (__u32 i = 0; i < OPTION_WORDS_MAX; i++) {
		if (i >= words || (void *)(word + i + 1) > end)
			return 0;
		if (word[i] == bpf_htonl(OPTION))
			return 1;
	}
	return 0;
}

SEC("xdp")
int tidegate_trickles(struct xdp_md *ctx)
{
	void *data = (void *)(long)ctx->data, *end = (void *)(long)ctx->data_end;
	struct ethhdr *eth = data;
	struct tcphdr *tcp;
	__u32 zero = 0, *wanted;

	if ((void *)(eth + 1) > end)
		return XDP_PASS;
	if (eth->h_proto == bpf_htons(ETH_P_IP)) {
		struct iphdr *ip = (void *)(eth + 1);

		if ((void *)(ip + 1) > end || ip->ihl != 5 || ip->protocol != IPPROTO_TCP)
			return XDP_PASS;
		/* Fragments have no header to look at. */
		if (ip->frag_off & bpf_htons(0x3fff))
			return XDP_PASS;
		tcp = (void *)(ip + 1);
	} else if (eth->h_proto == bpf_htons(ETH_P_IPV6)) {
		struct ipv6hdr *ip = (void *)(eth + 1);

		if ((void *)(ip + 1) > end || ip->nexthdr != IPPROTO_TCP)
			return XDP_PASS;
		tcp = (void *)(ip + 1);
	} else {
		return XDP_PASS;
	}
	if ((void *)(tcp + 1) > end || tcp->doff <= 5)
		return XDP_PASS;
	wanted = bpf_map_lookup_elem(&port, &zero);
	if (!wanted || tcp->dest != bpf_htons(*wanted) || !is_marked(tcp, end))
		return XDP_PASS;
	/* Without a socket on this queue AF_PACKET takes it. */
	return bpf_redirect_map(&sockets, ctx->rx_queue_index, XDP_PASS);
}
