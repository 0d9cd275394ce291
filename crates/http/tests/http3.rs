//! What holds of HTTP/3 whatever the bytes are and however they come.

#![allow(clippy::unwrap_used)] // A failed expectation ends the test.

use proptest::prelude::*;
use tidegate_http::http3::{
    Content, ControlReader, DecoderStream, EncoderStream, ErrorCode, FrameHeader, HeadError, Request,
    huffman, max_field_section_size, qpack, read_trailers, varint,
};
use tidegate_http::{ChunkLimits, ChunkedDecoder, FieldId, HeadLimits, Progress, RequestParser};

/// Name and value.
type Field = (Vec<u8>, Vec<u8>);

/// Bytes, and where they are cut into pieces.
fn in_pieces(bytes: impl Strategy<Value = Vec<u8>>) -> impl Strategy<Value = (Vec<u8>, Vec<usize>)> {
    (bytes, prop::collection::vec(1..9usize, 1..40))
}

/// Gives `bytes` to `push` in pieces of these lengths, over and over, until it refuses one.
fn feed(
    bytes: &[u8],
    pieces: &[usize],
    mut push: impl FnMut(&[u8]) -> Result<(), ErrorCode>,
) -> Result<(), ErrorCode> {
    let (mut rest, mut lengths) = (bytes, pieces.iter().cycle());
    while !rest.is_empty() {
        let (piece, later) = rest.split_at(rest.len().min(*lengths.next().unwrap()));
        push(piece)?;
        rest = later;
    }
    Ok(())
}

/// All that a control stream says.
fn control(bytes: &[u8], pieces: &[usize]) -> Result<(bool, u64), ErrorCode> {
    let mut reader = ControlReader::default();
    feed(bytes, pieces, |piece| reader.push(piece))?;
    Ok((reader.has_settings(), reader.idle_frames()))
}

fn encoder(bytes: &[u8], pieces: &[usize]) -> Result<u64, ErrorCode> {
    let mut stream = EncoderStream::default();
    feed(bytes, pieces, |piece| stream.push(piece))?;
    Ok(stream.instructions())
}

fn decoder(bytes: &[u8], pieces: &[usize]) -> Result<u64, ErrorCode> {
    let mut stream = DecoderStream::default();
    feed(bytes, pieces, |piece| stream.push(piece))?;
    Ok(stream.instructions())
}

/// Settings, and frames most of which may follow them.
fn control_streams() -> impl Strategy<Value = Vec<u8>> {
    let id = prop_oneof![0..4u64, 0..=varint::MAX];
    let frame = (prop_oneof![Just(7u64), Just(0xd), 0x20..0x2000u64, 0..16u64], id, 0..20usize);
    (prop::collection::vec((0..0x50u64, 0..=varint::MAX), 0..5), prop::collection::vec(frame, 0..10))
        .prop_map(|(settings, frames)| {
            let (mut payload, mut out) = (Vec::new(), Vec::new());
            for (identifier, value) in settings {
                varint::write(identifier, &mut payload);
                varint::write(value, &mut payload);
            }
            FrameHeader { kind: 4, length: payload.len() as u64 }.write(&mut out);
            out.extend_from_slice(&payload);
            for (kind, id, length) in frames {
                payload.clear();
                match kind {
                    0..0x10 => varint::write(id, &mut payload),
                    _ => payload.resize(length, 0xff),
                }
                FrameHeader { kind, length: payload.len() as u64 }.write(&mut out);
                out.extend_from_slice(&payload);
            }
            out
        })
}

fn names() -> impl Strategy<Value = Vec<u8>> {
    let known = FieldId::KNOWN.iter().map(|(_, name)| name.as_bytes().to_vec()).collect::<Vec<_>>();
    prop_oneof![prop::sample::select(known), "[a-z0-9!#$%&'*+.^_`|~-]{1,40}".prop_map(String::into_bytes)]
}

fn values() -> impl Strategy<Value = Vec<u8>> {
    let known = [&b""[..], b"0", b"*/*", b"text/css", b"no-cache", b"max-age=31536000", b"trailers"];
    prop_oneof![
        prop::sample::select(known.map(<[u8]>::to_vec).to_vec()),
        "[ -~]{0,200}".prop_map(String::into_bytes),
        prop::collection::vec(any::<u8>(), 0..50),
    ]
}

fn fields() -> impl Strategy<Value = Vec<Field>> {
    prop::collection::vec((names(), values()), 0..12)
}

fn section(fields: &[Field]) -> Vec<u8> {
    let mut out = Vec::new();
    qpack::write_prefix(&mut out);
    fields.iter().for_each(|(name, value)| qpack::write_field(name, value, &mut out));
    out
}

fn decoded(section: &[u8], max_size: u64) -> Result<Vec<Field>, HeadError> {
    let mut fields = Vec::new();
    qpack::decode(section, max_size, |name, value| {
        fields.push((name.to_vec(), value.to_vec()));
        Ok::<_, HeadError>(())
    })
    .map(|()| fields)
}

/// What was read is a head that a parser of HTTP/1.1 takes, with one host and nothing of a connection's.
fn check_request(section: &[u8], limits: &HeadLimits) -> Result<(), TestCaseError> {
    let Ok(request) = Request::read(section, limits) else { return Ok(()) };
    let facts = request.facts();
    for content in [Content::None, Content::MayFollow] {
        let head = request.clone().finish(content);
        let mut parser = RequestParser::new(HeadLimits::NONE);
        prop_assert_eq!(parser.parse(&head), Ok(Progress::Complete { length: head.len() }));
        let parsed = parser.head(&head);
        prop_assert_eq!(parsed.method, facts.method);
        prop_assert_eq!(parsed.fields.get_all(FieldId::Host).count(), 1);
        prop_assert!(parsed.fields.get_all(FieldId::Cookie).count() <= 1);
        prop_assert!(!parsed.fields.has(FieldId::Connection) && parsed.keep_alive);
        prop_assert_eq!(
            parsed.fields.has(FieldId::TransferEncoding),
            content == Content::MayFollow && facts.content_length.is_none()
        );
    }
    let head = request.finish(Content::None);
    prop_assert!(head.len() <= limits.head_bytes as usize);
    Ok(())
}

proptest! {
    #[test]
    fn an_integer_written_and_read_back_is_the_same(value in prop_oneof![0..=varint::MAX, 0..0x10000u64]) {
        let mut bytes = Vec::new();
        varint::write(value, &mut bytes);
        prop_assert_eq!(varint::read(&bytes), Some((value, bytes.len())));
        prop_assert_eq!(bytes.len(), varint::written_len(value));
    }

    #[test]
    fn text_coded_and_decoded_is_the_same(text in prop::collection::vec(any::<u8>(), 0..200)) {
        let (mut coded, mut out) = (Vec::new(), Vec::new());
        huffman::encode(text.iter().copied(), &mut coded);
        prop_assert_eq!(coded.len(), huffman::encoded_len(text.iter().copied()));
        prop_assert_eq!(huffman::decode(&coded, text.len(), &mut out), Ok(()));
        prop_assert_eq!(&out, &text);
        if let Some(less) = text.len().checked_sub(1) {
            prop_assert_eq!(
                huffman::decode(&coded, less, &mut Vec::new()),
                Err(huffman::HuffmanError::TooLong)
            );
        }
    }

    #[test]
    fn a_code_has_one_text_and_a_text_has_one_code(coded in prop::collection::vec(any::<u8>(), 0..40)) {
        let (mut text, mut again) = (Vec::new(), Vec::new());
        if huffman::decode(&coded, usize::MAX, &mut text).is_ok() {
            huffman::encode(text.iter().copied(), &mut again);
            prop_assert_eq!(again, coded);
        }
    }

    #[test]
    fn fields_written_and_read_back_are_the_same(fields in fields()) {
        let section = section(&fields);
        let size = fields.iter().map(|(name, value)| (name.len() + value.len() + 32) as u64).sum::<u64>();
        prop_assert_eq!(decoded(&section, size), Ok(fields));
        if let Some(less) = size.checked_sub(1) {
            prop_assert_eq!(decoded(&section, less), Err(HeadError::TooLarge));
        }
    }

    #[test]
    fn a_section_is_never_larger_than_its_bound(
        mut bytes in prop::collection::vec(any::<u8>(), 0..200), bound in 0..2000u64,
    ) {
        bytes.splice(0..0, [0, 0]);
        let mut size = 0;
        let _ = qpack::decode(&bytes, bound, |name, value| {
            size += (name.len() + value.len() + 32) as u64;
            Ok::<_, HeadError>(())
        });
        prop_assert!(size <= bound);
    }

    #[test]
    fn a_control_stream_says_the_same_in_any_pieces((bytes, pieces) in in_pieces(control_streams())) {
        prop_assert_eq!(control(&bytes, &pieces), control(&bytes, &[usize::MAX]));
    }

    #[test]
    fn streams_of_any_bytes_say_the_same_in_any_pieces(
        (bytes, pieces) in in_pieces(prop::collection::vec(any::<u8>(), 0..100)),
    ) {
        let settings = [&[4, 0][..], &bytes].concat();
        prop_assert_eq!(control(&bytes, &pieces), control(&bytes, &[usize::MAX]));
        prop_assert_eq!(control(&settings, &pieces), control(&settings, &[usize::MAX]));
        prop_assert_eq!(encoder(&bytes, &pieces), encoder(&bytes, &[usize::MAX]));
        let cancellations: Vec<_> = bytes.iter().map(|byte| byte & 0x7f | 0x40).collect();
        for bytes in [bytes, cancellations] {
            prop_assert_eq!(decoder(&bytes, &pieces), decoder(&bytes, &[usize::MAX]));
        }
    }

    #[test]
    fn what_is_taken_for_a_request_is_one_of_http_1(
        fields in fields(), authority in "[a-zA-Z.:@/]{0,12}", path in "/[!-~]{0,20}", bytes in 0..500u32,
    ) {
        let pseudo = [(":method", "POST"), (":scheme", "https"), (":authority", &authority), (":path", &path)];
        let mut all = pseudo.map(|(name, value)| (name.as_bytes().to_vec(), value.as_bytes().to_vec())).to_vec();
        all.extend(fields);
        check_request(&section(&all), &HeadLimits::default())?;
        let limits = HeadLimits { request_line_bytes: 40, head_bytes: bytes, fields: 6 };
        check_request(&section(&all), &limits)?;
        prop_assert_eq!(max_field_section_size(&limits), u64::from(bytes) + 6 * 32);
    }

    #[test]
    fn any_bytes_are_a_request_or_none(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let after_get = [&[0, 0, 0xd1, 0xd7, 0xc1, 0x50, 1, b'a'], &bytes[..]].concat();
        check_request(&after_get, &HeadLimits::default())?;
    }

    #[test]
    fn what_is_taken_for_trailers_is_a_section_of_http_1(fields in fields()) {
        let mut body = b"0\r\n".to_vec();
        if read_trailers(&section(&fields), &HeadLimits::default(), &mut body).is_ok() {
            body.extend_from_slice(b"\r\n");
            let read = ChunkedDecoder::new(ChunkLimits::default()).decode(&body);
            prop_assert!(read.is_ok_and(|read| read.done && read.consumed == body.len()));
        }
    }
}
