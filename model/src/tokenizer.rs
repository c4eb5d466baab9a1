//! Byte-level BPE tokenizer, built from what a GGUF file or a `tokenizer.json` says ([`source`]).
//!
//! Two ways to encode: [`Tokenizer::encode_ordinary`] for text of users and tools, in which nothing can become a
//! special token, and [`Tokenizer::encode_with_specials`] for text that is trusted to contain markers.
//!
//! Text is split into words by the model's pattern ([`split`]); a word that is a token of its own is found in one map
//! look-up, every other word goes through the merges of the `tokenizers` crate, whose results tests compare with.

mod byte_level;
mod json;
mod source;
mod split;

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use tokenizers::Model as _;
use tokenizers::models::bpe::{BPE, Vocab};

use crate::checkpoint::Checkpoint;
use crate::detokenize::ByteTable;
use crate::gguf;
use source::{Kind, Source};
use split::{Specials, Splitter};

/// End-of-turn markers of the model families, besides those that the files name.
const END_OF_TURN_TEXTS: [&str; 3] = ["<|im_end|>", "<|endoftext|>", "<|eot_id|>"];

/// The largest vocabularies take about 3 MB.
const MAX_VOCABULARY_BYTES: usize = 256 << 20;

/// Why a tokenizer cannot be built from a file.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Gguf(#[from] gguf::Error),
    #[error("tokenizer.json: {0}")]
    Json(#[from] serde_json::Error),
    #[error("{file}: {source}")]
    SideFile { file: &'static str, source: serde_json::Error },
    #[error("tokenizer model `{0}` is not supported (supported: byte-level BPE, which GGUF calls gpt2)")]
    UnsupportedModel(String),
    #[error("pre-tokenizer `{found}` is not supported (supported: {supported})")]
    UnsupportedPreTokenizer { found: String, supported: String },
    #[error("tokenizer feature {0} is not supported")]
    UnsupportedFeature(String),
    #[error("the vocabulary is inconsistent: {0}")]
    Inconsistent(String),
}

/// A token that the encoder cuts out of trusted text as a whole.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SpecialToken {
    pub id: u32,
    pub text: String,
    /// Controls the model and never reaches a client as text; otherwise an added token such as `<think>`.
    pub control: bool,
}

/// See the module's header. Share it with `Arc`; encoding needs no exclusive access.
pub struct Tokenizer {
    bytes: Arc<ByteTable>,
    /// Ordinary tokens by their bytes.
    by_bytes: HashMap<Vec<u8>, u32>,
    /// Per token: does encoding its text give it back? Found out at first use ([`Canonical`]).
    canonical: Vec<AtomicU8>,
    merges: BPE,
    splitter: Splitter,
    specials: Specials,
    end_of_turn: Vec<u32>,
    bos: Option<u32>,
    /// Every dialogue begins with `bos`, whether the chat template writes it or not.
    adds_bos: bool,
    eos: Option<u32>,
}

/// What is known of an ordinary token: a whole word equal to its text is encoded as this token, or as others.
/// (A vocabulary can hold tokens that its merges never build.)
#[repr(u8)]
#[derive(Clone, Copy, PartialEq, Eq)]
enum Canonical {
    Unknown = 0,
    Yes = 1,
    No = 2,
}

impl Tokenizer {
    /// Builds the tokenizer that the files of `checkpoint` describe.
    ///
    /// # Errors
    /// Missing keys, and models, pre-tokenizers and features other than the supported ones, by name.
    pub fn new(checkpoint: &Checkpoint) -> Result<Self, Error> {
        match checkpoint {
            Checkpoint::Gguf(gguf) => Self::of(&source::of_gguf(gguf)?),
            Checkpoint::Folder(folder) => Self::of(&json::Files::parse(&folder.texts)?.source()?),
        }
    }

    fn of(source: &Source<'_>) -> Result<Self, Error> {
        source.check()?;
        let splitter = Splitter::new(source.pattern);
        let specials = Specials::new(source.special_tokens())?;
        let bytes = Arc::new(ByteTable::new(source.tokens.iter().map(|(text, kind)| match kind {
            Kind::Control => (text.as_bytes().to_vec(), true),
            Kind::UserDefined => (text.as_bytes().to_vec(), false),
            Kind::Ordinary => (byte_level::to_bytes(text), false),
        })));
        let ordinary = |id: &u32| specials.by_id(*id).is_none();
        let by_bytes =
            (0..bytes.n_tokens()).filter(ordinary).map(|id| (bytes.bytes(id).to_vec(), id)).collect();
        Ok(Self {
            by_bytes,
            canonical: std::iter::repeat_with(AtomicU8::default).take(source.tokens.len()).collect(),
            merges: merges(source)?,
            end_of_turn: end_of_turn(source, &specials),
            bytes,
            splitter,
            specials,
            bos: source.bos,
            adds_bos: source.adds_bos,
            eos: source.eos,
        })
    }

    /// Encodes text of any origin. No special token comes out: `<|im_end|>` becomes ordinary pieces.
    ///
    /// A byte that the vocabulary lacks (SmolLM2 has none for some ASCII control characters) is left out, as llama.cpp
    /// and the `tokenizers` crate do.
    pub fn encode_ordinary(&self, text: &str) -> Vec<u32> {
        let mut ids = Vec::with_capacity(text.len() / 3);
        self.encode_ordinary_into(text, &mut ids);
        ids
    }

    /// [`Self::encode_ordinary`], appended to `ids`. O(text), about 0.1 µs a token.
    pub fn encode_ordinary_into(&self, text: &str, ids: &mut Vec<u32>) {
        let mut chars = String::new();
        for word in self.splitter.words(text) {
            match self.by_bytes.get(word.as_bytes()) {
                Some(id) if self.is_canonical(*id, word, &mut chars) => ids.push(*id),
                _ => self.merge_into(word, &mut chars, ids),
            }
        }
    }

    /// Encodes trusted text: special tokens in it become their ids, the text between them is encoded as ordinary.
    pub fn encode_with_specials(&self, text: &str) -> Vec<u32> {
        let mut ids = Vec::with_capacity(text.len() / 3);
        let mut from = 0;
        for (range, id) in self.specials.find(text) {
            self.encode_ordinary_into(&text[from..range.start], &mut ids);
            ids.push(id);
            from = range.end;
        }
        self.encode_ordinary_into(&text[from..], &mut ids);
        ids
    }

    /// The places of special tokens in `text`, in order: byte range and id.
    pub fn find_specials<'a>(
        &'a self,
        text: &'a str,
    ) -> impl Iterator<Item = (std::ops::Range<usize>, u32)> + 'a {
        self.specials.find(text)
    }

    /// All special tokens in the order of their ids.
    pub fn specials(&self) -> &[SpecialToken] {
        self.specials.all()
    }

    /// The id of the special token with this text.
    pub fn special_id(&self, text: &str) -> Option<u32> {
        self.specials.id(text)
    }

    /// True when every id means the same in both.
    pub fn same_vocabulary(&self, other: &Self) -> bool {
        let same = |id| self.bytes.bytes(id) == other.bytes.bytes(id);
        self.vocab_size() == other.vocab_size() && (0..self.vocab_size()).all(same)
    }

    /// Ids that end a turn: the file's eos and the control tokens known for it. Sorted, usually one to three.
    pub fn end_of_turn_ids(&self) -> &[u32] {
        &self.end_of_turn
    }

    pub fn is_end_of_turn(&self, id: u32) -> bool {
        self.end_of_turn.contains(&id)
    }

    pub fn bos_id(&self) -> Option<u32> {
        self.bos
    }

    /// What every dialogue has to begin with.
    pub(crate) fn leading_bos(&self) -> Option<u32> {
        self.bos.filter(|_| self.adds_bos)
    }

    pub fn eos_id(&self) -> Option<u32> {
        self.eos
    }

    pub fn vocab_size(&self) -> u32 {
        self.bytes.n_tokens()
    }

    /// The bytes of a token, also of a control token; empty for an id outside the vocabulary.
    pub fn token_bytes(&self, id: u32) -> &[u8] {
        self.bytes.bytes(id)
    }

    /// The table that detokenizers of this vocabulary share.
    pub fn byte_table(&self) -> Arc<ByteTable> {
        Arc::clone(&self.bytes)
    }

    fn is_canonical(&self, id: u32, word: &str, chars: &mut String) -> bool {
        let known = &self.canonical[id as usize];
        if known.load(Ordering::Relaxed) == Canonical::Unknown as u8 {
            let mut ids = Vec::new();
            self.merge_into(word, chars, &mut ids);
            let found = if ids == [id] { Canonical::Yes } else { Canonical::No };
            known.store(found as u8, Ordering::Relaxed);
        }
        known.load(Ordering::Relaxed) == Canonical::Yes as u8
    }

    /// Encodes one word by the merges. `chars` is scratch space.
    fn merge_into(&self, word: &str, chars: &mut String, ids: &mut Vec<u32>) {
        byte_level::to_chars(word.as_bytes(), chars);
        let tokens = self.merges.tokenize(chars).expect("without an unknown token the merges cannot fail");
        ids.extend(tokens.iter().map(|token| token.id));
    }
}

impl fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tokenizer")
            .field("vocab_size", &self.vocab_size())
            .field("pre_tokenizer", &self.splitter)
            .finish_non_exhaustive()
    }
}

fn end_of_turn(source: &Source<'_>, specials: &Specials) -> Vec<u32> {
    let control = |text: &&str| specials.all().iter().find(|token| token.control && token.text == **text);
    let mut ids = source.ends.clone();
    ids.extend(source.eos);
    ids.extend(END_OF_TURN_TEXTS.iter().filter_map(control).map(|token| token.id));
    ids.sort_unstable();
    ids.dedup();
    ids
}

fn merges(source: &Source<'_>) -> Result<BPE, Error> {
    let vocab: Vocab =
        source.tokens.iter().enumerate().map(|(id, (text, _))| ((*text).to_owned(), id as u32)).collect();
    let pairs = source.merges.iter().map(|(left, right)| ((*left).to_owned(), (*right).to_owned()));
    BPE::builder()
        .vocab_and_merges(vocab, pairs.collect())
        .ignore_merges(source.ignores_merges)
        .build()
        .map_err(|e| Error::Inconsistent(format!("the merges do not fit the tokens: {e}")))
}

#[cfg(test)]
mod tests;
