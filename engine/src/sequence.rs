//! One running turn: its tokens, its blocks, and how far it is.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use kv::BLOCK_TOKENS;
use kv::hash::{BlockHash, HashChain, HashKey};
use kv::pool::{BlockId, BlockPool};

use crate::constrain;
use crate::costs::StepCosts;
use crate::job::{Event, Fill, FinishReason, SequenceId, Sink};
use crate::sample::SamplingParams;
use crate::speculate;

/// Where a sequence stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum State {
    /// Not admitted yet, or preempted: holds no blocks.
    Waiting,
    /// Its blocks are being filled from outside under its grant.
    AwaitingKv,
    /// Takes part in steps.
    Running,
}

/// A turn inside the engine. `tokens` grows by one per sampled token; `computed` of them have KV in `table`.
pub(crate) struct Sequence {
    pub(crate) id: SequenceId,
    pub(crate) turn: u64,
    /// Names its blocks, and its tenant.
    pub(crate) key: HashKey,
    pub(crate) state: State,
    pub(crate) fill: Fill,
    pub(crate) tokens: Vec<u32>,
    pub(crate) prompt_tokens: usize,
    chain: HashChain,
    /// One per full block of `tokens`.
    pub(crate) hashes: Vec<BlockHash>,
    pub(crate) table: Vec<BlockId>,
    n_sealed: usize,
    pub(crate) computed: usize,
    /// Prompt tokens that went through this engine's model.
    pub(crate) prompt_computed: usize,
    pub(crate) announced: bool,
    /// Prefill tokens the engine had computed for anybody when this sequence was admitted.
    pub(crate) admitted_at: u64,
    /// Since when it waits for blocks that another sequence fetches.
    pub(crate) waits_since: Option<Instant>,
    /// It has waited so: whoever planned it did not know of the blocks that it found.
    pub(crate) has_waited: bool,
    pub(crate) speculation: speculate::State,
    pub(crate) sampling: SamplingParams,
    /// How the output stands to what it must look like; away while its masks are computed.
    pub(crate) constraint: Option<Box<constrain::State>>,
    pub(crate) max_output_tokens: usize,
    pub(crate) stop_ids: Vec<u32>,
    pub(crate) sink: Sink,
    /// Given back when the sequence goes, however it goes.
    _place: Place,
}

/// One of the engine's places for turns.
#[derive(Debug)]
pub(crate) struct Place(Arc<AtomicUsize>);

impl Place {
    /// Takes a place if fewer than `limit` are taken.
    pub(crate) fn take(taken: &Arc<AtomicUsize>, limit: usize) -> Option<Self> {
        let place = Self(Arc::clone(taken));
        (taken.fetch_add(1, Ordering::Relaxed) < limit).then_some(place)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// What a new sequence starts from.
pub(crate) struct Start {
    pub(crate) tokens: Vec<u32>,
    pub(crate) chain: HashChain,
    pub(crate) hashes: Vec<BlockHash>,
}

impl Sequence {
    pub(crate) fn new(id: SequenceId, start: Start, job: crate::job::Job, place: Place) -> Self {
        let constraint = job
            .constraint
            .map(|constraint| Box::new(constrain::State::new(constraint, start.tokens.len(), &job.stop_ids)));
        Self {
            id,
            turn: job.turn,
            key: job.prompt.key,
            state: State::Waiting,
            fill: job.fill,
            prompt_tokens: start.tokens.len(),
            tokens: start.tokens,
            chain: start.chain,
            hashes: start.hashes,
            table: Vec::new(),
            n_sealed: 0,
            computed: 0,
            prompt_computed: 0,
            announced: false,
            admitted_at: 0,
            waits_since: None,
            has_waited: false,
            speculation: speculate::State::default(),
            sampling: job.sampling,
            constraint,
            max_output_tokens: job.max_output_tokens,
            stop_ids: job.stop_ids,
            sink: job.sink,
            _place: place,
        }
    }

    /// Tokens that still need KV before the next token can be sampled.
    pub(crate) fn remaining(&self) -> usize {
        self.tokens.len() - self.computed
    }

    pub(crate) fn wants_output(&self) -> bool {
        self.max_output_tokens > 0
    }

    /// Output tokens that may still come; `context` is the model's limit in tokens.
    pub(crate) fn output_left(&self, context: usize) -> usize {
        let n_output = self.tokens.len() - self.prompt_tokens;
        self.max_output_tokens.saturating_sub(n_output).min(context.saturating_sub(self.tokens.len()))
    }

    /// Full blocks that may come from the cache: the last token is always computed when its logits are wanted.
    pub(crate) fn reusable_blocks(&self) -> usize {
        let tokens = if self.wants_output() { self.tokens.len() - 1 } else { self.tokens.len() };
        tokens / BLOCK_TOKENS
    }

    /// Takes held blocks into use as far as they go from where the sequence stands. Returns the tokens gained.
    pub(crate) fn reuse_held(&mut self, pool: &mut BlockPool) -> usize {
        let from = self.computed / BLOCK_TOKENS;
        if !self.computed.is_multiple_of(BLOCK_TOKENS) || self.table.len() > from {
            return 0;
        }
        let until = self.reusable_blocks();
        if from >= until {
            return 0;
        }
        let held = pool.acquire_prefix(&self.hashes[from..until]);
        let gained = held.len() * BLOCK_TOKENS;
        self.n_sealed = from + held.len();
        self.table.extend(held);
        self.computed += gained;
        gained
    }

    /// Whether the block with this hash is on its way to it from outside.
    pub(crate) fn fetches(&self, hash: &BlockHash) -> bool {
        let first = self.computed / BLOCK_TOKENS;
        let last = self.table.len().min(self.hashes.len());
        self.state == State::AwaitingKv
            && self.hashes.get(first..last).is_some_and(|coming| coming.contains(hash))
    }

    /// Whether it waits on for blocks that another sequence fetches. Outside work may take long, or fail: nobody waits
    /// longer than computing it all would take.
    pub(crate) fn still_waits(&mut self, costs: &StepCosts, step_tokens: usize) -> bool {
        let n_steps = self.remaining().div_ceil(step_tokens);
        let patience = n_steps as f64 * costs.of(step_tokens.min(self.remaining()));
        self.has_waited = true;
        self.waits_since.get_or_insert_with(Instant::now).elapsed().as_secs_f64() < patience
    }

    /// Names the blocks that have become full.
    pub(crate) fn seal_full(&mut self, pool: &mut BlockPool) {
        while (self.n_sealed + 1) * BLOCK_TOKENS <= self.computed {
            let idx = self.n_sealed;
            let parent = if idx == 0 { BlockHash::ROOT } else { self.hashes[idx - 1] };
            let tokens = self.tokens[idx * BLOCK_TOKENS..].first_chunk().expect("a full block");
            self.table[idx] = pool.seal(self.table[idx], self.hashes[idx], parent, *tokens);
            self.n_sealed += 1;
        }
    }

    /// Appends a sampled token; says whether the turn ends with it. `context` is the model's limit in tokens.
    pub(crate) fn push(&mut self, token: u32, context: usize) -> Option<FinishReason> {
        self.tokens.push(token);
        self.hashes.extend(self.chain.extend(&[token]));
        let n_output = self.tokens.len() - self.prompt_tokens;
        if self.stop_ids.contains(&token) {
            Some(FinishReason::Stop)
        } else if n_output >= self.max_output_tokens || self.tokens.len() >= context {
            Some(FinishReason::Length)
        } else {
            None
        }
    }

    /// Tells the listener; false when nobody listens.
    pub(crate) fn tell(&mut self, event: Event) -> bool {
        (self.sink)(event)
    }

    /// Keeps the first `n_blocks` blocks and gives the others back.
    pub(crate) fn truncate_table(&mut self, n_blocks: usize, pool: &mut BlockPool) {
        // Children first, so that eviction order stays leaf first.
        while self.table.len() > n_blocks {
            if let Some(id) = self.table.pop() {
                pool.release(id);
            }
        }
        self.n_sealed = self.n_sealed.min(n_blocks);
        self.computed = self.computed.min(n_blocks * BLOCK_TOKENS);
    }
}
