/// Media types by file name suffix, in lower case; text with its character set (RFC 9110 §8.3).
const TYPES: &[(&str, &str)] = &[
    ("avif", "image/avif"),
    ("css", "text/css; charset=utf-8"),
    ("csv", "text/csv; charset=utf-8"),
    ("gif", "image/gif"),
    ("gz", "application/gzip"),
    ("htm", "text/html; charset=utf-8"),
    ("html", "text/html; charset=utf-8"),
    ("ico", "image/vnd.microsoft.icon"),
    ("ics", "text/calendar; charset=utf-8"),
    ("jpeg", "image/jpeg"),
    ("jpg", "image/jpeg"),
    ("js", "text/javascript; charset=utf-8"),
    ("json", "application/json"),
    ("map", "application/json"),
    ("md", "text/markdown; charset=utf-8"),
    ("mjs", "text/javascript; charset=utf-8"),
    ("mp3", "audio/mpeg"),
    ("mp4", "video/mp4"),
    ("ogg", "audio/ogg"),
    ("otf", "font/otf"),
    ("pdf", "application/pdf"),
    ("png", "image/png"),
    ("svg", "image/svg+xml"),
    ("tar", "application/x-tar"),
    ("ttf", "font/ttf"),
    ("txt", "text/plain; charset=utf-8"),
    ("wasm", "application/wasm"),
    ("wav", "audio/wav"),
    ("webm", "video/webm"),
    ("webmanifest", "application/manifest+json"),
    ("webp", "image/webp"),
    ("woff", "font/woff"),
    ("woff2", "font/woff2"),
    ("xhtml", "application/xhtml+xml"),
    ("xml", "application/xml"),
    ("zip", "application/zip"),
];

/// The media type of a file by its name; bytes of unknown meaning otherwise.
pub fn content_type(name: &[u8]) -> &'static str {
    let file_name = name.rsplit(|byte| *byte == b'/').next().unwrap_or(b"");
    let Some(dot) = file_name.iter().rposition(|byte| *byte == b'.') else {
        return "application/octet-stream";
    };
    let suffix = file_name[dot + 1..].to_ascii_lowercase();
    TYPES
        .binary_search_by(|(known, _)| known.as_bytes().cmp(&suffix))
        .map_or("application/octet-stream", |index| TYPES[index].1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_sorted_so_that_it_can_be_searched() {
        assert!(TYPES.is_sorted());
    }

    #[test]
    fn names_have_types() {
        assert_eq!(content_type(b"a/b.d/INDEX.HTML"), "text/html; charset=utf-8");
        assert_eq!(content_type(b"a.html/b"), "application/octet-stream");
        assert_eq!(content_type(b"font.woff2"), "font/woff2");
        assert_eq!(content_type(b"x.unknown"), "application/octet-stream");
    }
}
