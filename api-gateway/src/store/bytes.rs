//! Values as bytes, one after the other: what rows are made of.

/// Longer numbers than this many bytes are none.
const MAX_VARINT_BYTES: usize = 10;

/// Bytes that are not what was written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Malformed;

/// Writes.
#[derive(Debug, Default)]
pub(super) struct Writer(pub(super) Vec<u8>);

impl Writer {
    pub(super) fn byte(&mut self, byte: u8) {
        self.0.push(byte);
    }

    pub(super) fn raw(&mut self, bytes: &[u8]) {
        self.0.extend_from_slice(bytes);
    }

    /// Seven bits a byte, the lowest first (LEB128).
    pub(super) fn number(&mut self, number: usize) {
        let mut rest = number;
        while rest >= 0x80 {
            self.0.push(u8::try_from(rest & 0x7f).expect("seven bits") | 0x80);
            rest >>= 7;
        }
        self.0.push(u8::try_from(rest).expect("seven bits"));
    }

    pub(super) fn text(&mut self, text: &str) {
        self.number(text.len());
        self.raw(text.as_bytes());
    }

    /// A byte that says whether the text is there, and the text.
    pub(super) fn some_text(&mut self, text: Option<&str>) {
        self.byte(text.is_some().into());
        if let Some(text) = text {
            self.text(text);
        }
    }

    /// Two bytes each when all ids of the vocabulary fit, else one to three.
    pub(super) fn ids(&mut self, ids: &[u32], width: IdWidth) {
        self.number(ids.len());
        match width {
            IdWidth::Two => {
                // An id that is outside of the vocabulary is a broken invariant of the log.
                let narrow = |id: &u32| u16::try_from(*id).expect("ids of this vocabulary have two bytes");
                self.0.extend(ids.iter().flat_map(|id| narrow(id).to_le_bytes()));
            }
            IdWidth::Varying => ids.iter().for_each(|&id| self.number(id as usize)),
        }
    }
}

/// How token ids are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum IdWidth {
    Two,
    Varying,
}

impl IdWidth {
    /// For a vocabulary of this size.
    pub(super) fn of_vocabulary(n_tokens: u32) -> Self {
        if n_tokens <= u32::from(u16::MAX) + 1 { Self::Two } else { Self::Varying }
    }
}

/// Reads what [`Writer`] wrote. Nothing is trusted: lengths are checked against what is there.
#[derive(Debug)]
pub(super) struct Reader<'a>(pub(super) &'a [u8]);

impl<'a> Reader<'a> {
    pub(super) fn raw(&mut self, n: usize) -> Result<&'a [u8], Malformed> {
        let (head, rest) = self.0.split_at_checked(n).ok_or(Malformed)?;
        self.0 = rest;
        Ok(head)
    }

    pub(super) fn array<const N: usize>(&mut self) -> Result<[u8; N], Malformed> {
        self.raw(N)?.try_into().map_err(|_| Malformed)
    }

    pub(super) fn byte(&mut self) -> Result<u8, Malformed> {
        Ok(self.array::<1>()?[0])
    }

    pub(super) fn number(&mut self) -> Result<usize, Malformed> {
        let mut number = 0_u64;
        for idx in 0..MAX_VARINT_BYTES {
            let byte = self.byte()?;
            number |= u64::from(byte & 0x7f) << (7 * idx).min(63);
            if byte < 0x80 {
                return usize::try_from(number).map_err(|_| Malformed);
            }
        }
        Err(Malformed)
    }

    /// How many values follow, of at least `least` bytes each.
    pub(super) fn count(&mut self, least: usize) -> Result<usize, Malformed> {
        let n = self.number()?;
        if n.checked_mul(least).is_some_and(|n_bytes| n_bytes <= self.0.len()) {
            Ok(n)
        } else {
            Err(Malformed)
        }
    }

    pub(super) fn text(&mut self) -> Result<&'a str, Malformed> {
        let n = self.count(1)?;
        std::str::from_utf8(self.raw(n)?).map_err(|_| Malformed)
    }

    pub(super) fn some_text(&mut self) -> Result<Option<&'a str>, Malformed> {
        match self.byte()? {
            0 => Ok(None),
            1 => Ok(Some(self.text()?)),
            _ => Err(Malformed),
        }
    }

    pub(super) fn ids(&mut self, width: IdWidth) -> Result<Vec<u32>, Malformed> {
        match width {
            IdWidth::Two => {
                let n = self.count(2)?;
                let (pairs, _) = self.raw(2 * n)?.as_chunks::<2>();
                Ok(pairs.iter().map(|pair| u16::from_le_bytes(*pair).into()).collect())
            }
            IdWidth::Varying => {
                let n = self.count(1)?;
                (0..n).map(|_| u32::try_from(self.number()?).map_err(|_| Malformed)).collect()
            }
        }
    }

    /// Nothing may be left.
    pub(super) fn end(self) -> Result<(), Malformed> {
        if self.0.is_empty() { Ok(()) } else { Err(Malformed) }
    }
}
