//! What ends the freedom of an output: a token, or a text in the bytes of its tokens.

/// Triggers of one constraint.
pub(super) const MAX_TRIGGERS: usize = 64;

/// Bytes of a trigger's text.
pub(super) const MAX_TEXT_BYTES: usize = 256;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Trigger {
    Token(u32),
    /// At least one byte.
    Text(Vec<u8>),
}

/// The end of a free output, in which the beginning of a text may stand.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Tail {
    bytes: Vec<u8>,
}

impl Tail {
    /// Adds a token. For every trigger that ends in it, in order, what the token's bytes say after it.
    pub(super) fn push<'a>(&mut self, token: u32, bytes: &'a [u8], triggers: &[Trigger]) -> Vec<&'a [u8]> {
        if triggers.contains(&Trigger::Token(token)) {
            return vec![&[]];
        }
        let n_before = self.bytes.len();
        self.bytes.extend_from_slice(bytes);
        let texts =
            || triggers.iter().filter_map(|t| if let Trigger::Text(text) = t { Some(text) } else { None });
        let ends = (1..=bytes.len())
            .filter(|n| texts().any(|text| self.bytes[..n_before + n].ends_with(text)))
            .map(|n| &bytes[n..]);
        let rests = ends.collect();
        let n_kept = texts().map(|text| text.len() - 1).max().unwrap_or(0).min(self.bytes.len());
        self.bytes.drain(..self.bytes.len() - n_kept);
        rests
    }
}

#[cfg(test)]
mod tests;
