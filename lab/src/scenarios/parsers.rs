//! Requests as browsers send them, and the parsers that are timed on them.

use std::hint::black_box;
use std::mem::MaybeUninit;

use tidegate_http::{HeadLimits, RequestParser};

/// Fields in the order in which a request of growing size takes them: a command-line client's first, then a browser's,
/// then its client hints and its metadata.
const FIELDS: [&str; 17] = [
    "Host: www.example.org",
    "User-Agent: Mozilla/5.0 (X11; Linux x86_64; rv:140.0) Gecko/20100101 Firefox/140.0",
    "Accept: text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8",
    "Accept-Encoding: gzip, deflate, br, zstd",
    "Accept-Language: en-US,en;q=0.5",
    "Connection: keep-alive",
    "Cache-Control: no-cache",
    "Upgrade-Insecure-Requests: 1",
    "Sec-Fetch-Dest: document",
    "Sec-Fetch-Mode: navigate",
    "Sec-Fetch-Site: same-origin",
    "Sec-Fetch-User: ?1",
    "Priority: u=0, i",
    "Referer: https://www.example.org/catalogue/tools?sort=price&order=ascending&page=11",
    "If-Modified-Since: Thu, 05 Jun 2025 09:21:07 GMT",
    "If-None-Match: \"68415d33-2b4f\"",
    "DNT: 1",
];
const COOKIE: &str = "Cookie: id=";

/// A request of exactly `size_bytes`, at least 90: as many fields as fit, filled up by a cookie.
pub(super) fn browser_request(size_bytes: usize) -> Vec<u8> {
    let mut request = String::from("GET /catalogue/tools?page=12 HTTP/1.1\r\n");
    // An empty cookie line and the empty line that ends the head.
    let rest = COOKIE.len() + 4;
    for field in FIELDS {
        if request.len() + field.len() + 2 + rest <= size_bytes {
            request.push_str(field);
            request.push_str("\r\n");
        }
    }
    let filler = size_bytes.saturating_sub(request.len() + rest);
    request.push_str(COOKIE);
    request.extend("9f86d081884c7d65-".chars().cycle().take(filler));
    request.push_str("\r\n\r\n");
    request.into_bytes()
}

/// A parser that is timed.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Parser {
    /// Finds the ends of lines and nothing else: the least that reading a head takes.
    Lines,
    /// As its documentation shows it.
    Httparse,
    /// With field slots that are not set to zero first: its fastest way.
    HttparseUninit,
    Tidegate,
}

impl Parser {
    pub(super) const ALL: [Self; 4] = [Self::Lines, Self::Httparse, Self::HttparseUninit, Self::Tidegate];

    pub(super) fn label(self) -> &'static str {
        match self {
            Self::Lines => "line ends alone (memchr)",
            Self::Httparse => "httparse",
            Self::HttparseUninit => "httparse with uninitialized slots",
            Self::Tidegate => "tidegate",
        }
    }

    /// Parses `request` so many times; how many of them were whole.
    pub(super) fn parse(self, request: &[u8], times: u32) -> u32 {
        match self {
            Self::Lines => {
                let lines = |_: &u32| memchr::memchr_iter(b'\n', black_box(request)).count() > 2;
                count(times, lines)
            }
            Self::Httparse => count(times, |_| {
                let mut fields = [httparse::EMPTY_HEADER; 100];
                let mut parsed = httparse::Request::new(&mut fields);
                matches!(black_box(parsed.parse(black_box(request))), Ok(status) if status.is_complete())
            }),
            Self::HttparseUninit => count(times, |_| {
                let mut fields = [const { MaybeUninit::uninit() }; 100];
                let mut parsed = httparse::Request::new(&mut []);
                let config = httparse::ParserConfig::default();
                let result =
                    config.parse_request_with_uninit_headers(&mut parsed, black_box(request), &mut fields);
                matches!(black_box(result), Ok(status) if status.is_complete())
            }),
            Self::Tidegate => {
                let mut parser = RequestParser::new(HeadLimits::default());
                count(times, |_| {
                    parser.reset();
                    let progress = black_box(parser.parse(black_box(request)));
                    matches!(progress, Ok(tidegate_http::Progress::Complete { .. }))
                })
            }
        }
    }
}

fn count(times: u32, mut whole: impl FnMut(&u32) -> bool) -> u32 {
    (0..times).map(|index| u32::from(whole(&index))).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_have_the_size_asked_for_and_every_parser_takes_them() {
        for size_bytes in [90, 128, 373, 374, 700, 1381, 2800] {
            let request = browser_request(size_bytes);
            assert_eq!(request.len(), size_bytes);
            for parser in Parser::ALL {
                assert_eq!(parser.parse(&request, 3), 3, "{} at {size_bytes}", parser.label());
            }
        }
    }

    #[test]
    fn a_cut_request_is_whole_for_no_real_parser() {
        let mut request = browser_request(373);
        request.truncate(300);
        for parser in [Parser::Httparse, Parser::HttparseUninit, Parser::Tidegate] {
            assert_eq!(parser.parse(&request, 2), 0, "{}", parser.label());
        }
    }
}
