//! How each personality reads a target; one row per technique of evasion.

#![allow(clippy::unwrap_used)] // A failed expectation ends the test.

use tidegate_http::normalize::{Personality, normalize};
use tidegate_http::{HeadError, HeadLimits, Progress, RequestParser};

use HeadError as E;
use Personality::{Apache, Iis, Nginx, Strict};

/// `authority path?query`, or the refusal.
fn normal(request: &str, personality: Personality) -> Result<String, HeadError> {
    let mut parser = RequestParser::new(HeadLimits::default());
    assert!(matches!(parser.parse(request.as_bytes()), Ok(Progress::Complete { .. })), "{request:?}");
    let mut scratch = Vec::new();
    let normal = normalize(&parser.head(request.as_bytes()), personality, &mut scratch)?;
    assert_eq!(normal.keep().get(), normal, "{request:?}");
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
    let query = normal.query.map_or(String::new(), |query| format!("?{}", text(query)));
    Ok(format!("{} {}{query}", text(normal.authority), text(normal.path)))
}

fn target(target: &str, personality: Personality) -> Result<String, HeadError> {
    let normal = normal(&format!("GET {target} HTTP/1.1\r\nHost: a\r\n\r\n"), personality)?;
    Ok(normal.strip_prefix("a ").unwrap().to_owned())
}

#[test]
fn all_personalities_agree_on_what_the_rfc_decides() {
    let table: &[(&str, Result<&str, HeadError>)] = &[
        ("/", Ok("/")),
        ("/a/b?c=d", Ok("/a/b?c=d")),
        ("/a?", Ok("/a?")),
        ("/a?b?c", Ok("/a?b?c")),
        ("/%61%2D%7e%5F", Ok("/a-~_")),
        ("/%c3%a9", Ok("/%C3%A9")),
        ("/é\"<>^`{|}", Ok("/%C3%A9%22%3C%3E%5E%60%7B%7C%7D")),
        ("/a[1]?a[1]=2", Ok("/a%5B1%5D?a[1]=2")),
        ("/a%3fb%23c%20d", Ok("/a%3Fb%23c%20d")),
        ("/a;b=c/!$&'()*+,=:@", Ok("/a;b=c/!$&'()*+,=:@")),
        ("/a/./b/../c", Ok("/a/c")),
        ("/a/%2e/b/%2E%2e/c", Ok("/a/c")),
        ("/a/.%2e", Ok("/")),
        ("/a/b/..", Ok("/a/")),
        ("/a/b/.", Ok("/a/b/")),
        ("/a/.../..b/.c", Ok("/a/.../..b/.c")),
        ("//a///b////", Ok("/a/b/")),
        ("/a//../b", Ok("/b")),
        ("/a?x=../..//y", Ok("/a?x=../..//y")),
        ("/a?x=%41%2f%5c", Ok("/a?x=A%2F%5C")),
        ("/%", Err(E::BadEscape)),
        ("/%4", Err(E::BadEscape)),
        ("/%4g", Err(E::BadEscape)),
        ("/%u0041", Err(E::BadEscape)),
        ("/a%00.html", Err(E::EncodedNul)),
        ("/a#b", Err(E::Fragment)),
        ("/a?b#c", Err(E::Fragment)),
        ("a", Err(E::BadTarget)),
        ("*", Err(E::BadTarget)),
        ("a:80", Err(E::BadTarget)),
        ("ftp://a/", Err(E::BadTarget)),
        ("http:/a", Err(E::BadTarget)),
    ];
    for (sent, expected) in table {
        for personality in Personality::ALL {
            let expected = expected.map(str::to_owned);
            assert_eq!(target(sent, personality), expected, "{sent} by {personality}");
        }
    }
}

#[test]
fn each_personality_reads_like_its_server_where_servers_differ() {
    // Sent; then strict, apache, nginx, iis.
    let table: &[(&str, [Result<&str, HeadError>; 4])] = &[
        ("/a%2fb", [Ok("/a%2Fb"), Err(E::EncodedSlash), Ok("/a/b"), Ok("/a/b")]),
        ("/a/..%2fb", [Err(E::EncodedSlash), Err(E::EncodedSlash), Ok("/b"), Ok("/b")]),
        ("/a%2f%2e%2e%2fb", [Err(E::EncodedSlash), Err(E::EncodedSlash), Ok("/b"), Ok("/b")]),
        ("/a%2f..b", [Ok("/a%2F..b"), Err(E::EncodedSlash), Ok("/a/..b"), Ok("/a/..b")]),
        ("/a\\b", [Ok("/a%5Cb"), Ok("/a%5Cb"), Ok("/a%5Cb"), Ok("/a/b")]),
        ("/a%5cb", [Ok("/a%5Cb"), Ok("/a%5Cb"), Ok("/a%5Cb"), Ok("/a/b")]),
        ("/a\\..\\b", [Err(E::EncodedSlash), Ok("/a%5C..%5Cb"), Ok("/a%5C..%5Cb"), Ok("/b")]),
        ("/..%5cb", [Err(E::EncodedSlash), Ok("/..%5Cb"), Ok("/..%5Cb"), Ok("/b")]),
        ("/../a", [Ok("/a"), Err(E::AboveRoot), Err(E::AboveRoot), Ok("/a")]),
        ("/a/../../b", [Ok("/b"), Err(E::AboveRoot), Err(E::AboveRoot), Ok("/b")]),
        ("/a%0d%0ab", [Err(E::BadEscape), Ok("/a%0D%0Ab"), Ok("/a%0D%0Ab"), Err(E::BadEscape)]),
        ("/%252e", [Ok("/%252e"), Ok("/%252e"), Ok("/%252e"), Err(E::BadEscape)]),
        ("/%25%34%31", [Ok("/%2541"), Ok("/%2541"), Ok("/%2541"), Err(E::BadEscape)]),
        ("/%25", [Ok("/%25"), Ok("/%25"), Ok("/%25"), Ok("/%25")]),
        ("/a?100%", [Err(E::BadEscape), Ok("/a?100%25"), Ok("/a?100%25"), Ok("/a?100%25")]),
        ("/a?%%42f", [Err(E::BadEscape), Ok("/a?%25Bf"), Ok("/a?%25Bf"), Ok("/a?%25Bf")]),
        ("/a?%00", [Err(E::EncodedNul), Ok("/a?%00"), Ok("/a?%00"), Ok("/a?%00")]),
        ("/a/..;/b", [Err(E::DotParameter), Ok("/a/..;/b"), Ok("/a/..;/b"), Ok("/a/..;/b")]),
        ("/a/%2e%2E%3bx", [Err(E::DotParameter), Ok("/a/..%3Bx"), Ok("/a/..%3Bx"), Ok("/a/..%3Bx")]),
        ("/.;x=1", [Err(E::DotParameter), Ok("/.;x=1"), Ok("/.;x=1"), Ok("/.;x=1")]),
        ("/a%5c..;x", [Err(E::EncodedSlash), Ok("/a%5C..;x"), Ok("/a%5C..;x"), Ok("/a/..;x")]),
        ("/...;x", [Ok("/...;x"), Ok("/...;x"), Ok("/...;x"), Ok("/...;x")]),
        ("/A/B", [Ok("/A/B"), Ok("/A/B"), Ok("/A/B"), Ok("/A/B")]),
    ];
    for (sent, expected) in table {
        for (personality, expected) in [Strict, Apache, Nginx, Iis].into_iter().zip(expected) {
            assert_eq!(target(sent, personality), expected.map(str::to_owned), "{sent} by {personality}");
        }
    }
    assert!(Iis.folds_case() && !Strict.folds_case() && !Apache.folds_case() && !Nginx.folds_case());
}

#[test]
fn hosts_have_one_form() {
    let table: &[(&str, Result<&str, HeadError>)] = &[
        ("www.example.com", Ok("www.example.com")),
        ("WWW.Example.COM", Ok("www.example.com")),
        ("example.com.", Ok("example.com")),
        ("example.com:80", Ok("example.com")),
        ("example.com:0080", Ok("example.com")),
        ("example.com:", Ok("example.com")),
        ("example.com:8080", Ok("example.com:8080")),
        ("example.com:08080", Ok("example.com:8080")),
        ("Example.com.:65535", Ok("example.com:65535")),
        ("127.0.0.1:81", Ok("127.0.0.1:81")),
        ("[::1]", Ok("[::1]")),
        ("[0:0::0001]:8080", Ok("[::1]:8080")),
        ("", Err(E::BadHost)),
        (".", Err(E::BadHost)),
        ("a..", Err(E::BadHost)),
        ("a..b", Err(E::BadHost)),
        (".a", Err(E::BadHost)),
        (":80", Err(E::BadHost)),
        ("a b", Err(E::BadHost)),
        ("a,b", Err(E::BadHost)),
        ("a/b", Err(E::BadHost)),
        ("a@b", Err(E::BadHost)),
        ("a%2eb", Err(E::BadHost)),
        ("a:b", Err(E::BadHost)),
        ("a:0", Err(E::BadHost)),
        ("a:65536", Err(E::BadHost)),
        ("a:80:80", Err(E::BadHost)),
        ("[::1", Err(E::BadHost)),
        ("[::1]a", Err(E::BadHost)),
        ("[v1.x]", Err(E::BadHost)),
        ("\u{e9}", Err(E::BadHost)),
    ];
    for (host, expected) in table {
        let result = normal(&format!("GET / HTTP/1.1\r\nHost: {host}\r\n\r\n"), Strict);
        assert_eq!(result, expected.map(|host| format!("{host} /")), "{host}");
    }
}

#[test]
fn the_four_forms_of_a_target_belong_to_their_methods() {
    let table: &[(&str, Result<&str, HeadError>)] = &[
        ("GET http://B/x?y HTTP/1.1\r\nHost: a\r\n\r\n", Ok("b /x?y")),
        ("GET HTTP://b:80/../x HTTP/1.1\r\nHost: a\r\n\r\n", Ok("b /x")),
        ("GET http://b HTTP/1.1\r\nHost: a\r\n\r\n", Ok("b /")),
        ("GET http://b?x HTTP/1.1\r\nHost: a\r\n\r\n", Ok("b /?x")),
        ("GET https://b:443/ HTTP/1.1\r\nHost: a\r\n\r\n", Ok("b /")),
        ("GET https://b:80/ HTTP/1.1\r\nHost: a\r\n\r\n", Ok("b:80 /")),
        ("GET http://user:password@b/ HTTP/1.1\r\nHost: a\r\n\r\n", Err(E::BadHost)),
        ("GET http:/// HTTP/1.1\r\nHost: a\r\n\r\n", Err(E::BadHost)),
        ("GET http://b/ HTTP/1.1\r\nHost: a b\r\n\r\n", Err(E::BadHost)),
        ("GET / HTTP/1.0\r\n\r\n", Ok(" /")),
        ("OPTIONS * HTTP/1.1\r\nHost: a\r\n\r\n", Ok("a *")),
        ("OPTIONS http://b HTTP/1.1\r\nHost: a\r\n\r\n", Ok("b *")),
        ("OPTIONS http://b/ HTTP/1.1\r\nHost: a\r\n\r\n", Ok("b /")),
        ("CONNECT B:443 HTTP/1.1\r\nHost: a\r\n\r\n", Ok("b:443 ")),
        ("CONNECT b HTTP/1.1\r\nHost: a\r\n\r\n", Err(E::BadTarget)),
        ("CONNECT b: HTTP/1.1\r\nHost: a\r\n\r\n", Err(E::BadTarget)),
        ("CONNECT /x HTTP/1.1\r\nHost: a\r\n\r\n", Err(E::BadTarget)),
        ("CONNECT http://b:1 HTTP/1.1\r\nHost: a\r\n\r\n", Err(E::BadHost)),
    ];
    for (request, expected) in table {
        assert_eq!(normal(request, Strict), expected.map(str::to_owned), "{request:?}");
    }
}

#[test]
fn what_is_normal_is_borrowed_and_what_is_not_is_bounded() {
    let request = b"GET /a/b.html?c=d HTTP/1.1\r\nHost: example.com\r\n\r\n";
    let mut parser = RequestParser::new(HeadLimits::default());
    let _ = parser.parse(request).unwrap();
    let mut scratch = Vec::new();
    let within = |part: &[u8]| request.as_ptr_range().contains(&part.as_ptr());
    let normal = normalize(&parser.head(request), Strict, &mut scratch).unwrap();
    assert!(within(normal.authority) && within(normal.path) && within(normal.query.unwrap()));
    assert_eq!(scratch.capacity(), 0);
}

#[test]
fn sixteen_kibibytes_of_slashes_and_dot_segments_shrink_to_their_path() {
    for run in ["/", "/.", "/a/..", "/%2e/", "/a//b/../.."] {
        let path = run.repeat(16_000 / run.len());
        assert_eq!(target(&format!("{path}/end"), Strict), Ok("/end".to_owned()));
    }
}

#[test]
fn personalities_are_read_as_they_are_written() {
    for personality in Personality::ALL {
        assert_eq!(personality.to_string().parse(), Ok(personality));
    }
    assert_eq!(Personality::default(), Strict);
    assert!("Apache".parse::<Personality>().is_err());
}

#[test]
fn paths_are_decoded_once_for_the_file_system() {
    let mut out = b"kept".to_vec();
    tidegate_http::normalize::percent_decode(b"/a%20b/%C3%A4%zz%2%+1%2541%", &mut out);
    assert_eq!(out, b"kept/a b/\xc3\xa4%zz%2%+1%41%");
}

/// What an application may read in `path`, where that is something else.
fn reading(path: &str, personality: Personality) -> Option<String> {
    let request = format!("GET {path} HTTP/1.1\r\nHost: A\r\n\r\n");
    let mut parser = RequestParser::new(HeadLimits::default());
    assert!(matches!(parser.parse(request.as_bytes()), Ok(Progress::Complete { .. })), "{request:?}");
    let mut scratch = Vec::new();
    let normal = normalize(&parser.head(request.as_bytes()), personality, &mut scratch).unwrap();
    assert_eq!(normal.authority, b"a");
    assert_eq!(normal.query, path.split_once('?').map(|(_, query)| query.as_bytes()));
    normal.reading.map(|reading| String::from_utf8(reading.to_vec()).unwrap())
}

#[test]
fn what_applications_may_read_differently_is_read_so_too() {
    for (path, expected) in [
        ("/private%2Fx", "/private/x"),
        ("/private%5cx?a", "/private/x"),
        ("/private\\x", "/private/x"),
        ("/a%2F%2fb//c", "/a/b/c"),
        ("/;x/admin?q;r", "/admin"),
        ("/%3Bx/admin", "/admin"),
        ("/admin;a=b;c/d;e", "/admin/d"),
        ("/admin;a%2Fb", "/admin/b"),
        ("/caf%C3%A9;x", "/caf%C3%A9"),
        ("/a%2F", "/a/"),
        ("/;", "/"),
    ] {
        assert_eq!(reading(path, Strict).as_deref(), Some(expected), "{path}");
    }
    for (path, expected) in
        [("/a/..;/b", "/b"), ("/..;/..;/b", "/b"), ("/a/b/.;x", "/a/b/"), ("/a%5C..%5Cb", "/b")]
    {
        for personality in [Apache, Nginx] {
            assert_eq!(reading(path, personality).as_deref(), Some(expected), "{path} by {personality}");
        }
    }
    for path in ["/", "/a/b?c;d", "/a%20b%25/c?%2F", "/a//b/../c", "/%252F"] {
        for personality in [Strict, Apache, Nginx] {
            assert_eq!(reading(path, personality), None, "{path} by {personality}");
        }
    }
}
