use proptest::prelude::*;

use super::*;

const ID: RequestId = RequestId(*b"\x01\x02\x03\x04\x05\x06\x07\x08");

#[test]
fn a_request_has_the_eleven_bytes_of_the_paper_in_front() {
    let request = Request {
        id: ID,
        other_port: 0x9c40,
        resend: true,
        token: None,
        pieces: Pieces::Unknown,
        once: Once::No,
        http: b"GET",
    };
    let mut bytes = Vec::new();
    request.write(&mut bytes);
    assert_eq!(bytes, b"\x01\x02\x03\x04\x05\x06\x07\x08\x9c\x40\x01GET");
    assert_eq!(Request::parse(&bytes), Ok(request));
}

#[test]
fn a_response_has_the_eight_bytes_of_the_paper_in_front() {
    let response = Response { id: ID, answer: Answer::Http { token: None, http: b"HTTP/1.1 200 OK" } };
    let mut bytes = Vec::new();
    response.write(&mut bytes);
    assert_eq!(bytes, b"\x01\x02\x03\x04\x05\x06\x07\x08HTTP/1.1 200 OK");
    assert_eq!(Response::parse(&bytes), Ok(response));
}

#[test]
fn short_messages_have_no_id_to_answer_to() {
    for length in 0..REQUEST_HEADER_BYTES {
        let bytes = [0x80; REQUEST_HEADER_BYTES];
        assert_eq!(Request::parse(&bytes[..length]), Err(WireError::Short));
    }
    assert_eq!(Response::parse(&ID.0), Err(WireError::Short));
}

#[test]
fn unknown_flags_and_bad_tokens_name_the_request() {
    let error = Request::parse(b"\x01\x02\x03\x04\x05\x06\x07\x08\x9c\x40\x10GET").unwrap_err();
    assert_eq!(error, WireError::UnknownFlags { id: ID, bits: 16 });
    assert_eq!(error.id(), Some(ID));
    for tail in [&b"\x02"[..], b"\x02\x03ab", b"\x02\x21"] {
        let bytes = [&b"\x01\x02\x03\x04\x05\x06\x07\x08\x9c\x40"[..], tail].concat();
        assert_eq!(Request::parse(&bytes), Err(WireError::BadToken { id: ID }));
    }
}

#[test]
fn a_control_answer_with_something_behind_it_is_refused() {
    for tail in
        [&b"\x01x"[..], b"\x02", b"\x02\0", b"\x02\x01ab", b"\x03\x01aX", b"\x03\0HTTP", b"\x04", b"x"]
    {
        let bytes = [&ID.0[..], tail].concat();
        assert_eq!(Response::parse(&bytes), Err(WireError::BadResponse), "{tail:?}");
    }
}

/// The examples of docs/protocol/dhttp.md, in their order.
fn documented() -> Vec<Vec<u8>> {
    let text = include_str!("../../../../docs/protocol/dhttp.md");
    let examples = text.split("```hex\n").skip(1).map(|rest| rest.split("```").next().unwrap());
    let byte = |digits: &str| u8::from_str_radix(digits, 16).ok().filter(|_| digits.len() == 2);
    // What follows the bytes of a line, behind two spaces, is for people.
    let line = |line: &str| -> Vec<u8> {
        line.split("  ").next().unwrap().split(' ').map(|digits| byte(digits).unwrap()).collect()
    };
    examples.map(|example| example.lines().flat_map(line).collect()).collect()
}

#[test]
fn the_documented_examples_are_what_is_sent() {
    let http = b"GET /a HTTP/1.1\r\nHost: e\r\n\r\n";
    let token: Vec<u8> = documented()[6][10..].to_vec();
    let request = Request {
        id: ID,
        other_port: 50845,
        resend: false,
        token: Some(&[]),
        pieces: Pieces::Unknown,
        once: Once::No,
        http,
    };
    let resent = Request { resend: true, token: None, ..request };
    let mut ranges = Vec::new();
    PieceRange { offset: 2000, length: 1000 }.write(&mut ranges);
    PieceRange { offset: 4000, length: 100 }.write(&mut ranges);
    let tag = 0xdead_beef;
    let repair = Request { pieces: Pieces::Repair { tag, ranges: &ranges }, ..request };
    let ok = Answer::Http { token: None, http: b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi" };
    let piece = Answer::Piece { tag, total: 4100, offset: 4000, piece: b"abc" };
    let responses = [ok, piece, Answer::UseTcp, Answer::ProveAddress { token: &token }]
        .map(|answer| Response { id: ID, answer });
    let mut written = vec![Vec::new(); 7];
    request.write(&mut written[0]);
    resent.write(&mut written[1]);
    responses[0].write(&mut written[2]);
    repair.write(&mut written[3]);
    for (response, out) in responses[1..].iter().zip(&mut written[4..]) {
        response.write(out);
    }
    assert_eq!(documented(), written);
    assert_eq!(token.len(), crate::token::TOKEN_BYTES);
}

fn token() -> impl Strategy<Value = Vec<u8>> {
    prop::collection::vec(any::<u8>(), 1..=MAX_TOKEN_BYTES)
}

proptest! {
    #[test]
    fn requests_survive_writing_and_reading(
        id: [u8; 8], other_port in 1024u16.., resend: bool, http: Vec<u8>,
        token in prop::option::of(prop::collection::vec(any::<u8>(), 0..=MAX_TOKEN_BYTES)),
        form in 0..3u8, once in 0..3u8, ticket: [u8; TICKET_BYTES], number: u32,
        tag: u32, ranges in prop::collection::vec(any::<[u8; 8]>(), 1..=MAX_RANGES),
    ) {
        let ranges = ranges.concat();
        let pieces = match form {
            0 => Pieces::Unknown,
            1 => Pieces::Accepted,
            _ => Pieces::Repair { tag, ranges: &ranges },
        };
        let once = match once {
            0 => Once::No,
            1 => Once::Unnumbered,
            _ => Once::Numbered(Numbered { ticket, number }),
        };
        let token = token.as_deref();
        let request =
            Request { id: RequestId(id), other_port, resend, token, pieces, once, http: &http };
        let mut bytes = Vec::new();
        request.write(&mut bytes);
        prop_assert_eq!(Request::parse(&bytes), Ok(request));
        prop_assert_eq!(bytes.len(), request.header_bytes() + http.len());
        for split in 0..bytes.len() {
            let part = Request::parse_prefix(&bytes[..split]).unwrap();
            prop_assert_eq!(part.is_some(), split >= request.header_bytes());
        }
    }

    #[test]
    fn responses_survive_writing_and_reading_and_are_never_requests(
        id: [u8; 8], body: Vec<u8>, token in token(), form in 0..7u8,
        ticket: [u8; TICKET_BYTES], tag: u32, offset in 0..u32::MAX / 2,
    ) {
        let http = [&b"HTTP/1.1 "[..], &body].concat();
        let answer = match form {
            0 => Answer::Http { token: None, http: &http },
            4 => Answer::Piece { tag, total: offset + http.len() as u32, offset, piece: &http },
            1 => Answer::Http { token: Some(&token), http: &http },
            2 => Answer::UseTcp,
            5 => Answer::OutcomeUnknown,
            6 => Answer::NewTicket { token: &token, ticket, refused: id, age_s: tag },
            _ => Answer::ProveAddress { token: &token },
        };
        let response = Response { id: RequestId(id), answer };
        let mut bytes = Vec::new();
        response.write(&mut bytes);
        prop_assert_eq!(Response::parse(&bytes), Ok(response));
        prop_assert_eq!(Request::parse(&bytes), Err(WireError::ResponseAsRequest));
    }

    #[test]
    fn any_bytes_are_read_or_refused_and_what_is_read_is_written_back(bytes: Vec<u8>) {
        let mut out = Vec::new();
        if let Ok(request) = Request::parse(&bytes) {
            request.write(&mut out);
            prop_assert_eq!(&out, &bytes);
        }
        out.clear();
        if let Ok(response) = Response::parse(&bytes) {
            response.write(&mut out);
            prop_assert_eq!(&out, &bytes);
        }
    }
}
