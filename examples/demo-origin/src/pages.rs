//! The demo's pages, pictures and endpoints.

use std::fmt::Write;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use crate::http::{Answer, Request};
use crate::slots::Slot;

/// Processor time that one HTML page costs.
pub const PAGE_WORK: Duration = Duration::from_millis(50);
/// How many pages there are.
const PAGES: u32 = 24;
/// Width and height of a picture, in pixels.
const PICTURE_SIDE: u32 = 160;

const STYLE: &str = "body{font:16px/1.5 system-ui,sans-serif;max-width:44rem;margin:2rem auto;padding:0 1rem;\
color:#123}a{color:#067}h1{display:flex;gap:.6rem;align-items:center}img{border-radius:6px}\
ul{columns:3;padding-left:1.2rem}code{background:#eef4f5;padding:.1rem .3rem}";
const LOGO: &str = "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 32 32\" width=\"32\" height=\"32\">\
<rect width=\"32\" height=\"32\" rx=\"6\" fill=\"#067\"/>\
<path d=\"M4 20q4-8 8 0t8 0 8 0\" fill=\"none\" stroke=\"#fff\" stroke-width=\"3\"/></svg>";

/// Answers a request; `work` is called before a page is made, and takes [`PAGE_WORK`].
pub fn answer(request: &Request, work: impl FnOnce()) -> Answer {
    if !matches!(request.method.as_str(), "GET" | "HEAD") {
        let fields = "Allow: GET, HEAD\r\nContent-Type: text/plain\r\n".to_owned();
        return Answer {
            status: "405 Method Not Allowed",
            fields,
            content: b"method not allowed\n".to_vec(),
        };
    }
    match request.path.as_str() {
        "/" => page(request, 0, work),
        "/style.css" => asset("text/css", STYLE.into()),
        "/logo.svg" => asset("image/svg+xml", LOGO.into()),
        "/api/time" => time(),
        path => {
            let numbered = |prefix: &str, suffix: &str| {
                let number = path.strip_prefix(prefix)?.strip_suffix(suffix)?.parse().ok()?;
                (1..=PAGES).contains(&number).then_some(number)
            };
            if let Some(number) = numbered("/page/", "") {
                page(request, number, work)
            } else if let Some(number) = numbered("/picture/", ".bmp") {
                asset("image/bmp", picture(number))
            } else {
                let fields = "Content-Type: text/plain\r\nCache-Control: max-age=5\r\n".to_owned();
                Answer { status: "404 Not Found", fields, content: b"no such page\n".to_vec() }
            }
        }
    }
}

/// Keeps a processor busy for [`PAGE_WORK`], as templates and queries would. The result has no meaning.
pub fn work(_processor: &Slot) -> u64 {
    let started = Instant::now();
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    while started.elapsed() < PAGE_WORK {
        for _ in 0..1000 {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
        }
        std::hint::black_box(state);
    }
    state
}

fn page(request: &Request, number: u32, work: impl FnOnce()) -> Answer {
    let tag = format!("\"page-{number}\"");
    let mut fields =
        format!("Content-Type: text/html; charset=utf-8\r\nCache-Control: max-age=60\r\nETag: {tag}\r\n");
    if request.if_none_match == tag {
        return Answer { status: "304 Not Modified", fields, content: Vec::new() };
    }
    work();
    let _ = write!(fields, "Server-Timing: render;dur={}\r\n", PAGE_WORK.as_millis());
    Answer { status: "200 OK", fields, content: html(number).into_bytes() }
}

fn html(number: u32) -> String {
    let title = if number == 0 { "Tide tables".to_owned() } else { format!("Tide table {number}") };
    let mut html = format!(
        "<!doctype html><html lang=\"en\"><meta charset=\"utf-8\"><title>{title}</title>\
<link rel=\"stylesheet\" href=\"/style.css\"><h1><img src=\"/logo.svg\" alt=\"\"> {title}</h1>\
<p>This page cost its server {} ms of work. Behind the accelerator it costs that once a minute, \
however many people read it. <code>/api/time</code> is never cached.</p>",
        PAGE_WORK.as_millis()
    );
    if number > 0 {
        let _ = write!(
            html,
            "<p><img src=\"/picture/{number}.bmp\" alt=\"tide {number}\"><p><a href=\"/\">all</a>"
        );
        return html;
    }
    html.push_str("<ul>");
    for number in 1..=PAGES {
        let _ = write!(html, "<li><a href=\"/page/{number}\">table {number}</a>");
    }
    html.push_str("</ul>");
    html
}

fn asset(kind: &str, content: Vec<u8>) -> Answer {
    let fields = format!("Content-Type: {kind}\r\nCache-Control: public, max-age=3600\r\n");
    Answer { status: "200 OK", fields, content }
}

fn time() -> Answer {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let fields = "Content-Type: application/json\r\nCache-Control: no-store\r\n".to_owned();
    Answer {
        status: "200 OK",
        fields,
        content: format!("{{\"unix_ms\":{}}}\n", now.as_millis()).into_bytes(),
    }
}

/// A picture of waves as an uncompressed 24-bit bitmap; its bytes depend on `number` alone.
fn picture(number: u32) -> Vec<u8> {
    let row_bytes = PICTURE_SIDE * 3;
    let data_bytes = row_bytes * PICTURE_SIDE;
    let mut bytes = b"BM".to_vec();
    for word in
        [54 + data_bytes, 0, 54, 40, PICTURE_SIDE, PICTURE_SIDE, 1 | 24 << 16, 0, data_bytes, 0, 0, 0, 0]
    {
        bytes.extend_from_slice(&word.to_le_bytes());
    }
    for y in 0..PICTURE_SIDE {
        for x in 0..PICTURE_SIDE {
            let phase = f64::from(x) / 12.0 + f64::from(number);
            let level = f64::from(PICTURE_SIDE) * 0.5 + phase.sin() * 18.0;
            let (blue, green, red) = if f64::from(y) < level { (136, 102, 0) } else { (250, 240, 228) };
            bytes.extend_from_slice(&[blue, green, red]);
        }
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn picture_of_any_number_is_a_bitmap_of_the_stated_size() {
        let bytes = picture(3);
        let stated = u32::from_le_bytes(bytes[2..6].try_into().unwrap());
        assert_eq!(bytes.len(), usize::try_from(stated).unwrap());
        assert_ne!(picture(4), bytes);
    }

    #[test]
    fn home_page_links_every_page() {
        let home = html(0);
        for number in 1..=PAGES {
            assert!(home.contains(&format!("\"/page/{number}\"")), "page {number}");
        }
    }
}
