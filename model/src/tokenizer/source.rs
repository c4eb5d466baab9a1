//! What a model's files say of its tokenizer, whatever their form; and how a GGUF file says it.

use super::split::Pattern;
use super::{Error, MAX_VOCABULARY_BYTES, SpecialToken};
use crate::gguf::Gguf;

/// `tokenizer.ggml.token_type` of a token that controls the model and is never text.
const TYPE_CONTROL: i64 = 3;
/// `tokenizer.ggml.token_type` of an added token that is text all the same, such as `<think>`.
const TYPE_USER_DEFINED: i64 = 4;

/// Everything a tokenizer is built from.
#[derive(Debug)]
pub(super) struct Source<'a> {
    /// By id.
    pub(super) tokens: Vec<(&'a str, Kind)>,
    /// The earlier, the stronger.
    pub(super) merges: Vec<(&'a str, &'a str)>,
    pub(super) pattern: Pattern,
    /// A word that is a token is taken as it is, whether the merges build it or not.
    pub(super) ignores_merges: bool,
    pub(super) bos: Option<u32>,
    pub(super) adds_bos: bool,
    pub(super) eos: Option<u32>,
    /// Ids besides `eos` that end a turn.
    pub(super) ends: Vec<u32>,
}

/// What a token is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Ordinary,
    /// Controls the model and is never text.
    Control,
    /// Added, but text all the same.
    UserDefined,
}

impl Source<'_> {
    /// Refuses ids outside the vocabulary and vocabularies of absurd size.
    pub(super) fn check(&self) -> Result<(), Error> {
        let ids = self.bos.into_iter().chain(self.eos).chain(self.ends.iter().copied());
        if let Some(id) = ids.into_iter().find(|id| *id as usize >= self.tokens.len()) {
            let problem = format!("it begins or ends texts with token {id}, but has {}", self.tokens.len());
            return Err(Error::Inconsistent(problem));
        }
        if self.tokens.iter().map(|(text, _)| text.len()).sum::<usize>() > MAX_VOCABULARY_BYTES {
            let problem = format!("its tokens are longer than {MAX_VOCABULARY_BYTES} bytes in all");
            return Err(Error::Inconsistent(problem));
        }
        Ok(())
    }

    /// In the order of their ids.
    pub(super) fn special_tokens(&self) -> Vec<SpecialToken> {
        let special = |(id, (text, kind)): (usize, &(&str, Kind))| {
            let special = *kind != Kind::Ordinary && !text.is_empty();
            let control = *kind == Kind::Control;
            special.then(|| SpecialToken { id: id as u32, text: (*text).to_owned(), control })
        };
        self.tokens.iter().enumerate().filter_map(special).collect()
    }
}

/// The tokenizer of a GGUF file.
pub(super) fn of_gguf(gguf: &Gguf) -> Result<Source<'_>, Error> {
    let model = gguf.str("tokenizer.ggml.model")?;
    if model != "gpt2" {
        return Err(Error::UnsupportedModel(model.to_owned()));
    }
    let pattern = Pattern::named(gguf.str("tokenizer.ggml.pre")?)?;
    let tokens = gguf.strings("tokenizer.ggml.tokens")?;
    let kinds = gguf.ints("tokenizer.ggml.token_type")?;
    if kinds.len() != tokens.len() {
        let problem = format!("{} tokens but {} token types", tokens.len(), kinds.len());
        return Err(Error::Inconsistent(problem));
    }
    let kind = |kind: &i64| match *kind {
        TYPE_CONTROL => Kind::Control,
        TYPE_USER_DEFINED => Kind::UserDefined,
        _ => Kind::Ordinary,
    };
    let has = |key: &str| gguf.get(key).is_some();
    let id = |key: &str| if has(key) { gguf.u32(key).map(Some) } else { Ok(None) };
    let adds_bos = "tokenizer.ggml.add_bos_token";
    Ok(Source {
        tokens: tokens.iter().zip(kinds).map(|(token, id)| (token.as_str(), kind(id))).collect(),
        merges: pairs(gguf.strings("tokenizer.ggml.merges")?)?,
        pattern,
        ignores_merges: pattern.is_llama3(),
        bos: id("tokenizer.ggml.bos_token_id")?,
        // As llama.cpp does when the file does not say.
        adds_bos: if has(adds_bos) { gguf.bool(adds_bos)? } else { pattern.is_llama3() },
        eos: id("tokenizer.ggml.eos_token_id")?,
        ends: id("tokenizer.ggml.eot_token_id")?.into_iter().collect(),
    })
}

fn pairs(merges: &[String]) -> Result<Vec<(&str, &str)>, Error> {
    merges.iter().map(|merge| pair(merge)).collect()
}

/// The two tokens of a merge written as one text.
pub(super) fn pair(merge: &str) -> Result<(&str, &str), Error> {
    merge.split_once(' ').ok_or_else(|| {
        Error::Inconsistent(format!("the merge `{merge}` is not two tokens with a space between them"))
    })
}
