// SPDX-License-Identifier: GPL-2.0-only OR Apache-2.0
/* URL and cookie control for cleartext HTTP (the paper's sections 3.3 and 4.5), where a segment reaches the stack and
 * before the server wakes. Every segment that begins with a method is a request, so that each request of a persistent
 * connection is policed. What a segment does not show is left to the server. */
#include "classify.h"
#include "connection.h"
#include "credits.h"
#include "limits.h"

char LICENSE[] SEC("license") = "GPL";

#define TC_ACT_OK 0
#define TC_ACT_SHOT 2

PAIR_OF_TRIES(paths, struct tg_path, struct tg_rule, TG_MAX_PATHS);
/* Rules about a cookie whatever the path. */
PAIR_OF_HASHES(cookies, struct tg_cookie, struct tg_rule, TG_MAX_COOKIES);

struct inner_patterns {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__uint(key_size, sizeof(__u32));
	__uint(value_size, sizeof(struct tg_patterns));
};
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY_OF_MAPS);
	__uint(max_entries, 2);
	__type(key, __u32);
	__array(values, struct inner_patterns);
} patterns SEC(".maps");

/* Since Linux 6.17. Without them patterns are left to the server. */
extern int bpf_strnstr(const char *text, const char *searched, __u64 length) __ksym __weak;
extern int bpf_strcspn(const char *text, const char *reject) __ksym __weak;

/* What is known of the segment at hand; too large for the stack. The bytes after `text` end it whatever it holds. */
struct request {
	struct tg_path path;
	__u32 length;			/* bytes of text */
	__u32 path_length;		/* of it in the window */
	__u32 path_ended;		/* not 0: that is all of the path */
	__u32 cookie;			/* where the cookie field's value begins, with the blank before it; 0: none */
	__u32 cookie_length;
	struct tg_cookie pair;		/* a cookie of the request */
	__u8 text[TG_HEAD_BYTES + TG_COOKIE_BYTES + 8];	/* from the path on */
};
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct request);
} scratch SEC(".maps");

/* The length of the method and the blank after it; 0: the segment does not begin a request. */
static __always_inline __u32 method_length(struct __sk_buff *skb, __u32 payload)
{
	__u64 word;

	if (bpf_skb_load_bytes(skb, payload, &word, sizeof(word)))
		return 0;
	word = bpf_be64_to_cpu(word);
	if (word >> 32 == 0x47455420ULL) /* GET */
		return 4;
	if (word >> 32 == 0x50555420ULL) /* PUT */
		return 4;
	if (word >> 24 == 0x504f535420ULL) /* POST */
		return 5;
	if (word >> 24 == 0x4845414420ULL) /* HEAD */
		return 5;
	if (word >> 16 == 0x504154434820ULL) /* PATCH */
		return 6;
	if (word >> 8 == 0x44454c45544520ULL) /* DELETE */
		return 7;
	if (word == 0x4f5054494f4e5320ULL) /* OPTIONS */
		return 8;
	return 0;
}

/* Copies the request from its path on. */
static __always_inline int read_request(struct __sk_buff *skb, const struct endpoints *ends, struct request *request)
{
	__u32 method = method_length(skb, ends->payload), length, shown;

	if (!method || ends->length <= method)
		return 0;
	length = ends->length - method;
	if (length > TG_HEAD_BYTES)
		length = TG_HEAD_BYTES;
	shown = length > TG_PATH_BYTES ? TG_PATH_BYTES : length;
	/* The compiler knows the bounds; the verifier has to be told again. */
	asm volatile("" : "+r"(length));
	if (length < 1 || length > TG_HEAD_BYTES)
		return 0;
	if (bpf_skb_load_bytes(skb, ends->payload + method, request->text, length))
		return 0;
	request->text[length] = 0;
	request->length = length;
	asm volatile("" : "+r"(shown));
	if (shown < 1 || shown > TG_PATH_BYTES)
		return 0;
	__builtin_memcpy(request->path.text, request->text, TG_PATH_BYTES);
	request->path.length_bits = shown * 8;
	return 1;
}

/* An index that the verifier believes. */
static __always_inline __u32 within(__u32 index)
{
	asm volatile("" : "+r"(index));
	return index & (TG_HEAD_BYTES - 1);
}

/* What a request is searched for, eight bytes at a time, and what was found. */
struct search {
	struct request *request;
	struct tg_patterns *patterns;
	struct tg_rule *found;
	__u32 best;			/* rank of what was found */
	__u32 set;
	__u32 pair;			/* where the cookie at hand begins; 0: before the cookie field */
	__u32 ended;			/* not 0: all cookies were seen, or there are none */
	__u32 base;			/* where the word at hand begins */
	__u32 next;			/* ... and the one after it */
	__u64 hits;			/* bytes of interest of the word at hand that were not looked at yet */
};

/* Words of a head, and bytes of interest that come with others in a word. */
#define LOOKS_MAX (2 * TG_HEAD_BYTES / 8)

#define EVERY_BYTE 0x0101010101010101ULL
_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the first byte of a word is its lowest");

/* The highest bit of each byte of `word` that is `byte`. */
static __always_inline __u64 equal(__u64 word, __u8 byte)
{
	__u64 differs = word ^ (EVERY_BYTE * byte), low = EVERY_BYTE * 0x7f;

	return ~(((differs & low) + low) | differs | low);
}

/* The number of the first byte that `equal` found. */
static __always_inline __u32 first(__u64 bits)
{
	return ((bits & -bits) >> 7) * 0x0001020304050607ULL >> 56;
}

static __always_inline __u64 word_at(const struct request *request, __u32 at)
{
	return *(const __u64 *)(request->text + within(at));
}

/* Read from its middle less a length, it masks that many bytes. */
static const struct {
	__u8 bytes[2 * TG_COOKIE_BYTES];
} keep = {{[0 ... TG_COOKIE_BYTES - 1] = 0xff}};

/* Asks for the rule about one cookie. */
static __always_inline void try_cookie(struct search *search, __u32 begin, __u32 end)
{
	struct request *request = search->request;
	void *inner = bpf_map_lookup_elem(&cookies, &search->set);
	__u64 *pair = (__u64 *)request->pair.text;
	struct tg_rule *rule;
	const __u8 *text, *kept;
	__u32 left;

	if ((word_at(request, begin) & 0xff) == ' ')
		begin += 1;
	left = end - begin;
	asm volatile("" : "+r"(left));
	if (!inner || left < 1 || left > TG_COOKIE_BYTES)
		return;
	text = request->text + within(begin);
	left = TG_COOKIE_BYTES - left;
	/* The verifier does not follow a subtraction from a pointer. */
	asm volatile("" : "+r"(left));
	if (left >= TG_COOKIE_BYTES)
		return;
	kept = keep.bytes + left;
#pragma unroll
	for (int i = 0; i < TG_COOKIE_BYTES / 8; i++)
		pair[i] = ((const __u64 *)text)[i] & ((const __u64 *)kept)[i];
	rule = bpf_map_lookup_elem(inner, &request->pair);
	if (rule && rule->rank < search->best) {
		search->found = rule;
		search->best = rule->rank;
	}
}

#define COOKIE_FIELD 0x003a65696b6f6f63ULL	/* "cookie:" */

/* At the end of a line before the cookie field: looks for the field, in any case (RFC 9110 section 5.1). */
static __always_inline long look_at_line(struct search *search, __u32 at)
{
	struct request *request = search->request;
	__u64 next = word_at(request, at);

	if ((next & 0xffff) == 0x0a0d && at + 2 <= request->length) {
		search->ended = 1;
		return 1;
	}
	if (((next | EVERY_BYTE * 0x20) & ~(0xffULL << 56)) == COOKIE_FIELD) {
		request->cookie = at + 7;
		search->pair = at + 7;
		/* None of what is left of this word is a cookie. */
		search->hits = 0;
	}
	return 0;
}

/* At the end of a cookie: asks for its rule. */
static __always_inline long look_at_cookie(struct search *search, __u32 at)
{
	struct request *request = search->request;

	if (at < search->pair)
		return 0;
	try_cookie(search, search->pair, at);
	if ((word_at(request, at) & 0xff) == '\r') {
		request->cookie_length = at - request->cookie + 1;
		search->ended = 1;
		return 1;
	}
	search->pair = at + 1;
	return 0;
}

/* Goes on to the next byte of interest of the word at hand, or to the next word. */
static long look(__u32 index __attribute__((unused)), struct search *search)
{
	__u64 hits = search->hits, word;
	__u32 at;

	if (!hits) {
		search->base = search->next;
		if (search->base >= search->request->length)
			return 1;
		search->next += 8;
		word = word_at(search->request, search->base);
		hits = search->pair ? equal(word, ';') | equal(word, '\r') : equal(word, '\n');
		if (!hits)
			return 0;
	}
	at = search->base + first(hits);
	search->hits = hits & (hits - 1);
	if (at >= search->request->length)
		return 1;
	return search->pair ? look_at_cookie(search, at) : look_at_line(search, at + 1);
}

static __always_inline int path_matches(const struct request *request, const struct tg_pattern *pattern)
{
	const char *text = (const char *)request->text, *searched = (const char *)pattern->path;
	__u32 length = pattern->path_length;

	if (pattern->path_kind == TG_PATH_ANY)
		return 1;
	if (request->path_length < length)
		return 0;
	/* What goes on in the next segment may end otherwise. */
	if (!request->path_ended && (pattern->path_kind == TG_PATH_EXACT || pattern->path_kind == TG_PATH_SUFFIX))
		return 0;
	switch (pattern->path_kind) {
	case TG_PATH_EXACT:
		return request->path_length == length && bpf_strnstr(text, searched, length) == 0;
	case TG_PATH_PREFIX:
		return bpf_strnstr(text, searched, length) == 0;
	case TG_PATH_SUFFIX:
		return bpf_strnstr(text + within(request->path_length - length), searched, length) == 0;
	case TG_PATH_INFIX:
		return bpf_strnstr(text, searched, request->path_length) >= 0;
	}
	return 0;
}

static __always_inline int has_cookie(const struct request *request, const char *cookie,
				      const struct tg_pattern *pattern)
{
	int at = bpf_strnstr(cookie, (const char *)pattern->cookie, request->cookie_length);
	__u8 next;

	if (at < 0)
		return 0;
	next = request->text[within(request->cookie + at + pattern->cookie_length)];
	if (next == ';' || next == '\r')
		return 1;
	/* The beginning of another value: the one asked for may come after it. */
	return bpf_strnstr(cookie, (const char *)pattern->cookie_inner, request->cookie_length) >= 0 ||
	       bpf_strnstr(cookie, (const char *)pattern->cookie_last, request->cookie_length) >= 0;
}

static long try_pattern(__u32 index, struct search *search)
{
	struct request *request = search->request;
	struct tg_pattern *pattern;

	if (index >= TG_MAX_PATTERNS || index >= search->patterns->count)
		return 1;
	pattern = &search->patterns->pattern[index];
	if (pattern->rule.rank > search->best)
		return 1;
	if (pattern->cookie_length) {
		const char *cookie = (const char *)request->text + within(request->cookie);

		if (!request->cookie || !has_cookie(request, cookie, pattern))
			return 0;
	}
	if (!path_matches(request, pattern))
		return 0;
	search->found = &pattern->rule;
	search->best = pattern->rule.rank;
	return 1;
}

/* The rule that governs a request, if any. */
static __always_inline struct tg_rule *governing(__u32 set, struct request *request)
{
	void *trie = bpf_map_lookup_elem(&paths, &set), *inner;
	struct tg_rule *rule = trie ? bpf_map_lookup_elem(trie, &request->path) : 0;
	struct tg_patterns *list;
	__u32 zero = 0;
	int length;

	inner = bpf_map_lookup_elem(&patterns, &set);
	list = inner ? bpf_map_lookup_elem(inner, &zero) : 0;
	if (!list)
		return rule;
	struct search search = {
		.request = request,
		.patterns = list,
		.best = rule ? rule->rank : ~0U,
		.set = set,
	};

	if (list->cookies) {
		request->cookie = 0;
		request->cookie_length = 0;
		bpf_loop(LOOKS_MAX, look, &search, 0);
		/* Without the end of the head in sight, a cookie may be in the next segment. */
		if (!search.ended) {
			count(TG_COUNT_REQUEST_PARTIAL);
			return 0;
		}
	}
	if (list->count && bpf_ksym_exists(bpf_strnstr) && bpf_ksym_exists(bpf_strcspn)) {
		length = bpf_strcspn((const char *)request->text, " ?\r");
		if (length < 0)
			length = 0;
		request->path_ended = (__u32)length < request->length;
		request->path_length = within(length < TG_HEAD_BYTES ? length : TG_HEAD_BYTES - 1);
		bpf_loop(TG_MAX_PATTERNS, try_pattern, &search, 0);
	}
	return search.found ? search.found : rule;
}

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
	if (rule && rule->flags & TG_RULE_REFUSE &&
	    (!(rule->flags & TG_RULE_ON_OVERLOAD) || control_get(TG_CONTROL_OVERLOAD)))
		return TC_ACT_SHOT;
	return TC_ACT_OK;
}

SEC("tcx/ingress")
int tidegate_url(struct __sk_buff *skb)
{
	struct endpoints ends = {};
	struct paying paying = {};
	enum connection connection = CONNECTION_NONE;
	struct request *request;
	struct tg_rule *rule, *acting;
	__u32 zero = 0, set = generation(), flags;
	__u64 now_ns;

	if (!read_headers(skb, &ends) || !(port_entry(set, bpf_ntohs(ends.header.dest)) & TG_PORT_HTTP))
		return TC_ACT_OK;
	request = bpf_map_lookup_elem(&scratch, &zero);
	if (!request || !read_request(skb, &ends, request))
		return TC_ACT_OK;
	rule = governing(set, request);
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
		count(TG_COUNT_REQUEST_PASSED);
	}
	/* Dropped, the segment would come again, and until then a server with a process for each connection would have
	 * one wait for it. The client is not to blame, and may connect again at once. */
	return admitted(&ends, set, rule, now_ns) ? TC_ACT_OK : refuse(skb, &ends);
}
