//! Who runs in the next step: admission, continuous batching with chunked prefill, preemption when blocks run out.
//!
//! One step mixes one token of every decoding sequence with slices of prefill (Orca, Yu et al. 2022; Sarathi, Agrawal et
//! al. 2023). Beside streams the slices are so short that the step lasts at most twice as long as without them, going by
//! measured costs; without streams they fill the token budget. The shortest rest goes first, but a turn that waits
//! gains on those that came later: new turns overtake it by about as much prefill as it has left. A turn whose next block
//! another one is computing waits for that block; for one that another worker sends it waits as long as computing would
//! take.
//!
//! When no block is left, the youngest running sequence gives its blocks back and is computed again later; what it had
//! sealed usually waits in the cache.

use std::collections::{HashSet, VecDeque};
use std::ops::RangeInclusive;

use kv::BLOCK_TOKENS;
use kv::hash::BlockHash;
use kv::pool::BlockPool;

use crate::costs::StepCosts;
use crate::exports::Exports;
use crate::grants::Grants;
use crate::job::{Admitted, Error, Event, ExportTo, Fill, SequenceId};
use crate::sequence::{Sequence, State};
use crate::speculate::MAX_STEP_DRAFTS;

/// How long a step with streams and prefill may last, in steps of the streams alone.
const MIXED_STEP_TIMES: f64 = 2.0;

/// Prefill advances by this many tokens whatever it costs.
const MIN_SLICE: usize = 4;

/// A part of one sequence in a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Share {
    /// Index into `Scheduler::running`.
    pub(crate) idx: usize,
    pub(crate) n_tokens: usize,
    /// The next token of a stream, and its draft; not a slice of prefill.
    pub(crate) stream: bool,
    /// The logits of its last token are wanted; of a stream, those of all.
    pub(crate) sample: bool,
}

/// Blocks that are on their way.
#[derive(Debug, Default)]
struct Claims {
    /// A sequence of this engine computes them.
    computed: HashSet<BlockHash>,
    /// They come from another worker.
    fetched: HashSet<BlockHash>,
}

/// Limits of a step and of the running set.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limits {
    pub(crate) step_tokens: usize,
    pub(crate) max_running: usize,
}

/// Sequences and blocks of one engine. Owned by its thread.
pub(crate) struct Scheduler {
    pub(crate) pool: BlockPool,
    pub(crate) grants: Grants,
    pub(crate) exports: Exports,
    waiting: VecDeque<(Sequence, Option<ExportTo>)>,
    /// In order of admission: the last is the youngest.
    pub(crate) running: Vec<Sequence>,
    limits: Limits,
    pub(crate) costs: StepCosts,
    /// Prefill tokens planned so far.
    n_prefilled: u64,
    pub(crate) admitted_turns: Vec<u64>,
    pub(crate) n_preempted: u64,
}

impl Scheduler {
    pub(crate) fn new(pool: BlockPool, grants: Grants, exports: Exports, limits: Limits) -> Self {
        let (waiting, running, admitted_turns) = (VecDeque::new(), Vec::new(), Vec::new());
        let costs = StepCosts::default();
        Self {
            pool,
            grants,
            exports,
            waiting,
            running,
            limits,
            costs,
            n_prefilled: 0,
            admitted_turns,
            n_preempted: 0,
        }
    }

    pub(crate) fn n_waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Prompt tokens that nobody has computed yet.
    pub(crate) fn queued_tokens(&self) -> usize {
        let waiting = self.waiting.iter().map(|(sequence, _)| {
            let held = self.pool.held_prefix(&sequence.hashes[..sequence.reusable_blocks()]);
            sequence.tokens.len() - held * BLOCK_TOKENS
        });
        let running = self.running.iter().filter(|s| s.state == State::Running && s.remaining() > 1);
        waiting.sum::<usize>() + running.map(Sequence::remaining).sum::<usize>()
    }

    /// Queues a new sequence.
    pub(crate) fn enqueue(&mut self, sequence: Sequence, export: Option<ExportTo>) {
        self.waiting.push_back((sequence, export));
    }

    /// Gives waiting sequences their place, in order, while there is room. Those whose next block is on its way to another
    /// one wait for it: the same KV is not sent twice.
    pub(crate) fn admit(&mut self) {
        let mut held_back = Vec::new();
        self.admit_in_order(&mut held_back);
        held_back.into_iter().rev().for_each(|waiting| self.waiting.push_front(waiting));
    }

    fn admit_in_order(&mut self, held_back: &mut Vec<(Sequence, Option<ExportTo>)>) {
        while self.running.len() < self.limits.max_running {
            let Some((mut sequence, export)) = self.waiting.pop_front() else { return };
            let cached_tokens = sequence.reuse_held(&mut self.pool);
            if self.comes_soon(&mut sequence) {
                sequence.truncate_table(0, &mut self.pool);
                held_back.push((sequence, export));
                continue;
            }
            let wanted = blocks_to_grant(&sequence);
            // Its tokens and one more must fit, or admission would only preempt what runs, or itself.
            let whole = (sequence.tokens.len() / BLOCK_TOKENS + 1).min(self.pool.capacity());
            let needed = whole.saturating_sub(sequence.table.len()).max(wanted);
            if needed > self.pool.available() {
                let alone = self.running.is_empty() && self.exports.is_empty();
                sequence.truncate_table(0, &mut self.pool);
                if !alone {
                    self.waiting.push_front((sequence, export));
                    return;
                }
                self.refuse(sequence);
                continue;
            }
            self.place(sequence, export, cached_tokens, wanted);
        }
    }

    fn place(
        &mut self,
        mut sequence: Sequence,
        export: Option<ExportTo>,
        cached_tokens: usize,
        n_granted: usize,
    ) {
        let granted = self.pool.allocate(n_granted).expect("admission has checked the room");
        sequence.table.extend(&granted);
        if granted.is_empty() {
            sequence.state = State::Running;
        } else {
            sequence.state = State::AwaitingKv;
            self.grants.open(sequence.id, &granted);
        }
        if let Some(to) = export {
            self.exports.begin(sequence.id, to);
        }
        // A preempted sequence has been announced before.
        let first_time = !sequence.announced;
        sequence.admitted_at = self.n_prefilled;
        sequence.announced = true;
        let mut heard = true;
        if first_time {
            self.admitted_turns.push(sequence.turn);
            // Only who fetches KV from elsewhere needs to name it: the history is not copied for anybody else.
            let waits = !granted.is_empty();
            let admitted = Admitted {
                prompt_tokens: sequence.prompt_tokens,
                cached_tokens,
                hashes: if waits { sequence.hashes.clone() } else { Vec::new() },
                ids: if waits { sequence.tokens.clone() } else { Vec::new() },
                granted,
            };
            heard = sequence.tell(Event::Admitted(admitted));
        }
        let id = sequence.id;
        self.running.push(sequence);
        if !heard {
            self.cancel(id);
        }
    }

    fn refuse(&mut self, mut sequence: Sequence) {
        let limit = self.pool.capacity() * BLOCK_TOKENS;
        let tokens = sequence.tokens.len();
        sequence.tell(Event::Failed(Error::PromptTooLong { tokens, limit }));
    }

    /// The most tokens a step can have: every running stream's next one, drafts, and the largest slices of prefill.
    pub(crate) fn max_step_tokens(&self) -> usize {
        self.limits.max_running + MAX_STEP_DRAFTS + self.limits.step_tokens.max(MIN_SLICE)
    }

    /// Chooses the next step: a token of every stream, then slices of prefill. Blocks for all its tokens are allocated.
    pub(crate) fn plan(&mut self) -> Vec<Share> {
        let mut shares = Vec::new();
        for idx in 0..self.running.len() {
            self.take(idx, usize::from(self.is_stream(idx)), &mut shares);
        }
        let n_streams = shares.len();
        let mut budget = self.prefill_budget(n_streams);
        let mut claims = self.claims();
        for (place, idx) in self.by_urgency().into_iter().enumerate() {
            // Only the most urgent one begins a block that it cannot finish: others may wait for it.
            let min_slice = if place == 0 { 1 } else { BLOCK_TOKENS };
            let n_tokens = self.slice(idx, min_slice..=budget, &mut claims);
            budget -= self.take(idx, n_tokens, &mut shares);
        }
        let slices = shares.iter().filter(|share| !share.stream);
        self.n_prefilled += slices.map(|share| share.n_tokens as u64).sum::<u64>();
        self.queue_exports(&shares);
        shares
    }

    /// True for a sequence whose next token waits only for the last one.
    fn is_stream(&self, idx: usize) -> bool {
        let sequence = self.running.get(idx);
        sequence
            .is_some_and(|s| s.state == State::Running && s.remaining() == 1 && s.computed >= s.prompt_tokens)
    }

    /// Prefill tokens beside `n_streams` streams.
    fn prefill_budget(&self, n_streams: usize) -> usize {
        let limit = self.limits.step_tokens;
        if n_streams == 0 {
            limit
        } else {
            self.costs.room_within(n_streams, MIXED_STEP_TIMES, limit).max(MIN_SLICE)
        }
    }

    /// Sequences with prefill left, the most urgent first: the shortest rest, less what others have been given since.
    fn by_urgency(&self) -> Vec<usize> {
        let prefills = |idx: &usize| {
            let sequence = &self.running[*idx];
            sequence.state == State::Running && sequence.remaining() > 0 && !self.is_stream(*idx)
        };
        let mut order: Vec<usize> = (0..self.running.len()).filter(prefills).collect();
        let wait = |s: &Sequence| i64::try_from(self.n_prefilled - s.admitted_at).unwrap_or(i64::MAX);
        order.sort_by_key(|&idx| {
            let sequence = &self.running[idx];
            i64::try_from(sequence.remaining()).unwrap_or(i64::MAX) - wait(sequence)
        });
        order
    }

    /// Blocks that somebody has begun to compute, or waits for from outside.
    fn claims(&self) -> Claims {
        let mut claims = Claims::default();
        for sequence in &self.running {
            let at = sequence.computed / BLOCK_TOKENS;
            let (blocks, claimed) = match sequence.state {
                State::AwaitingKv => (at..sequence.table.len(), &mut claims.fetched),
                State::Running if !sequence.computed.is_multiple_of(BLOCK_TOKENS) => {
                    (at..at + 1, &mut claims.computed)
                }
                State::Running | State::Waiting => continue,
            };
            let last = blocks.end.min(sequence.hashes.len());
            claimed.extend(&sequence.hashes[blocks.start.min(last)..last]);
        }
        claims
    }

    /// The next slice of prefill, its length within `limits`; 0 when there is none, or while another sequence makes the
    /// block that it begins with.
    fn slice(&mut self, idx: usize, limits: RangeInclusive<usize>, claims: &mut Claims) -> usize {
        let budget = *limits.end();
        let Some(sequence) = self.running.get_mut(idx) else { return 0 };
        if budget == 0 || sequence.state != State::Running {
            return 0;
        }
        // Another sequence may have computed the same prefix in the meantime.
        sequence.reuse_held(&mut self.pool);
        if self.waits(idx, claims) {
            return 0;
        }
        let sequence = &self.running[idx];
        let remaining = sequence.remaining();
        let whole = (sequence.computed + budget) / BLOCK_TOKENS * BLOCK_TOKENS;
        if remaining <= budget {
            remaining
        } else if whole > sequence.computed {
            whole - sequence.computed
        } else if budget >= *limits.start() {
            budget
        } else {
            0
        }
    }

    /// True while what a sequence would have sent to it first is being sent to another one.
    fn comes_soon(&self, sequence: &mut Sequence) -> bool {
        let at = sequence.table.len();
        let fetches = blocks_to_grant(sequence) > 0 && at < sequence.reusable_blocks();
        if !fetches || !self.running.iter().any(|other| other.fetches(&sequence.hashes[at])) {
            sequence.waits_since = None;
            return false;
        }
        sequence.still_waits(&self.costs, self.limits.step_tokens)
    }

    /// True while it is better to wait for another sequence's block than to compute it; otherwise the block is claimed.
    fn waits(&mut self, idx: usize, claims: &mut Claims) -> bool {
        let sequence = &mut self.running[idx];
        let at = sequence.computed / BLOCK_TOKENS;
        if !sequence.computed.is_multiple_of(BLOCK_TOKENS) || at >= sequence.reusable_blocks() {
            return false;
        }
        let hash = sequence.hashes[at];
        if claims.fetched.contains(&hash) && sequence.still_waits(&self.costs, self.limits.step_tokens) {
            return true;
        }
        sequence.waits_since = None;
        !claims.computed.insert(hash)
    }

    /// True when a sequence's patience may end without a command.
    pub(crate) fn someone_waits(&self) -> bool {
        let waiting = self.waiting.iter().map(|(sequence, _)| sequence);
        self.running.iter().chain(waiting).any(|sequence| sequence.waits_since.is_some())
    }

    /// Adds a share of `n_tokens`, 0 for none. Returns its tokens; fewer when the sequence itself had to give way.
    fn take(&mut self, idx: usize, n_tokens: usize, shares: &mut Vec<Share>) -> usize {
        if n_tokens == 0 || !self.make_room(idx, n_tokens, shares) {
            return 0;
        }
        let (stream, sequence) = (self.is_stream(idx), &self.running[idx]);
        let sample = n_tokens == sequence.remaining() && sequence.wants_output();
        shares.push(Share { idx, n_tokens, stream, sample });
        n_tokens
    }

    /// Makes a stream's share longer by the draft of its sequence, as far as free blocks go.
    pub(crate) fn add_draft(&mut self, share: &mut Share) {
        let sequence = &mut self.running[share.idx];
        let n_drafted = sequence.speculation.draft().len();
        let needed = (sequence.computed + 1 + n_drafted).div_ceil(BLOCK_TOKENS);
        while sequence.table.len() < needed {
            // Drafts never push anybody out.
            match self.pool.allocate(1) {
                Ok(fresh) => sequence.table.extend(fresh),
                Err(_) => break,
            }
        }
        let n_fitting = (sequence.table.len() * BLOCK_TOKENS - sequence.computed - 1).min(n_drafted);
        sequence.speculation.truncate(n_fitting);
        share.n_tokens = 1 + n_fitting;
    }

    /// Allocates the blocks of the next `n_tokens`. False: the sequence itself had to give way.
    fn make_room(&mut self, idx: usize, n_tokens: usize, shares: &mut Vec<Share>) -> bool {
        loop {
            let sequence = &mut self.running[idx];
            let missing =
                (sequence.computed + n_tokens).div_ceil(BLOCK_TOKENS).saturating_sub(sequence.table.len());
            match self.pool.allocate(missing) {
                Ok(fresh) => {
                    sequence.table.extend(fresh);
                    return true;
                }
                Err(_) => {
                    let victim = self.youngest_running();
                    self.preempt(victim);
                    shares.retain(|share| share.idx != victim);
                    if victim == idx {
                        return false;
                    }
                }
            }
        }
    }

    fn youngest_running(&self) -> usize {
        self.running
            .iter()
            .rposition(|s| s.state == State::Running)
            .expect("the caller's sequence is running")
    }

    /// Takes a sequence's blocks; it waits at the head of the queue. Sequences after it move up by one, but none of
    /// them is running (it was the youngest), so no share names them.
    fn preempt(&mut self, idx: usize) {
        let mut sequence = self.running.remove(idx);
        self.n_preempted += 1;
        tracing::debug!(sequence = sequence.id.0, "preempted: no KV block is free");
        sequence.truncate_table(0, &mut self.pool);
        sequence.speculation.lose_place();
        sequence.state = State::Waiting;
        sequence.fill = Fill::Compute;
        self.waiting.push_front((sequence, None));
    }

    fn queue_exports(&mut self, shares: &[Share]) {
        if self.exports.is_empty() {
            return;
        }
        for share in shares {
            let sequence = &self.running[share.idx];
            // A block leaves when it is full, or when the prompt ends in it.
            let end = sequence.computed + share.n_tokens;
            let ends = share.n_tokens == sequence.remaining();
            let until = if ends { end.div_ceil(BLOCK_TOKENS) } else { end / BLOCK_TOKENS };
            let n_complete = sequence.computed / BLOCK_TOKENS;
            self.exports.queue(sequence.id, &sequence.table, n_complete, until, &mut self.pool);
        }
    }

    /// Outside work on an awaiting sequence is over, whole or not: seals what arrived, computes the rest here.
    /// Returns true when the whole prompt is in place.
    pub(crate) fn filled(&mut self, id: SequenceId, whole: bool) -> bool {
        let Some(idx) = self.running.iter().position(|s| s.id == id && s.state == State::AwaitingKv) else {
            return false;
        };
        let sequence = &mut self.running[idx];
        let n_before = sequence.computed / BLOCK_TOKENS;
        let n_arrived = self.grants.close(id, &sequence.table[n_before..]);
        let complete = n_before + n_arrived == sequence.table.len();
        sequence.state = State::Running;
        if whole && complete && sequence.fill == Fill::Handover {
            sequence.computed = sequence.tokens.len();
            sequence.seal_full(&mut self.pool);
            return true;
        }
        let n_usable = (n_before + n_arrived).min(sequence.reusable_blocks());
        sequence.computed = n_usable * BLOCK_TOKENS;
        sequence.truncate_table(n_usable, &mut self.pool);
        sequence.seal_full(&mut self.pool);
        false
    }

    /// Ends a sequence, whatever its state, and gives its blocks back.
    pub(crate) fn cancel(&mut self, id: SequenceId) {
        self.waiting.retain(|(sequence, _)| sequence.id != id);
        if let Some(idx) = self.running.iter().position(|sequence| sequence.id == id) {
            self.remove(idx);
        }
    }

    /// Takes a sequence out and gives its blocks back; sealed ones stay cached.
    pub(crate) fn remove(&mut self, idx: usize) -> Sequence {
        let mut sequence = self.running.remove(idx);
        self.grants.close(sequence.id, &[]);
        self.exports.end(sequence.id, &mut self.pool);
        sequence.truncate_table(0, &mut self.pool);
        sequence
    }
}

/// A rest of a prompt that is this short is computed where its beginning has arrived meanwhile: a handover costs more.
const SHORT_REST: usize = 2 * BLOCK_TOKENS;

/// Blocks that a new sequence waits for from outside.
fn blocks_to_grant(sequence: &Sequence) -> usize {
    let held = sequence.table.len();
    match sequence.fill {
        Fill::Compute => 0,
        Fill::PullPrefix(n_blocks) => n_blocks.min(sequence.reusable_blocks()).saturating_sub(held),
        Fill::Handover if sequence.remaining() == 0 => 0,
        Fill::Handover if sequence.has_waited && held > 0 && sequence.remaining() <= SHORT_REST => 0,
        Fill::Handover => sequence.tokens.len().div_ceil(BLOCK_TOKENS) - held,
    }
}

#[cfg(test)]
mod tests;
