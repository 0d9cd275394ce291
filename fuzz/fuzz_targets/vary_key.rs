//! Which fields select a response does not depend on how `Vary` is written, and two requests share a key only if the
//! origin gets the same of each of them.
#![no_main]

use libfuzzer_sys::fuzz_target;
use tidegate_http::cache::vary;
use tidegate_http::{FieldId, Fields, HeadLimits, Method, Progress, RequestParser, ResponseParser};

/// One field of each kind: not known, a list, weighted, and one that counts byte by byte.
const NAMES: [(&str, FieldId); 5] = [
    ("x-a", FieldId::Other),
    ("accept", FieldId::Accept),
    ("accept-language", FieldId::AcceptLanguage),
    ("cookie", FieldId::Cookie),
    ("user-agent", FieldId::UserAgent),
];

fn with_request<T>(fields: &[u8], read: impl FnOnce(&Fields<'_>) -> T) -> Option<T> {
    let head = [b"GET / HTTP/1.1\r\nHost: a\r\n", fields, b"\r\n"].concat();
    let mut parser = RequestParser::new(HeadLimits::default());
    let Ok(Progress::Complete { length }) = parser.parse(&head) else { return None };
    (length == head.len()).then(|| read(&parser.head(&head).fields))
}

fn names_of(fields: &[u8]) -> Option<Vec<u8>> {
    let head = [b"HTTP/1.1 200 OK\r\n", fields, b"\r\n"].concat();
    let mut parser = ResponseParser::new(HeadLimits::default());
    parser.reset(Method::Get);
    let Ok(Progress::Complete { length }) = parser.parse(&head) else { return None };
    let head = (length == head.len()).then(|| parser.head(&head))?;
    let mut names = Vec::new();
    (!vary::is_any(&head.fields) && vary::write_names(&head.fields, &mut names)).then_some(names)
}

/// `Vary` written in another order, in lines of their own, in upper case: the same names.
fn check_names(value: &[u8]) {
    let Some(names) = names_of(&[b"Vary: ", value, b"\r\n"].concat()) else { return };
    let mut lines: Vec<Vec<u8>> = names
        .split(|&byte| byte == b',')
        .map(|name| [b"vary: ,", &*name.to_ascii_uppercase(), b" ,\r\n"].concat())
        .collect();
    lines.reverse();
    // Beyond the number of fields that a head may have there is nothing to compare.
    if let Some(again) = names_of(&lines.concat()) {
        assert_eq!(again, names);
    }
}

struct Keyed {
    key: Vec<u8>,
    /// Of each name its lines, or `None` if it is absent.
    values: Vec<Option<Vec<Vec<u8>>>>,
}

fn keyed(fields: &[u8]) -> Option<Keyed> {
    let names = NAMES.map(|(name, _)| name).join(",");
    with_request(fields, |fields| {
        let mut key = Vec::new();
        vary::write_secondary_key(names.as_bytes(), fields, b"", &mut key);
        let values = NAMES.iter().map(|(name, id)| {
            let lines: Vec<Vec<u8>> = match id {
                FieldId::Other => fields.named(name.as_bytes()).map(<[u8]>::to_vec).collect(),
                id => fields.get_all(*id).map(<[u8]>::to_vec).collect(),
            };
            (!lines.is_empty()).then_some(lines)
        });
        Keyed { key, values: values.collect() }
    })
}

/// What a field's value cannot differ in unnoticed: all but the spaces and the lines of a list.
fn essence(id: FieldId, lines: &[Vec<u8>]) -> Vec<u8> {
    match id {
        FieldId::Cookie | FieldId::UserAgent => lines.join(&b'\n'),
        _ => lines.join(&b',').into_iter().filter(|byte| !b" \t".contains(byte)).collect(),
    }
}

fuzz_target!(|data: &[u8]| {
    let mut parts = data.splitn(3, |&byte| byte == 0);
    check_names(parts.next().unwrap_or(b""));
    let requests = parts.map(|part| {
        let lines = part.split(|&byte| byte == b'\n').take(16).filter_map(|line| {
            let (&chosen, value) = line.split_first()?;
            let (name, _) = NAMES[usize::from(chosen) % NAMES.len()];
            Some([name.as_bytes(), b": ", value, b"\r\n"].concat())
        });
        lines.collect::<Vec<_>>().concat()
    });
    let requests: Vec<Vec<u8>> = requests.collect();
    for fields in &requests {
        let (alone, beside) = (keyed(fields), keyed(&[&b"X-Unrelated: 1\r\n"[..], fields].concat()));
        if let (Some(alone), Some(beside)) = (&alone, &beside) {
            assert_eq!(alone.key, beside.key, "a field that Vary does not name counts");
        }
    }
    let [one, other] = &requests[..] else { return };
    let (Some(one), Some(other)) = (keyed(one), keyed(other)) else { return };
    if one.key != other.key {
        return;
    }
    for ((name, id), (one, other)) in NAMES.iter().zip(one.values.iter().zip(&other.values)) {
        // Of languages only the weights count, so that the values may differ; whether there are any counts.
        if *id == FieldId::AcceptLanguage {
            assert_eq!(one.is_some(), other.is_some(), "{name}");
            continue;
        }
        let [one, other] = [one, other].map(|lines| lines.as_deref().map(|lines| essence(*id, lines)));
        assert_eq!(one, other, "{name}");
    }
});
