//! Follows the frames that a connection carries (RFC 9113 §4.1), for what the library does not tell: which requests it has
//! refused by itself, and how many frames ask for nothing.

const HEADER_BYTES: usize = 9;
/// What a client sends before its first frame (§3.4).
pub(super) const PREFACE_BYTES: usize = 24;

const DATA: u8 = 0;
const HEADERS: u8 = 1;
const RST_STREAM: u8 = 3;
const CONTINUATION: u8 = 9;
const END_HEADERS: u8 = 4;
const REFUSED_STREAM: u32 = 7;

/// One direction of a connection, as far as it has come.
pub(super) struct Frames {
    /// Bytes until the next frame's header.
    left: usize,
    header: [u8; HEADER_BYTES],
    header_bytes: usize,
    /// The last four bytes of the frame so far.
    last: u32,
}

/// A frame that is there to its end.
struct Frame {
    length: usize,
    kind: u8,
    flags: u8,
    stream: u32,
    /// Its payload's last four bytes.
    last: u32,
}

impl Frames {
    /// What begins with `skipped` bytes that are no frame.
    fn after(skipped: usize) -> Self {
        Self { left: skipped, header: [0; HEADER_BYTES], header_bytes: 0, last: 0 }
    }

    /// Tells of each frame that ends in these bytes.
    fn follow(&mut self, mut bytes: &[u8], mut tell: impl FnMut(&Frame)) {
        while !bytes.is_empty() {
            if self.left == 0 {
                let (taken, rest) = bytes.split_at(bytes.len().min(HEADER_BYTES - self.header_bytes));
                let end = self.header_bytes + taken.len();
                self.header[self.header_bytes..end].copy_from_slice(taken);
                (self.header_bytes, bytes) = (end, rest);
                if end < HEADER_BYTES {
                    return;
                }
                self.left = self.frame().length;
            } else {
                let (taken, rest) = bytes.split_at(bytes.len().min(self.left));
                for byte in &taken[taken.len().saturating_sub(4)..] {
                    self.last = self.last << 8 | u32::from(*byte);
                }
                self.left -= taken.len();
                bytes = rest;
            }
            if self.left == 0 && self.header_bytes == HEADER_BYTES {
                tell(&self.frame());
                self.header_bytes = 0;
            }
        }
    }

    fn frame(&self) -> Frame {
        let [a, b, c, kind, flags, stream @ ..] = self.header;
        Frame {
            length: u32::from_be_bytes([0, a, b, c]) as usize,
            kind,
            flags,
            stream: u32::from_be_bytes(stream) & 0x7FFF_FFFF,
            last: self.last,
        }
    }
}

/// What a client sends.
pub(super) struct Received {
    frames: Frames,
    last_stream: u32,
    /// Streams that the client has opened.
    pub opened: u64,
    /// Frames that neither ask for anything nor bring content, but for those that end a stream.
    idle: u64,
    /// Streams that the client has ended early, and those that were not open.
    resets: u64,
}

impl Received {
    pub(super) fn new() -> Self {
        Self { frames: Frames::after(PREFACE_BYTES), last_stream: 0, opened: 0, idle: 0, resets: 0 }
    }

    /// Frames that neither ask for anything nor bring content. What cancels a request is counted elsewhere; there can be no
    /// more of it than requests.
    pub(super) fn idle(&self) -> u64 {
        self.idle + self.resets.saturating_sub(self.opened)
    }

    pub(super) fn follow(&mut self, bytes: &[u8]) {
        let Self { frames, last_stream, opened, idle, resets } = self;
        frames.follow(bytes, |frame| match frame.kind {
            HEADERS | CONTINUATION => {
                // Trailers come on a stream that is open (§5.1.1).
                if frame.flags & END_HEADERS != 0 && frame.stream > *last_stream {
                    *last_stream = frame.stream;
                    *opened += 1;
                }
            }
            DATA if frame.length > 0 => {}
            RST_STREAM => *resets += 1,
            _ => *idle += 1,
        });
    }
}

/// What is sent to a client.
pub(super) struct Sent {
    frames: Frames,
    /// Streams beyond those that there may be at once, which the client may ask for again (§8.7).
    pub turned_away: u64,
}

impl Sent {
    pub(super) fn new() -> Self {
        Self { frames: Frames::after(0), turned_away: 0 }
    }

    pub(super) fn follow(&mut self, bytes: &[u8]) {
        let Self { frames, turned_away } = self;
        frames.follow(bytes, |frame| {
            if frame.kind == RST_STREAM && frame.last == REFUSED_STREAM {
                *turned_away += 1;
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
        let mut out = (payload.len() as u32).to_be_bytes()[1..].to_vec();
        out.extend([kind, flags]);
        out.extend(stream.to_be_bytes());
        out.extend(payload);
        out
    }

    /// Whatever the pieces are in which it comes.
    fn in_pieces(bytes: &[u8], mut follow: impl FnMut(usize, &[u8])) {
        for size in 1..=bytes.len() {
            bytes.chunks(size).for_each(|piece| follow(size, piece));
        }
    }

    #[test]
    fn streams_are_counted_when_their_heads_are_whole_and_trailers_are_not() {
        let mut bytes = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec();
        bytes.extend(frame(4, 0, 0, b""));
        bytes.extend(frame(HEADERS, END_HEADERS, 1, b"head"));
        bytes.extend(frame(HEADERS, 0, 3, b"part"));
        bytes.extend(frame(CONTINUATION, 0, 3, b"more"));
        bytes.extend(frame(CONTINUATION, END_HEADERS, 3, b"rest"));
        bytes.extend(frame(DATA, 0, 1, b"content"));
        bytes.extend(frame(DATA, 0, 1, b""));
        bytes.extend(frame(HEADERS, END_HEADERS | 1, 1, b"trailers"));
        bytes.extend(frame(RST_STREAM, 0, 3, &[0, 0, 0, 8]));
        bytes.extend(frame(6, 0, 0, b"whatever"));
        let mut received: Vec<Received> = (0..=bytes.len()).map(|_| Received::new()).collect();
        in_pieces(&bytes, |size, piece| received[size].follow(piece));
        for (size, received) in received.iter().enumerate().skip(1) {
            // SETTINGS, PING and content without any.
            assert_eq!((received.opened, received.idle()), (2, 3), "{size}");
        }
        let mut resets = Received::new();
        resets.follow(&bytes);
        (0..10).for_each(|_| resets.follow(&frame(RST_STREAM, 0, 3, &[0, 0, 0, 8])));
        assert_eq!(resets.idle(), 3 + 11 - 2, "of a stream that is gone");
        let mut cut = Received::new();
        cut.follow(&bytes[..PREFACE_BYTES + 9 + 9 + 3]);
        assert_eq!(cut.opened, 0);
    }

    #[test]
    fn streams_that_are_turned_away_are_told_from_other_resets() {
        let mut bytes = frame(4, 0, 0, &[0, 3, 0, 0, 0, 7]);
        bytes.extend(frame(RST_STREAM, 0, 3, &[0, 0, 0, 7]));
        bytes.extend(frame(RST_STREAM, 0, 5, &[0, 0, 0, 1]));
        bytes.extend(frame(DATA, 1, 7, &[1, 2, 0, 0, 0, 7]));
        bytes.extend(frame(RST_STREAM, 0, 9, &[0, 0, 0, 7]));
        let mut sent: Vec<Sent> = (0..=bytes.len()).map(|_| Sent::new()).collect();
        in_pieces(&bytes, |size, piece| sent[size].follow(piece));
        assert!(sent.iter().skip(1).all(|sent| sent.turned_away == 2));
    }
}
