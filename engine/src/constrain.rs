//! Outputs that have to follow a grammar ([`model::grammar`]), from their first token on or after triggers.
//!
//! ```text
//!            trigger complete                       grammar can go on no further
//!   free ────────────────────────▶ ruled by grammar ──────────────────────────▶ free
//!   (every token is allowed)       (masks)                 (only with triggers; else the end)
//! ```
//!
//! Which tokens may come next depends on the output so far and on nothing else, so constrained output is the same with
//! and without drafts. Drafts are tried on the same state and taken back where they were wrong.

use std::fmt;
use std::sync::Arc;

use model::detokenize::ByteTable;
use model::grammar::{Error as GrammarError, Grammar, GrammarEngine, Mask, Matcher};
use proto::v1;
use proto::v1::trigger::Trigger as WireTrigger;

use crate::job::Error;
use triggers::{Tail, Trigger};

pub(crate) mod masks;
mod triggers;

/// What an output must look like, checked and ready.
pub struct Constraint {
    grammar: Grammar,
    triggers: Arc<[Trigger]>,
    /// The bytes of tokens, for triggers that are texts.
    bytes: Arc<ByteTable>,
    /// How many of the prompt's last tokens are output already.
    generated: usize,
    start: Phase,
}

impl Constraint {
    /// Checks a constraint and compiles its grammar, which blocks as [`GrammarEngine::compile`] does.
    ///
    /// # Errors
    /// [`Error::Constraint`] with what is wrong; [`Error::GrammarUnknown`] for a hash of no grammar that is kept.
    pub fn from_wire(wire: v1::Constraint, grammars: &GrammarEngine) -> Result<Self, Error> {
        let bad = |why: &str| Error::Constraint(why.to_owned());
        if wire.triggers.len() > triggers::MAX_TRIGGERS {
            return Err(bad(&format!("it has more than {} triggers", triggers::MAX_TRIGGERS)));
        }
        let vocab = grammars.byte_table().n_tokens();
        let trigger = |wire: v1::Trigger| match wire.trigger {
            Some(WireTrigger::Id(id)) if id < vocab => Ok(Trigger::Token(id)),
            Some(WireTrigger::Id(_)) => Err(bad("a trigger is no token of the vocabulary")),
            Some(WireTrigger::Text(text)) if (1..=triggers::MAX_TEXT_BYTES).contains(&text.len()) => {
                Ok(Trigger::Text(text.into_bytes()))
            }
            Some(WireTrigger::Text(_)) => {
                Err(bad(&format!("a trigger's text has 1 to {} bytes", triggers::MAX_TEXT_BYTES)))
            }
            None => Err(bad("a trigger is neither a token nor a text")),
        };
        let triggers = wire.triggers.into_iter().map(trigger).collect::<Result<Arc<[_]>, _>>()?;
        let grammar = if wire.grammar.is_empty() && !wire.grammar_hash.is_empty() {
            grammars.known(&wire.grammar_hash).ok_or(Error::GrammarUnknown)?
        } else {
            grammars.compile(&wire.grammar)?
        };
        let start = Phase::start(&grammar, &triggers);
        Ok(Self {
            grammar,
            triggers,
            bytes: grammars.byte_table(),
            generated: wire.generated as usize,
            start,
        })
    }

    pub(crate) fn generated(&self) -> usize {
        self.generated
    }
}

impl fmt::Debug for Constraint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Constraint").field("n_triggers", &self.triggers.len()).finish_non_exhaustive()
    }
}

impl From<GrammarError> for Error {
    fn from(error: GrammarError) -> Self {
        Self::Constraint(error.to_string())
    }
}

/// Where an output stands.
enum Phase {
    /// Triggers are watched for.
    Free(Tail),
    Ruled(Box<Matcher>),
}

impl Phase {
    fn start(grammar: &Grammar, triggers: &[Trigger]) -> Self {
        if triggers.is_empty() {
            Self::Ruled(Box::new(grammar.matcher()))
        } else {
            Self::Free(Tail::default())
        }
    }
}

/// How to take one token back.
enum Undo {
    /// Nothing has changed.
    Nothing,
    /// The grammar has consumed it.
    Rollback,
    /// It began another phase than this one.
    Restore(Phase),
    /// The same, after the grammar had consumed it.
    RestoreAndRollback(Phase),
}

/// The masks of a run of output tokens: the token that follows what is known, and those after each draft token.
pub(crate) struct Masks {
    /// None: every token is allowed. Ends early where a draft token is refused.
    rows: Vec<Option<Mask>>,
    /// Why there is no first row.
    error: Option<GrammarError>,
}

/// What may stand at one place of an output.
pub(crate) enum Allowed<'a> {
    Any,
    Some(&'a Mask),
    /// The output is complete.
    Nothing,
    /// Nobody has looked so far ahead.
    Unknown,
}

impl Masks {
    /// The i-th place, or why the output cannot go on at the first one.
    pub(crate) fn at(&self, i: usize) -> Result<Allowed<'_>, &GrammarError> {
        match (self.rows.get(i), &self.error) {
            (Some(None), _) => Ok(Allowed::Any),
            (Some(Some(mask)), _) if mask.first().is_none() => Ok(Allowed::Nothing),
            (Some(Some(mask)), _) => Ok(Allowed::Some(mask)),
            (None, Some(error)) if i == 0 => Err(error),
            (None, _) => Ok(Allowed::Unknown),
        }
    }
}

/// One output's way: its tokens up to `n_sure`, and drafts tried after them.
pub(crate) struct State {
    grammar: Grammar,
    triggers: Arc<[Trigger]>,
    bytes: Arc<ByteTable>,
    /// Where the output begins in its sequence.
    output_start: usize,
    stop_ids: Vec<u32>,
    phase: Phase,
    /// Tokens of the output that cannot change any more.
    n_sure: usize,
    /// Tokens tried after them, with the way back.
    tried: Vec<(u32, Undo)>,
    /// What went wrong; all is computed again before the next use, in case only a draft was to blame.
    error: Option<GrammarError>,
}

impl State {
    /// For a sequence that begins with `prompt_tokens`.
    pub(crate) fn new(constraint: Constraint, prompt_tokens: usize, stop_ids: &[u32]) -> Self {
        let Constraint { grammar, triggers, bytes, generated, start } = constraint;
        Self {
            grammar,
            triggers,
            bytes,
            output_start: prompt_tokens.saturating_sub(generated),
            stop_ids: stop_ids.to_vec(),
            phase: start,
            n_sure: 0,
            tried: Vec::new(),
            error: None,
        }
    }

    /// Follows a sequence to its present end; drafts that did not come true are taken back. 2 to 5 µs a token.
    pub(crate) fn follow(&mut self, tokens: &[u32]) {
        let output = tokens.get(self.output_start..).unwrap_or_default();
        if self.error.take().is_some() {
            self.phase = Phase::start(&self.grammar, &self.triggers);
            self.n_sure = 0;
            self.tried.clear();
        }
        if let Err(error) = self.try_follow(output) {
            self.error = Some(error);
        }
    }

    fn try_follow(&mut self, output: &[u32]) -> Result<(), GrammarError> {
        let ahead = output.get(self.n_sure..).unwrap_or_default();
        let n_right = self.tried.iter().zip(ahead).take_while(|((tried, _), token)| tried == *token).count();
        while self.tried.len() > n_right {
            let Some((_, undo)) = self.tried.pop() else { break };
            self.undo(undo)?;
        }
        self.tried.clear();
        self.n_sure += n_right;
        while let Some(&token) = output.get(self.n_sure) {
            self.advance(token)?;
            self.n_sure += 1;
        }
        Ok(())
    }

    /// How many of the draft's first tokens the grammar may take: the masks decide, this spares the hopeless rest.
    pub(crate) fn n_fitting(&mut self, draft: &[u32]) -> usize {
        let stop_at = draft.iter().position(|token| self.stop_ids.contains(token)).unwrap_or(draft.len());
        let n_fitting = match (&mut self.phase, &self.error) {
            (_, Some(_)) => Ok(0),
            (Phase::Free(_), None) => Ok(draft.len()),
            (Phase::Ruled(matcher), None) if stop_at == 0 => {
                matcher.is_accepting().map(|accepting| usize::from(accepting && !draft.is_empty()))
            }
            (Phase::Ruled(matcher), None) => matcher.n_fitting(&draft[..stop_at]),
        };
        self.noted(n_fitting)
    }

    /// The tokens that must come next, as far as that is certain.
    pub(crate) fn forced(&mut self) -> Vec<u32> {
        let forced = match (&mut self.phase, &self.error) {
            (Phase::Ruled(matcher), None) if matcher.is_complete() => match self.stop_ids[..] {
                [stop] => Ok(vec![stop]),
                _ => Ok(Vec::new()),
            },
            (Phase::Ruled(matcher), None) => matcher.forced(),
            (Phase::Free(_), _) | (_, Some(_)) => Ok(Vec::new()),
        };
        self.noted(forced)
    }

    /// The masks after what was followed, and after each token of `draft` as far as it is allowed.
    pub(crate) fn masks(&mut self, draft: &[u32]) -> Masks {
        let mut rows = Vec::with_capacity(draft.len() + 1);
        let result = self.try_masks(draft, &mut rows);
        if let Err(error) = result {
            self.error.get_or_insert(error);
        }
        Masks { rows, error: self.error.clone() }
    }

    fn try_masks(&mut self, draft: &[u32], rows: &mut Vec<Option<Mask>>) -> Result<(), GrammarError> {
        if self.error.is_some() {
            return Ok(());
        }
        for token in draft {
            let mask = self.mask()?;
            let goes_on =
                !self.stop_ids.contains(token) && mask.as_ref().is_none_or(|mask| mask.allows(*token));
            rows.push(mask);
            if !goes_on {
                return Ok(());
            }
            let undo = self.advance(*token)?;
            self.tried.push((*token, undo));
        }
        rows.push(self.mask()?);
        Ok(())
    }

    fn mask(&mut self) -> Result<Option<Mask>, GrammarError> {
        let Phase::Ruled(matcher) = &mut self.phase else { return Ok(None) };
        let mut mask = matcher.mask()?;
        if matcher.is_complete() || matcher.is_accepting()? {
            self.stop_ids.iter().for_each(|&stop| mask.allow(stop));
        }
        Ok(Some(mask))
    }

    fn advance(&mut self, token: u32) -> Result<Undo, GrammarError> {
        if self.stop_ids.contains(&token) {
            return Ok(Undo::Nothing);
        }
        match &mut self.phase {
            Phase::Ruled(matcher) => {
                matcher.consume(token)?;
                if !matcher.is_complete() || self.triggers.is_empty() {
                    return Ok(Undo::Rollback);
                }
                let ruled = std::mem::replace(&mut self.phase, Phase::Free(Tail::default()));
                Ok(Undo::RestoreAndRollback(ruled))
            }
            Phase::Free(tail) => {
                let before = tail.clone();
                let rests = tail.push(token, self.bytes.visible_bytes(token), &self.triggers);
                for rest in rests {
                    let mut matcher = self.grammar.matcher();
                    if matcher.consume_bytes(rest)? {
                        self.phase = match matcher.is_complete() {
                            true => Phase::Free(Tail::default()),
                            false => Phase::Ruled(Box::new(matcher)),
                        };
                        break;
                    }
                }
                Ok(Undo::Restore(Phase::Free(before)))
            }
        }
    }

    fn undo(&mut self, undo: Undo) -> Result<(), GrammarError> {
        let is_consumed = matches!(undo, Undo::Rollback | Undo::RestoreAndRollback(_));
        if let Undo::Restore(phase) | Undo::RestoreAndRollback(phase) = undo {
            self.phase = phase;
        }
        match &mut self.phase {
            Phase::Ruled(matcher) if is_consumed => matcher.rollback(1),
            Phase::Ruled(_) | Phase::Free(_) => Ok(()),
        }
    }

    fn noted<T: Default>(&mut self, result: Result<T, GrammarError>) -> T {
        result.unwrap_or_else(|error| {
            self.error = Some(error);
            T::default()
        })
    }
}
