// SPDX-License-Identifier: GPL-2.0-only OR Apache-2.0
/* Polices a request for a server: run by user space (BPF_PROG_TEST_RUN), never attached. What a segment does not show is
 * policed where the request is parsed, with the same tokens and the same counters. The frame is the question. */
#include "credits.h"

char LICENSE[] SEC("license") = "GPL";

SEC("xdp")
int tidegate_take(struct xdp_md *ctx)
{
	const void *data = (void *)(long)ctx->data, *end = (void *)(long)ctx->data_end;
	const struct tg_question *asked = data;
	struct tg_question question;
	struct tg_credited *credit;

	if ((const void *)(asked + 1) > end)
		return 1;
	question = *asked;
	/* One writer per connection takes away: the server that reads it. */
	credit = bpf_map_lookup_elem(&credits, &question.credit);
	if (credit && credit->requests) {
		__sync_fetch_and_add(&credit->requests, -1);
		return 1;
	}
	if (take(&question.rule, bpf_ktime_get_ns())) {
		count(TG_COUNT_REQUEST_PASSED);
		return 1;
	}
	count(TG_COUNT_REQUEST_SERVER);
	return 0;
}
