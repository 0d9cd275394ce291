//! What each data core counts.

use tidegate_core::metric_set;

metric_set! {
    /// One data core's counters. The core is the only writer.
    pub struct CoreMetrics {
        Counter connections_accepted_total: "Client connections accepted.",
        Gauge connections_open: "Client connections open now.",
        Counter connections_refused_total: "Client connections closed at once because the limit was reached.",
        Counter connections_shed_total: "Connections that kept the server waiting and were ended to make room for others.",
        Counter connections_policed_total: "Client connections closed because a rule or the block list refused them.",
        Counter connections_crowded_out_total: "Connections of the lowest class closed because too many waited.",
        Counter proxy_senders_refused_total: "Connections closed because a PROXY header has to begin them, which only trusted proxies may send.",
        Counter proxy_headers_refused_total: "Connections closed because no whole and valid PROXY header came in time.",
        Counter tls_handshakes_failed_total: "Connections on which client and server did not agree on TLS.",
        Counter acme_challenges_total: "Handshakes and requests by which a certificate authority looked whether a name is ours.",
        Counter tls_floods_total: "Connections over TLS ended because of records without content, such as endless new keys.",
        Counter http2_floods_total: "HTTP/2 connections ended because of frames without use: requests that the client cancelled, content in bytes, heads without end.",
        Counter http3_connections_total: "Connections by HTTP/3, of those that were accepted.",
        Counter http3_floods_total: "HTTP/3 connections ended because of frames without use: requests that the client cancelled, content in bytes, endless signs of life.",
        Counter quic_retries_total: "Clients of HTTP/3 that had to prove their address before anything else, because many connections were being made.",
        Counter accept_errors_total: "Failed accepts, such as for want of file descriptors.",
        Counter requests_total: "Requests whose head was complete and well formed.",
        Counter requests_refused_total: "Request heads refused as malformed, ambiguous or too large.",
        Counter requests_policed_total: "Requests that a rule refused, reset or dropped.",
        Counter header_timeouts_total: "Connections ended because a request head took too long.",
        Counter idle_timeouts_total: "Persistent connections ended because they were idle too long.",
        Counter slow_bodies_total: "Connections ended because a request body came too slowly.",
        Counter slow_readers_total: "Connections ended because the client took a response too slowly.",
        Counter responses_1xx_total: "Interim responses sent.",
        Counter responses_2xx_total: "Responses sent with a status from 200 to 299.",
        Counter responses_3xx_total: "Responses sent with a status from 300 to 399.",
        Counter responses_4xx_total: "Responses sent with a status from 400 to 499.",
        Counter responses_5xx_total: "Responses sent with a status from 500 to 599.",
        Counter response_bytes_total: "Bytes sent to clients, heads included.",
        Counter clients_gone_total: "Requests dropped because the client reset the connection while the upstream worked.",
        Counter responses_broken_total: "Responses that ended early because the upstream or the client did.",
        Counter cache_hits_total: "Requests answered from the cache without asking an upstream.",
        Counter cache_stale_total: "Requests answered with a stale object because the rules allow it.",
        Counter cache_misses_total: "Requests for which the cache held nothing usable.",
        Counter cache_revalidated_total: "Stored objects that the upstream confirmed with 304.",
        Counter cache_stored_total: "Objects stored.",
        Counter cache_store_failures_total: "Objects not stored for want of space, or because they ended early.",
        Counter cache_collapsed_total: "Requests that waited for another request's answer instead of asking again.",
        Counter cache_passed_total: "Requests that are never answered from the cache, such as POST.",
        Counter upstream_errors_total: "Requests for which no upstream gave a valid response.",
        Counter compressed_responses_total: "Responses of upstreams that were compressed on their way.",
        Counter compressed_input_bytes_total: "Bytes of content that were compressed.",
        Counter compressed_bytes_total: "Bytes that they became.",
        Counter compressions_skipped_total: "Responses that were not compressed because of stress and not to be stored, or because too many were being compressed.",
        Counter icap_exchanges_total: "Messages that ICAP services were asked about.",
        Gauge icap_waiting: "Messages that wait for an ICAP service's decision now.",
        Counter icap_modified_total: "Messages in whose place an ICAP service put another one, such as a refusal.",
        Counter icap_failures_total: "Messages about which an ICAP service did not decide.",
        Counter icap_bypassed_total: "Messages that went on without a decision because failure = \"open\".",
        Counter tunnels_total: "Connections upgraded to another protocol.",
        Counter access_log_dropped_total: "Access log lines dropped because the writer could not keep up.",
    }
}

impl CoreMetrics {
    /// Counts a response by the class of its status.
    pub fn count_response(&self, status: u16, bytes: u64) {
        match status {
            100..=199 => self.responses_1xx_total.add(1),
            200..=299 => self.responses_2xx_total.add(1),
            300..=399 => self.responses_3xx_total.add(1),
            400..=499 => self.responses_4xx_total.add(1),
            _ => self.responses_5xx_total.add(1),
        }
        self.response_bytes_total.add(bytes);
    }
}
