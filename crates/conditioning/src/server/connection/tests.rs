#![allow(clippy::unwrap_used)]

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use super::*;
use crate::ledger::Ledger;

/// A server's end of a connection whose request was claimed.
struct End {
    connection: Connection,
    client: TcpStream,
    socket: TcpStream,
    _filters: (OwnedFd, OwnedFd),
}

/// A request of which the filters said so much, and `sent`, all that the client has sent.
fn end(flags: u16, head_bytes: u32, socket_bytes: u64, sent: &[u8]) -> End {
    let (ledger, file) = Ledger::create().unwrap();
    let (link, filter) = link::pair().unwrap();
    assert!(ledger.take(1));
    let id = ledger.present(1).unwrap();
    assert!(ledger.claim(id));
    let chain = Arc::new(Chain { link, ledger });
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (socket, peer) = listener.accept().unwrap();
    client.write_all(sent).unwrap();
    let request = sent[..head_bytes as usize].to_vec();
    let bundle = Bundle { id, flags, peer, socket_bytes, arrived_ns: 0, replaces: 0, head_bytes, request };
    let connection = Connection::new(chain, bundle, socket.as_raw_fd(), true);
    End { connection, client, socket, _filters: (filter, file) }
}

impl End {
    /// The server reads as much as it may of `wanted` bytes.
    fn read(&mut self, wanted: usize) -> Vec<u8> {
        if self.connection.source() == Source::Copy {
            let mut bytes = self.connection.unread_copy().to_vec();
            bytes.truncate(wanted);
            self.connection.took_copy(self.socket.as_fd(), bytes.len());
            return bytes;
        }
        let Source::Socket(left) = self.connection.source_of(self.socket.as_fd(), wanted) else {
            return Vec::new();
        };
        let mut bytes = vec![0; wanted.min(left as usize)];
        let got = self.socket.read(&mut bytes).unwrap();
        bytes.truncate(got);
        self.connection.took_from_socket(got as u64);
        bytes
    }
}

const GET: &[u8] = b"GET / HTTP/1.1\r\n\r\n";
const POST: &[u8] = b"POST / HTTP/1.1\r\nContent-Length: 20\r\n\r\n";
const CHUNKED: &[u8] = b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n";

/// It does not know how much its parent has read since, and would skip a part of the next request.
#[test]
fn a_child_that_closes_skips_nothing_of_what_its_parent_reads() {
    let request = [POST, &[b'x'; 20]].concat();
    let sent = [&request[..], GET].concat();
    let mut end = end(flags::PERSISTENT, POST.len() as u32, request.len() as u64, &sent);
    assert_eq!(end.read(1000).len(), POST.len() + "Connection: close\r\n".len());
    assert_eq!(end.read(5), b"xxxxx");
    end.connection.share();
    end.connection.inherited();
    // The parent reads on.
    end.socket.read_exact(&mut [0; 15]).unwrap();
    assert_eq!(end.connection.close_locally(end.socket.as_fd()), Some(false));
    let mut next = [0; GET.len()];
    end.socket.read_exact(&mut next).unwrap();
    assert_eq!(next, GET);
}

/// The same of one that its parent has not begun to read: nobody else knows the request.
#[test]
fn a_child_that_closes_what_its_parent_has_not_begun_to_read_leaves_it_to_the_parent() {
    let mut end = end(flags::PERSISTENT, GET.len() as u32, GET.len() as u64, GET);
    end.connection.share();
    end.connection.inherited();
    assert_eq!(end.connection.close_locally(end.socket.as_fd()), None);
}

/// Where its framing goes on is known to nobody there: what comes might be content, or the next request.
#[test]
fn a_chunked_upload_that_was_begun_to_be_read_is_not_read_on_by_another_process() {
    let sent = [CHUNKED, b"5\r\nhel"].concat();
    let mut end = end(flags::PERSISTENT, CHUNKED.len() as u32, UNKNOWN_END, &sent);
    assert!(end.read(1000).ends_with(b"Connection: close\r\n\r\n"));
    assert_eq!(end.read(1000), b"5\r\nhel");
    let passage = end.connection.passage();
    assert_eq!(passage.chunks, Passed::Lost);
    // The decoder knows how much is left of the chunk, and so does who gets the connection; of what follows it knows
    // nothing.
    let left = passage.socket_left;
    let mut other = Connection::passed(end.connection.chain().clone(), passage, end.socket.as_raw_fd());
    end.client.write_all(&[b"lo\r\n0\r\n\r\n", GET].concat()).unwrap();
    end.socket.read_exact(&mut vec![0; left as usize]).unwrap();
    other.took_from_socket(left);
    assert_eq!(other.source_of(end.socket.as_fd(), 1000), Source::Malformed);
    assert_eq!(other.close_locally(end.socket.as_fd()), Some(false));
}

/// Requests could follow that no filter sees.
#[test]
fn a_change_of_protocol_that_nobody_asked_for_makes_the_connection_nobodys() {
    let switching = b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: echo\r\nConnection: upgrade\r\n\r\n";
    for (asked, then) in [(0, Source::Malformed), (flags::FINAL, Source::Socket(u64::MAX))] {
        let mut end = end(flags::PERSISTENT | asked, GET.len() as u32, GET.len() as u64, GET);
        assert_eq!(end.read(1000), GET);
        end.connection.tracker().unwrap().wrote(switching);
        assert!(end.connection.changes_protocol());
        assert_eq!(end.connection.source_of(end.socket.as_fd(), 1000), then);
    }
}

/// What came before the first request of a stay is no part of the response to the second.
#[test]
fn what_was_written_in_answer_to_one_request_is_not_counted_for_the_next() {
    let mut end = end(flags::PERSISTENT, GET.len() as u32, GET.len() as u64, GET);
    end.connection.is_blocking = true;
    end.connection.watch_for_unseen(end.socket.as_fd());
    assert_eq!(end.read(1000), GET);
    let response = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n";
    end.socket.write_all(response).unwrap();
    end.connection.tracker().unwrap().wrote(response);
    end.connection.set_touched();
    assert!(end.connection.is_over() && end.connection.chain().ledger.linger(end.connection.id()));
    end.connection.begin_to_linger(1);
    end.client.write_all(GET).unwrap();
    let whole =
        Whole { head_bytes: GET.len() as u32, socket_bytes: GET.len() as u64, flags: flags::PERSISTENT };
    assert!(end.connection.resume(&whole, GET));
    end.connection.watch_for_unseen(end.socket.as_fd());
    assert_eq!(end.read(1000), GET);
    assert!(!end.connection.wrote_unseen(end.socket.as_fd()));
    end.socket.write_all(b"HTTP/1.1 200 OK\r\n").unwrap();
    assert!(end.connection.wrote_unseen(end.socket.as_fd()), "nobody saw it");
}
