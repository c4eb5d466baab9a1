//! Deterministic text that looks like the output of tools: the same seed gives the same words, about one token each.

use std::sync::Arc;

/// Words that byte-pair tokenizers know whole.
const WORDS: [&str; 96] = [
    "the", "a", "of", "to", "and", "in", "is", "was", "for", "with", "on", "as", "from", "by", "at", "this",
    "that", "are", "be", "it", "not", "all", "one", "two", "three", "new", "old", "first", "last", "next",
    "same", "other", "file", "line", "test", "case", "value", "name", "type", "list", "map", "key", "set",
    "call", "read", "write", "open", "close", "start", "end", "time", "day", "user", "group", "data",
    "table", "row", "column", "index", "page", "result", "error", "note", "state", "change", "check",
    "found", "made", "used", "left", "right", "high", "low", "full", "empty", "small", "large", "number",
    "order", "part", "point", "system", "service", "process", "memory", "network", "server", "client",
    "request", "response", "model", "block", "token", "text", "word", "path",
];

/// What lines of a tool's output begin with.
const OPENINGS: [&str; 8] = ["result", "note", "found", "line", "file", "check", "state", "the"];

/// Words and line ends that one line holds.
const LINE_UNITS: usize = 14;

/// A small generator of random numbers whose sequence never changes (SplitMix64).
#[derive(Debug, Clone)]
pub struct Rng(u64);

impl Rng {
    /// Starts the sequence of `seed`.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// The next 64 random bits.
    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn pick<'a>(&mut self, words: &[&'a str]) -> &'a str {
        let n = u64::try_from(words.len()).expect("a short list");
        words[usize::try_from(self.next_u64() % n).expect("an index of a short list")]
    }
}

/// Mixes `b` into the seed `a`, so that neighbours get unrelated sequences.
#[must_use]
pub fn mix(a: u64, b: u64) -> u64 {
    Rng::new(a ^ Rng::new(b).next_u64()).next_u64()
}

/// One stretch of a prompt.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Piece {
    Given(Arc<str>),
    /// The first `n` units of the sequence of `seed`.
    Words {
        seed: u64,
        n: usize,
    },
}

/// Text that is rendered when it is needed: traces name far more text than fits in memory. Cheap to clone.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Text(Vec<Piece>);

impl Text {
    /// Text that is known.
    #[must_use]
    pub fn given(text: impl Into<Arc<str>>) -> Self {
        Self(vec![Piece::Given(text.into())])
    }

    /// About `n` tokens of the sequence of `seed`; a shorter text is a prefix of a longer one of the same seed.
    #[must_use]
    pub fn words(seed: u64, n: usize) -> Self {
        Self(vec![Piece::Words { seed, n }])
    }

    /// Appends `more`.
    pub fn extend(&mut self, more: &Self) {
        self.0.extend_from_slice(&more.0);
    }

    /// True when nothing would be rendered.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.iter().all(|piece| match piece {
            Piece::Given(text) => text.is_empty(),
            Piece::Words { n, .. } => *n == 0,
        })
    }

    /// How many tokens the text has at most, nearly: real text is counted at 2.5 bytes a token.
    #[must_use]
    pub fn estimated_tokens(&self) -> usize {
        let of_piece = |piece: &Piece| match piece {
            Piece::Given(text) => text.len() * 2 / 5,
            Piece::Words { n, .. } => *n,
        };
        self.0.iter().map(of_piece).sum()
    }

    /// The text itself.
    #[must_use]
    pub fn render(&self) -> String {
        let mut out = String::new();
        for piece in &self.0 {
            match piece {
                Piece::Given(text) => out.push_str(text),
                Piece::Words { seed, n } => push_words(*seed, *n, &mut out),
            }
        }
        out
    }
}

/// Exactly `n_bytes` bytes of the sequence of `seed`.
#[must_use]
pub fn prose(seed: u64, n_bytes: usize) -> String {
    // A unit is at least one byte, so this many are enough.
    let mut out = String::new();
    push_words(seed, n_bytes, &mut out);
    out.truncate(n_bytes);
    out
}

fn push_words(seed: u64, n: usize, out: &mut String) {
    let mut rng = Rng::new(seed);
    for unit in 0..n {
        match unit % LINE_UNITS {
            0 => out.push_str(rng.pick(&OPENINGS)),
            last if last == LINE_UNITS - 1 => out.push('\n'),
            _ => {
                out.push(' ');
                out.push_str(rng.pick(&WORDS));
            }
        }
    }
}

#[cfg(test)]
mod tests;
