/* SPDX-License-Identifier: GPL-2.0-only OR Apache-2.0 */
/* From what a segment shows of a request to the rule that governs it. */
#ifndef TIDEGATE_MATCH_H
#define TIDEGATE_MATCH_H

#include "head.h"

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

/* Words that are looked at before the loop's next turn, which costs more than a word. */
#define WORDS_A_TURN 4

/* Goes on to the next byte of interest of the word at hand, or to the next word that has one. */
static long look(__u32 index __attribute__((unused)), struct search *search)
{
	__u64 hits = search->hits, word;
	__u32 at;

#pragma unroll
	for (int i = 0; i < WORDS_A_TURN; i++) {
		if (hits)
			break;
		search->base = search->next;
		if (search->base >= search->request->length)
			return 1;
		search->next += 8;
		word = word_at(search->request, search->base);
		hits = search->pair ? equal(word, ';') | equal(word, '\r') : equal(word, '\n');
	}
	if (!hits)
		return 0;
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

/* Whether no rule of this set is about any request. */
static __always_inline int governs_nothing(__u32 set)
{
	void *inner = bpf_map_lookup_elem(&patterns, &set);
	struct tg_patterns *list;
	__u32 zero = 0;

	list = inner ? bpf_map_lookup_elem(inner, &zero) : 0;
	return (!list || (!list->cookies && !list->count)) && !bpf_map_lookup_elem(&paths, &set);
}

/* Of the rule that is about the path, if any, and those that need a search the one of lowest rank. */
static __always_inline struct tg_rule *searched(struct __sk_buff *skb, const struct endpoints *ends, __u32 set,
						struct request *request, struct tg_patterns *list,
						struct tg_rule *rule)
{
	struct search search = {
		.request = request,
		.patterns = list,
		.best = rule ? rule->rank : ~0U,
		.set = set,
	};
	int length;

	if (!read_text(skb, ends, request))
		return rule;
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

/* The rule that governs a request, if any. */
static __always_inline struct tg_rule *governing(struct __sk_buff *skb, const struct endpoints *ends, __u32 set,
						 struct request *request)
{
	void *trie = bpf_map_lookup_elem(&paths, &set), *inner = bpf_map_lookup_elem(&patterns, &set);
	struct tg_rule *rule = trie ? bpf_map_lookup_elem(trie, &request->path) : 0;
	struct tg_patterns *list;
	__u32 zero = 0;

	list = inner ? bpf_map_lookup_elem(inner, &zero) : 0;
	if (!list || (!list->cookies && !list->count))
		return rule;
	return searched(skb, ends, set, request, list, rule);
}

#endif
