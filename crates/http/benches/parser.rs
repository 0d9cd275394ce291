//! The request parser beside httparse in one run: a 373-byte request of Firefox and a 1,381-byte one of
//! Chrome. Ours also recognizes field names, bounds every length and checks Host, framing and connection options.
//!
//! `cargo bench -p tidegate-http --bench parser`

#![allow(missing_docs)] // criterion_group! makes an undocumented function.

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use std::hint::black_box;
use tidegate_http::normalize::{Personality, normalize};
use tidegate_http::{HeadLimits, Progress, RequestParser, ResponseParser};

/// Pads `request` with a cookie to `length` bytes.
fn padded(request: &str, length: usize) -> Vec<u8> {
    let line = "Cookie: session=";
    let pad = length - request.len() - line.len() - 4;
    let cookie: String = "0123456789abcdef-".chars().cycle().take(pad).collect();
    let request = format!("{request}{line}{cookie}\r\n\r\n");
    assert_eq!(request.len(), length);
    request.into_bytes()
}

/// What Firefox sends for a first page.
fn short_request() -> Vec<u8> {
    padded(
        "GET /docs/index.html HTTP/1.1\r\n\
         Host: www.example.com\r\n\
         User-Agent: Mozilla/5.0 (X11; Linux x86_64; rv:128.0) Gecko/20100101 Firefox/128.0\r\n\
         Accept: text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8\r\n\
         Accept-Language: en-US,en;q=0.5\r\n\
         Accept-Encoding: gzip, deflate\r\n\
         Connection: keep-alive\r\n",
        373,
    )
}

/// What Chrome sends within a site, with client hints and a long cookie.
fn long_request() -> Vec<u8> {
    padded(
        "GET /shop/catalogue/garden/tools?page=3&sort=price&order=asc&campaign=autumn HTTP/1.1\r\n\
         Host: www.example.com\r\n\
         Connection: keep-alive\r\n\
         Cache-Control: max-age=0\r\n\
         sec-ch-ua: \"Chromium\";v=\"128\", \"Not;A=Brand\";v=\"24\", \"Google Chrome\";v=\"128\"\r\n\
         sec-ch-ua-mobile: ?0\r\n\
         sec-ch-ua-platform: \"Linux\"\r\n\
         Upgrade-Insecure-Requests: 1\r\n\
         User-Agent: Mozilla/5.0 (X11; Linux x86_64) AppleWebKit/537.36 (KHTML, like Gecko) Chrome/128.0.0.0 Safari/537.36\r\n\
         Accept: text/html,application/xhtml+xml,application/xml;q=0.9,image/avif,image/webp,image/apng,*/*;q=0.8\r\n\
         Sec-Fetch-Site: same-origin\r\n\
         Sec-Fetch-Mode: navigate\r\n\
         Sec-Fetch-User: ?1\r\n\
         Sec-Fetch-Dest: document\r\n\
         Referer: https://www.example.com/shop/catalogue/garden/tools?page=2&sort=price&order=asc\r\n\
         Accept-Encoding: gzip, deflate, br, zstd\r\n\
         Accept-Language: en-GB,en-US;q=0.9,en;q=0.8,de;q=0.7\r\n\
         If-None-Match: \"5f3c-61d2b0f9a8c40\"\r\n\
         If-Modified-Since: Tue, 03 Sep 2024 10:12:44 GMT\r\n",
        1381,
    )
}

fn requests(c: &mut Criterion) {
    for request in [short_request(), long_request()] {
        let mut group = c.benchmark_group(format!("request_{}_bytes", request.len()));
        group.throughput(Throughput::Bytes(request.len() as u64));
        group.bench_function("httparse", |b| {
            b.iter(|| {
                let mut fields = [httparse::EMPTY_HEADER; 100];
                let mut parsed = httparse::Request::new(&mut fields);
                black_box(parsed.parse(black_box(&request)))
            });
        });
        group.bench_function("httparse_uninit", |b| {
            b.iter(|| {
                let mut fields = [const { std::mem::MaybeUninit::uninit() }; 100];
                let mut parsed = httparse::Request::new(&mut []);
                let config = httparse::ParserConfig::default();
                black_box(config.parse_request_with_uninit_headers(
                    &mut parsed,
                    black_box(&request),
                    &mut fields,
                ))
            });
        });
        let mut parser = RequestParser::new(HeadLimits::default());
        group.bench_function("tidegate", |b| {
            b.iter(|| {
                parser.reset();
                let progress = black_box(parser.parse(black_box(&request)));
                assert_eq!(progress, Ok(Progress::Complete { length: request.len() }));
            });
        });
        group.bench_function("tidegate_and_normalize", |b| {
            let mut scratch = Vec::new();
            b.iter(|| {
                parser.reset();
                assert!(parser.parse(black_box(&request)).is_ok());
                let head = parser.head(&request);
                black_box(normalize(&head, Personality::Strict, &mut scratch)).map(|n| n.path.len())
            });
        });
        group.finish();
    }
}

fn responses(c: &mut Criterion) {
    let response = b"HTTP/1.1 200 OK\r\nServer: nginx/1.22.1\r\nDate: Tue, 03 Sep 2024 10:12:44 GMT\r\n\
        Content-Type: text/html\r\nContent-Length: 612\r\nLast-Modified: Mon, 02 Sep 2024 08:00:00 GMT\r\n\
        Connection: keep-alive\r\nETag: \"5f3c-61d2b0f9a8c40\"\r\nAccept-Ranges: bytes\r\n\r\n";
    let mut group = c.benchmark_group(format!("response_{}_bytes", response.len()));
    group.throughput(Throughput::Bytes(response.len() as u64));
    group.bench_function("httparse", |b| {
        b.iter(|| {
            let mut fields = [httparse::EMPTY_HEADER; 100];
            let mut parsed = httparse::Response::new(&mut fields);
            black_box(parsed.parse(black_box(response)))
        });
    });
    let mut parser = ResponseParser::new(HeadLimits::default());
    group.bench_function("tidegate", |b| {
        b.iter(|| {
            parser.reset(tidegate_http::Method::Get);
            black_box(parser.parse(black_box(response)))
        });
    });
    group.finish();
}

criterion_group!(benches, requests, responses);
criterion_main!(benches);
