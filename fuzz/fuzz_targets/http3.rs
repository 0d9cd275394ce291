//! What is taken for a request of HTTP/3 is one sound head of HTTP/1.1, within the limits; trailers are sound lines; a
//! field section written anew is the same; and streams of frames and instructions say the same in any pieces.
#![no_main]

use libfuzzer_sys::fuzz_target;
use tidegate_http::http3::{
    Content, ControlReader, DecoderStream, EncoderStream, ErrorCode, HeadError, Request,
    max_field_section_size, qpack, read_trailers,
};
use tidegate_http::{ChunkLimits, ChunkedDecoder, FieldId, HeadLimits, Progress, RequestParser};

const LIMITS: HeadLimits = HeadLimits { request_line_bytes: 256, head_bytes: 1024, fields: 12 };
/// What a section begins with that most requests would have, so that what follows is read as their fields.
const GET: &[u8] = &[0, 0, 0xd1, 0xd7, 0xc1, 0x50, 1, b'a'];

fn check_request(section: &[u8]) {
    let Ok(request) = Request::read(section, &LIMITS) else { return };
    let facts = request.facts();
    for content in [Content::None, Content::MayFollow] {
        let head = request.clone().finish(content);
        let mut parser = RequestParser::new(HeadLimits::NONE);
        assert_eq!(parser.parse(&head), Ok(Progress::Complete { length: head.len() }));
        let parsed = parser.head(&head);
        assert_eq!(parsed.method, facts.method);
        assert!(parsed.keep_alive && !parsed.upgrade);
        assert!(parsed.fields.iter().all(|(_, name, _)| !name.iter().any(u8::is_ascii_uppercase)));
        for id in [FieldId::Host, FieldId::Cookie, FieldId::ContentLength] {
            assert!(parsed.fields.get_all(id).count() <= 1);
        }
        let is_chunked = content == Content::MayFollow && facts.content_length.is_none();
        assert_eq!(parsed.fields.has(FieldId::TransferEncoding), is_chunked);
        if content == Content::None {
            let length = head.len();
            assert_eq!(RequestParser::new(LIMITS).parse(&head), Ok(Progress::Complete { length }));
        }
    }
}

fn check_trailers(section: &[u8]) {
    let mut body = b"0\r\n".to_vec();
    if read_trailers(section, &LIMITS, &mut body).is_ok() {
        body.extend_from_slice(b"\r\n");
        let decoded = ChunkedDecoder::new(ChunkLimits::default()).decode(&body).expect("sound lines");
        assert!(decoded.done && decoded.consumed == body.len());
    }
}

fn check_section(section: &[u8]) {
    let (mut size, mut fields, mut again) = (0, Vec::new(), Vec::new());
    qpack::write_prefix(&mut again);
    let bound = max_field_section_size(&LIMITS);
    let decoded = qpack::decode(section, bound, |name, value| {
        size += (name.len() + value.len() + 32) as u64;
        fields.push((name.to_ascii_lowercase(), value.to_vec()));
        qpack::write_field(name, value, &mut again);
        Ok::<_, HeadError>(())
    });
    assert!(size <= bound);
    if decoded.is_ok() {
        let mut fields = fields.into_iter();
        let decoded = qpack::decode(&again, bound, |name, value| {
            assert_eq!(fields.next(), Some((name.to_vec(), value.to_vec())));
            Ok::<_, HeadError>(())
        });
        assert!(decoded.is_ok() && fields.next().is_none());
    }
}

/// Gives `bytes` to `push` in copies of exactly so many: a read beyond them is seen by the sanitizer.
fn feed(
    bytes: &[u8],
    piece: usize,
    mut push: impl FnMut(&[u8]) -> Result<(), ErrorCode>,
) -> Result<(), ErrorCode> {
    bytes.chunks(piece).try_for_each(|piece| push(&piece.to_vec().into_boxed_slice()))
}

fn check_streams(bytes: &[u8], piece: usize) {
    let control = |piece| {
        let mut reader = ControlReader::default();
        let result = feed(bytes, piece, |bytes| reader.push(bytes));
        result.map(|()| (reader.has_settings(), reader.idle_frames()))
    };
    let encoder = |piece| {
        let mut stream = EncoderStream::default();
        feed(bytes, piece, |bytes| stream.push(bytes)).map(|()| stream.instructions())
    };
    let decoder = |piece| {
        let mut stream = DecoderStream::default();
        feed(bytes, piece, |bytes| stream.push(bytes)).map(|()| stream.instructions())
    };
    let whole = bytes.len().max(1);
    assert_eq!(control(piece), control(whole));
    assert_eq!(encoder(piece), encoder(whole));
    assert_eq!(decoder(piece), decoder(whole));
}

fuzz_target!(|data: &[u8]| {
    let Some((&seed, bytes)) = data.split_first() else { return };
    let after_get = [GET, bytes].concat();
    for section in [bytes, &after_get] {
        check_request(section);
        check_trailers(section);
        check_section(section);
    }
    check_streams(bytes, usize::from(seed) % 16 + 1);
    check_streams(&[&[4, 0], bytes].concat(), usize::from(seed) % 16 + 1);
});
