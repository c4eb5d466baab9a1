//! A tokenizer as `tokenizer.json` of the `tokenizers` library describes it, with its side files.
//!
//! Text is not normalised, as in llama.cpp: a file that asks for NFC is accepted, and text that is not NFC is encoded as
//! it came, so that decoding gives it back.

use std::collections::HashMap;
use std::fmt;

use serde::Deserialize;
use serde::de::{Deserializer, Error as _, SeqAccess, Visitor};
use serde_json::Value;
use serde_json::value::RawValue;

use super::Error;
use super::source::{Kind, Source, pair};
use super::split::Pattern;
use crate::folder::{GENERATION_CONFIG, TOKENIZER_CONFIG, Texts};

/// The files, read but not yet put together.
pub(super) struct Files {
    model: Bpe,
    added_tokens: Vec<AddedToken>,
    pattern: Pattern,
    post_processor: Option<Value>,
    config: SideConfig,
    ends: Vec<u32>,
}

/// `tokenizer.json`; what the model is made of depends on its type.
#[derive(Deserialize)]
struct Outer<'a> {
    #[serde(default)]
    added_tokens: Vec<AddedToken>,
    normalizer: Option<Value>,
    pre_tokenizer: Option<Value>,
    post_processor: Option<Value>,
    #[serde(borrow)]
    model: &'a RawValue,
}

#[derive(Deserialize)]
struct ModelType {
    /// Old files leave it out for BPE.
    r#type: Option<String>,
}

#[derive(Deserialize)]
struct Bpe {
    vocab: HashMap<String, u32>,
    merges: Vec<Merge>,
    #[serde(default)]
    ignore_merges: bool,
    #[serde(default)]
    byte_fallback: bool,
    continuing_subword_prefix: Option<String>,
    end_of_word_suffix: Option<String>,
}

/// Older files write `"a b"`, newer ones `["a", "b"]`.
enum Merge {
    Text(String),
    Pair(String, String),
}

#[derive(Deserialize)]
struct AddedToken {
    id: u32,
    content: String,
    #[serde(default)]
    special: bool,
    #[serde(default)]
    lstrip: bool,
    #[serde(default)]
    rstrip: bool,
    #[serde(default)]
    single_word: bool,
}

/// What `tokenizer_config.json` adds.
#[derive(Default, Deserialize)]
struct SideConfig {
    add_bos_token: Option<bool>,
    bos_token: Option<TokenText>,
    eos_token: Option<TokenText>,
}

/// A token by its text, or as an object with it.
#[derive(Deserialize)]
#[serde(untagged)]
enum TokenText {
    Text(String),
    Token { content: String },
}

#[derive(Default, Deserialize)]
struct Ends {
    eos_token_id: Option<EndIds>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum EndIds {
    One(u32),
    Several(Vec<u32>),
}

impl Files {
    pub(super) fn parse(texts: &Texts) -> Result<Self, Error> {
        let outer: Outer<'_> = serde_json::from_slice(&texts.tokenizer)?;
        let model: ModelType = serde_json::from_str(outer.model.get())?;
        if model.r#type.as_deref().is_some_and(|found| found != "BPE") {
            return Err(Error::UnsupportedModel(model.r#type.unwrap_or_default()));
        }
        check_normalizer(outer.normalizer.as_ref())?;
        let pattern = pattern(outer.pre_tokenizer.as_ref())?;
        let model: Bpe = serde_json::from_str(outer.model.get())?;
        let affixes = [&model.continuing_subword_prefix, &model.end_of_word_suffix];
        if model.byte_fallback || affixes.into_iter().flatten().any(|affix| !affix.is_empty()) {
            return Err(Error::UnsupportedModel(
                "BPE on characters, with byte fallback or affixes".to_owned(),
            ));
        }
        let trims = |token: &&AddedToken| token.lstrip || token.rstrip || token.single_word;
        if let Some(token) = outer.added_tokens.iter().find(trims) {
            let feature = format!("lstrip, rstrip or single_word of the token `{}`", token.content);
            return Err(Error::UnsupportedFeature(feature));
        }
        let ends: Ends = side(GENERATION_CONFIG, texts.generation_config.as_deref())?;
        Ok(Self {
            model,
            added_tokens: outer.added_tokens,
            pattern,
            post_processor: outer.post_processor,
            config: side(TOKENIZER_CONFIG, texts.tokenizer_config.as_deref())?,
            ends: match ends.eos_token_id {
                Some(EndIds::One(id)) => vec![id],
                Some(EndIds::Several(ids)) => ids,
                None => Vec::new(),
            },
        })
    }

    pub(super) fn source(&self) -> Result<Source<'_>, Error> {
        let tokens = self.tokens()?;
        let merges = self.model.merges.iter().map(|merge| match merge {
            Merge::Text(text) => pair(text),
            Merge::Pair(left, right) => Ok((left.as_str(), right.as_str())),
        });
        let bos = self.id_of(self.config.bos_token.as_ref());
        Ok(Source {
            merges: merges.collect::<Result<_, _>>()?,
            pattern: self.pattern,
            ignores_merges: self.model.ignore_merges,
            adds_bos: self.config.add_bos_token.unwrap_or_else(|| self.template_begins_with_bos()),
            bos,
            eos: self.id_of(self.config.eos_token.as_ref()),
            ends: self.ends.clone(),
            tokens,
        })
    }

    /// Texts and kinds by id. Ids may have holes, but not more than there are tokens.
    fn tokens(&self) -> Result<Vec<(&str, Kind)>, Error> {
        let ordinary = self.model.vocab.iter().map(|(text, id)| (*id, (text.as_str(), Kind::Ordinary)));
        let added = self.added_tokens.iter().map(|token| (token.id, (token.content.as_str(), token.kind())));
        let n_tokens = self.model.vocab.len() + self.added_tokens.len();
        let last = ordinary.clone().chain(added.clone()).map(|(id, _)| id as usize).max();
        let Some(last) = last.filter(|last| *last < 2 * n_tokens) else {
            return Err(Error::Inconsistent(format!("{n_tokens} tokens with ids up to {last:?}")));
        };
        let mut tokens = vec![("", Kind::Ordinary); last + 1];
        ordinary.chain(added).for_each(|(id, token)| tokens[id as usize] = token);
        Ok(tokens)
    }

    fn id_of(&self, token: Option<&TokenText>) -> Option<u32> {
        let (TokenText::Text(text) | TokenText::Token { content: text }) = token?;
        let added = self.added_tokens.iter().find(|token| token.content == *text).map(|token| token.id);
        added.or_else(|| self.model.vocab.get(text).copied())
    }

    /// Whether a post-processor puts the first token of every text.
    fn template_begins_with_bos(&self) -> bool {
        let steps = self.post_processor.iter().flat_map(|processor| steps(processor, "processors"));
        steps.into_iter().any(|step| step.pointer("/single/0/SpecialToken").is_some())
    }
}

impl AddedToken {
    /// Converters to GGUF also take tokens for control that are not marked as special but look like it.
    fn kind(&self) -> Kind {
        let looks_special = self.content.starts_with("<|") && self.content.ends_with("|>");
        if self.special || looks_special { Kind::Control } else { Kind::UserDefined }
    }
}

impl<'de> Deserialize<'de> for Merge {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(MergeVisitor)
    }
}

struct MergeVisitor;

impl<'de> Visitor<'de> for MergeVisitor {
    type Value = Merge;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a merge: \"a b\" or [\"a\", \"b\"]")
    }

    fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<Merge, E> {
        Ok(Merge::Text(text.to_owned()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut parts: A) -> Result<Merge, A::Error> {
        match (parts.next_element()?, parts.next_element()?, parts.next_element::<String>()?) {
            (Some(left), Some(right), None) => Ok(Merge::Pair(left, right)),
            _ => Err(A::Error::custom("a merge is made of two tokens")),
        }
    }
}

/// A side file's content; what it would hold by default when it is not there.
fn side<'a, T: Default + Deserialize<'a>>(file: &'static str, json: Option<&'a [u8]>) -> Result<T, Error> {
    let Some(json) = json else { return Ok(T::default()) };
    serde_json::from_slice(json).map_err(|source| Error::SideFile { file, source })
}

fn type_of(step: &Value) -> &str {
    step.get("type").and_then(Value::as_str).unwrap_or("without a type")
}

/// The steps of a sequence, or the one step that it is.
fn steps<'a>(value: &'a Value, key: &str) -> Vec<&'a Value> {
    match value.get(key).and_then(Value::as_array) {
        Some(steps) => steps.iter().collect(),
        None => vec![value],
    }
}

fn check_normalizer(normalizer: Option<&Value>) -> Result<(), Error> {
    match normalizer.map(type_of) {
        None | Some("NFC") => Ok(()),
        Some(other) => Err(Error::UnsupportedFeature(format!("normalizer `{other}`"))),
    }
}

/// The pattern that the pre-tokenizer's steps amount to.
fn pattern(pre_tokenizer: Option<&Value>) -> Result<Pattern, Error> {
    let steps = pre_tokenizer.map_or_else(Vec::new, |value| steps(value, "pretokenizers"));
    let has = |step: &Value, key: &str, wanted: bool, default: bool| {
        step.get(key).and_then(Value::as_bool).unwrap_or(default) == wanted
    };
    let is_bytes = |step: &Value| type_of(step) == "ByteLevel" && has(step, "add_prefix_space", false, true);
    let found = match steps.as_slice() {
        [bytes] if is_bytes(bytes) && has(bytes, "use_regex", true, true) => Some(Pattern::Gpt2),
        [digits, bytes] if is_bytes(bytes) && type_of(digits) == "Digits" => {
            let alone = has(digits, "individual_digits", true, false) && has(bytes, "use_regex", true, true);
            alone.then_some(Pattern::SmolLm)
        }
        [split, bytes] if is_bytes(bytes) && type_of(split) == "Split" => {
            let isolated = split.get("behavior").and_then(Value::as_str) == Some("Isolated");
            let plain =
                isolated && has(split, "invert", false, false) && has(bytes, "use_regex", false, true);
            let regex = split.pointer("/pattern/Regex").and_then(Value::as_str);
            regex.filter(|_| plain).and_then(Pattern::published_as)
        }
        _ => None,
    };
    found.ok_or_else(|| {
        let describe = |step: &&Value| match step.pointer("/pattern/Regex").and_then(Value::as_str) {
            Some(regex) => format!("Split by {regex}"),
            None => type_of(step).to_owned(),
        };
        let found = steps.iter().map(describe).collect::<Vec<_>>().join(", then ");
        Error::UnsupportedPreTokenizer { found, supported: Pattern::supported() }
    })
}
