//! Who runs in the next step: admission, continuous batching with chunked prefill, preemption when blocks run out.
//!
//! One step mixes one token of every decoding sequence with slices of prefill within a token budget, first come first
//! served (Orca, Yu et al. 2022; Sarathi, Agrawal et al. 2023). When no block is left, the youngest running sequence
//! gives its blocks back and is computed again later; what it had sealed usually waits in the cache.

use std::collections::VecDeque;

use kv::BLOCK_TOKENS;
use kv::pool::BlockPool;

use crate::exports::Exports;
use crate::grants::Grants;
use crate::job::{Admitted, Error, Event, ExportTo, Fill, SequenceId};
use crate::sequence::{Sequence, State};

/// A part of one sequence in a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Share {
    /// Index into `Scheduler::running`.
    pub(crate) idx: usize,
    pub(crate) n_tokens: usize,
    /// A slice of prefill, not the next token of a stream.
    pub(crate) prefill: bool,
    /// The logits of its last token are wanted.
    pub(crate) sample: bool,
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
    pub(crate) admitted_turns: Vec<u64>,
    pub(crate) n_preempted: u64,
}

impl Scheduler {
    pub(crate) fn new(pool: BlockPool, grants: Grants, exports: Exports, limits: Limits) -> Self {
        let (waiting, running, admitted_turns) = (VecDeque::new(), Vec::new(), Vec::new());
        Self { pool, grants, exports, waiting, running, limits, admitted_turns, n_preempted: 0 }
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

    /// Gives waiting sequences their place, in order, while there is room.
    pub(crate) fn admit(&mut self) {
        while self.running.len() < self.limits.max_running {
            let Some((mut sequence, export)) = self.waiting.pop_front() else { return };
            let cached_tokens = sequence.reuse_held(&mut self.pool);
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

    /// The most tokens a step can have: every running stream's next one and the largest slices of prefill.
    pub(crate) fn max_step_tokens(&self) -> usize {
        self.limits.max_running + self.limits.step_tokens.max(BLOCK_TOKENS)
    }

    /// Chooses the next step. Blocks for all its tokens are allocated.
    pub(crate) fn plan(&mut self) -> Vec<Share> {
        let mut shares = Vec::new();
        for prefill in [false, true] {
            let mut idx = 0;
            while idx < self.running.len() {
                let budget = self.budget(&shares, prefill);
                if let Some(n_tokens) = self.wish(idx, prefill, budget) {
                    if !self.make_room(idx, n_tokens, &mut shares) {
                        continue;
                    }
                    let sequence = &self.running[idx];
                    let sample = n_tokens == sequence.remaining() && sequence.wants_output();
                    shares.push(Share { idx, n_tokens, prefill, sample });
                }
                idx += 1;
            }
        }
        self.queue_exports(&shares);
        shares
    }

    /// Tokens left in a step. Every stream gets its token; prefill gets the rest, and at least a block, so that it
    /// advances however many streams there are.
    fn budget(&self, shares: &[Share], prefill: bool) -> usize {
        let taken =
            |kind: bool| shares.iter().filter(|s| s.prefill == kind).map(|s| s.n_tokens).sum::<usize>();
        if !prefill {
            return self.limits.max_running - taken(false);
        }
        let slices = self.limits.step_tokens.saturating_sub(taken(false)).max(BLOCK_TOKENS);
        slices.saturating_sub(taken(true))
    }

    /// How many tokens of the sequence fit the pass over decoding or prefilling sequences.
    fn wish(&mut self, idx: usize, prefill: bool, budget: usize) -> Option<usize> {
        let sequence = &mut self.running[idx];
        if sequence.state != State::Running {
            return None;
        }
        if sequence.remaining() > 1 {
            // Another sequence may have computed the same prefix in the meantime.
            sequence.reuse_held(&mut self.pool);
        }
        let remaining = sequence.remaining();
        if remaining == 0 || budget == 0 || (remaining > 1) != prefill {
            return None;
        }
        if remaining <= budget {
            return Some(remaining);
        }
        let end = (sequence.computed + budget) / BLOCK_TOKENS * BLOCK_TOKENS;
        (end > sequence.computed).then(|| end - sequence.computed)
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
            let until = (sequence.computed + share.n_tokens).div_ceil(BLOCK_TOKENS);
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

/// Blocks that a new sequence waits for from outside.
fn blocks_to_grant(sequence: &Sequence) -> usize {
    let held = sequence.table.len();
    match sequence.fill {
        Fill::Compute => 0,
        Fill::PullPrefix(n_blocks) => n_blocks.min(sequence.reusable_blocks()).saturating_sub(held),
        Fill::Handover if sequence.remaining() == 0 => 0,
        Fill::Handover => sequence.tokens.len().div_ceil(BLOCK_TOKENS) - held,
    }
}

#[cfg(test)]
mod tests;
