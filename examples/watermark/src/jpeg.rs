//! Baseline JPEG (ITU-T T.81), read and coded anew block by block.

use crate::bits::{Huffman, Reader, Writer, category};
use std::ops::RangeInclusive;

const MAX_COMPONENTS: usize = 3;
/// Categories of a DC difference in baseline (T.81 F.1.2.1).
const DC_CATEGORIES: RangeInclusive<u8> = 0..=11;
/// Largest quantized DC value.
const DC_MAX: i32 = 1023;
const POSITION_BYTES: usize = 26;

/// Why a picture cannot be marked.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum JpegError {
    /// Ends before it should.
    Truncated,
    /// Not a JPEG, or one that contradicts itself.
    Malformed,
    /// Progressive, arithmetic, with restarts, or in several scans.
    Unsupported,
}

impl std::fmt::Display for JpegError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Truncated => "the picture ends early",
            Self::Malformed => "not a JPEG picture",
            Self::Unsupported => "only baseline JPEG in one scan and without restarts can be marked",
        })
    }
}

impl std::error::Error for JpegError {}

/// The bits that make a client's picture its own.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Mark(u64);

impl Mark {
    /// Of a client's name. An example: whoever knows the function can remove the mark, a service would key it.
    #[must_use]
    pub fn of(name: &[u8]) -> Self {
        Self(name.iter().fold(0xcbf2_9ce4_8422_2325, |hash: u64, &byte| mix(hash ^ u64::from(byte))))
    }

    /// The bit of a block, counted from the first of the scan.
    #[must_use]
    pub fn bit(&self, block: u64) -> bool {
        mix(self.0 ^ block) & 1 == 1
    }
}

fn mix(mut z: u64) -> u64 {
    z = z.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Where a part begins in both streams: what goes into a continuation.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(crate) struct Position {
    /// Minimum coded unit; 0 is the picture's head.
    unit: u32,
    /// Bits of the scan that were read.
    read_bits: u64,
    /// The last DC value of each component, as read and as written.
    read_dc: [i16; MAX_COMPONENTS],
    written_dc: [i16; MAX_COMPONENTS],
    /// Bits of the byte that the part before began, and how many.
    pending: (u8, u8),
}

impl Position {
    pub(crate) fn to_bytes(self) -> [u8; POSITION_BYTES] {
        let mut bytes = [0; POSITION_BYTES];
        bytes[..4].copy_from_slice(&self.unit.to_be_bytes());
        bytes[4..12].copy_from_slice(&self.read_bits.to_be_bytes());
        let values = self.read_dc.into_iter().chain(self.written_dc);
        for (place, value) in bytes[12..24].chunks_mut(2).zip(values) {
            place.copy_from_slice(&value.to_be_bytes());
        }
        (bytes[24], bytes[25]) = self.pending;
        bytes
    }

    pub(crate) fn from_bytes(bytes: &[u8]) -> Option<(Self, &[u8])> {
        let (head, rest) = bytes.split_first_chunk::<POSITION_BYTES>()?;
        let short = |at: usize| i16::from_be_bytes([head[at], head[at + 1]]);
        let mut read_bits = [0; 8];
        read_bits.copy_from_slice(&head[4..12]);
        let position = Self {
            unit: u32::from_be_bytes([head[0], head[1], head[2], head[3]]),
            read_bits: u64::from_be_bytes(read_bits),
            read_dc: [short(12), short(14), short(16)],
            written_dc: [short(18), short(20), short(22)],
            pending: (head[24], head[25]),
        };
        (position.pending.1 < 8).then_some((position, rest))
    }
}

#[derive(Clone, Copy, Debug, Default)]
struct Component {
    blocks: u64,
    dc: usize,
    ac: usize,
}

/// A picture that can be marked.
#[derive(Clone, Debug)]
pub struct Jpeg {
    /// Everything up to the scan, with tables that code any DC difference.
    head: Vec<u8>,
    scan: Vec<u8>,
    components: Vec<Component>,
    units: u32,
    read_dc: [Option<Huffman>; 4],
    ac: [Option<Huffman>; 4],
    written_dc: Huffman,
}

fn short(bytes: &[u8], at: usize) -> Result<usize, JpegError> {
    let two = bytes.get(at..at + 2).ok_or(JpegError::Truncated)?;
    Ok(usize::from(u16::from_be_bytes([two[0], two[1]])))
}

/// What the frame header says.
struct Frame {
    width: usize,
    height: usize,
    /// Id and sampling of each component.
    sampling: Vec<(u8, usize, usize)>,
}

impl Jpeg {
    /// Reads a picture, to its last block.
    ///
    /// # Errors
    /// It is no baseline JPEG in one scan, or broken.
    pub fn new(bytes: &[u8]) -> Result<Self, JpegError> {
        let written_dc = Huffman::flat(DC_CATEGORIES);
        let mut jpeg = Self {
            head: vec![0xff, 0xd8],
            scan: Vec::new(),
            components: Vec::new(),
            units: 0,
            read_dc: Default::default(),
            ac: Default::default(),
            written_dc,
        };
        if bytes.get(..2) != Some(&[0xff, 0xd8]) {
            return Err(JpegError::Malformed);
        }
        let (mut at, mut frame) = (2, None);
        loop {
            let marker = bytes.get(at..at + 2).ok_or(JpegError::Truncated)?;
            let length = short(bytes, at + 2)?;
            let body = bytes.get(at + 4..at + 2 + length).ok_or(JpegError::Truncated)?;
            at += 2 + length;
            match marker {
                [0xff, 0xc4] => {
                    jpeg.tables(body)?;
                    continue;
                }
                [0xff, 0xc0] => frame = Some(Frame::read(body)?),
                [0xff, 0xc1..=0xcf] => return Err(JpegError::Unsupported),
                [0xff, 0xdd] if body != [0, 0] => return Err(JpegError::Unsupported),
                [0xff, 0xda] => jpeg.scan_head(body, frame.as_ref().ok_or(JpegError::Malformed)?)?,
                [0xff, 0xdb..=0xff] => {}
                _ => return Err(JpegError::Malformed),
            }
            jpeg.head.extend_from_slice(marker);
            jpeg.head.extend_from_slice(&(length as u16).to_be_bytes());
            jpeg.head.extend_from_slice(body);
            if marker[1] == 0xda {
                break;
            }
        }
        jpeg.scan = bytes[at..].to_vec();
        let end = jpeg.code(&jpeg.start(), &Mark(0), u64::MAX, &mut |_| {})?;
        debug_assert!(end.1.is_none(), "without a limit there is one part");
        Ok(jpeg)
    }

    /// Takes over Huffman tables: those of AC values as they are, in place of each for DC ours.
    fn tables(&mut self, mut body: &[u8]) -> Result<(), JpegError> {
        let mut out = Vec::new();
        while let Some((&class_and_id, rest)) = body.split_first() {
            let (counts, rest) = rest.split_first_chunk::<16>().ok_or(JpegError::Truncated)?;
            let total = counts.iter().map(|&count| usize::from(count)).sum();
            let (symbols, rest) = rest.split_at_checked(total).ok_or(JpegError::Truncated)?;
            body = rest;
            let table = Huffman::new(*counts, symbols.to_vec());
            let id = usize::from(class_and_id & 15);
            if class_and_id >> 4 == 0 {
                self.written_dc.describe(class_and_id, &mut out);
                *self.read_dc.get_mut(id).ok_or(JpegError::Malformed)? = Some(table);
            } else {
                table.describe(class_and_id, &mut out);
                *self.ac.get_mut(id).ok_or(JpegError::Malformed)? = Some(table);
            }
        }
        self.head.extend_from_slice(&[0xff, 0xc4]);
        self.head.extend_from_slice(&(out.len() as u16 + 2).to_be_bytes());
        self.head.extend_from_slice(&out);
        Ok(())
    }

    fn scan_head(&mut self, body: &[u8], frame: &Frame) -> Result<(), JpegError> {
        let count = usize::from(*body.first().ok_or(JpegError::Truncated)?);
        if count != frame.sampling.len() || body.len() != 4 + 2 * count {
            return Err(JpegError::Unsupported);
        }
        let widest = frame.sampling.iter().map(|&(_, h, _)| h).max().unwrap_or(1);
        let highest = frame.sampling.iter().map(|&(_, _, v)| v).max().unwrap_or(1);
        for (pair, &(id, h, v)) in body[1..].chunks(2).zip(&frame.sampling) {
            if pair[0] != id {
                return Err(JpegError::Malformed);
            }
            // T.81 A.2.2: a component alone is not interleaved.
            let blocks = if count == 1 { 1 } else { (h * v) as u64 };
            let (dc, ac) = (usize::from(pair[1] >> 4), usize::from(pair[1] & 15));
            self.components.push(Component { blocks, dc, ac });
        }
        let (across, down) = if count == 1 { (8, 8) } else { (8 * widest, 8 * highest) };
        let units = frame.width.div_ceil(across) * frame.height.div_ceil(down);
        self.units = u32::try_from(units).map_err(|_| JpegError::Unsupported)?;
        Ok(())
    }

    pub(crate) fn start(&self) -> Position {
        Position::default()
    }

    /// The marked picture as a whole.
    #[must_use]
    pub fn marked(&self, mark: &Mark) -> Vec<u8> {
        let mut bytes = Vec::new();
        self.part(&self.start(), mark, u64::MAX, &mut |byte| bytes.push(byte));
        bytes
    }

    /// Codes the part that begins at `position`: `limit` bytes or a little more, or up to the end. Returns its length, and
    /// where the next one begins.
    pub(crate) fn part(
        &self,
        position: &Position,
        mark: &Mark,
        limit: u64,
        out: &mut dyn FnMut(u8),
    ) -> (u64, Option<Position>) {
        // A position of another picture: a replica has been given another file. The output ends there.
        self.code(position, mark, limit, out).unwrap_or((0, None))
    }

    fn code(
        &self,
        position: &Position,
        mark: &Mark,
        limit: u64,
        out: &mut dyn FnMut(u8),
    ) -> Result<(u64, Option<Position>), JpegError> {
        let mut reader = Reader::new(&self.scan, position.read_bits);
        let mut writer = Writer::new(position.pending, out);
        let mut now = *position;
        if position.unit == 0 {
            self.head.iter().for_each(|&byte| writer.byte(byte));
        }
        let blocks_of_unit: u64 = self.components.iter().map(|component| component.blocks).sum();
        while now.unit < self.units {
            if writer.bytes >= limit && now.unit > 0 {
                (now.read_bits, now.pending) = (reader.at, writer.pending);
                return Ok((writer.bytes, Some(now)));
            }
            let mut block = u64::from(now.unit) * blocks_of_unit;
            for (index, component) in self.components.iter().enumerate() {
                for _ in 0..component.blocks {
                    let marked = index == 0 && mark.bit(block);
                    self.block(component, index, marked, &mut now, &mut reader, &mut writer)?;
                    block += 1;
                }
            }
            now.unit += 1;
        }
        writer.finish();
        writer.byte(0xff);
        writer.byte(0xd9);
        Ok((writer.bytes, None))
    }

    fn block(
        &self,
        component: &Component,
        index: usize,
        marked: bool,
        now: &mut Position,
        reader: &mut Reader<'_>,
        writer: &mut Writer<'_>,
    ) -> Result<(), JpegError> {
        let dc = self.read_dc.get(component.dc).and_then(Option::as_ref).ok_or(JpegError::Malformed)?;
        let ac = self.ac.get(component.ac).and_then(Option::as_ref).ok_or(JpegError::Malformed)?;
        let length = reader.symbol(dc)?;
        if !DC_CATEGORIES.contains(&length) {
            return Err(JpegError::Malformed);
        }
        let value = i32::from(now.read_dc[index]) + reader.value(length)?;
        let written = if marked && value < DC_MAX { value + 1 } else { value };
        let difference = written - i32::from(now.written_dc[index]);
        let needed = category(difference);
        if !DC_CATEGORIES.contains(&needed) {
            return Err(JpegError::Malformed);
        }
        writer.symbol(&self.written_dc, needed);
        writer.value(difference, needed);
        now.read_dc[index] = i16::try_from(value).map_err(|_| JpegError::Malformed)?;
        now.written_dc[index] = i16::try_from(written).map_err(|_| JpegError::Malformed)?;
        let mut coefficient = 1;
        while coefficient < 64 {
            let symbol = reader.symbol(ac)?;
            writer.symbol(ac, symbol);
            let (run, length) = (symbol >> 4, symbol & 15);
            if length == 0 {
                match run {
                    15 => coefficient += 16,
                    _ => break,
                }
                continue;
            }
            let value = reader.value(length)?;
            writer.value(value, length);
            coefficient += usize::from(run) + 1;
        }
        Ok(())
    }
}

impl Frame {
    fn read(body: &[u8]) -> Result<Self, JpegError> {
        let (height, width) = (short(body, 1)?, short(body, 3)?);
        let count = usize::from(*body.get(5).ok_or(JpegError::Truncated)?);
        if body[0] != 8 || count == 0 || count > MAX_COMPONENTS || height == 0 || width == 0 {
            return Err(JpegError::Unsupported);
        }
        let mut sampling = Vec::new();
        for component in body.get(6..6 + 3 * count).ok_or(JpegError::Truncated)?.chunks(3) {
            let (h, v) = (usize::from(component[1] >> 4), usize::from(component[1] & 15));
            if !(1..=4).contains(&h) || !(1..=4).contains(&v) {
                return Err(JpegError::Malformed);
            }
            sampling.push((component[0], h, v));
        }
        Ok(Self { width, height, sampling })
    }
}
