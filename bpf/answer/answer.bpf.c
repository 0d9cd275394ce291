// SPDX-License-Identifier: GPL-2.0-only OR Apache-2.0
/* Where answers leave the host: how long a request of each class took, whatever server it is that answers. */
#include "limits.h"
#include "segment.h"

#include <linux/pkt_cls.h>

char LICENSE[] SEC("license") = "GPL";

/* Quarters of powers of two, so that a percentile is right to a fifth. */
static __always_inline __u32 bucket_of(__u64 us)
{
	__u32 power = 0, shifted = us > 0xffffffffULL ? 0xffffffff : us;

	if (shifted < 4)
		return shifted;
#pragma unroll
	for (int step = 16; step; step >>= 1) {
		if (shifted >> step) {
			power += step;
			shifted >>= step;
		}
	}
	/* The two bits below the highest. */
	shifted = us > 0xffffffffULL ? 0xffffffff : us;
	return power * 4 + ((shifted >> (power - 2)) & 3) - 4;
}

SEC("tcx/egress")
int tidegate_out(struct __sk_buff *skb)
{
	struct endpoints ends = {};
	struct tg_flow flow = {};
	struct tg_begun *request;
	__u64 *counted;
	__u32 key;

	if (!control_get(TG_CONTROL_CLASSES) || !read_headers(skb, &ends))
		return TC_ACT_OK;
	if (!(port_entry(generation(), bpf_ntohs(ends.header.source)) & TG_PORT_HTTP))
		return TC_ACT_OK;
	__builtin_memcpy(flow.client, ends.destination, 16);
	flow.client_port = bpf_ntohs(ends.header.dest);
	flow.server_port = bpf_ntohs(ends.header.source);
	request = bpf_map_lookup_elem(&begun, &flow);
	if (!request)
		return TC_ACT_OK;
	key = (request->class & (TG_MAX_CLASSES - 1)) * TG_LATENCY_BUCKETS +
	      (bucket_of((bpf_ktime_get_ns() - request->since_ns) / 1000) & (TG_LATENCY_BUCKETS - 1));
	bpf_map_delete_elem(&begun, &flow);
	counted = bpf_map_lookup_elem(&latencies, &key);
	if (counted)
		*counted += 1;
	return TC_ACT_OK;
}
