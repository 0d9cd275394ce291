//! A client's control stream (RFC 9114 §6.2.1).

use super::error::ErrorCode;
use super::frames::{FrameHeader, frame_type, is_reserved_frame_type};
use super::varint;

/// The greatest length of a SETTINGS frame that is looked at, in bytes: some hundred settings.
pub const MOST_SETTINGS_BYTES: u64 = 1024;

/// Reads a client's control stream after its type, in whatever pieces it comes. Nothing is kept of a frame that is not
/// known, whatever its length, and of others no more than [`MOST_SETTINGS_BYTES`].
#[derive(Debug, Default)]
pub struct ControlReader {
    at: At,
    /// The bytes of the header or payload that is being read, if they come in pieces.
    kept: Vec<u8>,
    has_settings: bool,
    max_push_id: Option<u64>,
    goaway: Option<u64>,
    idle_frames: u64,
}

#[derive(Clone, Copy, Debug, Default)]
enum At {
    #[default]
    Header,
    /// The payload of a frame that counts.
    Payload(FrameHeader),
    /// So many bytes of a frame that does not.
    Skipped(u64),
}

impl ControlReader {
    /// Takes what came next.
    ///
    /// # Errors
    /// The connection must be closed with this; what comes later means nothing.
    pub fn push(&mut self, mut bytes: &[u8]) -> Result<(), ErrorCode> {
        loop {
            match self.at {
                At::Header => {
                    let Some(header) = self.header(&mut bytes) else { return Ok(()) };
                    self.at = self.begin(header)?;
                }
                At::Skipped(length) => {
                    let taken = bytes.len().min(usize::try_from(length).unwrap_or(usize::MAX));
                    bytes = &bytes[taken..];
                    let left = length - taken as u64;
                    self.at = if left == 0 { At::Header } else { At::Skipped(left) };
                    if left > 0 {
                        return Ok(());
                    }
                }
                At::Payload(header) => {
                    // `begin` lets no more through than MOST_SETTINGS_BYTES.
                    let length = header.length as usize;
                    let taken = bytes.len().min(length - self.kept.len());
                    let (of_frame, rest) = bytes.split_at(taken);
                    self.kept.extend_from_slice(of_frame);
                    bytes = rest;
                    if self.kept.len() < length {
                        return Ok(());
                    }
                    self.at = At::Header;
                    let payload = std::mem::take(&mut self.kept);
                    self.end(header.kind, &payload)?;
                }
            }
        }
    }

    /// The next frame's header, if it is complete; takes its bytes.
    fn header(&mut self, bytes: &mut &[u8]) -> Option<FrameHeader> {
        let before = self.kept.len();
        let candidate = bytes.len().min(FrameHeader::MOST_BYTES - before);
        let (header, taken) = if before == 0 {
            FrameHeader::read(bytes).or_else(|| {
                self.kept.extend_from_slice(&bytes[..candidate]);
                None
            })?
        } else {
            self.kept.extend_from_slice(&bytes[..candidate]);
            FrameHeader::read(&self.kept)?
        };
        self.kept.clear();
        // What was kept before was no complete header: this one ends after it.
        *bytes = &bytes[taken - before..];
        Some(header)
    }

    /// What may be known of a frame from its header.
    fn begin(&mut self, header: FrameHeader) -> Result<At, ErrorCode> {
        let FrameHeader { kind, length } = header;
        if !self.has_settings && kind != frame_type::SETTINGS {
            return Err(ErrorCode::MissingSettings);
        }
        match kind {
            // §7.2.4: "If an endpoint receives a second SETTINGS frame".
            frame_type::SETTINGS if self.has_settings => Err(ErrorCode::FrameUnexpected),
            frame_type::SETTINGS if length > MOST_SETTINGS_BYTES => Err(ErrorCode::ExcessiveLoad),
            frame_type::SETTINGS => {
                self.has_settings = true;
                Ok(At::Payload(header))
            }
            // §7.2.1, §7.2.2, §7.2.5.
            frame_type::DATA | frame_type::HEADERS | frame_type::PUSH_PROMISE => {
                Err(ErrorCode::FrameUnexpected)
            }
            _ if is_reserved_frame_type(kind) => Err(ErrorCode::FrameUnexpected),
            // §7.1: a payload is as long as its fields, which here are one integer.
            frame_type::CANCEL_PUSH | frame_type::GOAWAY | frame_type::MAX_PUSH_ID => {
                self.idle_frames = self.idle_frames.saturating_add(1);
                if matches!(length, 1 | 2 | 4 | 8) {
                    Ok(At::Payload(header))
                } else {
                    Err(ErrorCode::FrameError)
                }
            }
            // §9.
            _ => {
                self.idle_frames = self.idle_frames.saturating_add(1);
                Ok(At::Skipped(length))
            }
        }
    }

    fn end(&mut self, kind: u64, payload: &[u8]) -> Result<(), ErrorCode> {
        if kind == frame_type::SETTINGS {
            return self.settings(payload);
        }
        let Some((id, taken)) = varint::read(payload) else { return Err(ErrorCode::FrameError) };
        if taken != payload.len() {
            return Err(ErrorCode::FrameError);
        }
        match kind {
            // §5.2: what was said to be refused is not taken back.
            frame_type::GOAWAY if self.goaway.is_none_or(|before| id <= before) => self.goaway = Some(id),
            // §7.2.7.
            frame_type::MAX_PUSH_ID if self.max_push_id.is_none_or(|before| id >= before) => {
                self.max_push_id = Some(id);
            }
            // §7.2.3: of a push that was not promised, and none ever is.
            _ => return Err(ErrorCode::IdError),
        }
        Ok(())
    }

    /// §7.2.4.
    fn settings(&mut self, mut payload: &[u8]) -> Result<(), ErrorCode> {
        let mut identifiers = Vec::new();
        while !payload.is_empty() {
            let (identifier, taken) = varint::read(payload).ok_or(ErrorCode::FrameError)?;
            payload = &payload[taken..];
            let (_, taken) = varint::read(payload).ok_or(ErrorCode::FrameError)?;
            payload = &payload[taken..];
            // §7.2.4.1, §11.2.2: settings of HTTP/2. Of the others none changes what is sent: there is no dynamic table, and
            // a head that is larger than a client wants is for the client to refuse (§4.2.2).
            if matches!(identifier, 0x0 | 0x2..=0x5) {
                return Err(ErrorCode::SettingsError);
            }
            identifiers.push(identifier);
        }
        identifiers.sort_unstable();
        if identifiers.windows(2).any(|pair| pair[0] == pair[1]) {
            return Err(ErrorCode::SettingsError);
        }
        Ok(())
    }

    /// Whether the client's settings are known.
    pub fn has_settings(&self) -> bool {
        self.has_settings && !matches!(self.at, At::Payload(FrameHeader { kind: frame_type::SETTINGS, .. }))
    }

    /// Frames so far that ask for nothing: all but the settings. A client has reason for a few.
    pub fn idle_frames(&self) -> u64 {
        self.idle_frames
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Settings that say nothing.
    const SETTINGS: &[u8] = &[4, 0];

    fn read(bytes: &[u8]) -> Result<ControlReader, ErrorCode> {
        let mut reader = ControlReader::default();
        reader.push(bytes).map(|()| reader)
    }

    fn after_settings(bytes: &[u8]) -> Result<ControlReader, ErrorCode> {
        read(&[SETTINGS, bytes].concat())
    }

    #[test]
    fn settings_are_known_when_all_of_them_are_there() {
        let bytes = [4, 8, 1, 0, 6, 0x80, 1, 0, 0, 0x21];
        assert!(matches!(read(&bytes), Err(ErrorCode::FrameError)));
        let bytes = [4, 9, 1, 0, 6, 0x80, 1, 0, 0, 0x21, 5];
        for cut in 0..bytes.len() {
            let reader = read(&bytes[..cut]).unwrap();
            assert!(!reader.has_settings(), "{cut}");
        }
        let reader = read(&bytes).unwrap();
        assert!(reader.has_settings());
    }

    #[test]
    fn a_stream_begins_with_settings_and_has_them_once() {
        for bytes in [&[0, 0][..], &[7, 1, 0], &[0x21, 0], &[0xd, 1, 0], &[2, 0]] {
            assert_eq!(read(bytes).err(), Some(ErrorCode::MissingSettings), "{bytes:?}");
        }
        assert_eq!(after_settings(SETTINGS).err(), Some(ErrorCode::FrameUnexpected));
    }

    #[test]
    fn frames_of_requests_and_of_http_2_are_unexpected() {
        for kind in [0, 1, 5, 2, 6, 8, 9] {
            assert_eq!(after_settings(&[kind, 0]).err(), Some(ErrorCode::FrameUnexpected), "{kind}");
        }
    }

    #[test]
    fn settings_of_http_2_and_settings_said_twice_are_refused() {
        for identifier in [0, 2, 3, 4, 5] {
            assert_eq!(read(&[4, 2, identifier, 0]).err(), Some(ErrorCode::SettingsError), "{identifier}");
        }
        assert_eq!(read(&[4, 6, 6, 1, 0x21, 0, 6, 1]).err(), Some(ErrorCode::SettingsError));
        // The same identifier in more bytes.
        assert_eq!(read(&[4, 5, 6, 1, 0x40, 6, 1]).err(), Some(ErrorCode::SettingsError));
        assert!(read(&[4, 6, 1, 0, 7, 0, 8, 1]).is_ok());
    }

    #[test]
    fn settings_beyond_the_bound_are_refused_before_they_come() {
        let mut bytes = Vec::new();
        FrameHeader { kind: 4, length: MOST_SETTINGS_BYTES + 1 }.write(&mut bytes);
        assert_eq!(read(&bytes).err(), Some(ErrorCode::ExcessiveLoad));
        let mut bytes = Vec::new();
        FrameHeader { kind: 4, length: MOST_SETTINGS_BYTES }.write(&mut bytes);
        for identifier in 0..MOST_SETTINGS_BYTES / 4 {
            varint::write(0x1000 + identifier, &mut bytes);
            varint::write(0x1000, &mut bytes);
        }
        assert!(read(&bytes).unwrap().has_settings());
    }

    #[test]
    fn payloads_that_are_not_one_integer_are_malformed() {
        for kind in [3, 7, 0xd] {
            for payload in [&[0][..], &[3, 0, 0, 0], &[2, 0, 0], &[1, 0x40], &[9]] {
                let bytes = [&[kind], payload].concat();
                assert_eq!(after_settings(&bytes).err(), Some(ErrorCode::FrameError), "{bytes:?}");
            }
        }
    }

    #[test]
    fn ids_go_one_way_only() {
        assert!(after_settings(&[7, 1, 9, 7, 1, 9, 7, 1, 0, 0xd, 1, 1, 0xd, 1, 1, 0xd, 1, 2]).is_ok());
        for bytes in [&[7, 1, 0, 7, 1, 1][..], &[0xd, 1, 2, 0xd, 1, 1], &[3, 1, 0], &[0xd, 1, 2, 3, 1, 1]] {
            assert_eq!(after_settings(bytes).err(), Some(ErrorCode::IdError), "{bytes:?}");
        }
    }

    #[test]
    fn unknown_frames_are_skipped_and_counted_whatever_their_length() {
        let mut reader = after_settings(&[0x21, 3, 1, 2, 3, 0x40, 0x54, 0, 7, 1, 0]).unwrap();
        assert_eq!(reader.idle_frames(), 3);
        let mut header = Vec::new();
        FrameHeader { kind: 0x21, length: varint::MAX }.write(&mut header);
        reader.push(&header).unwrap();
        for _ in 0..100 {
            reader.push(&[0; 4096]).unwrap();
        }
        assert_eq!((reader.idle_frames(), reader.kept.capacity()), (4, 0));
    }
}
