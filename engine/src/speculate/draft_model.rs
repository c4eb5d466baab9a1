//! A smaller model with the same vocabulary that guesses ahead. It has KV of its own, whose full blocks are named and
//! shared like the large model's, so that a conversation's history is not run again with every turn.

use std::collections::HashMap;
use std::sync::Arc;

use kernels::isa::Isa;
use kernels::pool::ThreadPool;
use kv::BLOCK_TOKENS;
use kv::hash::BlockHash;
use kv::pool::{BlockId, BlockPool};

use super::Guess;
use crate::arena::KvArena;
use crate::forward::{Forward, Logits, Slice};
use crate::job::SequenceId;
use crate::sequence::Sequence;
use crate::weights::Weights;

/// Tokens that catch up in one step of the draft model, all streams together.
const STEP_TOKENS: usize = 512;

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
}

/// One stream's share of a step: the tokens to run, and where they begin.
struct Run {
    idx: usize,
    start: usize,
    tokens: Vec<u32>,
}

impl DraftModel {
    pub(crate) fn new(
        weights: Arc<Weights>,
        threads: Arc<ThreadPool>,
        n_blocks: u32,
        max_streams: usize,
    ) -> Self {
        let arena = KvArena::new(weights.shape().kv_geometry(), n_blocks as usize);
        let forward = Forward::new(weights, threads, STEP_TOKENS + max_streams);
        Self { forward, arena, pool: BlockPool::new(n_blocks), places: HashMap::new() }
    }

    /// The likeliest token after each stream's tokens and draft, given as (index, draft).
    /// A stream for which there is no room gets a guess of probability 0.
    pub(crate) fn guess<'a>(
        &mut self,
        running: &[Sequence],
        drafts: impl Iterator<Item = (usize, &'a [u32])>,
    ) -> Vec<Guess> {
        let drafts: Vec<(usize, &[u32])> = drafts.collect();
        self.forget_the_ended(running);
        let mut guesses = vec![Guess { token: 0, probability: 0.0 }; drafts.len()];
        let mut open: Vec<usize> = (0..drafts.len()).collect();
        while !open.is_empty() {
            let mut budget = STEP_TOKENS;
            let mut runs = Vec::new();
            open.retain(|&i| {
                let (idx, draft) = drafts[i];
                let Some(run) = self.next_run(&running[idx], idx, draft, budget + 1) else { return false };
                budget = budget.saturating_sub(run.tokens.len());
                runs.push((i, run));
                true
            });
            let ended = self.step(running, &runs, &drafts, &mut guesses);
            open.retain(|i| !ended.contains(i));
        }
        guesses
    }

    /// What a stream has to run next; None when it gets no room.
    fn next_run(&mut self, sequence: &Sequence, idx: usize, draft: &[u32], budget: usize) -> Option<Run> {
        let tokens = &sequence.tokens;
        let place = self.places.entry(sequence.id).or_default();
        let from = place.computed / BLOCK_TOKENS;
        let last = tokens.len() - 1;
        if place.computed.is_multiple_of(BLOCK_TOKENS)
            && place.table.len() == from
            && from < last / BLOCK_TOKENS
        {
            let held = self.pool.acquire_prefix(&sequence.hashes[from..last / BLOCK_TOKENS]);
            place.n_sealed = from + held.len();
            place.computed += held.len() * BLOCK_TOKENS;
            place.table.extend(held);
        }
        let start = place.computed;
        let wanted =
            tokens[start.min(tokens.len())..].iter().chain(&draft[start.saturating_sub(tokens.len())..]);
        let tokens: Vec<u32> = wanted.copied().take(budget).collect();
        let n_blocks = (start + tokens.len()).div_ceil(BLOCK_TOKENS).saturating_sub(place.table.len());
        match self.pool.allocate(n_blocks) {
            Ok(fresh) => place.table.extend(fresh),
            Err(_) => return None,
        }
        Some(Run { idx, start, tokens })
    }

    /// Runs one step and returns the drafts that are complete now.
    fn step(
        &mut self,
        running: &[Sequence],
        runs: &[(usize, Run)],
        drafts: &[(usize, &[u32])],
        guesses: &mut [Guess],
    ) -> Vec<usize> {
        let slices: Vec<Slice<'_>> = runs
            .iter()
            .map(|(_, run)| Slice {
                tokens: &run.tokens,
                start: run.start,
                blocks: &self.places[&running[run.idx].id].table,
                logits: Logits::Last,
            })
            .collect();
        let rows = match self.forward.run(&mut self.arena, &slices, &mut |_, _| ()) {
            Ok(rows) => rows,
            Err(error) => {
                // Drafts are a convenience: without them the stream goes on.
                tracing::warn!(%error, "the draft model refused a step");
                return runs.iter().map(|(i, _)| *i).collect();
            }
        };
        // Nobody is told which blocks the draft model holds.
        let _ = self.pool.take_changes();
        let mut ended = Vec::new();
        for (row, (i, run)) in runs.iter().enumerate() {
            let sequence = &running[run.idx];
            self.seal(sequence, run.start + run.tokens.len());
            if run.start + run.tokens.len() == sequence.tokens.len() + drafts[*i].1.len() {
                guesses[*i] = Guess::likeliest(Isa::detect(), rows.row(row), |token| token as u32);
                ended.push(*i);
            }
        }
        ended
    }

    /// Notes what has KV now, and names the full blocks that hold none of the draft.
    fn seal(&mut self, sequence: &Sequence, computed: usize) {
        let place = self.places.get_mut(&sequence.id).expect("the stream has run");
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
