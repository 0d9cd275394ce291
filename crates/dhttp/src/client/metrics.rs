use tidegate_core::metric_set;

metric_set! {
    /// What one client counts. The client's core is the only writer.
    pub struct ClientMetrics {
        Counter dhttp_client_requests_total: "Requests begun.",
        Counter dhttp_client_resends_total: "Requests sent again because no answer came in time.",
        Counter dhttp_client_repairs_total: "Requests for pieces of a response that did not come.",
        Counter dhttp_client_responses_udp_total: "Responses accepted by UDP.",
        Counter dhttp_client_responses_connection_total: "Responses accepted on connections that a server opened.",
        Counter dhttp_client_outcome_unknown_total: "Requests that must not be repeated and may have been executed.",
        Counter dhttp_client_seal_refused_total: "Answers ignored because they were not sealed for a sealed request.",
        Counter dhttp_client_use_tcp_total: "Requests that went over a connection that the client opens.",
        Counter dhttp_client_use_http_total: "Requests left to HTTP because the server does not speak DHTTP.",
        Counter dhttp_client_proofs_total: "Requests sent again with a token at once.",
        Counter dhttp_client_probes_total: "Datagrams that asked a silent server for a sign of life.",
        Counter dhttp_client_silent_total: "Servers that gave none: UDP does not pass between them and the client.",
        Counter dhttp_client_unreachable_total: "Servers that ICMP said UDP does not get to.",
        Counter dhttp_client_malformed_total: "Datagrams ignored because they were no responses.",
        Counter dhttp_client_unmatched_total: "Responses ignored because no request waited for them on that port.",
        Counter dhttp_client_late_total: "Responses ignored because another channel already had the request.",
        Counter dhttp_client_caches_refused_total: "Answers of interception caches that the policy refuses.",
        Counter dhttp_client_bad_http_total: "Answers whose HTTP was malformed or not complete.",
        Counter dhttp_client_refused_total: "Requests refused because too many were outstanding.",
        Counter dhttp_client_connections_refused_total:
            "Connections of servers closed at once because the limit was reached.",
        Counter dhttp_client_connections_reused_total:
            "Requests over a connection that the client had opened for one before.",
        Gauge dhttp_client_outstanding: "Requests that wait for their response now.",
    }
}
