//! Token ids back to text, one id at a time.
//!
//! A token of a byte-level vocabulary can end in the middle of a character. [`Detokenizer`] keeps such a tail until the
//! character is complete, so that each piece is whole characters and all pieces together are what
//! `String::from_utf8_lossy` makes of all bytes.

use std::fmt;
use std::sync::Arc;

/// The bytes of every token of a vocabulary, in one allocation.
pub struct ByteTable {
    bytes: Vec<u8>,
    /// Token `i` lies at `ends[i]..ends[i + 1]`.
    ends: Vec<u32>,
    /// Sorted ids of control tokens: they have bytes, but no text.
    control: Vec<u32>,
}

impl ByteTable {
    /// From the bytes of each token in the order of ids, and whether it is a control token.
    pub fn new(tokens: impl Iterator<Item = (Vec<u8>, bool)>) -> Self {
        let mut table = Self { bytes: Vec::new(), ends: vec![0], control: Vec::new() };
        for (id, (bytes, control)) in tokens.enumerate() {
            table.bytes.extend(bytes);
            table.ends.push(table.bytes.len() as u32);
            if control {
                table.control.push(id as u32);
            }
        }
        table
    }

    /// The bytes of token `id`, also of a control token; empty for an id outside the vocabulary.
    pub fn bytes(&self, id: u32) -> &[u8] {
        match self.ends.get(id as usize..).unwrap_or_default() {
            [from, to, ..] => &self.bytes[*from as usize..*to as usize],
            _ => &[],
        }
    }

    /// The bytes that a client sees of token `id`: none of a control token.
    pub fn visible_bytes(&self, id: u32) -> &[u8] {
        if self.control.binary_search(&id).is_ok() { &[] } else { self.bytes(id) }
    }

    pub fn n_tokens(&self) -> u32 {
        self.ends.len() as u32 - 1
    }
}

impl fmt::Debug for ByteTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ByteTable({} tokens)", self.n_tokens())
    }
}

/// Decodes one stream of ids. Control tokens give no text.
#[derive(Debug, Clone)]
pub struct Detokenizer {
    table: Arc<ByteTable>,
    /// Start of a character whose end has not come yet; at most 3 bytes between calls.
    carry: Vec<u8>,
    piece: String,
}

impl Detokenizer {
    pub fn new(table: Arc<ByteTable>) -> Self {
        Self { table, carry: Vec::new(), piece: String::new() }
    }

    /// The text that `id` completes; empty while a character is incomplete. Bytes that can never become a character
    /// come out as U+FFFD.
    pub fn push(&mut self, id: u32) -> &str {
        self.piece.clear();
        self.carry.extend_from_slice(self.table.visible_bytes(id));
        let mut rest = self.carry.as_slice();
        loop {
            match str::from_utf8(rest) {
                Ok(text) => {
                    self.piece.push_str(text);
                    rest = &[];
                    break;
                }
                Err(error) => {
                    let (valid, invalid) = rest.split_at(error.valid_up_to());
                    self.piece.push_str(str::from_utf8(valid).expect("checked up to here"));
                    rest = invalid;
                    let Some(len) = error.error_len() else { break };
                    self.piece.push(char::REPLACEMENT_CHARACTER);
                    rest = &rest[len..];
                }
            }
        }
        let kept = rest.len();
        self.carry.drain(..self.carry.len() - kept);
        &self.piece
    }

    /// What is left when no more ids come: U+FFFD for an incomplete character, else nothing.
    pub fn finish(self) -> String {
        String::from_utf8_lossy(&self.carry).into_owned()
    }
}

#[cfg(test)]
mod tests;
