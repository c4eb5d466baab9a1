//! Speculative decoding: several tokens of a stream are checked in one step (Leviathan et al. 2023, Chen et al. 2023).
//!
//! Lossless by construction: the token at a position is what plain decoding would choose there, a pure function of
//! logits, seed and position (see [`crate::sample`]); a draft token is kept when it *is* that token. For a proposed
//! token x this accepts with probability p(x) and otherwise draws from p without x, so it is the rejection rule for a
//! draft distribution with all its mass on x, and seeds stay reproducible whatever is drafted
//! (docs/decisions/0004-lossless-speculation.md).
//!
//! A stream under a constraint gets what its grammar forces as a draft that is sure; other drafts end where the grammar
//! refuses them.
//!
//! How much is drafted follows from what a wider step costs now ([`crate::costs`]) and from how often drafts of this kind
//! were right, here and in this conversation ([`trust`]).

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use kernels::isa::Isa;
use kernels::logits;
use kv::hash::HashKey;
use metrics::{Counter, Gauge};

use crate::costs::StepCosts;
use crate::engine::Speculate;
use crate::forward::LogitRows;
use crate::metrics as names;
use crate::sequence::Sequence;
use lookup::{Recent, SuffixIndex};
use trust::{Evidence, Rates, Source, Trust};
use worth::Base;

pub(crate) mod draft_model;
pub mod head;
mod lookup;
mod trust;
mod worth;

/// Draft tokens in one step, all streams together.
pub(crate) const MAX_STEP_DRAFTS: usize = 32;

/// Kinds of drafts.
pub(crate) const N_SOURCES: usize = Source::ALL.len();

/// Tokens of one look-up.
const MAX_LOOKUP: usize = 15;

/// Tokens of one guesser's draft.
pub(crate) const MAX_GUESSES: usize = 4;

/// Below this chance of its first token a look-up gives way to a guesser.
const MIN_LOOKUP_CHANCE: f64 = 0.35;

/// What a guess is expected to take before any was made.
const FIRST_GUESS_SECONDS: f64 = 0.0005;

/// How fast the estimate returns to the quickest guess while nothing is guessed.
const IDLE_DRIFT: f64 = 0.01;

/// Tenants whose recent outputs are remembered.
const MAX_TENANTS: usize = 8;

/// A stream's part of speculation.
#[derive(Debug, Default)]
pub(crate) struct State {
    index: SuffixIndex,
    /// The model's residual stream at the newest position it has run; empty when unknown.
    hidden: Vec<f32>,
    trust: [Trust; N_SOURCES],
    /// What this step checks.
    draft: Option<Draft>,
}

/// Proposed next tokens of one stream.
#[derive(Debug, Clone)]
pub(crate) struct Draft {
    source: Source,
    pub(crate) tokens: Vec<u32>,
    evidence: Vec<Evidence>,
    /// Per token, given that all before it are accepted.
    chances: Vec<f64>,
}

impl Draft {
    fn new(source: Source) -> Self {
        Self { source, tokens: Vec::new(), evidence: Vec::new(), chances: Vec::new() }
    }

    fn push(&mut self, token: u32, evidence: Evidence, chance: f64) {
        self.tokens.push(token);
        self.evidence.push(evidence);
        self.chances.push(chance);
    }

    fn truncate(&mut self, len: usize) {
        self.tokens.truncate(len);
        self.evidence.truncate(len);
        self.chances.truncate(len);
    }
}

impl State {
    /// The tokens to check in this step.
    pub(crate) fn draft(&self) -> &[u32] {
        self.draft.as_ref().map_or(&[], |draft| &draft.tokens)
    }

    /// As if a look-up had found `tokens`.
    #[cfg(test)]
    pub(crate) fn draft_for_tests(&mut self, tokens: &[u32]) {
        let mut draft = Draft::new(Source::Lookup);
        tokens.iter().for_each(|&token| draft.push(token, Evidence::of_match(9), 0.9));
        self.draft = Some(draft);
    }

    /// Forgets what a preempted stream knew of its last position.
    pub(crate) fn lose_place(&mut self) {
        self.hidden.clear();
        self.draft = None;
    }

    /// Keeps the first `len` tokens of the draft.
    pub(crate) fn truncate(&mut self, len: usize) {
        match &mut self.draft {
            Some(draft) if len > 0 => draft.truncate(len),
            draft => *draft = None,
        }
    }
}

/// Who proposes tokens where nothing was seen before.
#[derive(Debug)]
pub(crate) enum Guesser {
    None,
    Head(head::Runner),
    Model(Box<draft_model::DraftModel>),
}

/// A guesser's likeliest next token.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Guess {
    pub(crate) token: u32,
    pub(crate) probability: f32,
}

impl Guess {
    /// The greatest of `logits`, of which `token_of` names the token.
    fn likeliest(isa: Isa, logits: &[f32], token_of: impl Fn(usize) -> u32) -> Self {
        let best = logits::argmax(isa, logits);
        let sum = logits::exp_sum(isa, logits, logits[best]);
        Self { token: token_of(best), probability: if sum > 0.0 { sum.recip() as f32 } else { 0.0 } }
    }
}

/// A worker's speculation: what it has learnt, and its guesser.
pub(crate) struct Speculation {
    mode: Speculate,
    rates: Rates,
    guesser: Guesser,
    /// Seconds per guess and stream: the estimate, and the least seen.
    guess_seconds: f64,
    quickest_guess: f64,
    /// Tokens of the model; guesses beyond are none.
    vocab: usize,
    /// Time spent on the drafts of this step.
    drafting: Duration,
    recent: VecDeque<(HashKey, Recent)>,
    metrics: Metrics,
}

/// A stream whose draft is being extended by the guesser.
struct Drafting {
    /// Index into the running sequences.
    idx: usize,
    draft: Draft,
    /// Chance that all of the draft is accepted.
    total: f64,
    max_len: usize,
}

impl Speculation {
    pub(crate) fn new(mode: Speculate, guesser: Guesser, vocab: usize, worker: &str) -> Self {
        Self {
            mode,
            rates: Rates::default(),
            guesser,
            guess_seconds: if mode == Speculate::Always { 0.0 } else { FIRST_GUESS_SECONDS },
            quickest_guess: FIRST_GUESS_SECONDS,
            vocab,
            drafting: Duration::ZERO,
            recent: VecDeque::new(),
            metrics: Metrics::new(worker),
        }
    }

    /// Gives the streams at `streams`, indices into `running`, the drafts that are worth checking in a step that has
    /// `n_tokens` tokens already. `context` is the model's limit.
    pub(crate) fn propose(
        &mut self,
        running: &mut [Sequence],
        streams: &[usize],
        n_tokens: usize,
        costs: &StepCosts,
        context: usize,
    ) {
        let costs = match self.mode {
            Speculate::Never => return,
            Speculate::WhenItPays => costs,
            Speculate::Always => &StepCosts::FLAT,
        };
        self.drafting = Duration::ZERO;
        if streams.is_empty() {
            return;
        }
        let began = Instant::now();
        self.rates.fade();
        if let Guesser::Model(model) = &mut self.guesser {
            model.catch_up(running, streams);
        }
        let base = Base { n_tokens, n_streams: streams.len() };
        let mut drafts = Vec::new();
        let mut unknown = Vec::new();
        let mut n_drafts = 0;
        for &idx in streams {
            let sequence = &mut running[idx];
            let max_len = sequence.output_left(context).saturating_sub(1);
            match self.forced(sequence, max_len).or_else(|| self.look_up(sequence, max_len)) {
                Some(draft) => {
                    n_drafts = (n_drafts + draft.tokens.len()).min(MAX_STEP_DRAFTS);
                    drafts.push((idx, draft));
                }
                None if max_len > 0 => unknown.push((idx, max_len)),
                None => {}
            }
        }
        drafts.extend(self.guess(running, &unknown, base, n_drafts, costs));
        drafts.retain_mut(|(idx, draft)| {
            if let Some(constraint) = &mut running[*idx].constraint {
                draft.truncate(constraint.n_fitting(&draft.tokens));
            }
            !draft.tokens.is_empty()
        });
        let chances: Vec<Vec<f64>> = drafts.iter().map(|(_, draft)| draft.chances.clone()).collect();
        let kept = worth::choose(costs, base, &chances, MAX_STEP_DRAFTS);
        for ((idx, mut draft), len) in drafts.into_iter().zip(kept) {
            if len > 0 {
                draft.truncate(len);
                running[idx].speculation.draft = Some(draft);
            }
        }
        self.drafting = began.elapsed();
    }

    /// What a stream's constraint leaves no choice about.
    fn forced(&self, sequence: &mut Sequence, max_len: usize) -> Option<Draft> {
        let forced = sequence.constraint.as_mut()?.forced();
        let mut draft = Draft::new(Source::Grammar);
        forced.into_iter().take(max_len.min(MAX_STEP_DRAFTS)).for_each(|token| {
            draft.push(token, Evidence::FORCED, 1.0);
        });
        (!draft.tokens.is_empty()).then_some(draft)
    }

    fn look_up(&self, sequence: &mut Sequence, max_len: usize) -> Option<Draft> {
        let tokens = &sequence.tokens;
        let State { index, trust, .. } = &mut sequence.speculation;
        index.extend(tokens, 1);
        let own = index.longest(tokens, tokens).map(|found| (found.len, &tokens[found.next..]));
        let recent = self.recent.iter().find(|(key, _)| *key == sequence.key);
        let others =
            recent.and_then(|(_, recent)| recent.longest(tokens)).map(|(found, after)| (found.len, after));
        let (n_matched, after) = match (own, others) {
            (Some(own), Some(others)) if others.0 > own.0 => others,
            (Some(own), _) => own,
            (None, others) => others?,
        };
        let trust = trust[Source::Lookup as usize];
        let mut draft = Draft::new(Source::Lookup);
        for (i, &token) in after.iter().take(MAX_LOOKUP.min(max_len)).enumerate() {
            // The tokens accepted so far make the match longer.
            let evidence = Evidence::of_match(n_matched + i);
            draft.push(token, evidence, trust.chance(&self.rates, evidence));
        }
        let first = *draft.chances.first()?;
        (first >= MIN_LOOKUP_CHANCE || matches!(self.guesser, Guesser::None)).then_some(draft)
    }

    /// Lets the guesser work on the streams `unknown`, given as (index, most tokens), as deep as it pays.
    fn guess(
        &mut self,
        running: &[Sequence],
        unknown: &[(usize, usize)],
        base: Base,
        mut n_drafts: usize,
        costs: &StepCosts,
    ) -> Vec<(usize, Draft)> {
        let Some(source) = self.guesser.source() else { return Vec::new() };
        let mut done = Vec::new();
        let start = |&(idx, max_len): &(usize, usize)| Drafting {
            idx,
            draft: Draft::new(source),
            total: 1.0,
            max_len,
        };
        let mut active: Vec<Drafting> = unknown.iter().map(start).collect();
        for depth in 0..MAX_GUESSES {
            let typical = self.rates.typical(source);
            let (rest, stopped): (Vec<_>, Vec<_>) = active.into_iter().partition(|drafting| {
                let sequence = &running[drafting.idx];
                let chance = drafting.total * sequence.speculation.trust[source as usize].apply(typical);
                depth == drafting.draft.tokens.len()
                    && depth < drafting.max_len
                    && self.guesser.knows(sequence)
                    && base.pays(costs, n_drafts, chance, self.guess_seconds)
            });
            active = rest;
            done.extend(stopped);
            if active.is_empty() || n_drafts >= MAX_STEP_DRAFTS {
                // An estimate that a disturbed moment has spoilt must not keep the guesser from being asked for ever.
                self.guess_seconds += IDLE_DRIFT * (self.quickest_guess - self.guess_seconds);
                break;
            }
            let began = Instant::now();
            let guesses = self.guesser.guess(running, &active);
            if self.mode == Speculate::WhenItPays {
                let seconds = began.elapsed().as_secs_f64() / active.len() as f64;
                self.quickest_guess = self.quickest_guess.min(seconds);
                let seconds = seconds.min(2.0 * self.guess_seconds);
                self.guess_seconds += 0.1 * (seconds - self.guess_seconds);
            }
            for (drafting, guess) in active.iter_mut().zip(guesses) {
                let Some(guess) = guess.filter(|guess| (guess.token as usize) < self.vocab) else { continue };
                let evidence = Evidence::of_guess(source, guess.probability);
                let trust = running[drafting.idx].speculation.trust[source as usize];
                let chance = trust.chance(&self.rates, evidence);
                drafting.total *= chance;
                drafting.draft.push(guess.token, evidence, chance);
                n_drafts += 1;
            }
        }
        done.extend(active);
        done.into_iter().filter(|d| !d.draft.tokens.is_empty()).map(|d| (d.idx, d.draft)).collect()
    }

    /// Takes what the head starts from, when a stream's first token comes from the row `row`.
    pub(crate) fn begin(&self, sequence: &mut Sequence, rows: &LogitRows, row: usize) {
        if let Guesser::Head(_) = self.guesser {
            sequence.speculation.hidden = rows.hidden(row).to_vec();
        }
    }

    /// Learns from what a stream's step has shown: it has `n_outputs` new tokens, at least one, and the rows of `rows`
    /// from `first_row` on are the logits they came from. Ends the stream's draft.
    pub(crate) fn learn(
        &mut self,
        sequence: &mut Sequence,
        n_outputs: usize,
        rows: &LogitRows,
        first_row: usize,
    ) {
        if self.mode == Speculate::Never {
            return;
        }
        let State { hidden, trust, draft, .. } = &mut sequence.speculation;
        match &mut self.guesser {
            Guesser::None => {}
            Guesser::Head(_) => {
                hidden.clear();
                hidden.extend_from_slice(rows.hidden(first_row + n_outputs - 1));
            }
            Guesser::Model(model) => model.keep(sequence.id, sequence.tokens.len() + n_outputs - 1),
        }
        let drafted = draft.take();
        for source in Source::ALL {
            match &drafted {
                Some(draft) if draft.source == source => {
                    let n_accepted = n_outputs - 1;
                    trust[source as usize].learn(&mut self.rates, &draft.evidence, n_accepted);
                    self.metrics.count(source, draft.tokens.len(), n_accepted);
                }
                _ => trust[source as usize].forgive(),
            }
        }
    }

    /// Counts what the drafts of a step were worth. `proposed` and `accepted` are tokens by source; the step's streams
    /// alone take `plain` seconds a token, and the drafts made it `longer`.
    pub(crate) fn account(
        &self,
        proposed: [usize; N_SOURCES],
        accepted: [usize; N_SOURCES],
        plain: f64,
        longer: f64,
    ) {
        let n_proposed: usize = proposed.iter().sum();
        for source in Source::ALL.map(|source| source as usize).into_iter().filter(|_| n_proposed > 0) {
            let share = proposed[source] as f64 / n_proposed as f64;
            let cost = share * (longer.max(0.0) + self.drafting.as_secs_f64());
            self.metrics.saved[source].increment(accepted[source] as f64 * plain - cost);
        }
    }

    /// The source of a stream's draft.
    pub(crate) fn source_of(sequence: &Sequence) -> Option<usize> {
        sequence.speculation.draft.as_ref().map(|draft| draft.source as usize)
    }

    /// A stream has ended: what it said may be said again.
    pub(crate) fn remember(&mut self, sequence: &Sequence) {
        let output = &sequence.tokens[sequence.prompt_tokens.min(sequence.tokens.len())..];
        if self.mode == Speculate::Never || output.len() <= lookup::MIN_MATCH {
            return;
        }
        let at = self.recent.iter().position(|(key, _)| *key == sequence.key);
        let mut tenant =
            at.and_then(|at| self.recent.remove(at)).unwrap_or((sequence.key, Recent::default()));
        tenant.1.add(output);
        self.recent.push_front(tenant);
        self.recent.truncate(MAX_TENANTS);
    }
}

impl Guesser {
    fn source(&self) -> Option<Source> {
        match self {
            Self::None => None,
            Self::Head(_) => Some(Source::Head),
            Self::Model(_) => Some(Source::Model),
        }
    }

    /// True when it has what it needs for a stream.
    fn knows(&self, sequence: &Sequence) -> bool {
        match self {
            Self::None => false,
            Self::Head(_) => !sequence.speculation.hidden.is_empty(),
            Self::Model(model) => model.knows(sequence),
        }
    }

    /// The next token of every stream after its draft so far.
    fn guess(&mut self, running: &[Sequence], active: &[Drafting]) -> Vec<Option<Guess>> {
        match self {
            Self::None => Vec::new(),
            Self::Head(head) => {
                let begins = active.iter().all(|drafting| drafting.draft.tokens.is_empty());
                if begins {
                    head.begin(active.iter().map(|d| (d.idx, &running[d.idx].speculation.hidden[..])));
                }
                let tokens = active.iter().map(|d| {
                    (
                        d.idx,
                        *d.draft
                            .tokens
                            .last()
                            .or(running[d.idx].tokens.last())
                            .expect("a prompt is not empty"),
                    )
                });
                head.guess(tokens).into_iter().map(Some).collect()
            }
            Self::Model(model) => model.guess(running, active.iter().map(|d| (d.idx, &d.draft.tokens[..]))),
        }
    }
}

struct Metrics {
    drafts: [Counter; N_SOURCES],
    proposed: [Counter; N_SOURCES],
    accepted: [Counter; N_SOURCES],
    saved: [Gauge; N_SOURCES],
}

impl Metrics {
    fn new(worker: &str) -> Self {
        let labels = |source: Source| [("worker", worker.to_owned()), ("source", source.name().to_owned())];
        Self {
            drafts: Source::ALL.map(|source| metrics::counter!(names::DRAFTS, &labels(source))),
            proposed: Source::ALL.map(|source| metrics::counter!(names::DRAFT_TOKENS, &labels(source))),
            accepted: Source::ALL.map(|source| metrics::counter!(names::DRAFT_ACCEPTED, &labels(source))),
            saved: Source::ALL.map(|source| metrics::gauge!(names::DRAFT_SAVED_SECONDS, &labels(source))),
        }
    }

    fn count(&self, source: Source, n_proposed: usize, n_accepted: usize) {
        self.drafts[source as usize].increment(1);
        self.proposed[source as usize].increment(n_proposed as u64);
        self.accepted[source as usize].increment(n_accepted as u64);
    }
}
