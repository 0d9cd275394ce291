use tidegate_core::metric_set;

metric_set! {
    /// What one server core counts. The core is the only writer.
    pub struct ServerMetrics {
        Counter dhttp_requests_total: "Requests by UDP that were passed on to be answered.",
        Counter dhttp_requests_resent_total: "Requests with the resend flag from proved addresses.",
        Counter dhttp_requests_short_total: "Datagrams ignored because they were too short to hold an id.",
        Counter dhttp_requests_looped_total: "Datagrams ignored because they were responses.",
        Counter dhttp_requests_bad_port_total: "Datagrams ignored because a port was not one that clients use.",
        Counter dhttp_requests_bad_header_total: "Requests with unknown flags or a malformed token field.",
        Counter dhttp_requests_bad_http_total: "Requests whose HTTP was malformed, ambiguous or not complete.",
        Counter dhttp_requests_duplicate_total: "Requests ignored because they were being answered already.",
        Counter dhttp_requests_answered_total: "Requests ignored because a connection had carried the answer.",
        Counter dhttp_requests_unsafe_total: "Requests by UDP that must not be repeated, answered with use TCP.",
        Counter dhttp_once_executed_total: "Requests by UDP that must not be repeated, executed.",
        Counter dhttp_once_repeated_total: "Such requests answered again with the response that was kept.",
        Counter dhttp_once_tickets_total: "Tickets given to clients to number such requests.",
        Counter dhttp_once_unknown_total: "Such requests of which it is no longer known what came of them.",
        Counter dhttp_sealed_opened_total: "Sealed requests by UDP that were opened.",
        Counter dhttp_sealed_refused_total: "Sealed requests by UDP of an unknown key, or changed on their way.",
        Counter dhttp_requests_shed_total: "Requests answered with use TCP because too many were being answered.",
        Counter dhttp_requests_crowded_total:
            "Requests answered with use TCP because the site worked for too many of their client's.",
        Counter dhttp_tokens_refused_total: "Tokens that were malformed, out of date or of another address.",
        Counter dhttp_tokens_asked_total: "Answers that asked the client to prove its address.",
        Counter dhttp_answers_suppressed_total:
            "Answers not sent because they were too long for the datagram they answer.",
        Counter dhttp_responses_udp_total: "HTTP responses sent by UDP.",
        Counter dhttp_responses_pieces_total: "HTTP responses sent in several datagrams.",
        Counter dhttp_pieces_total: "Datagrams that held a piece of a response.",
        Counter dhttp_repairs_total: "Requests for pieces that a client missed.",
        Counter dhttp_responses_connection_total: "HTTP responses routed to a connection that the server opened.",
        Counter dhttp_responses_use_tcp_total: "Responses given up for the answer use TCP.",
        Counter dhttp_connections_opened_total: "Connections to clients begun.",
        Counter dhttp_connections_failed_total: "Connections to clients that failed or were not accepted in time.",
        Counter dhttp_connections_idle_total: "Connections to clients closed because they were idle too long.",
        Counter dhttp_connections_evicted_total: "Idle connections to clients closed to make room for another.",
        Counter dhttp_connections_refused_total: "Responses for which no connection could be had because of a limit.",
        Counter dhttp_connections_spared_total:
            "Responses for which no connection was opened because the client had not accepted one.",
        Gauge dhttp_connections_open: "Connections to clients open or being opened now.",
        Gauge dhttp_requests_in_flight: "Requests being answered now.",
        Gauge dhttp_high_loss:
            "1 while short responses to networks of which little is known mostly go by connections, because requests \
             of many networks are resent.",
    }
}
