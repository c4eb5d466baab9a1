//! Prompt lookup: what followed the same words before is likely to follow them again.
//!
//! Every position of a text is chained to the previous one that ends with the same three tokens; a look-up walks the
//! chain and keeps the longest match. Saxena 2023, "Prompt Lookup Decoding"; suffix matches over earlier outputs as in
//! SuffixDecoding (Oliaro et al. 2024).

/// Tokens that must agree before a match counts.
pub(crate) const MIN_MATCH: usize = 3;

/// Longer matches are not told apart.
const MAX_MATCH: usize = 32;

/// Earlier places that a look-up compares with; the newest come first.
const MAX_CANDIDATES: usize = 16;

/// End of a chain.
const NONE: u32 = u32::MAX;

/// Stands between texts of a [`Recent`]; no token has this id.
const SEPARATOR: u32 = u32::MAX;

/// An index of a growing token list that the caller keeps. Memory: 8 to 16 bytes per token; O(1) per token.
#[derive(Debug, Default)]
pub(crate) struct SuffixIndex {
    /// The newest position whose three tokens fall into this bucket; a power of two of buckets.
    newest: Vec<u32>,
    /// Per position, the next older one of its bucket.
    older: Vec<u32>,
}

/// An earlier place that ends with the tokens looked up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Match {
    /// Index of the first token after the match.
    pub(crate) next: usize,
    /// Tokens that agree, from [`MIN_MATCH`] up.
    pub(crate) len: usize,
}

impl SuffixIndex {
    /// Adds the positions of `tokens` that are new since the last call, except the last `n_left_out`.
    pub(crate) fn extend(&mut self, tokens: &[u32], n_left_out: usize) {
        let end = tokens.len().saturating_sub(n_left_out);
        if end > self.newest.len() {
            self.newest = vec![NONE; (2 * end).next_power_of_two().max(64)];
            self.older.clear();
        }
        for at in self.older.len()..end {
            let mut older = NONE;
            if let Some(bucket) = self.bucket(&tokens[..=at]) {
                older = std::mem::replace(&mut self.newest[bucket], at as u32);
            }
            self.older.push(older);
        }
    }

    /// The longest match of the end of `suffix` in the indexed part of `tokens`, the newest of equals.
    pub(crate) fn longest(&self, tokens: &[u32], suffix: &[u32]) -> Option<Match> {
        let mut best: Option<Match> = None;
        let mut at = self.newest[self.bucket(suffix)?];
        for _ in 0..MAX_CANDIDATES {
            if at == NONE {
                break;
            }
            let len = common_suffix(&tokens[..=at as usize], suffix);
            if len >= MIN_MATCH && best.is_none_or(|best| len > best.len) {
                best = Some(Match { next: at as usize + 1, len });
                if len == MAX_MATCH {
                    break;
                }
            }
            at = self.older[at as usize];
        }
        best
    }

    /// Where the last three tokens belong.
    fn bucket(&self, tokens: &[u32]) -> Option<usize> {
        let gram = tokens.last_chunk::<MIN_MATCH>()?;
        if self.newest.is_empty() {
            return None;
        }
        let mix = |hash: u64, &token: &u32| (hash ^ u64::from(token)).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        let hash = gram.iter().fold(0, mix);
        Some((hash >> 32) as usize & (self.newest.len() - 1))
    }
}

fn common_suffix(a: &[u32], b: &[u32]) -> usize {
    a.iter().rev().zip(b.iter().rev()).take(MAX_MATCH).take_while(|(a, b)| a == b).count()
}

/// The newest outputs of one tenant, in two halves of which the older one is forgotten as a whole.
#[derive(Debug, Default)]
pub(crate) struct Recent {
    halves: [Half; 2],
}

#[derive(Debug, Default)]
struct Half {
    tokens: Vec<u32>,
    index: SuffixIndex,
}

impl Recent {
    /// Tokens of a half.
    const HALF_TOKENS: usize = 16 * 1024;

    /// Remembers an output; only the end of one that is longer than a half.
    pub(crate) fn add(&mut self, output: &[u32]) {
        let output = &output[output.len().saturating_sub(Self::HALF_TOKENS)..];
        if self.halves[0].tokens.len() + output.len() > Self::HALF_TOKENS {
            self.halves.swap(0, 1);
            self.halves[0] = Half::default();
        }
        let half = &mut self.halves[0];
        half.tokens.extend_from_slice(output);
        half.tokens.push(SEPARATOR);
        half.index.extend(&half.tokens, 0);
    }

    /// The longest match of the end of `suffix`, and what followed it there.
    pub(crate) fn longest(&self, suffix: &[u32]) -> Option<(Match, &[u32])> {
        let of = |half: &'_ Half| half.index.longest(&half.tokens, suffix);
        let (newer, older) = (of(&self.halves[0]), of(&self.halves[1]));
        let (found, half) = match (newer, older) {
            (Some(newer), Some(older)) if older.len > newer.len => (older, &self.halves[1]),
            (Some(newer), _) => (newer, &self.halves[0]),
            (None, older) => (older?, &self.halves[1]),
        };
        let after = &half.tokens[found.next..];
        let len = after.iter().position(|&token| token == SEPARATOR).unwrap_or(after.len());
        (len > 0).then_some((found, &after[..len]))
    }
}

#[cfg(test)]
mod tests;
