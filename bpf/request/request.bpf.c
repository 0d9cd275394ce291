// SPDX-License-Identifier: GPL-2.0-only OR Apache-2.0
/* URL and cookie control for cleartext HTTP (the paper's sections 3.3 and 4.5), where a segment reaches the stack and
 * before the server wakes. Every segment that begins with a method is a request, so that each request of a persistent
 * connection is policed. What a segment does not show is left to the server. */
#include "classify.h"
#include "connection.h"
#include "credits.h"
#include "limits.h"
#include "match.h"
#include "reset.h"

char LICENSE[] SEC("license") = "GPL";

#define TC_ACT_OK 0
#define TC_ACT_SHOT 2

/* Whether a segment that had its token is here again: it was lost behind the gate, where the accept queue was full, say.
 * The server's half of the sequence numbers is not the client's to choose, but nor does the stack ask for exactly it. */
static __always_inline int came_before(struct tg_segment *last, const struct endpoints *ends)
{
	if (last->seq != bpf_ntohl(ends->header.seq) || last->ack != bpf_ntohl(ends->header.ack_seq) ||
	    last->repeats >= TG_REPEATS_MAX)
		return 0;
	last->repeats += 1;
	return 1;
}

static __always_inline void note(struct tg_segment *last, const struct endpoints *ends)
{
	last->seq = bpf_ntohl(ends->header.seq);
	last->ack = bpf_ntohl(ends->header.ack_seq);
	last->repeats = 0;
}

/* A request under a rule that takes tokens. */
struct paying {
	struct tg_credit key;
	struct tg_credited *known;	/* of the same connection and rule, the one before */
	__u32 repeated;			/* not 0: this one had its token */
};

static __always_inline void find_credit(struct paying *paying, const struct endpoints *ends, const struct tg_rule *rule)
{
	paying->key.client_port = bpf_ntohs(ends->header.source);
	paying->key.server_port = bpf_ntohs(ends->header.dest);
	paying->key.slot = rule->slot;
	__builtin_memcpy(paying->key.client, ends->source, 16);
	paying->known = bpf_map_lookup_elem(&credits, &paying->key);
	paying->repeated = paying->known && came_before(&paying->known->last, ends);
}

/* Whether the segment comes in the window of one that fitted the connection. To guess its number is as hard as to guess
 * one that fits the socket, which is dear to find. */
static __always_inline int continues(const struct paying *paying, const struct endpoints *ends)
{
	return paying->known &&
	       bpf_ntohl(ends->header.seq) - paying->known->last.seq < HANDSHAKE_WINDOW;
}

/* Takes a token, once for each request. Not 0: the request is compliant. */
static __always_inline int take_once(struct paying *paying, const struct endpoints *ends, const struct tg_rule *rule,
				     __u64 now_ns)
{
	struct tg_credited *known = paying->known, first = {};

	if (paying->repeated) {
		count(TG_COUNT_REQUEST_REPEATED);
		return 1;
	}
	if (!take(rule, now_ns))
		return 0;
	if (!(rule->flags & TG_RULE_LIMITED))
		return 1;
	first.requests = control_get(TG_CONTROL_CREDITS) != 0;
	note(&first.last, ends);
	if (known) {
		/* What the stack has thrown away for good, a wrong checksum say, the server never asks about. */
		if (known->requests < TG_CREDITS_MAX)
			__sync_fetch_and_add(&known->requests, first.requests);
		known->last = first.last;
	} else {
		bpf_map_update_elem(&credits, &paying->key, &first, BPF_ANY);
	}
	return 1;
}

static __always_inline void penalize(const struct endpoints *ends, __u64 now_ns)
{
	__u64 until_ns = control_get(TG_CONTROL_PENALTY_NS);
	struct tg_client client;

	if (!until_ns)
		return;
	until_ns += now_ns;
	__builtin_memcpy(client.address, ends->source, 16);
	bpf_map_update_elem(&penalties, &client, &until_ns, BPF_ANY);
	control_set(TG_CONTROL_PENALIZED_NS, until_ns);
}

/* The class of a request: that of its rule, or else that of its connection. */
static __always_inline __u32 class_of_request(const struct endpoints *ends, __u32 set, const struct tg_rule *rule,
					      __u64 classes)
{
	struct tg_rule *connection = 0;
	__u16 port_class;

	if (rule && rule->flags & TG_RULE_CLASSED)
		return rule->class;
	if (classes & TG_CLASSES_SYNS) {
		port_class = port_entry(set, bpf_ntohs(ends->header.dest)) & TG_PORT_CLASS;
		if (ends->v6) {
			connection = classify6(set, ends->source, ends->destination, port_class);
		} else {
			__u32 source, destination;

			__builtin_memcpy(&source, ends->source + 12, 4);
			__builtin_memcpy(&destination, ends->destination + 12, 4);
			connection = classify4(set, source, destination, port_class);
		}
	}
	return class_of(set, connection);
}

/* What no rule objects to is subject to the limit of its class; 0: it is beyond that. */
static __always_inline int admitted(const struct endpoints *ends, __u32 set, const struct tg_rule *rule, __u64 now_ns)
{
	__u64 classes = control_get(TG_CONTROL_CLASSES);
	struct tg_flow flow = {
		.client_port = bpf_ntohs(ends->header.source),
		.server_port = bpf_ntohs(ends->header.dest),
	};
	struct tg_begun begins = {.since_ns = now_ns}, *known;

	if (!classes)
		return 1;
	__builtin_memcpy(flow.client, ends->source, 16);
	known = bpf_map_lookup_elem(&begun, &flow);
	if (known && came_before(&known->segment, ends))
		return 1;
	begins.class = class_of_request(ends, set, rule, classes);
	if (classes & TG_CLASSES_REQUESTS && !class_take(begins.class, now_ns))
		return 0;
	note(&begins.segment, ends);
	bpf_map_update_elem(&begun, &flow, &begins, BPF_ANY);
	return 1;
}

static __always_inline int refuse(struct __sk_buff *skb, const struct endpoints *ends)
{
	if (reset_both(skb, ends)) {
		count(TG_COUNT_RESET_FAILED);
		return TC_ACT_SHOT;
	}
	count(TG_COUNT_REQUEST_RESET);
	return TC_ACT_OK;
}

/* Whether what the rule does reaches beyond this segment: a token, a penalty, a reset. */
static __always_inline int reaches_beyond(const struct tg_rule *rule)
{
	return rule->flags & TG_RULE_LIMITED ||
	       (rule->flags & (TG_RULE_REFUSE | TG_RULE_RESET)) == (TG_RULE_REFUSE | TG_RULE_RESET);
}

/* What becomes of a segment that fits no connection: it costs nobody anything. */
static __always_inline int stray(enum connection connection, const struct tg_rule *rule)
{
	/* Not even late: its acknowledgement was lost. */
	if (connection == CONNECTION_OLD)
		return TC_ACT_OK;
	count(TG_COUNT_REQUEST_STRAY);
	if (connection == CONNECTION_BEYOND)
		return TC_ACT_SHOT;
	return rule && rule->flags & TG_RULE_REFUSE && acts_now(rule) ? TC_ACT_SHOT : TC_ACT_OK;
}

SEC("tcx/ingress")
int tidegate_url(struct __sk_buff *skb)
{
	struct endpoints ends;
	struct paying paying = {};
	enum connection connection = CONNECTION_NONE;
	struct request *request;
	struct tg_rule *rule, *acting;
	__u32 zero = 0, set = generation(), flags;
	__u64 now_ns;

	if (!read_headers(skb, &ends) || !(port_entry(set, bpf_ntohs(ends.header.dest)) & TG_PORT_HTTP))
		return TC_ACT_OK;
	if (governs_nothing(set) && !control_get(TG_CONTROL_CLASSES))
		return TC_ACT_OK;
	request = bpf_map_lookup_elem(&scratch, &zero);
	if (!request || !read_path(skb, &ends, request))
		return TC_ACT_OK;
	rule = governing(skb, &ends, set, request);
	acting = rule && !(rule->flags & TG_RULE_ELSEWHERE) ? rule : 0;
	if (acting && acting->flags & TG_RULE_LIMITED)
		find_credit(&paying, &ends, acting);
	if ((acting && reaches_beyond(acting) && !paying.repeated && !continues(&paying, &ends)) ||
	    control_get(TG_CONTROL_CLASSES)) {
		connection = connection_of(skb, &ends);
		if (connection != CONNECTION_FITS)
			return stray(connection, acting);
	}
	now_ns = bpf_ktime_get_ns();
	if (acting) {
		flags = acting->flags;
		if (!take_once(&paying, &ends, acting, now_ns)) {
			if (!(flags & TG_RULE_RESET)) {
				count(TG_COUNT_REQUEST_DROPPED);
				return TC_ACT_SHOT;
			}
			if (connection != CONNECTION_FITS) {
				connection = connection_of(skb, &ends);
				if (connection != CONNECTION_FITS)
					return stray(connection, acting);
			}
			penalize(&ends, now_ns);
			return refuse(skb, &ends);
		}
	}
	if (admitted(&ends, set, rule, now_ns)) {
		if (acting)
			count(TG_COUNT_REQUEST_PASSED);
		return TC_ACT_OK;
	}
	if (acting && !paying.repeated)
		give_back(acting);
	/* Dropped, the segment would come again, and until then a server with a process for each connection would have
	 * one wait for it. The client is not to blame, and may connect again at once. */
	return refuse(skb, &ends);
}
