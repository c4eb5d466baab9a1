//! Cuts text into the words that merges work on, and trusted text at its special tokens.
//!
//! Text is not normalised, as in llama.cpp. The published patterns end in `\s+(?!\S)|\s+`: a run of spaces before a word leaves its last space to the word.
//! Look-ahead costs a backtracking engine, so the pattern here ends in `\s+` and [`Words`] gives the last space back.

use std::collections::HashMap;
use std::fmt;
use std::ops::Range;

use regex::Regex;

use super::{Error, SpecialToken};

/// What the published patterns end in, where ours end in [`SPACES`].
const PUBLISHED_SPACES: &str = r"\s+(?!\S)|\s+";
const SPACES: &str = r"\s+";

/// The supported values of `tokenizer.ggml.pre` with what they mean.
const PATTERNS: [(&str, Pattern); 6] = [
    ("smollm", Pattern::SmolLm),
    ("gpt-2", Pattern::Gpt2),
    ("qwen2", Pattern::Qwen2),
    ("llama-bpe", Pattern::Llama3),
    ("llama3", Pattern::Llama3),
    ("llama-v3", Pattern::Llama3),
];

/// How text is cut into words.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Pattern {
    /// Each digit alone, then GPT-2's pattern on the text between digits.
    SmolLm,
    Gpt2,
    Qwen2,
    Llama3,
}

impl Pattern {
    /// The pattern with this name in GGUF.
    pub(super) fn named(name: &str) -> Result<Self, Error> {
        let found = PATTERNS.iter().find(|(known, _)| *known == name).map(|(_, pattern)| *pattern);
        let supported = Self::supported;
        found.ok_or_else(|| Error::UnsupportedPreTokenizer { found: name.to_owned(), supported: supported() })
    }

    /// The pattern with this regular expression in a `tokenizer.json`.
    pub(super) fn published_as(regex: &str) -> Option<Self> {
        let ours = format!("{}{SPACES}", regex.strip_suffix(PUBLISHED_SPACES)?);
        [Self::Qwen2, Self::Llama3].into_iter().find(|pattern| pattern.regex() == ours)
    }

    /// All names, for error messages.
    pub(super) fn supported() -> String {
        PATTERNS.map(|(known, _)| known).join(", ")
    }

    pub(super) fn is_llama3(self) -> bool {
        self == Self::Llama3
    }

    /// The published pattern without its look-ahead.
    fn regex(self) -> &'static str {
        match self {
            Self::SmolLm => r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+",
            Self::Gpt2 => r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+",
            Self::Qwen2 => {
                r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+"
            }
            Self::Llama3 => {
                r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+"
            }
        }
    }

    /// In these patterns line ends have an alternative of their own, without the look-ahead.
    fn keeps_line_ends(self) -> bool {
        matches!(self, Self::Qwen2 | Self::Llama3)
    }
}

/// Splits text of any origin into words.
pub(super) struct Splitter {
    pattern: Pattern,
    regex: Regex,
}

impl Splitter {
    pub(super) fn new(pattern: Pattern) -> Self {
        let regex = Regex::new(pattern.regex()).expect("the pattern is a constant that tests compile");
        Self { pattern, regex }
    }

    /// The words of `text`; together they are the whole text.
    pub(super) fn words<'a>(&'a self, text: &'a str) -> Words<'a> {
        Words { splitter: self, text, at: 0 }
    }
}

impl fmt::Debug for Splitter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.pattern.fmt(f)
    }
}

/// See [`Splitter::words`].
pub(super) struct Words<'a> {
    splitter: &'a Splitter,
    text: &'a str,
    at: usize,
}

impl<'a> Iterator for Words<'a> {
    type Item = &'a str;

    fn next(&mut self) -> Option<&'a str> {
        let found = self.splitter.regex.find_at(self.text, self.at)?;
        let word = found.as_str();
        let last = word.chars().next_back()?;
        let mut end = found.end();
        if last.is_whitespace() && word.len() > last.len_utf8() && self.gives_back(last, end) {
            end -= last.len_utf8();
        }
        self.at = end;
        Some(&self.text[found.start()..end])
    }
}

impl Words<'_> {
    /// Whether a run of white space that ends with `last` before `end` leaves `last` to the next word.
    fn gives_back(&self, last: char, end: usize) -> bool {
        let pattern = self.splitter.pattern;
        match self.text[end..].chars().next() {
            None => false,
            // The digit is cut out first, so the run stands at the end of its text.
            Some(next) if pattern == Pattern::SmolLm && next.is_numeric() => false,
            Some(_) => !(pattern.keeps_line_ends() && matches!(last, '\r' | '\n')),
        }
    }
}

/// Special tokens with the means to find them in trusted text, the longest first where several fit.
#[derive(Debug)]
pub(super) struct Specials {
    tokens: Vec<SpecialToken>,
    ids: HashMap<String, u32>,
    /// None when there are no special tokens.
    regex: Option<Regex>,
}

impl Specials {
    /// `tokens` in the order of their ids.
    ///
    /// # Errors
    /// When there are too many to search for.
    pub(super) fn new(tokens: Vec<SpecialToken>) -> Result<Self, Error> {
        let too_many =
            |e: regex::Error| Error::Inconsistent(format!("its special tokens cannot be searched for: {e}"));
        let mut texts: Vec<&str> = tokens.iter().map(|token| token.text.as_str()).collect();
        texts.sort_unstable_by_key(|text| (std::cmp::Reverse(text.len()), *text));
        let pattern = texts.iter().map(|text| regex::escape(text)).collect::<Vec<_>>().join("|");
        let regex = if texts.is_empty() { None } else { Some(Regex::new(&pattern).map_err(too_many)?) };
        let ids = tokens.iter().map(|token| (token.text.clone(), token.id)).collect();
        Ok(Self { tokens, ids, regex })
    }

    pub(super) fn all(&self) -> &[SpecialToken] {
        &self.tokens
    }

    pub(super) fn id(&self, text: &str) -> Option<u32> {
        self.ids.get(text).copied()
    }

    pub(super) fn by_id(&self, id: u32) -> Option<&SpecialToken> {
        self.tokens.binary_search_by_key(&id, |token| token.id).ok().map(|index| &self.tokens[index])
    }

    pub(super) fn find<'a>(&'a self, text: &'a str) -> impl Iterator<Item = (Range<usize>, u32)> + 'a {
        let found = self.regex.iter().flat_map(move |regex| regex.find_iter(text));
        found.map(|found| (found.range(), self.ids[found.as_str()]))
    }
}
