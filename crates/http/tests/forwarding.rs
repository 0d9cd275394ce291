//! What the next hop sees of a request, and the client of a response.

#![allow(clippy::unwrap_used)] // A failed expectation ends the test.

use tidegate_http::forward::{
    ForwardContext, forwarded_for, without_cookie, write_response_fields, write_upstream_request,
};
use tidegate_http::normalize::{Personality, normalize};
use tidegate_http::{
    BodyFraming, FieldId, FieldRules, HeadError, HeadLimits, Progress, RequestParser, ResponseParser,
    status_reason,
};

const CONTEXT: ForwardContext<'static> = ForwardContext {
    client: std::net::IpAddr::V4(std::net::Ipv4Addr::new(192, 0, 2, 1)),
    scheme: "http",
    default_host: b"app:81",
    via_pseudonym: "tidegate",
    trusted_client: false,
    keep_upgrade: false,
    framing: BodyFraming::None,
    removed: &[],
    added: &[],
    own_cookie: b"",
    rules: FieldRules::NONE,
};

fn forwarded(request: &str, context: &ForwardContext<'_>) -> String {
    let mut parser = RequestParser::new(HeadLimits::default());
    assert!(matches!(parser.parse(request.as_bytes()), Ok(Progress::Complete { .. })), "{request:?}");
    let head = parser.head(request.as_bytes());
    let mut scratch = Vec::new();
    let normalized = normalize(&head, Personality::Strict, &mut scratch).unwrap();
    let mut out = Vec::new();
    write_upstream_request(&head, &normalized, context, &mut out);
    // Whatever goes out is a sound head in normal form.
    let mut again = RequestParser::new(HeadLimits::default());
    assert_eq!(again.parse(&out), Ok(Progress::Complete { length: out.len() }));
    assert_eq!(again.head(&out).framing, context.framing);
    String::from_utf8(out).unwrap()
}

#[test]
fn a_request_goes_on_in_normal_form_with_our_word_for_where_it_came_from() {
    let sent = "GET http://Example.COM:80/a/../b%7e?q HTTP/1.0\r\nHost: other\r\nAccept: */*\r\nVia: 1.0 x\r\n\
        X-Forwarded-For: 10.0.0.1\r\nForwarded: for=10.0.0.1\r\nX-Forwarded-Proto: https\r\nX-Forwarded-Host: evil\r\n\
        X-Real-IP: 10.0.0.1\r\n\r\n";
    assert_eq!(
        forwarded(sent, &CONTEXT),
        "GET /b~?q HTTP/1.1\r\nHost: example.com\r\nAccept: */*\r\nVia: 1.0 x\r\nVia: 1.0 tidegate\r\n\
         X-Forwarded-For: 192.0.2.1\r\nX-Forwarded-Proto: http\r\nX-Forwarded-Host: example.com\r\n\
         Forwarded: for=192.0.2.1;host=example.com;proto=http\r\n\r\n"
    );
}

/// Servers refuse a request of HTTP/1.1 that says nothing.
#[test]
fn whom_a_client_of_http_1_0_does_not_ask_for_is_the_server() {
    let out = forwarded("GET /a HTTP/1.0\r\n\r\n", &CONTEXT);
    assert!(out.starts_with("GET /a HTTP/1.1\r\nHost: app:81\r\nVia: "), "{out}");
    assert!(
        !out.contains("X-Forwarded-Host") && !out.contains("host="),
        "the client has said nothing: {out}"
    );
}

#[test]
fn a_trusted_client_keeps_its_word() {
    let sent = "GET / HTTP/1.1\r\nHost: a:81\r\nX-Forwarded-For: 10.0.0.1\r\nForwarded: for=10.0.0.1\r\n\
        X-Forwarded-Proto: https\r\nX-Forwarded-Host: public\r\nX-Real-IP: 10.0.0.1\r\n\r\n";
    let context = ForwardContext { client: "2001:db8::1".parse().unwrap(), trusted_client: true, ..CONTEXT };
    assert_eq!(
        forwarded(sent, &context),
        "GET / HTTP/1.1\r\nHost: a:81\r\nX-Real-IP: 10.0.0.1\r\nVia: 1.1 tidegate\r\n\
         X-Forwarded-For: 10.0.0.1, 2001:db8::1\r\nX-Forwarded-Proto: https\r\nX-Forwarded-Host: public\r\n\
         Forwarded: for=10.0.0.1, for=\"[2001:db8::1]\";host=\"a:81\";proto=http\r\n\r\n"
    );
}

#[test]
fn what_a_trusted_client_has_said_nothing_in_begins_with_our_word() {
    let sent = "GET / HTTP/1.1\r\nHost: a\r\nX-Forwarded-For:\r\nForwarded:\r\n\r\n";
    let out = forwarded(sent, &ForwardContext { trusted_client: true, ..CONTEXT });
    assert!(out.contains("\r\nX-Forwarded-For: 192.0.2.1\r\n"), "{out}");
    assert!(out.contains("\r\nForwarded: for=192.0.2.1;host=a;proto=http\r\n"), "{out}");
}

#[test]
fn fields_of_one_connection_stay_on_it() {
    let sent = "GET / HTTP/1.1\r\nHost: a\r\nConnection: close, X-Hop, Host, Cookie\r\nX-Hop: 1\r\nCookie: c=1\r\n\
        Keep-Alive: 5\r\nProxy-Connection: x\r\nProxy-Authorization: x\r\nProxy: x\r\nProxy-Foo: x\r\nProxying: y\r\n\
        TE: gzip, Trailers\r\nTrailer: x\r\nUpgrade: h2c\r\nX-End: 2\r\n\r\n";
    let out = forwarded(sent, &CONTEXT);
    let (ours, _) = out.split_once("Via").unwrap();
    assert_eq!(
        ours,
        "GET / HTTP/1.1\r\nHost: a\r\nCookie: c=1\r\nProxying: y\r\nX-End: 2\r\nConnection: TE\r\nTE: trailers\r\n"
    );
}

#[test]
fn a_field_that_cgi_takes_for_one_of_ours_does_not_go_on() {
    let sent = "GET / HTTP/1.1\r\nHost: a\r\nX_Forwarded_For: 10.0.0.1\r\ncontent_length: 3\r\nPROXY_X: y\r\nmy_field: z\r\n\r\n";
    let out = forwarded(sent, &CONTEXT);
    assert!(out.starts_with("GET / HTTP/1.1\r\nHost: a\r\nmy_field: z\r\nVia: "));
}

/// Every field that only we, or a trusted proxy, may set, as CGI and its descendants may be sent it.
#[test]
fn no_field_that_is_dropped_goes_on_with_underscores() {
    let dropped = [
        "Forwarded",
        "X-Forwarded-For",
        "X-Forwarded-Host",
        "X-Forwarded-Proto",
        "X-Forwarded-Port",
        "X-Forwarded-Prefix",
        "X-Forwarded-Client-Cert",
        "X-Forwarded",
        "X-Real-IP",
        "Front-End-Https",
        "X-Envoy-Original-Host",
        "X-Envoy-Original-Path",
        "X-Host",
        "X-HTTP-Host-Override",
        "X-Original-Host",
        "X-Original-Method",
        "X-Original-Proto",
        "X-Original-Scheme",
        "X-Original-Uri",
        "X-Original-URL",
        "X-Rewrite-Url",
        "X-Scheme",
        "X-Url-Scheme",
        "CF-Connecting-IP",
        "Client-IP",
        "Fastly-Client-IP",
        "Forwarded-For",
        "True-Client-IP",
        "X-Client-IP",
        "X-Cluster-Client-IP",
        "X-Envoy-External-Address",
        "X-Forward-For",
        "X-Original-Forwarded-For",
        "X-Originating-IP",
        "X-Remote-Addr",
        "X-Remote-IP",
        "X-HTTP-Method",
        "X-HTTP-Method-Override",
        "X-Method-Override",
        "HTTP2-Settings",
        "Surrogate-Capability",
        "Proxy",
        "Proxy-Foo",
        "Proxy-Authorization",
        "Keep-Alive",
    ];
    let underscored = ["Transfer-Encoding", "Content-Length", "If-None-Match", "Cache-Control", "User-Agent"];
    let mut names: Vec<String> = dropped.iter().map(|name| (*name).to_owned()).collect();
    for name in dropped.iter().chain(&underscored).filter(|name| name.contains('-')) {
        names.push(name.replace('-', "_"));
        names.push(name.replacen('-', "_", 1).to_ascii_uppercase());
        names.push(name.rsplitn(2, '-').collect::<Vec<_>>().into_iter().rev().collect::<Vec<_>>().join("_"));
    }
    for name in names {
        let out =
            forwarded(&format!("GET / HTTP/1.1\r\nHost: a\r\n{name}: poison\r\nX_Mine: 1\r\n\r\n"), &CONTEXT);
        assert!(!out.contains("poison") && out.contains("\r\nX_Mine: 1\r\n"), "{name}: {out}");
    }
}

#[test]
fn more_connection_options_than_sound_peers_name_are_refused() {
    let sent = |options: &str| {
        format!("GET / HTTP/1.1\r\nHost: a\r\nConnection: {options}\r\nX-A: 1\r\nX-B: 2\r\n\r\n")
    };
    let most = sent(&format!("{}x-a,{}x-b", ",".repeat(9000), "o,".repeat(14)));
    assert!(forwarded(&most, &CONTEXT).starts_with("GET / HTTP/1.1\r\nHost: a\r\nVia: "));
    let refused = RequestParser::new(HeadLimits::default()).parse(sent(&"o,".repeat(17)).as_bytes());
    assert_eq!(refused.unwrap_err(), HeadError::TooManyConnectionOptions);
}

#[test]
fn what_only_a_trusted_proxy_may_say_is_dropped_from_others() {
    let sent = "GET / HTTP/1.1\r\nHost: a\r\nX-Forwarded-Port: 1\r\nX-Original-URL: /x\r\nTrue-Client-IP: 1\r\n\
                X-Mine: 1\r\n\r\n";
    assert!(forwarded(sent, &CONTEXT).starts_with("GET / HTTP/1.1\r\nHost: a\r\nX-Mine: 1\r\nVia: "));
    let kept = forwarded(sent, &ForwardContext { trusted_client: true, ..CONTEXT });
    assert!(kept.contains("X-Forwarded-Port: 1\r\n") && kept.contains("X-Original-URL: /x\r\n"));
}

#[test]
fn a_trusted_proxy_that_knows_only_x_forwarded_is_not_contradicted() {
    let sent = "GET / HTTP/1.1\r\nHost: a\r\nX-Forwarded-For: 192.0.2.7, 2001:db8::1\r\nX-Forwarded-Proto: https\r\n\r\n";
    let out = forwarded(sent, &ForwardContext { trusted_client: true, ..CONTEXT });
    let expected = "\r\nForwarded: for=192.0.2.7;proto=https, for=\"[2001:db8::1]\", for=192.0.2.1;host=a;proto=http\r\n";
    assert!(out.contains(expected), "{out}");
    assert!(forwarded(sent, &CONTEXT).contains("\r\nForwarded: for=192.0.2.1;host=a;proto=http\r\n"));
}

#[test]
fn of_a_trusted_proxys_lists_the_origin_is_told_what_the_cache_is_keyed_by() {
    let trusted = ForwardContext { trusted_client: true, ..CONTEXT };
    let sent = |fields: &str| forwarded(&format!("GET / HTTP/1.1\r\nHost: a\r\n{fields}\r\n"), &trusted);
    for fields in ["X-Forwarded-Host: evil\r\nX-Forwarded-Host: h\r\n", "X-Forwarded-Host: evil, h\r\n"] {
        let out = sent(fields);
        assert!(out.contains("\r\nX-Forwarded-Host: h\r\n") && !out.contains("evil"), "{out}");
    }
    assert!(sent("X-Forwarded-Host: h,\r\n").contains("\r\nX-Forwarded-Host: a\r\n"));
    for (fields, scheme) in [
        ("X-Forwarded-Proto: https, http\r\n", "http"),
        ("X-Forwarded-Proto: http\r\nX-Forwarded-Proto: HTTPS\r\n", "https"),
        ("X-Forwarded-Proto: evil\r\n", "http"),
    ] {
        let out = sent(&format!("{fields}X-Forwarded-For: 192.0.2.7\r\n"));
        let expected = format!("\r\nX-Forwarded-Proto: {scheme}\r\n");
        assert!(out.contains(&expected) && !out.contains("evil"), "{out}");
        assert!(out.contains(&format!("for=192.0.2.7;proto={scheme}, ")), "{out}");
    }
}

#[test]
fn what_else_a_trusted_proxy_says_of_the_url_is_found_for_the_key() {
    let request = b"GET / HTTP/1.1\r\nHost: a\r\nForwarded: for=\"x;host=evil\", by=y;Proto=https\r\nX-Forwarded-For: 1.2.3.4\r\n\
        X-Forwarded-Port: 8\r\nX-Original-URL: /x\r\nX-Client-IP: 1.2.3.4\r\nX-Other: 1\r\n\r\n";
    let mut parser = RequestParser::new(HeadLimits::default());
    let _ = parser.parse(request).unwrap();
    let mut found = Vec::new();
    tidegate_http::forward::other_claims(&parser.head(request).fields, |_, value| {
        found.push(String::from_utf8_lossy(value).into_owned());
    });
    assert_eq!(found, ["host=evil\"", "Proto=https", "8", "/x"]);
}

#[test]
fn addresses_are_read_with_ports_and_brackets() {
    let read = |text: &str| {
        tidegate_http::forward::parse_address(text.as_bytes()).map(|address| address.to_string())
    };
    for (text, expected) in [
        ("192.0.2.1", "192.0.2.1"),
        (" 192.0.2.1:4711 ", "192.0.2.1"),
        ("2001:db8::1", "2001:db8::1"),
        ("[2001:db8::1]", "2001:db8::1"),
        ("[2001:db8::1]:4711", "2001:db8::1"),
        ("::ffff:192.0.2.1", "192.0.2.1"),
    ] {
        assert_eq!(read(text).as_deref(), Some(expected), "{text}");
    }
    for text in ["", "unknown", "192.0.2.1:", "192.0.2.1:x", "[192.0.2.1]", "[2001:db8::1", "_hidden"] {
        assert_eq!(read(text), None, "{text}");
    }
}

#[test]
fn a_safe_method_is_not_turned_into_another_one() {
    let sent =
        |method: &str| format!("{method} / HTTP/1.1\r\nHost: a\r\nX-HTTP-Method-Override: PATCH\r\n\r\n");
    assert!(!forwarded(&sent("GET"), &CONTEXT).contains("Override"));
    assert!(forwarded(&sent("DELETE"), &CONTEXT).contains("Override"));
}

#[test]
fn protocols_that_carry_requests_are_not_upgraded_to() {
    let sent = "GET / HTTP/1.1\r\nHost: a\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c, websocket\r\n\
                HTTP2-Settings: AAMAAABkAAQ\r\n\r\n";
    let out = forwarded(sent, &ForwardContext { keep_upgrade: true, ..CONTEXT });
    assert!(
        out.contains("\r\nUpgrade: websocket\r\n") && !out.contains("h2c") && !out.contains("HTTP2"),
        "{out}"
    );
    let others = sent.replace("h2c, websocket", "TLS/1.0, h2, HTTP/2.0, IRC/6.9");
    let out = forwarded(&others, &ForwardContext { keep_upgrade: true, ..CONTEXT });
    let upgrades: Vec<&str> = out.lines().filter(|line| line.starts_with("Upgrade: ")).collect();
    assert_eq!(upgrades, ["Upgrade: IRC/6.9"]);
    let alone = sent.replace(", websocket", "");
    let out = forwarded(&alone, &ForwardContext { keep_upgrade: true, ..CONTEXT });
    assert!(!out.contains("pgrade"), "{out}");
}

#[test]
fn upgrade_goes_on_as_one_line_of_few_protocols_and_of_nothing_else() {
    let upgrade = |value: &str| {
        let sent = format!("GET / HTTP/1.1\r\nHost: a\r\nConnection: upgrade\r\nUpgrade: {value}\r\n\r\n");
        let out = forwarded(&sent, &ForwardContext { keep_upgrade: true, ..CONTEXT });
        let lines = out.lines().filter_map(|line| line.strip_prefix("Upgrade: "));
        lines.map(str::to_owned).collect::<Vec<_>>()
    };
    assert_eq!(upgrade("chat/2 ,, websocket"), ["chat/2, websocket"]);
    assert_eq!(upgrade("\"h2c\", h2c\tx, h2c;a, chat"), ["chat"]);
    assert!(upgrade("\"h2c\"").is_empty());
    // A line for each would make six times as much of a head that has thousands.
    assert_eq!(upgrade(&"a,".repeat(10_000)), [["a"; 16].join(", ")]);
}

#[test]
fn an_upgrade_goes_on_only_when_told() {
    let sent = "GET / HTTP/1.1\r\nHost: a\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n";
    assert!(!forwarded(sent, &CONTEXT).contains("pgrade"));
    let out = forwarded(sent, &ForwardContext { keep_upgrade: true, ..CONTEXT });
    assert!(out.contains("\r\nConnection: upgrade\r\nUpgrade: websocket\r\n"));
}

#[test]
fn the_body_is_framed_once_and_as_told() {
    let sent = "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n";
    let out = forwarded(sent, &ForwardContext { framing: BodyFraming::Length(7), ..CONTEXT });
    assert!(out.contains("\r\nContent-Length: 7\r\n") && !out.contains("Transfer-Encoding"));
    let sent = "PUT / HTTP/1.1\r\nHost: a\r\nContent-Length: 7\r\n\r\n";
    let out = forwarded(sent, &ForwardContext { framing: BodyFraming::Chunked, ..CONTEXT });
    assert!(out.contains("\r\nTransfer-Encoding: chunked\r\n") && !out.contains("Content-Length"));
    let out = forwarded(sent, &ForwardContext { framing: BodyFraming::Length(0), ..CONTEXT });
    assert!(out.contains("\r\nContent-Length: 0\r\n"));
}

#[test]
fn conditions_are_replaced_and_hops_counted() {
    let context = ForwardContext {
        removed: &[FieldId::IfNoneMatch, FieldId::Range],
        added: &[(b"If-None-Match", b"\"ours\"")],
        ..CONTEXT
    };
    let sent = "OPTIONS * HTTP/1.1\r\nHost: a\r\nIf-None-Match: \"theirs\"\r\nRange: bytes=0-1\r\nMax-Forwards: 3\r\n\r\n";
    let out = forwarded(sent, &context);
    assert!(out.starts_with("OPTIONS * HTTP/1.1\r\nHost: a\r\nMax-Forwards: 2\r\n"));
    assert!(out.ends_with("\r\nIf-None-Match: \"ours\"\r\n\r\n"));
    assert!(!out.contains("theirs") && !out.contains("Range"));
}

#[test]
fn a_response_goes_on_without_its_connection() {
    let sent = b"HTTP/1.1 200 OK\r\nConnection: x-hop, Cache-Control\r\nX-Hop: 1\r\nCache-Control: no-store\r\n\
        Transfer-Encoding: chunked\r\nKeep-Alive: 5\r\nAge: 3\r\nProxy-Status: a\r\nSet-Cookie: a\r\nset-cookie: b\r\n\r\n";
    let mut parser = ResponseParser::new(HeadLimits::default());
    let _ = parser.parse(sent).unwrap();
    let mut out = Vec::new();
    write_response_fields(&parser.head(sent), |id, _| id == FieldId::Age, &mut out);
    assert_eq!(
        String::from_utf8(out).unwrap(),
        "Cache-Control: no-store\r\nProxy-Status: a\r\nSet-Cookie: a\r\nset-cookie: b\r\n"
    );
    assert_eq!((status_reason(404), status_reason(799)), ("Not Found", ""));
}

#[test]
fn own_cookie_stays_here_and_others_go_on() {
    for (sent, expected) in [
        ("a=b", Some("a=b")),
        ("a=b;  c=d;", Some("a=b;  c=d;")),
        ("pass=1", None),
        (" pass=1 ; pass=2;", None),
        ("a=b; pass=1; c=d", Some("a=b; c=d")),
        ("pass=1; a=b", Some("a=b")),
        ("passport=1; a=pass=1; pass", Some("passport=1; a=pass=1; pass")),
    ] {
        let kept = without_cookie(sent.as_bytes(), b"pass");
        assert_eq!(kept.as_deref(), expected.map(str::as_bytes), "{sent:?}");
        assert_eq!(without_cookie(sent.as_bytes(), b"").as_deref(), Some(sent.as_bytes()));
    }
    let context = ForwardContext { own_cookie: b"pass", ..CONTEXT };
    let out =
        forwarded("GET / HTTP/1.1\r\nHost: a\r\nCookie: pass=1\r\nCookie: pass=1; x=y\r\n\r\n", &context);
    assert!(out.contains("\r\nCookie: x=y\r\n") && !out.contains("pass"), "{out}");
}

#[test]
fn forwarded_names_clients_the_last_first() {
    let named = |line: &str| -> Vec<Option<String>> {
        forwarded_for(line.as_bytes()).map(|client| client.map(|client| client.to_string())).collect()
    };
    let some = |address: &str| Some(address.to_owned());
    assert_eq!(named("for=192.0.2.1"), [some("192.0.2.1")]);
    assert_eq!(
        named("For=\"[2001:db8::1]:80\";proto=http;by=10.0.0.1, , for=192.0.2.1:8080"),
        [some("192.0.2.1"), some("2001:db8::1")]
    );
    assert_eq!(
        named("for=192.0.2.1, for=unknown, for=_hidden, proto=https;by=_x"),
        [None, None, None, some("192.0.2.1")]
    );
    // A quote that a client has left open takes nothing of what a proxy has appended.
    assert_eq!(named("for=\"192.0.2.9, proto=http;for=\"192.0.2.1\""), [some("192.0.2.1"), None]);
}
