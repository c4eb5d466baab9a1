//! Byte-level BPE tokenizer built from the GGUF alone.
//!
//! Two ways to encode: [`Tokenizer::encode_ordinary`] for text of users and tools, in which nothing can become a
//! special token, and [`Tokenizer::encode_with_specials`] for text that is trusted to contain markers.
//!
//! Text is split into words by the model's pattern ([`split`]); a word that is a token of its own is found in one map
//! look-up, every other word goes through the merges of the `tokenizers` crate, whose results tests compare with.

mod byte_level;
mod split;

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use tokenizers::Model as _;
use tokenizers::models::bpe::{BPE, Vocab};

use crate::detokenize::ByteTable;
use crate::gguf::{self, Gguf};
use split::{Specials, Splitter};

/// End-of-turn markers of the model families, besides the file's `eos_token_id`.
const END_OF_TURN_TEXTS: [&str; 3] = ["<|im_end|>", "<|endoftext|>", "<|eot_id|>"];

/// The largest vocabularies take about 3 MB.
const MAX_VOCABULARY_BYTES: usize = 256 << 20;

/// `tokenizer.ggml.token_type` of a token that controls the model and is never text.
const TYPE_CONTROL: i64 = 3;
/// `tokenizer.ggml.token_type` of an added token that is text all the same, such as `<think>`.
const TYPE_USER_DEFINED: i64 = 4;

/// Why a tokenizer cannot be built from a file.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Gguf(#[from] gguf::Error),
    #[error("tokenizer model `{0}` is not supported (supported: gpt2, that is byte-level BPE)")]
    UnsupportedModel(String),
    #[error("pre-tokenizer `{found}` is not supported (supported: {supported})")]
    UnsupportedPreTokenizer { found: String, supported: String },
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
    /// Builds the tokenizer that `gguf` describes.
    ///
    /// # Errors
    /// Missing keys, and models or pre-tokenizers other than the supported ones, by name.
    pub fn new(gguf: &Gguf) -> Result<Self, Error> {
        let model = gguf.str("tokenizer.ggml.model")?;
        if model != "gpt2" {
            return Err(Error::UnsupportedModel(model.to_owned()));
        }
        let splitter = Splitter::new(gguf.str("tokenizer.ggml.pre")?)?;
        let tokens = gguf.strings("tokenizer.ggml.tokens")?;
        let kinds = gguf.ints("tokenizer.ggml.token_type")?;
        if kinds.len() != tokens.len() {
            let problem = format!("{} tokens but {} token types", tokens.len(), kinds.len());
            return Err(Error::Inconsistent(problem));
        }
        if tokens.iter().map(String::len).sum::<usize>() > MAX_VOCABULARY_BYTES {
            return Err(Error::Inconsistent(format!(
                "its tokens are longer than {MAX_VOCABULARY_BYTES} bytes in all"
            )));
        }
        let (bos, eos) = (token_id(gguf, "bos", tokens.len())?, token_id(gguf, "eos", tokens.len())?);
        let specials = Specials::new(special_tokens(tokens, kinds))?;
        let bytes = Arc::new(ByteTable::new(tokens.iter().zip(kinds).map(|(token, kind)| match *kind {
            TYPE_CONTROL => (token.as_bytes().to_vec(), true),
            TYPE_USER_DEFINED => (token.as_bytes().to_vec(), false),
            _ => (byte_level::to_bytes(token), false),
        })));
        let ordinary = |id: &u32| specials.by_id(*id).is_none();
        let by_bytes =
            (0..bytes.n_tokens()).filter(ordinary).map(|id| (bytes.bytes(id).to_vec(), id)).collect();
        Ok(Self {
            by_bytes,
            canonical: std::iter::repeat_with(AtomicU8::default).take(tokens.len()).collect(),
            merges: merges(tokens, gguf.strings("tokenizer.ggml.merges")?, &splitter)?,
            end_of_turn: end_of_turn(eos, &specials),
            bytes,
            splitter,
            specials,
            bos,
            eos,
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

fn token_id(gguf: &Gguf, which: &str, n_tokens: usize) -> Result<Option<u32>, Error> {
    let key = format!("tokenizer.ggml.{which}_token_id");
    if gguf.get(&key).is_none() {
        return Ok(None);
    }
    let id = gguf.u32(&key)?;
    if id as usize >= n_tokens {
        return Err(Error::Inconsistent(format!("`{key}` is {id}, but there are {n_tokens} tokens")));
    }
    Ok(Some(id))
}

fn special_tokens(tokens: &[String], kinds: &[i64]) -> Vec<SpecialToken> {
    let special = |(id, (text, kind)): (usize, (&String, &i64))| {
        let special = matches!(*kind, TYPE_CONTROL | TYPE_USER_DEFINED) && !text.is_empty();
        special.then(|| SpecialToken { id: id as u32, text: text.clone(), control: *kind == TYPE_CONTROL })
    };
    tokens.iter().zip(kinds).enumerate().filter_map(special).collect()
}

fn end_of_turn(eos: Option<u32>, specials: &Specials) -> Vec<u32> {
    let control = |text: &&str| specials.all().iter().find(|token| token.control && token.text == **text);
    let mut ids: Vec<u32> = eos.into_iter().collect();
    ids.extend(END_OF_TURN_TEXTS.iter().filter_map(control).map(|token| token.id));
    ids.sort_unstable();
    ids.dedup();
    ids
}

fn merges(tokens: &[String], merges: &[String], splitter: &Splitter) -> Result<BPE, Error> {
    let vocab: Vocab = tokens.iter().enumerate().map(|(id, token)| (token.clone(), id as u32)).collect();
    let pairs = merges.iter().map(|merge| {
        let (left, right) = merge.split_once(' ').ok_or_else(|| {
            Error::Inconsistent(format!("the merge `{merge}` is not two tokens with a space between them"))
        })?;
        Ok((left.to_owned(), right.to_owned()))
    });
    BPE::builder()
        .vocab_and_merges(vocab, pairs.collect::<Result<_, Error>>()?)
        .ignore_merges(splitter.ignores_merges())
        .build()
        .map_err(|e| Error::Inconsistent(format!("the merges do not fit the tokens: {e}")))
}

#[cfg(test)]
mod tests;
