/* SPDX-License-Identifier: GPL-2.0-only OR Apache-2.0 */
/* What a segment shows of a request. */
#ifndef TIDEGATE_HEAD_H
#define TIDEGATE_HEAD_H

#include "maps.h"
#include "segment.h"

/* What is known of the segment at hand; too large for the stack. The bytes after `text` end it whatever it holds. */
struct request {
	struct tg_path path;
	__u32 method;			/* bytes of the method and the blank after it */
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

/* The length of the method that these bytes begin with, and of the blank after it; 0: no request begins so. */
static __always_inline __u32 method_length(__u64 word)
{
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

/* What is before the text of a path. */
#define BEFORE_PATH __builtin_offsetof(struct tg_path, text)

/* Copies the payload from `skipped` bytes on to the path; the first of them go where its length will be. Gives how many
 * bytes the path has. */
static __always_inline __u32 load_path(struct __sk_buff *skb, const struct endpoints *ends, __u32 skipped,
				       struct request *request)
{
	__u32 length = ends->length - skipped;

	if (length > sizeof(request->path))
		length = sizeof(request->path);
	/* The compiler knows the bounds; the verifier has to be told again. */
	asm volatile("" : "+r"(length));
	if (length <= BEFORE_PATH || length > sizeof(request->path) ||
	    bpf_skb_load_bytes(skb, ends->payload + skipped, &request->path, length))
		return 0;
	return length - BEFORE_PATH;
}

/* Reads the path, if the segment begins a request. A method of four bytes, as most have, takes one copy. */
static __always_inline int read_path(struct __sk_buff *skb, const struct endpoints *ends, struct request *request)
{
	__u64 *begin = (__u64 *)&request->path;
	__u32 length;

	/* What is shorter than a word does not go on as the segment before did. */
	*begin = 0;
	length = load_path(skb, ends, 0, request);
	if (!length)
		return 0;
	request->method = method_length(*begin);
	if (!request->method || ends->length <= request->method)
		return 0;
	if (request->method != BEFORE_PATH) {
		length = load_path(skb, ends, request->method - BEFORE_PATH, request);
		if (!length)
			return 0;
	}
	request->path.length_bits = length * 8;
	return 1;
}

/* Copies the request from its path on. */
static __always_inline int read_text(struct __sk_buff *skb, const struct endpoints *ends, struct request *request)
{
	__u32 length = ends->length - request->method;

	if (length > TG_HEAD_BYTES)
		length = TG_HEAD_BYTES;
	asm volatile("" : "+r"(length));
	if (length < 1 || length > TG_HEAD_BYTES ||
	    bpf_skb_load_bytes(skb, ends->payload + request->method, request->text, length))
		return 0;
	request->text[length] = 0;
	request->length = length;
	return 1;
}

#endif
