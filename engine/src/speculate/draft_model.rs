//! A smaller model with the same vocabulary that guesses ahead. It has KV of its own, whose full blocks are named and
//! shared like the large model's, so that a conversation's history is not run again with every turn.

use std::collections::HashMap;
use std::sync::Arc;

use kernels::isa::Isa;
use kernels::pool::ThreadPool;
use kv::BLOCK_TOKENS;
use kv::hash::BlockHash;
use kv::pool::{BlockId, BlockPool};

use super::{Guess, MAX_GUESSES};
use crate::arena::KvArena;
use crate::forward::{Forward, Logits, Slice};
use crate::job::SequenceId;
use crate::sequence::Sequence;
use crate::weights::Weights;

/// Tokens of histories that catch up in one engine step, so that no stream waits long for another one's history.
const CATCH_UP_TOKENS: usize = 32;

/// A stream whose history lags by more than this is not drafted for yet.
const MAX_LAG: usize = 16;

/// One stream's place in the draft model's KV.
#[derive(Debug, Default)]
struct Place {
    table: Vec<BlockId>,
    n_sealed: usize,
    /// Tokens of the sequence, and of its present draft after them, that have KV here.
    computed: usize,
}

/// The draft model of one engine.
#[derive(Debug)]
pub(crate) struct DraftModel {
    forward: Forward,
    arena: KvArena,
    pool: BlockPool,
    places: HashMap<SequenceId, Place>,
    context_len: usize,
}

/// One stream's share of a step: the tokens to run, and where they begin.
struct Run {
    idx: usize,
    start: usize,
    tokens: Vec<u32>,
    /// The token after it is wanted.
    is_guess: bool,
}

impl DraftModel {
    pub(crate) fn new(
        weights: Arc<Weights>,
        threads: Arc<ThreadPool>,
        n_blocks: u32,
        max_streams: usize,
    ) -> Self {
        let shape = weights.shape();
        let context_len = shape.context_len;
        let arena = KvArena::new(shape.kv_geometry(), n_blocks as usize);
        let max_step_tokens = CATCH_UP_TOKENS + max_streams * (MAX_LAG + MAX_GUESSES + 1);
        let forward = Forward::new(weights, threads, max_step_tokens);
        Self { forward, arena, pool: BlockPool::new(n_blocks), places: HashMap::new(), context_len }
    }

    /// True when a stream can be drafted for: its history is nearly complete here, and fits.
    pub(crate) fn knows(&self, sequence: &Sequence) -> bool {
        let computed = self.places.get(&sequence.id).map_or(0, |place| place.computed);
        let n_tokens = sequence.tokens.len();
        n_tokens - computed.min(n_tokens) <= MAX_LAG && n_tokens + MAX_GUESSES < self.context_len
    }

    /// Brings the histories of `streams`, indices into `running`, nearer to their ends, by a limited number of tokens.
    pub(crate) fn catch_up(&mut self, running: &[Sequence], streams: &[usize]) {
        self.forget_the_ended(running);
        let mut budget = CATCH_UP_TOKENS;
        let mut runs = Vec::new();
        for &idx in streams {
            let sequence = &running[idx];
            if budget == 0 || self.knows(sequence) || sequence.tokens.len() + MAX_GUESSES >= self.context_len
            {
                continue;
            }
            let Some(mut run) = self.next_run(sequence, idx, &[], budget) else { continue };
            run.is_guess = false;
            // The last token is left for the guess.
            run.tokens.truncate(sequence.tokens.len() - 1 - run.start);
            if !run.tokens.is_empty() {
                budget -= run.tokens.len();
                runs.push(run);
            }
        }
        if !runs.is_empty() {
            let _ = self.step(running, &runs);
        }
    }

    /// The likeliest token after each stream's tokens and draft, given as (index, draft); None for a stream for which
    /// there is no room.
    pub(crate) fn guess<'a>(
        &mut self,
        running: &[Sequence],
        drafts: impl Iterator<Item = (usize, &'a [u32])>,
    ) -> Vec<Option<Guess>> {
        let runs: Vec<Option<Run>> =
            drafts.map(|(idx, draft)| self.next_run(&running[idx], idx, draft, usize::MAX)).collect();
        let asked: Vec<bool> = runs.iter().map(Option::is_some).collect();
        let runs: Vec<Run> = runs.into_iter().flatten().collect();
        let mut guesses = self.step(running, &runs).into_iter();
        asked.into_iter().map(|asked| if asked { guesses.next().flatten() } else { None }).collect()
    }

    /// What a stream has to run next, at most `budget` tokens; None when it gets no room.
    fn next_run(&mut self, sequence: &Sequence, idx: usize, draft: &[u32], budget: usize) -> Option<Run> {
        let computed = self.places.entry(sequence.id).or_default().computed;
        // Blocks that a draft had filled are sealed once the draft turned out to be right.
        self.seal(sequence, computed);
        let tokens = &sequence.tokens;
        let place = self.places.get_mut(&sequence.id)?;
        let from = place.computed / BLOCK_TOKENS;
        let until = (tokens.len() - 1) / BLOCK_TOKENS;
        let at_border = place.computed.is_multiple_of(BLOCK_TOKENS) && place.table.len() == from;
        if at_border && place.n_sealed == from && from < until {
            let held = self.pool.acquire_prefix(&sequence.hashes[from..until]);
            place.n_sealed += held.len();
            place.computed += held.len() * BLOCK_TOKENS;
            place.table.extend(held);
        }
        let start = place.computed;
        let wanted =
            tokens[start.min(tokens.len())..].iter().chain(&draft[start.saturating_sub(tokens.len())..]);
        let tokens: Vec<u32> = wanted.copied().take(budget).collect();
        let n_blocks = (start + tokens.len()).div_ceil(BLOCK_TOKENS).saturating_sub(place.table.len());
        place.table.extend(self.pool.allocate(n_blocks).ok()?);
        Some(Run { idx, start, tokens, is_guess: true })
    }

    /// Runs one step; the guess of every run that wants one.
    fn step(&mut self, running: &[Sequence], runs: &[Run]) -> Vec<Option<Guess>> {
        if runs.is_empty() {
            return Vec::new();
        }
        let slices: Vec<Slice<'_>> = runs
            .iter()
            .map(|run| Slice {
                tokens: &run.tokens,
                start: run.start,
                blocks: &self.places[&running[run.idx].id].table,
                logits: if run.is_guess { Logits::Last } else { Logits::None },
            })
            .collect();
        let rows = match self.forward.run(&mut self.arena, &slices, &mut |_, _| ()) {
            Ok(rows) => rows,
            Err(error) => {
                // Drafts are a convenience: without them the streams go on.
                tracing::debug!(%error, "the draft model refused a step");
                return vec![None; runs.len()];
            }
        };
        // Nobody is told which blocks the draft model holds.
        let _ = self.pool.take_changes();
        let mut guesses = Vec::with_capacity(runs.len());
        let mut row = 0;
        for run in runs {
            self.seal(&running[run.idx], run.start + run.tokens.len());
            guesses.push(run.is_guess.then(|| {
                row += 1;
                Guess::likeliest(Isa::detect(), rows.row(row - 1), |token| token as u32)
            }));
        }
        guesses
    }

    /// Notes what has KV now, and names the full blocks that hold none of the draft.
    fn seal(&mut self, sequence: &Sequence, computed: usize) {
        let place = self.places.entry(sequence.id).or_default();
        place.computed = computed;
        let certain = computed.min(sequence.tokens.len());
        while (place.n_sealed + 1) * BLOCK_TOKENS <= certain {
            let at = place.n_sealed;
            let parent = if at == 0 { BlockHash::ROOT } else { sequence.hashes[at - 1] };
            let tokens = sequence.tokens[at * BLOCK_TOKENS..].first_chunk().expect("a full block");
            place.table[at] = self.pool.seal(place.table[at], sequence.hashes[at], parent, *tokens);
            place.n_sealed += 1;
        }
    }

    /// Forgets what was computed for rejected drafts of a stream: only its first `n_tokens` are right.
    pub(crate) fn keep(&mut self, id: SequenceId, n_tokens: usize) {
        if let Some(place) = self.places.get_mut(&id) {
            place.computed = place.computed.min(n_tokens);
        }
    }

    /// Gives the blocks of streams that run no more back; sealed ones stay cached.
    fn forget_the_ended(&mut self, running: &[Sequence]) {
        let pool = &mut self.pool;
        self.places.retain(|id, place| {
            let runs = running.iter().any(|sequence| sequence.id == *id);
            if !runs {
                // Children first, so that eviction order stays leaf first.
                place.table.drain(..).rev().for_each(|block| pool.release(block));
            }
            runs
        });
    }
}
