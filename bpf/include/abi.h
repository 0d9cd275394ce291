/* SPDX-License-Identifier: GPL-2.0-only OR Apache-2.0 */
/* Everything that the kernel programs and user space share. The Rust side is generated from this file.
 * Times are nanoseconds of CLOCK_MONOTONIC. Addresses are in network byte order, everything else in the host's.
 * No struct has implicit padding: keys are compared byte by byte. */
#ifndef TIDEGATE_ABI_H
#define TIDEGATE_ABI_H

#include <linux/bpf.h>
#include <linux/types.h>

/* Bounds of the maps. */
#define TG_MAX_SLOTS 16384		/* rule states: two sets of 4096 connection rules and as many request rules */
#define TG_STATES (TG_MAX_SLOTS + TG_MAX_CLASSES)	/* a state for each class behind those of the rules */
#define TG_MAX_FLOWS 65536		/* connections whose request is not answered yet */
#define TG_LATENCY_BUCKETS 128		/* of each class: quarters of powers of two, in microseconds */
#define TG_EVENTS_BYTES 262144	/* of TCP events that nobody has taken yet */
#define TG_MAX_SOURCES 65536		/* (destination, port class, source prefix) entries of one rule set and family */
#define TG_MAX_DESTINATIONS 4096	/* destination prefixes of one rule set and family */
#define TG_MAX_PATHS 8192		/* literal paths and path prefixes of one rule set */
#define TG_MAX_PATTERNS 32		/* request rules of one rule set that need a search */
#define TG_MAX_COOKIES 4096		/* cookies that request rules about every path ask for */
#define TG_LENGTHS_MAX 3		/* different prefix lengths of sources that are looked up one by one */
#define TG_MAX_BLOCKED 1000000		/* blocked single addresses of each family */
#define TG_BLOCKED4_SLOTS 8		/* of one bucket: two cache lines */
#define TG_BLOCKED4_BUCKETS (1 << 19)	/* so many that hardly one is full; a power of two */
#define TG_EXPIRY_SHIFT 26		/* unit of expiry: 2^26 ns, so that 32 bits last for nine years */
#define TG_HIT_SHIFT 20			/* unit of the time of a hit: 2^20 ns; it wraps after seven weeks */
#define TG_MAX_BLOCKED_PREFIXES 65536	/* blocked prefixes of each family */
#define TG_MAX_REASONS 16384		/* why an address or prefix is blocked, where somebody said it */
#define TG_MAX_CREDITS 65536		/* (connection, rule) pairs whose requests were policed on their segments */
#define TG_MAX_PENALTIES 65536		/* clients whose SYNs are dropped after a reset */
#define TG_MAX_QUEUES 64		/* addresses with a prioritized listen queue */
#define TG_MAX_CLASSES 8		/* priority classes of one listen queue; 0 is served first */
#define TG_PATH_BYTES 120		/* longest literal path that the kernel tells apart */
#define TG_COOKIE_BYTES 96		/* longest `name=value` that the kernel looks for; whole words */
#define TG_HEAD_BYTES 2048		/* how much of a segment is searched */
#define TG_LABEL_BYTES 128
#define TG_REASON_BYTES 64

/* Keys of the map `control`; each value is one __u64. */
enum tg_control {
	TG_CONTROL_GENERATION,		/* which rule set of each pair is in force: 0 or 1 */
	TG_CONTROL_OVERLOAD,		/* not 0: rules with TG_RULE_ON_OVERLOAD act */
	TG_CONTROL_PENALTY_NS,		/* how long a client's SYNs are dropped after a reset; 0: not at all */
	TG_CONTROL_PENALIZED_NS,	/* until when somebody may be penalized */
	TG_CONTROL_BLOCK_SINGLES,	/* not 0: the lists of single addresses are not empty */
	TG_CONTROL_BLOCK_PREFIXES,	/* not 0: the prefix lists are not empty */
	TG_CONTROL_HOLD_DEPTH,		/* accept queue depth from which lower classes are held back; 0: never */
	TG_CONTROL_NETNS,		/* cookie of the network namespace the programs are attached in */
	TG_CONTROL_BLOCK_CHANGED_NS,	/* when user space last changed the block list */
	TG_CONTROL_BLOCK_FOR_NS,	/* life of a block that does not say its own; for user space */
	TG_CONTROL_CLASSES,		/* TG_CLASSES_...; 0: no agent adapts the limits of classes */
	TG_CONTROL_CREDITS,		/* not 0: a server asks which requests were policed on their segments */
	TG_CONTROL_BLOCK_EVICTED,	/* blocks that had to make room before their time; for user space */
	TG_CONTROL_COUNT,
};

/* Keys of the per-CPU map `counters`. */
enum tg_counter {
	TG_COUNT_BLOCKED,		/* packets from a blocked address */
	TG_COUNT_PENALTY,		/* SYNs of a client that was just reset */
	TG_COUNT_SYN_PASSED,
	TG_COUNT_SYN_POLICED,		/* SYNs without a token */
	TG_COUNT_SYN_HELD,		/* SYNs held back while a higher class waits */
	TG_COUNT_MALFORMED,		/* fragments, extension headers and tags that hide ports (RFC 1858, RFC 8504) */
	TG_COUNT_CLASS_POLICED,		/* SYNs and requests beyond the limit of their class */
	TG_COUNT_STEERED,		/* connections given to the queue of their class */
	TG_COUNT_STEER_FAILED,		/* ... or not, because the queue is gone */
	TG_COUNT_REQUEST_PASSED,	/* requests that a rule let pass */
	TG_COUNT_REQUEST_REPEATED,	/* ... that came again, because the first segment was lost behind the gate */
	TG_COUNT_REQUEST_DROPPED,
	TG_COUNT_REQUEST_RESET,
	TG_COUNT_REQUEST_PARTIAL,	/* requests whose head did not fit the segment: policed by the server, if at all */
	TG_COUNT_REQUEST_SERVER,	/* requests that the server refused by a rule */
	TG_COUNT_EVENT,			/* TCP events */
	TG_COUNT_EVENT_LOST,		/* ... for which there was no room */
	TG_COUNT_REQUEST_STRAY,		/* requests of no connection of this host: nobody's tokens, no penalty */
	TG_COUNT_RESET_FAILED,		/* resets that could not be built: the segment was dropped instead */
	TG_COUNT_COUNT,
};

/* Flags of a rule. */
#define TG_RULE_LIMITED 1		/* the token bucket decides */
#define TG_RULE_ON_OVERLOAD 2		/* only while overload is signalled */
#define TG_RULE_REFUSE 4		/* every match is a violation */
#define TG_RULE_RESET 8			/* a violation resets both ends; otherwise the segment is dropped */
#define TG_RULE_CLASSED 32		/* the rule names a priority class */
#define TG_RULE_ELSEWHERE 16		/* the kernel only recognizes the request: user space decides */

/* What a rule does. Its counters are in map `states` and its tokens in map `buckets`, under `slot`: both outlive a change of
 * the rest. */
struct tg_rule {
	__u32 slot;
	__u32 flags;
	__u32 class;			/* 0 is served first */
	__u32 rank;			/* of the rules that match, the one of lowest rank governs */
	__u64 token_ns;			/* after this time there is one more token */
	__u64 fill_ns;			/* after this time an empty bucket is full */
};

/* What classes are limited by, while an agent adapts them. */
#define TG_CLASSES_SYNS 1		/* some connection rule names a class: SYNs count */
#define TG_CLASSES_REQUESTS 2		/* some request rule does: requests count */

/* What happened under a rule. */
struct tg_state {
	__u64 passed;
	__u64 refused;
};

/* The rule in a slot as text, and how it is enforced: for people, never read by a kernel program. */
enum tg_label_kind {
	TG_LABEL_FREE,
	TG_LABEL_CONNECTION,
	TG_LABEL_REQUEST,
};
struct tg_label {
	__u32 kind;
	__u32 mechanism;		/* codes of user space */
	__u32 why;
	__u32 order;			/* place in the configuration */
	__u8 text[TG_LABEL_BYTES];
};

/* The prefix lengths of sources, the longest first, where all of them are in a hash; none: they are in a trie. */
struct tg_lengths {
	__u32 count;
	__u32 length_bits[TG_LENGTHS_MAX];	/* with the 32 bits of the classes */
	__u8 mask[TG_LENGTHS_MAX][16];		/* IPv4: of the first four bytes */
};

/* Port number to port class. Ports of one class are matched by the same rules. */
struct tg_ports {
	__u16 class_of[65536];
	__u32 classes;			/* number of priority classes; what no rule names is in the last one */
	__u32 reserved;
	struct tg_lengths lengths4;
	struct tg_lengths lengths6;
};
#define TG_PORT_HTTP 0x8000		/* flag beside the class: cleartext HTTP is spoken here */
#define TG_PORT_CLASS 0x7fff
#define TG_PORT_OUTSIDE 0x7fff	/* class of ports that no rule is about, not even one for every port */

/* Destination prefix to destination class (__u32); no entry means class 0. */
struct tg_prefix4 {
	__u32 length_bits;
	__u8 address[4];
};
struct tg_prefix6 {
	__u32 length_bits;
	__u8 address[16];
};

/* Source prefix within a pair of classes; `length_bits` counts the 32 bits of the classes. */
struct tg_source4 {
	__u32 length_bits;
	__u16 destination_class;
	__u16 port_class;
	__u8 address[4];
};
struct tg_source6 {
	__u32 length_bits;
	__u16 destination_class;
	__u16 port_class;
	__u8 address[16];
};
#define TG_SOURCE_CLASS_BITS 32

/* Path prefix of a request. */
struct tg_path {
	__u32 length_bits;
	__u8 text[TG_PATH_BYTES];
};

/* `name=value`, filled up with zeroes. */
struct tg_cookie {
	__u8 text[TG_COOKIE_BYTES];
};

/* A request rule that needs a search: a suffix, an infix, a cookie. */
enum tg_path_kind {
	TG_PATH_ANY,
	TG_PATH_EXACT,
	TG_PATH_PREFIX,
	TG_PATH_SUFFIX,
	TG_PATH_INFIX,
};
struct tg_pattern {
	struct tg_rule rule;
	__u32 path_kind;
	__u32 path_length;
	__u32 cookie_length;		/* 0: no cookie asked for; otherwise of the first text below */
	__u32 reserved;
	__u8 path[TG_PATH_BYTES + 8];
	__u8 cookie[TG_COOKIE_BYTES + 8];	/* " name=value" */
	__u8 cookie_inner[TG_COOKIE_BYTES + 8];	/* " name=value;" */
	__u8 cookie_last[TG_COOKIE_BYTES + 8];	/* " name=value\r" */
};
struct tg_patterns {
	__u32 count;
	__u32 cookies;			/* not 0: some rule asks for a cookie */
	struct tg_pattern pattern[TG_MAX_PATTERNS];	/* by rank */
};

/* A blocked IPv4 address: in one of the two buckets that its hash tells, so that a packet from it costs one cache miss. The
 * rest of the table's last bucket but its first slot is unused: `address` there is the seed, `hits` the number of entries.
 * User space maps the table into its memory and claims a slot by exchanging its address. */
struct tg_blocked4_slot {
	__u32 address;			/* as in the packet; 0: the slot is free */
	__u32 expires;			/* 0: never */
	__u32 last_hit;
	__u32 hits;
};
struct tg_blocked4 {
	struct tg_blocked4_slot slot[TG_BLOCKED4_SLOTS];
};
/* address ^ seed, multiplied, folded and multiplied, has from these bits on two numbers of buckets. */
#define TG_BLOCKED4_MIX 0x9e3779b97f4a7c15ULL
#define TG_BLOCKED4_FIRST_BIT 45
#define TG_BLOCKED4_SECOND_BIT 26

/* A blocked IPv6 address, or a prefix. */
struct tg_block {
	__u64 expires_ns;		/* 0: never */
	__u64 last_hit_ns;		/* 0: never; starts as the time of insertion */
	__u64 hits;			/* packets */
	__u32 length_bits;
	__u32 reserved;
};

/* What is blocked, and what was said about it: for people, never read by a kernel program. IPv4 is IPv4-mapped. */
struct tg_target {
	__u8 address[16];
	__u32 length_bits;
};
struct tg_reason {
	__u8 text[TG_REASON_BYTES];
};

/* The segment of a request that had its token. Sequence numbers as in the segment, in the host's order. */
struct tg_segment {
	__u32 seq;
	__u32 ack;
	__u32 repeats;			/* how often it came again */
	__u32 reserved;
};
/* A client may choose its sequence numbers so that every request looks like the last one. */
#define TG_REPEATS_MAX 4

/* Requests of one connection that a rule has let pass on their segments. */
struct tg_credit {
	__u8 client[16];		/* IPv4 as IPv4-mapped */
	__u16 client_port;
	__u16 server_port;
	__u32 slot;
};
/* The most credits of one connection and rule: it pays tokens for them when there are some, and could hoard. */
#define TG_CREDITS_MAX 8
struct tg_credited {
	__u64 requests;			/* ... that the server has not asked about yet, if one asks */
	struct tg_segment last;
};

/* What happened to a connection. */
enum tg_event_kind {
	TG_EVENT_RETRANSMIT,
	TG_EVENT_STATE,
	TG_EVENT_RESET_SENT,
	TG_EVENT_RESET_RECEIVED,
	TG_EVENT_ZERO_WINDOW,
};
struct tg_event {
	__u64 at_ns;
	__u8 client[16];		/* IPv4 as IPv4-mapped */
	__u16 client_port;
	__u16 server_port;
	__u32 kind;
	__u32 old_state;
	__u32 new_state;
	__u32 srtt_us;
	__u32 window;			/* bytes that the client is ready to take */
	__u32 retransmits;		/* since the connection began */
	__u32 reserved;
};

/* A request that is not answered yet. The client, IPv4 as IPv4-mapped. */
struct tg_flow {
	__u8 client[16];
	__u16 client_port;
	__u16 server_port;
};
struct tg_begun {
	__u64 since_ns;
	__u32 class;
	__u32 reserved;
	struct tg_segment segment;
};

/* What a server asks about a request that it has parsed. */
struct tg_question {
	struct tg_rule rule;
	struct tg_credit credit;
};

/* Where a prioritized listen queue is; an address of all zeroes means any. IPv4 is IPv4-mapped. */
struct tg_endpoint {
	__u8 address[16];
	__u16 port;
	__u16 reserved;
};

/* A client, IPv4 as IPv4-mapped. */
struct tg_client {
	__u8 address[16];
};

#endif
