//! A service that answers with objects: input is a path, output the object's bytes. It keeps nothing between events.

use crate::server::{Application, Event, EventInput, EventKind, EventWant, Minisocket};
use crate::user::{MAX_OPAQUE_BYTES, REGION_BITS};

/// Code of a reset: no such object.
pub const NOT_FOUND: u16 = 404;
/// Code of a reset: the object changed or went while it was being sent.
pub const GONE: u16 = 410;
/// Code of a reset: the path is too long.
pub const PATH_TOO_LONG: u16 = 414;
/// Code of a reset: the object is longer than a request's region of sequence numbers.
pub const TOO_LARGE: u16 = 413;
/// Longest path in bytes: what fits into a continuation beside the version.
pub const MAX_PATH_BYTES: usize = MAX_OPAQUE_BYTES - VERSION_BYTES;
const VERSION_BYTES: usize = 8;

/// What is known of an object.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Object {
    /// Its length in bytes.
    pub length: u64,
    /// Changes whenever its bytes change.
    pub version: u64,
}

/// Bytes that can be read at any offset, any number of times, the same on every replica.
pub trait Objects {
    /// Looks an object up.
    fn find(&mut self, path: &[u8]) -> Option<Object>;
    /// Fills `buffer` from `offset` on; returns how many bytes there were. `None` if this version is gone.
    fn read(&mut self, path: &[u8], version: u64, offset: u64, buffer: &mut [u8]) -> Option<usize>;
}

/// Serves [`Objects`].
#[derive(Debug)]
pub struct FileService<O> {
    objects: O,
    buffer: Vec<u8>,
}

impl<O: Objects> FileService<O> {
    /// A service over `objects`.
    pub fn new(objects: O) -> Self {
        Self { objects, buffer: Vec::new() }
    }

    /// A range that a client asks for with an output continuation (Trickles §4.3).
    fn answer_want(&mut self, index: usize, want: &EventWant<'_>, socket: &mut Minisocket) {
        let Some((version, path)) = want.opaque.split_first_chunk::<VERSION_BYTES>() else { return };
        if want.aged {
            // Without room the client asks with the old one for as long as its epoch is accepted.
            let valid = (want.valid_start, want.valid_end);
            let _ = socket.set_output_continuation(index, want.request, valid, want.opaque);
        }
        if want.offset == want.valid_end {
            let _ = socket.end(index, want.request, want.valid_end);
            return;
        }
        self.send(
            index,
            want.request,
            want.offset,
            want.length as usize,
            u64::from_be_bytes(*version),
            path,
            socket,
        );
    }

    /// Fills one packet; returns how many bytes went in, or `None` where the request failed.
    #[expect(clippy::too_many_arguments, reason = "names a range of a version of an object, and a packet")]
    fn send(
        &mut self,
        index: usize,
        request: u32,
        offset: u64,
        length: usize,
        version: u64,
        path: &[u8],
        socket: &mut Minisocket,
    ) -> Option<usize> {
        let length = length.min(socket.room(index));
        self.buffer.resize(length, 0);
        match self.objects.read(path, version, offset, &mut self.buffer) {
            Some(read) => Some(socket.send(index, request, offset, &self.buffer[..read.min(length)])),
            None => {
                // Without room the client asks again.
                let _ = socket.reset(index, request, GONE);
                None
            }
        }
    }

    /// Input (Trickles §4.2): a path, of which the input continuation carries what came before. The answer's
    /// continuation goes into a packet from `first` on; the object is what follows.
    fn answer_input(
        &mut self,
        input: &EventInput<'_>,
        first: usize,
        socket: &mut Minisocket,
    ) -> Option<(Object, Vec<u8>)> {
        let mut path = input.opaque.to_vec();
        path.extend_from_slice(input.data);
        // Where there is no room for an answer, the client sends the input again.
        if path.len() > MAX_PATH_BYTES {
            let _ = socket.reset(first, input.request, PATH_TOO_LONG);
            return None;
        }
        if !input.last {
            let consumed = input.consumed + input.data.len() as u64;
            let _ = socket.set_input_continuation(first, input.request, consumed, &path);
            return None;
        }
        let Some(object) = self.objects.find(&path) else {
            let _ = socket.reset(first, input.request, NOT_FOUND);
            return None;
        };
        if object.length > 1 << REGION_BITS {
            let _ = socket.reset(first, input.request, TOO_LARGE);
            return None;
        }
        let mut opaque = object.version.to_be_bytes().to_vec();
        opaque.extend_from_slice(&path);
        let valid = (0, object.length);
        socket.set_output_continuation(first, input.request, valid, &opaque).ok()?;
        socket.end(first, input.request, object.length).ok()?;
        Some((object, path))
    }

    /// The first bytes of an answer, of the server's own accord.
    fn send_first(
        &mut self,
        request: u32,
        (object, path): (Object, &[u8]),
        packets: std::ops::Range<usize>,
        socket: &mut Minisocket,
    ) {
        let mut offset = 0;
        for index in packets {
            let left = usize::try_from(object.length - offset).unwrap_or(usize::MAX);
            match self.send(index, request, offset, left, object.version, path, socket) {
                Some(sent) => offset += sent as u64,
                None => return,
            }
        }
    }
}

impl<O: Objects> Application for FileService<O> {
    fn handle(&mut self, event: &Event<'_>, socket: &mut Minisocket) {
        if event.kind == EventKind::Close {
            return;
        }
        for (index, want) in event.wants.iter().enumerate() {
            self.answer_want(index, want, socket);
        }
        // What is asked for is told for all requests before the first bytes of any take up the room.
        let mut answers = Vec::new();
        for (input, packets) in event.inputs_with_packets(socket.packets()) {
            let answer = self.answer_input(input, packets.start, socket);
            answers.extend(answer.map(|(object, path)| (input.request, object, path, packets)));
        }
        for (request, object, path, packets) in answers {
            self.send_first(request, (object, &path), packets, socket);
        }
    }
}
