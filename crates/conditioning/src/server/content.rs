//! Chunked content whose end no filter has seen (RFC 9112 §7.1): what belongs to it is found on the socket before the
//! server reads it, so that it reads nothing beyond.

use std::os::fd::BorrowedFd;

use rustix::net::RecvFlags;
use tidegate_http::{ChunkLimits, ChunkedDecoder};

/// So many bytes are looked for beyond those that the kernel counts.
const BEYOND_BYTES: usize = 512;

/// Content of which a part was looked at.
#[derive(Debug)]
pub struct Chunks {
    decoder: ChunkedDecoder,
    is_untouched: bool,
    is_malformed: bool,
}

impl Chunks {
    /// Content of which nothing was looked at.
    pub fn new() -> Self {
        let decoder = ChunkedDecoder::new(ChunkLimits::default());
        Self { decoder, is_untouched: true, is_malformed: false }
    }

    /// Content of which nothing more can be read, such as some of which another process has looked at a part.
    pub fn lost() -> Self {
        Self { is_malformed: true, ..Self::new() }
    }

    /// Whether nothing was looked at.
    pub fn is_untouched(&self) -> bool {
        self.is_untouched && !self.is_malformed
    }

    /// Whether nothing more of it can be read, although it has not come to its end.
    pub fn is_malformed(&self) -> bool {
        self.is_malformed
    }

    /// Whether the end was seen.
    pub fn is_done(&self) -> bool {
        self.decoder.is_done()
    }

    /// Looks at up to `wanted` bytes of what is on the socket, of which the first `known` were looked at. Returns how
    /// many more belong to the content, be they there or not.
    pub fn look(&mut self, fd: BorrowedFd<'_>, known: u64, wanted: usize) -> u64 {
        let Ok(known) = usize::try_from(known) else { return 0 };
        if self.is_malformed || wanted <= known {
            return 0;
        }
        // Room for what is there, and for more than that: what the kernel counts ends before a byte that is urgent
        // (tcp(7)), and what can be read does not.
        let there =
            rustix::io::ioctl_fionread(fd).map_or(0, |there| usize::try_from(there).unwrap_or(usize::MAX));
        let wanted = there.saturating_add(BEYOND_BYTES).min(wanted);
        let mut room = Vec::<u8>::with_capacity(wanted);
        let room = &mut room.spare_capacity_mut()[..wanted];
        match rustix::net::recv(fd, room, RecvFlags::PEEK | RecvFlags::DONTWAIT) {
            Ok(((seen, _), _)) if seen.len() > known => self.find(&seen[known..]),
            _ => 0,
        }
    }

    fn find(&mut self, mut bytes: &[u8]) -> u64 {
        let mut found = 0;
        self.is_untouched = false;
        while !bytes.is_empty() && !self.is_done() {
            let Ok(decoded) = self.decoder.decode(bytes) else {
                self.is_malformed = true;
                return found;
            };
            found += decoded.consumed as u64;
            bytes = &bytes[decoded.consumed..];
        }
        found.saturating_add(self.decoder.pass_data())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn content_ends_where_its_framing_says_however_it_comes() {
        let content = b"5\r\nhello\r\n3;a=b\r\nabc\r\n0\r\nA: b\r\n\r\nGET / HTTP/1.1\r\n";
        let end = content.len() as u64 - 16;
        for step in 1..content.len() {
            let (mut chunks, mut known) = (Chunks::new(), 0);
            while !chunks.is_done() {
                let there = ((known / step + 1) * step).min(content.len());
                let found = chunks.find(&content[known.min(there)..there]) as usize;
                assert!(!chunks.is_malformed());
                known += found;
            }
            assert_eq!(known as u64, end, "{step} bytes at a time");
        }
    }

    /// The kernel counts none, and a reader that looks for them finds some: it was told again and again that they are
    /// there.
    #[test]
    fn content_behind_a_byte_that_is_urgent_is_found() {
        use std::io::{Read, Write};
        use std::os::fd::AsFd;

        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let mut client = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (mut server, _) = listener.accept().unwrap();
        rustix::net::send(&client, b"Z", rustix::net::SendFlags::OOB).unwrap();
        client.write_all(b"5\r\nhel").unwrap();
        client.shutdown(std::net::Shutdown::Write).unwrap();
        let is_ended = rustix::event::PollFlags::RDHUP;
        rustix::event::poll(&mut [rustix::event::PollFd::new(&server, is_ended)], None).unwrap();
        assert_eq!(rustix::io::ioctl_fionread(&server), Ok(0));
        let mut chunks = Chunks::new();
        // All of the chunk, and its end.
        assert_eq!(chunks.look(server.as_fd(), 0, 4096), 8);
        let mut read = Vec::new();
        server.read_to_end(&mut read).unwrap();
        assert_eq!(read, b"5\r\nhel");
    }

    #[test]
    fn malformed_content_may_be_read_to_where_it_is_malformed() {
        let mut chunks = Chunks::new();
        assert_eq!(chunks.find(b"3\r\nabc\r\nz\r\n0\r\n\r\n"), 6);
        assert!(chunks.is_malformed() && !chunks.is_done());
    }
}
