//! From generated tokens to pieces of output: text, reasoning and calls.

use std::sync::Arc;

use model::calls::{CallFinder, Piece};
use model::detokenize::Detokenizer;
use model::tokenizer::Tokenizer;
use proto::v1;

use crate::prepare::Prepared;
use crate::state::Gateway;
use crate::wire::{Create, Logprob, ToolChoice};

/// A piece of output; of text also how likely its tokens were, when that was asked for.
pub(crate) type Part = (Piece, Vec<Logprob>);

/// What the output is within.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Text,
    /// Text that may turn out to be something else.
    Held,
    Reasoning,
    Call,
}

impl Kind {
    fn of(finder: &CallFinder) -> Self {
        match finder {
            _ if finder.is_reasoning() => Self::Reasoning,
            _ if finder.holds_back() => Self::Held,
            _ if finder.is_text() => Self::Text,
            _ => Self::Call,
        }
    }
}

/// Where in the output items begin.
#[derive(Debug, Default)]
struct Place {
    n_tokens: usize,
    /// Tokens before the item that is not complete yet.
    item_from: usize,
    /// Tokens before what may become the next item.
    next_from: Option<usize>,
    /// Tokens before the text that is held back.
    held_from: usize,
}

impl Place {
    /// The next token has led from one kind to another and has brought these pieces.
    fn moved(&mut self, before: Kind, after: Kind, pieces: &[Piece]) {
        let (at, behind) = (self.n_tokens, self.n_tokens + 1);
        let is_shown = pieces.iter().any(|piece| matches!(piece, Piece::Text(_)));
        let begins = pieces.iter().any(|piece| matches!(piece, Piece::Call(_) | Piece::Reasoning(_)));
        match (before, after) {
            (Kind::Held, Kind::Reasoning | Kind::Call) => self.next_from = Some(self.held_from),
            (Kind::Text, Kind::Reasoning | Kind::Call) => self.next_from = Some(at),
            _ => {}
        }
        if begins && let Some(from) = self.next_from.take() {
            self.item_from = from;
        }
        if pieces.iter().any(|piece| matches!(piece, Piece::End { .. })) {
            self.item_from = behind;
        }
        match (before, after) {
            // What looked like a call was none.
            (Kind::Call, Kind::Text | Kind::Held) if self.next_from.take().is_some() => {}
            (Kind::Reasoning | Kind::Call, Kind::Text | Kind::Held) => {
                self.next_from = None;
                self.item_from = behind;
            }
            _ => {}
        }
        // A token of which a part was shown is not held back.
        if after == Kind::Held && is_shown {
            self.held_from = behind;
        } else if before != Kind::Held {
            self.held_from = at;
        }
    }
}

/// The output of one response while it is generated.
#[derive(Debug)]
pub(crate) struct Output<'a> {
    tokenizer: &'a Tokenizer,
    detokenizer: Detokenizer,
    /// None: everything is text.
    finder: Option<CallFinder>,
    n_reasoning: usize,
    place: Place,
    /// Of tokens whose text has not been given on yet.
    logprobs: Vec<Logprob>,
}

impl<'a> Output<'a> {
    pub(crate) fn new(gateway: &'a Gateway, create: &Create, prepared: &Prepared) -> Self {
        let prompts = &gateway.text().prompts;
        // Calls that nobody offered, or wants, stay the text that they are.
        let tools = match create.tool_choice {
            _ if prepared.compacts => Arc::default(),
            ToolChoice::None => Arc::default(),
            _ => Arc::clone(&prepared.tools.shown),
        };
        let splits = !tools.is_empty() || prompts.format().knows_reasoning();
        let finder = splits.then(|| CallFinder::new(Arc::clone(prompts.format()), tools, prepared.thinks));
        let tokenizer = &*gateway.text().tokenizer;
        let detokenizer = Detokenizer::new(tokenizer.byte_table());
        Self { tokenizer, detokenizer, finder, n_reasoning: 0, place: Place::default(), logprobs: Vec::new() }
    }

    /// How many of the tokens stand before the item that is not complete yet.
    pub(crate) fn n_complete(&self) -> usize {
        // What follows the arguments of a call belongs to it, and the call is complete.
        let is_behind_call = self.finder.as_ref().is_some_and(CallFinder::is_behind_call);
        if is_behind_call { self.place.n_tokens } else { self.place.item_from }
    }

    /// Tokens of the output that are reasoning.
    pub(crate) fn n_reasoning(&self) -> usize {
        self.n_reasoning
    }

    /// What the tokens add.
    pub(crate) fn push(&mut self, tokens: &v1::Tokens) -> Vec<Part> {
        let mut pieces = Vec::new();
        for (idx, &id) in tokens.ids.iter().enumerate() {
            let text = self.detokenizer.push(id);
            let is_text = match &mut self.finder {
                None => {
                    if !text.is_empty() {
                        pieces.push(Piece::Text(text.to_owned()));
                    }
                    true
                }
                Some(finder) => {
                    let (before, n_before) = (Kind::of(finder), pieces.len());
                    self.n_reasoning += usize::from(before == Kind::Reasoning);
                    finder.push(id, text, &mut pieces);
                    self.place.moved(before, Kind::of(finder), &pieces[n_before..]);
                    finder.is_text()
                }
            };
            self.place.n_tokens += 1;
            if let Some(logprobs) = tokens.logprobs.get(idx)
                && is_text
                && !self.tokenizer.is_end_of_turn(id)
            {
                self.logprobs.push(Logprob::new(self.tokenizer, id, logprobs));
            }
        }
        self.parts(pieces)
    }

    /// What was held back until it was clear that nothing more comes.
    pub(crate) fn finish(&mut self) -> Vec<Part> {
        let next = Detokenizer::new(self.tokenizer.byte_table());
        let rest = std::mem::replace(&mut self.detokenizer, next).finish();
        let mut pieces = Vec::new();
        match self.finder.take() {
            None if rest.is_empty() => {}
            None => pieces.push(Piece::Text(rest)),
            Some(mut finder) => {
                if !rest.is_empty() {
                    finder.push(u32::MAX, &rest, &mut pieces);
                }
                finder.finish(&mut pieces);
            }
        }
        self.parts(pieces)
    }

    /// Pieces that belong together as one: an event costs more than a byte. Log-probabilities go with the first piece of
    /// text after their tokens.
    fn parts(&mut self, pieces: Vec<Piece>) -> Vec<Part> {
        let mut parts: Vec<Part> = Vec::with_capacity(pieces.len());
        for piece in pieces {
            match (parts.last_mut(), piece) {
                (Some((Piece::Text(text), _)), Piece::Text(more))
                | (Some((Piece::Reasoning(text), _)), Piece::Reasoning(more))
                | (Some((Piece::Arguments(text), _)), Piece::Arguments(more)) => text.push_str(&more),
                (_, piece) => parts.push((piece, Vec::new())),
            }
        }
        if let Some((_, logprobs)) = parts.iter_mut().find(|(piece, _)| matches!(piece, Piece::Text(_))) {
            *logprobs = std::mem::take(&mut self.logprobs);
        }
        parts
    }
}
