//! The bits of a JPEG scan: Huffman codes, and the zero byte after each 0xff (ITU-T T.81 Annex F).

use crate::jpeg::JpegError;

/// Reads bits of a scan.
#[derive(Clone, Debug)]
pub(crate) struct Reader<'a> {
    scan: &'a [u8],
    /// Position in bits, those of stuffed bytes included.
    pub(crate) at: u64,
}

impl<'a> Reader<'a> {
    pub(crate) fn new(scan: &'a [u8], at: u64) -> Self {
        Self { scan, at }
    }

    fn bit(&mut self) -> Result<u32, JpegError> {
        let byte = (self.at / 8) as usize;
        let value = *self.scan.get(byte).ok_or(JpegError::Truncated)?;
        let bit = u32::from(value >> (7 - self.at % 8) & 1);
        self.at += 1;
        if self.at.is_multiple_of(8) && value == 0xff {
            self.at += 8;
        }
        Ok(bit)
    }

    /// A number of `length` bits in the code of T.81 F.1.2.1.
    pub(crate) fn value(&mut self, length: u8) -> Result<i32, JpegError> {
        let mut bits = 0_i32;
        for _ in 0..length {
            bits = bits << 1 | self.bit()? as i32;
        }
        let negative = length > 0 && bits < 1 << (length - 1);
        Ok(if negative { bits - (1 << length) + 1 } else { bits })
    }

    pub(crate) fn symbol(&mut self, table: &Huffman) -> Result<u8, JpegError> {
        let (mut code, mut first, mut index) = (0_u32, 0_u32, 0_usize);
        for &count in &table.counts {
            code = code << 1 | self.bit()?;
            let count = u32::from(count);
            if code < first + count {
                let symbol = table.symbols.get(index + (code - first) as usize);
                return symbol.copied().ok_or(JpegError::Malformed);
            }
            index += count as usize;
            first = (first + count) << 1;
        }
        Err(JpegError::Malformed)
    }
}

/// Writes bits of a scan, from any bit on.
pub(crate) struct Writer<'a> {
    /// The bits of the byte under way, and how many.
    pub(crate) pending: (u8, u8),
    /// Bytes written.
    pub(crate) bytes: u64,
    out: &'a mut dyn FnMut(u8),
}

impl<'a> Writer<'a> {
    pub(crate) fn new(pending: (u8, u8), out: &'a mut dyn FnMut(u8)) -> Self {
        Self { pending, bytes: 0, out }
    }

    /// A byte outside the scan.
    pub(crate) fn byte(&mut self, byte: u8) {
        (self.out)(byte);
        self.bytes += 1;
    }

    pub(crate) fn bits(&mut self, value: u32, length: u8) {
        for bit in (0..length).rev() {
            let (byte, count) = self.pending;
            self.pending = (byte << 1 | (value >> bit & 1) as u8, count + 1);
            if count == 7 {
                let byte = self.pending.0;
                self.pending = (0, 0);
                self.byte(byte);
                if byte == 0xff {
                    self.byte(0);
                }
            }
        }
    }

    pub(crate) fn symbol(&mut self, table: &Huffman, symbol: u8) {
        let (code, length) = table.codes[usize::from(symbol)];
        self.bits(code, length);
    }

    pub(crate) fn value(&mut self, value: i32, length: u8) {
        let bits = if value < 0 { value + (1 << length) - 1 } else { value };
        self.bits(bits as u32, length);
    }

    /// Fills the last byte with ones, as T.81 F.1.2.3 has it.
    pub(crate) fn finish(&mut self) {
        if self.pending.1 > 0 {
            let missing = 8 - self.pending.1;
            self.bits((1 << missing) - 1, missing);
        }
    }
}

/// Bits that a number needs.
pub(crate) fn category(value: i32) -> u8 {
    (32 - value.unsigned_abs().leading_zeros()) as u8
}

/// A Huffman table as DHT has it, and the code of each symbol.
#[derive(Clone, Debug)]
pub(crate) struct Huffman {
    counts: [u8; 16],
    symbols: Vec<u8>,
    codes: Vec<(u32, u8)>,
}

impl Huffman {
    pub(crate) fn new(counts: [u8; 16], symbols: Vec<u8>) -> Self {
        let mut codes = vec![(0, 0); 256];
        let (mut code, mut index) = (0_u32, 0);
        for (length, &count) in (1_u8..).zip(&counts) {
            for _ in 0..count {
                if let Some(&symbol) = symbols.get(index) {
                    codes[usize::from(symbol)] = (code, length);
                }
                (code, index) = (code + 1, index + 1);
            }
            code <<= 1;
        }
        Self { counts, symbols, codes }
    }

    /// A table in which every symbol of `symbols` has a code of one length; whatever a mark makes of a block has one.
    pub(crate) fn flat(symbols: impl Iterator<Item = u8>) -> Self {
        let symbols: Vec<u8> = symbols.collect();
        // The code of ones alone is left free (T.81 C.2).
        let length = (symbols.len() + 1).next_power_of_two().trailing_zeros() as usize;
        let mut counts = [0; 16];
        counts[length - 1] = symbols.len() as u8;
        Self::new(counts, symbols)
    }

    /// The body of a DHT segment for one table.
    pub(crate) fn describe(&self, class_and_id: u8, out: &mut Vec<u8>) {
        out.push(class_and_id);
        out.extend_from_slice(&self.counts);
        out.extend_from_slice(&self.symbols);
    }
}
