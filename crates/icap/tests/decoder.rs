//! Servers' messages at every split, and what is refused of them.
#![allow(clippy::unwrap_used, reason = "a failure here is the test's failure")]

use proptest::prelude::*;
use tidegate_icap::{Body, Decoder, Event, HEAD_BYTES, IcapError, Method, Request, ResponseHead, Transfer};

/// What a message consists of, its body in one piece, and how much of the bytes it is.
#[derive(Clone, Debug, Default, PartialEq)]
struct Message {
    heads: Vec<ResponseHead>,
    sections: Vec<u8>,
    body: Vec<u8>,
    length: Option<usize>,
}

/// Feeds `bytes` in pieces of these lengths, over and over.
fn decode(bytes: &[u8], pieces: &[usize]) -> (Message, Result<(), IcapError>) {
    let mut decoder = Decoder::default();
    let mut message = Message::default();
    let mut pieces = pieces.iter().cycle();
    let (mut taken, mut available) = (0, 0);
    loop {
        loop {
            let window = &bytes[taken..available];
            let decoded = match decoder.decode(window) {
                Ok(decoded) => decoded,
                Err(error) => return (message, Err(error)),
            };
            taken += decoded.consumed;
            match decoded.event {
                None => {
                    assert_eq!(taken, available, "without an event everything is used up");
                    break;
                }
                Some(Event::Head(head)) => message.heads.push(*head),
                Some(Event::Sections(sections)) => message.sections = sections,
                Some(Event::Body(range)) => {
                    assert!(range.end <= decoded.consumed);
                    message.body.extend_from_slice(&window[range]);
                }
                Some(Event::End) => {
                    assert!(decoder.is_done());
                    message.length = Some(taken);
                    return (message, Ok(()));
                }
            }
        }
        if available == bytes.len() {
            return (message, Ok(()));
        }
        available = (available + pieces.next().unwrap().max(&1)).min(bytes.len());
    }
}

fn refusal(bytes: &str) -> IcapError {
    decode(bytes.as_bytes(), &[bytes.len()]).1.unwrap_err()
}

const MODIFIED: &str = "ICAP/1.0 200 OK\r\nServer: x\r\nConnection: close\r\nISTag: \"1\"\r\n\
    Encapsulated: req-hdr=0, res-hdr=18, res-body=45\r\n\r\n\
    GET / HTTP/1.1\r\n\r\nHTTP/1.1 403 Forbidden\r\nA: b\r\n\r\n5\r\nhello\r\n3;x=y\r\n you\r\n0\r\n\r\n";

#[test]
fn a_modified_response_at_every_split() {
    let bytes = MODIFIED.replace("res-body=45", "res-body=50").replace(" you", "you") + "after";
    let (whole, result) = decode(bytes.as_bytes(), &[bytes.len()]);
    assert_eq!(result, Ok(()));
    let head = &whole.heads[0];
    assert_eq!((head.status, head.keep_alive), (200, false));
    let sections = head.sections.as_ref().unwrap();
    assert_eq!((sections.request.clone(), sections.response.clone()), (Some(0..18), Some(18..50)));
    assert_eq!(sections.body, Body::Response);
    assert_eq!(&whole.sections[18..], b"HTTP/1.1 403 Forbidden\r\nA: b\r\n\r\n");
    assert_eq!((whole.body.as_slice(), whole.length), (&b"helloyou"[..], Some(bytes.len() - 5)));
    for split in 0..bytes.len() {
        assert_eq!(decode(bytes.as_bytes(), &[split, bytes.len()]).0, whole, "split at {split}");
    }
}

#[test]
fn continue_is_followed_by_the_answer_proper() {
    let bytes = b"ICAP/1.0 100 Continue\r\n\r\nICAP/1.0 204 No Content\r\nEncapsulated: null-body=0\r\n\r\n";
    for piece in 1..bytes.len() {
        let (message, result) = decode(bytes, &[piece]);
        assert_eq!(result, Ok(()));
        assert_eq!(message.heads.iter().map(|head| head.status).collect::<Vec<_>>(), [100, 204]);
        assert_eq!(message.length, Some(bytes.len()));
    }
}

#[test]
fn options_of_a_service() {
    let bytes = b"ICAP/1.0 200 OK\r\nMethods: RESPMOD, REQMOD\r\nService: echo\r\nISTag: \"5BDEEEA9-12E4-2\"\r\n\
        Encapsulated: null-body=0\r\nMax-Connections: 20\r\nOptions-TTL: 60\r\nAllow: 204, 206\r\nPreview: 1024\r\n\
        Transfer-Ignore: jpg, .GIF\r\nTransfer-Complete: asp\r\nTransfer-Preview: *\r\n\r\n";
    let (message, _) = decode(bytes, &[bytes.len()]);
    let options = &message.heads[0].options;
    assert!(options.reqmod && options.respmod && options.allow_204);
    assert_eq!((options.preview_bytes, options.max_connections), (Some(1024), Some(20)));
    assert_eq!(options.life().as_secs(), 60);
    let transfers = ["/a/b.gif", "/x.JPG", "/y.asp", "/z.html", "/plain", "/dir.gif/file"];
    let found = transfers.map(|path| options.transfer(path.as_bytes()));
    use Transfer::{Complete, Ignore, Preview};
    assert_eq!(found, [Ignore, Ignore, Complete, Preview, Preview, Preview]);
}

#[test]
fn what_no_server_may_send() {
    let head = |line: &str| format!("ICAP/1.0 200 OK\r\n{line}\r\n\r\n");
    for (message, error) in [
        ("HTTP/1.1 200 OK\r\n\r\n".into(), IcapError::StatusLine),
        ("ICAP/2.0 200 OK\r\n\r\n".into(), IcapError::StatusLine),
        ("ICAP/1.0 099 OK\r\n\r\n".into(), IcapError::StatusLine),
        ("ICAP/1.0 2000 OK\r\n\r\n".into(), IcapError::StatusLine),
        ("ICAP/1.0 200 OK\nA: b\n\r\n".into(), IcapError::FieldLine),
        (head("no colon"), IcapError::FieldLine),
        (head(" A: folded"), IcapError::FieldLine),
        (head("A : b"), IcapError::FieldLine),
        (head("A: b\rc"), IcapError::FieldLine),
        (head("A: b\0c"), IcapError::FieldLine),
        (head(&"A: b\r\n".repeat(200)), IcapError::FieldLine),
        (head(&"a".repeat(HEAD_BYTES)), IcapError::HeadTooLarge),
        (head("Encapsulated: null-body"), IcapError::Encapsulated),
        (head("Encapsulated: "), IcapError::Encapsulated),
        (head("Encapsulated: null-body=-1"), IcapError::Encapsulated),
        (head("Encapsulated: null-body=7"), IcapError::Encapsulated),
        (head("Encapsulated: res-hdr=0"), IcapError::Encapsulated),
        (head("Encapsulated: res-hdr=0, res-body=0"), IcapError::Encapsulated),
        (head("Encapsulated: res-hdr=5, res-body=9"), IcapError::Encapsulated),
        (head("Encapsulated: res-hdr=0, req-hdr=4, res-body=9"), IcapError::Encapsulated),
        (head("Encapsulated: res-body=0, res-hdr=4"), IcapError::Encapsulated),
        (head("Encapsulated: null-body=0\r\nEncapsulated: null-body=0"), IcapError::Encapsulated),
        (head("Encapsulated: res-hdr=0, res-body=999999999"), IcapError::SectionsTooLarge),
        (head("Encapsulated: res-hdr=0, res-body=99999999999999999999"), IcapError::Encapsulated),
    ] {
        assert_eq!(refusal(&message), error, "{message:?}");
    }
    assert!(matches!(refusal(&(head("Encapsulated: res-body=0") + "xyz")), IcapError::Body(_)));
}

#[test]
fn a_request_names_where_its_parts_begin() {
    let mut out = Vec::new();
    let request = Request {
        method: Method::Respmod,
        service: "icap://127.0.0.1:1344/echo",
        host: "127.0.0.1:1344",
        client: Some([192, 0, 2, 1].into()),
        allow_204: true,
        preview_bytes: Some(4096),
        http_request: b"GET / HTTP/1.1\r\n\r\n",
        http_response: Some(b"HTTP/1.1 200 OK\r\n\r\n"),
        has_body: true,
    };
    request.write(&mut out);
    let text = String::from_utf8(out).unwrap();
    assert!(text.starts_with("RESPMOD icap://127.0.0.1:1344/echo ICAP/1.0\r\nHost: 127.0.0.1:1344\r\n"));
    assert!(text.contains("\r\nEncapsulated: req-hdr=0, res-hdr=18, res-body=37\r\n\r\nGET / "), "{text}");
    let mut out = Vec::new();
    Request { http_response: None, method: Method::Reqmod, has_body: false, ..request }.write(&mut out);
    assert!(String::from_utf8(out).unwrap().contains("\r\nEncapsulated: req-hdr=0, null-body=18\r\n"));
}

proptest! {
    /// Any bytes in any pieces lead to the same message, and to the same refusal.
    #[test]
    fn pieces_do_not_matter(
        edits in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..4),
        pieces in prop::collection::vec(1usize..40, 1..8),
    ) {
        let mut bytes = MODIFIED.replace("res-body=45", "res-body=50").replace(" you", "you").into_bytes();
        for (at, byte) in edits {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        let whole = decode(&bytes, &[bytes.len()]);
        let pieced = decode(&bytes, &pieces);
        prop_assert_eq!(&whole.1, &pieced.1);
        if whole.1.is_ok() {
            prop_assert_eq!(whole.0, pieced.0);
        }
    }
}
