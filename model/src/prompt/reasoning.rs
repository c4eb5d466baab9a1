//! What becomes of the reasoning in generated turns when a dialogue is rendered again.
//!
//! Templates of models that reason keep the reasoning of the turns behind the last user message, where the model is
//! still at work, and drop it from older ones: `content.split("</think>")[-1].lstrip("\n")`. Generated ids do not pass
//! through the template, so the same is done to them here.

use std::borrow::Cow;

use crate::calls::Thinks;
use crate::chat_template::Content;
use crate::tokenizer::Tokenizer;

const OPEN: &str = "<think>";
const CLOSE: &str = "</think>";

/// What a prompt that opens the reasoning ends with.
pub(super) fn opener(prompt: &str, tokenizer: &Tokenizer) -> Vec<u32> {
    let opener = prompt.rfind(OPEN).map_or("", |at| &prompt[at..]);
    tokenizer.encode_with_specials(opener)
}

/// The ids of a turn whose reasoning the prompt has opened, with what has opened it; None when there is no reasoning.
pub(super) fn opened<'a>(ids: &'a [u32], opener: &[u32], tokenizer: &Tokenizer) -> Option<Cow<'a, [u32]>> {
    let text: Vec<u8> = ids.iter().flat_map(|id| tokenizer.token_bytes(*id)).copied().collect();
    String::from_utf8_lossy(&text).contains(CLOSE).then(|| [opener, ids].concat().into())
}

/// A message without the reasoning in front of it; None when there is none. `end` is the token that ends reasoning, if
/// that is one token.
pub(super) fn answer_of(content: &Content, end: Option<u32>) -> Option<Content> {
    let special = content.specials().iter().rev().find(|(_, id)| Some(*id) == end).map(|(at, _)| *at);
    let written = content.text().rfind(CLOSE).map(|at| at + CLOSE.len());
    let from = special.max(written)?;
    let text = &content.text()[from..];
    Some(content.behind(content.text().len() - text.trim_start_matches('\n').len()))
}

/// The ids of a turn without its reasoning. Ids behind it stay as they were generated.
pub(super) fn without<'a>(ids: &'a [u32], thinks: Thinks, tokenizer: &Tokenizer) -> Cow<'a, [u32]> {
    let ends = ids.last().is_some_and(|id| tokenizer.is_end_of_turn(*id));
    let (said, end) = ids.split_at(ids.len() - usize::from(ends));
    let mut text = Vec::new();
    // Where the text of each id ends.
    let ends_at: Vec<usize> = said
        .iter()
        .map(|id| {
            text.extend_from_slice(tokenizer.token_bytes(*id));
            text.len()
        })
        .collect();
    if thinks == Thinks::MayBegin && !text.trim_ascii_start().starts_with(OPEN.as_bytes()) {
        return ids.into();
    }
    let close = CLOSE.as_bytes();
    let Some(at) = text.windows(close.len()).rposition(|window| window == close) else { return end.into() };
    let answer = &text[at + close.len()..];
    let n_line_ends = answer.iter().take_while(|byte| **byte == b'\n').count();
    let from = at + close.len() + n_line_ends;
    match ends_at.iter().position(|end| *end == from) {
        Some(idx) => ids[idx + 1..].into(),
        // The answer begins within a token.
        None => {
            let answer = String::from_utf8_lossy(&text[from..]);
            [tokenizer.encode_ordinary(&answer).as_slice(), end].concat().into()
        }
    }
}
