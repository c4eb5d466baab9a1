//! The engine's thread: take commands, choose a step, run the model, publish.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, TryRecvError};
use std::time::{Duration, Instant};

use kernels::pool::ThreadPool;
use kv::BLOCK_TOKENS;
use kv::announce::Announcer;
use kv::hash::HashChain;
use kv::pool::BlockPool;
use kv::port::PortCommand;
use metrics::{Counter, Gauge, Histogram};

use crate::arena::KvArena;
use crate::constrain::masks::{self, Masker};
use crate::costs::StepCosts;
use crate::engine::{Command, EngineConfig, Model};
use crate::exports::{Cut, Exports};
use crate::forward::{Forward, LogitRows, Logits, Slice};
use crate::grants::Grants;
use crate::job::{Error, Event, FinishReason, Job, Output, SequenceId};
use crate::metrics as names;
use crate::sample::Sampler;
use crate::scheduler::{Limits, Scheduler, Share};
use crate::sequence::{Place, Sequence, Start};
use crate::speculate::{N_SOURCES, Speculation};
use crate::verify::{Verdict, verify};

/// How often slow readers of frames, and those who wait for others' blocks, are looked after while nothing runs.
const BACKLOG_POLL: Duration = Duration::from_millis(1);
/// Load reports that say nothing urgent are at least this far apart.
const LOAD_INTERVAL: Duration = Duration::from_millis(50);

/// The time that measuring the costs of steps may take at the start.
const MEASURE_TIME: Duration = Duration::from_millis(150);

/// Everything the thread owns.
pub(crate) struct Steps {
    scheduler: Scheduler,
    arena: KvArena,
    forward: Forward,
    speculation: Speculation,
    sampler: Sampler,
    masker: Masker,
    context: usize,
    vocab: usize,
    announcer: Announcer,
    /// Work done since the start.
    totals: proto::v1::Load,
    load_sent: proto::v1::Load,
    load_sent_at: Instant,
    metrics: Metrics,
}

struct Metrics {
    prefill_tokens: Counter,
    cached_tokens: Counter,
    decode_tokens: Counter,
    step_seconds: Histogram,
    running: Gauge,
    free_blocks: Gauge,
    preemptions: Counter,
}

impl Steps {
    pub(crate) fn new(
        model: Model,
        threads: Arc<ThreadPool>,
        config: EngineConfig,
        announcer: Announcer,
        name: String,
    ) -> Self {
        let shape = model.weights.shape();
        let geometry = shape.kv_geometry().with_dtype(config.kv_dtype);
        let context = shape.context_len.min(config.n_blocks as usize * BLOCK_TOKENS);
        let vocab = shape.vocab;
        let layer_bytes = geometry.bytes_per_block_layer();
        let n_layers = u32::try_from(geometry.n_layers).expect("a model has few layers");
        let cut = Cut::new(geometry.n_layers, layer_bytes, proto::MAX_FRAME_BYTES);
        let scheduler = Scheduler::new(
            BlockPool::new(config.n_blocks),
            Grants::new(n_layers, layer_bytes),
            Exports::new(cut),
            Limits { step_tokens: config.step_tokens, max_running: config.max_running },
        );
        let max_step_tokens = scheduler.max_step_tokens();
        let guesser = model.guesser(&threads, config);
        Self {
            scheduler,
            arena: KvArena::new(geometry, config.n_blocks as usize),
            forward: Forward::new(model.weights, threads, max_step_tokens),
            speculation: Speculation::new(config.speculate, guesser, vocab, &name),
            sampler: Sampler::default(),
            masker: Masker::default(),
            context,
            vocab,
            announcer,
            totals: proto::v1::Load::default(),
            load_sent: proto::v1::Load::default(),
            load_sent_at: Instant::now(),
            metrics: Metrics::new(name),
        }
    }

    /// Runs until told to stop or until all handles are gone.
    pub(crate) fn run(mut self, inbox: &Receiver<Command>) {
        self.measure_costs();
        let mut idle = false;
        loop {
            match self.take_commands(inbox, idle) {
                Flow::Continue => {}
                Flow::Stop => return,
            }
            self.scheduler.exports.pump(&self.arena, &mut self.scheduler.pool);
            self.scheduler.admit();
            let n_preempted = self.scheduler.n_preempted;
            let mut shares = self.scheduler.plan();
            let preempted = self.scheduler.n_preempted > n_preempted;
            masks::follow(&mut self.scheduler.running, &shares);
            self.add_drafts(&mut shares);
            // Who lost its place to another in a plan that came to nothing may get it in the next one.
            idle = shares.is_empty() && !preempted && !self.finish_prefilled();
            if !shares.is_empty() {
                self.step(&shares);
                self.finish_prefilled();
            }
            // Blocks that came back may be what a waiting turn needs.
            let released = self.scheduler.exports.pump(&self.arena, &mut self.scheduler.pool);
            idle &= !(released && self.scheduler.n_waiting() > 0);
            self.publish(idle);
        }
    }

    /// Measures steps of a few widths on memory that nobody uses yet.
    fn measure_costs(&mut self) {
        let began = Instant::now();
        let mut measured = Vec::new();
        let n_tokens_max =
            self.scheduler.max_step_tokens().min(self.context).min(self.arena.n_blocks() * BLOCK_TOKENS);
        for width in StepCosts::widths().take_while(|&width| width <= n_tokens_max) {
            let mut best = Duration::MAX;
            for _ in 0..3 {
                let left = MEASURE_TIME.saturating_sub(began.elapsed());
                if best != Duration::MAX && left.is_zero() {
                    break;
                }
                let Some(took) = self.time_step(width) else { return };
                best = best.min(took);
            }
            measured.push(best);
            if began.elapsed() >= MEASURE_TIME {
                break;
            }
        }
        tracing::debug!(?measured, "the costs of steps of 1, 2, 3, 4, 6, 8, ... tokens");
        self.scheduler.costs.set(&measured);
    }

    fn time_step(&mut self, n_tokens: usize) -> Option<Duration> {
        let tokens = vec![0; n_tokens];
        let blocks: Vec<u32> = (0..).take(n_tokens.div_ceil(BLOCK_TOKENS)).collect();
        let slice = Slice { tokens: &tokens, start: 0, blocks: &blocks, logits: Logits::All };
        let began = Instant::now();
        self.forward.run(&mut self.arena, &[slice], &mut |_, _| ()).ok()?;
        Some(began.elapsed())
    }

    /// Makes the streams' shares longer by what is worth checking.
    fn add_drafts(&mut self, shares: &mut [Share]) {
        let streams: Vec<usize> = shares.iter().filter(|share| share.stream).map(|share| share.idx).collect();
        let n_tokens = shares.iter().map(|share| share.n_tokens).sum();
        let Scheduler { running, costs, .. } = &mut self.scheduler;
        self.speculation.propose(running, &streams, n_tokens, costs, self.context);
        shares.iter_mut().filter(|share| share.stream).for_each(|share| self.scheduler.add_draft(share));
    }

    fn take_commands(&mut self, inbox: &Receiver<Command>, mut idle: bool) -> Flow {
        loop {
            let command = if idle && (self.scheduler.exports.has_backlog() || self.scheduler.someone_waits())
            {
                inbox.recv_timeout(BACKLOG_POLL).map_err(|error| error == RecvTimeoutError::Disconnected)
            } else if idle {
                inbox.recv().map_err(|_| true)
            } else {
                inbox.try_recv().map_err(|error| error == TryRecvError::Disconnected)
            };
            idle = false;
            match command {
                Ok(Command::Stop) | Err(true) => return Flow::Stop,
                Ok(command) => self.obey(command),
                Err(false) => return Flow::Continue,
            }
        }
    }

    fn obey(&mut self, command: Command) {
        match command {
            Command::Submit(id, job, place) => self.submit(id, *job, place),
            Command::Filled { id, first, whole } => self.filled(id, first, whole),
            Command::Cancel(id) => self.scheduler.cancel(id),
            Command::Port(PortCommand::Import { grant, frame, reply }) => {
                reply.send(self.scheduler.grants.import(grant, &frame, &mut self.arena));
            }
            Command::Port(PortCommand::Export { hashes, frames }) => {
                let held = self.scheduler.pool.acquire_prefix(&hashes);
                self.scheduler.exports.send_cached(held, frames);
            }
            Command::Stop => {}
        }
    }

    fn submit(&mut self, id: SequenceId, mut job: Job, place: Place) {
        match self.resolve(&job) {
            Ok(start) => {
                let export = job.export.take();
                self.scheduler.enqueue(Sequence::new(id, start, job, place), export);
            }
            Err(error) => {
                (job.sink)(Event::Failed(error));
            }
        }
    }

    /// The whole prompt and its hashes: from the cache up to the parent, from the job after it.
    fn resolve(&self, job: &Job) -> Result<Start, Error> {
        let prompt = &job.prompt;
        let (mut tokens, mut hashes) = if prompt.parent.is_root() {
            (Vec::new(), Vec::new())
        } else {
            let pool = &self.scheduler.pool;
            let tokens = pool.tokens_of(&prompt.parent).ok_or(Error::ParentUnknown)?;
            (tokens, pool.hashes_of(&prompt.parent).ok_or(Error::ParentUnknown)?)
        };
        tokens.extend_from_slice(&prompt.ids);
        if tokens.is_empty() || prompt.ids.iter().any(|&id| id as usize >= self.vocab) {
            return Err(Error::BadPrompt);
        }
        if job.constraint.as_ref().is_some_and(|constraint| constraint.generated() > tokens.len()) {
            return Err(Error::Constraint("more tokens are said to be output than there are".to_owned()));
        }
        let limit = if job.max_output_tokens == 0 { self.context } else { self.context - 1 };
        if tokens.len() > limit {
            return Err(Error::PromptTooLong { tokens: tokens.len(), limit });
        }
        let mut chain = HashChain::after(prompt.key, prompt.parent, hashes.len());
        hashes.extend(chain.extend(&prompt.ids));
        Ok(Start { tokens, chain, hashes })
    }

    fn filled(&mut self, id: SequenceId, first: Option<Output>, whole: bool) {
        let whole = whole && self.accepts_first(id, first.as_ref());
        if !self.scheduler.filled(id, whole) {
            return;
        }
        let Some(idx) = self.scheduler.running.iter().position(|sequence| sequence.id == id) else { return };
        let sequence = &mut self.scheduler.running[idx];
        self.metrics.cached_tokens.increment(sequence.prompt_tokens as u64);
        let heard = sequence.tell(Event::Prefilled { computed_tokens: 0 });
        match first {
            Some(output) if heard && sequence.wants_output() => self.deliver(idx, output),
            _ => self.finish(idx, heard.then_some(FinishReason::Prefilled)),
        }
    }

    /// A handover must bring a token of the vocabulary when output is wanted.
    fn accepts_first(&self, id: SequenceId, first: Option<&Output>) -> bool {
        let sequence = self.scheduler.running.iter().find(|sequence| sequence.id == id);
        sequence.is_some_and(|sequence| match first {
            Some(output) => (output.id as usize) < self.vocab,
            None => !sequence.wants_output(),
        })
    }

    fn step(&mut self, shares: &[Share]) {
        let began = Instant::now();
        self.masker.order(&mut self.scheduler.running, shares);
        let result = self.run_model(shares);
        let masks = self.masker.collect(&mut self.scheduler.running);
        let rows = match result {
            Ok(rows) => rows,
            Err(error) => return self.fail(shares, &error),
        };
        let mut outcome = Outcome::default();
        let mut row = 0;
        let mut verdicts = Vec::new();
        for share in shares {
            let sequence = &mut self.scheduler.running[share.idx];
            let masks = masks.get(&sequence.id);
            if share.stream {
                outcome.n_streams += 1;
                let verdict = verify(&mut self.sampler, sequence, masks, &rows, row);
                let n_outputs = verdict.n_outputs();
                if let Some(source) = Speculation::source_of(sequence) {
                    outcome.proposed[source] += share.n_tokens - 1;
                    outcome.accepted[source] += n_outputs.saturating_sub(1);
                }
                if n_outputs > 0 {
                    self.speculation.learn(sequence, n_outputs, &rows, row);
                }
                sequence.computed += 1;
                outcome.n_output += n_outputs;
                verdicts.push((sequence.id, verdict));
                row += share.n_tokens;
            } else {
                let n_prompt = sequence.prompt_tokens.saturating_sub(sequence.computed).min(share.n_tokens);
                sequence.prompt_computed += n_prompt;
                sequence.computed += share.n_tokens;
                outcome.n_prefill += share.n_tokens;
                if share.sample {
                    self.speculation.begin(sequence, &rows, row);
                    verdicts.push((sequence.id, verify(&mut self.sampler, sequence, masks, &rows, row)));
                    row += 1;
                }
            }
            sequence.seal_full(&mut self.scheduler.pool);
        }
        for (id, verdict) in verdicts {
            match verdict {
                Verdict::Outputs(outputs) => self.deliver_run(id, outputs),
                Verdict::Complete => self.complete(id),
                Verdict::Failed(error) => self.fail_one(id, error),
            }
        }
        outcome.n_tokens = shares.iter().map(|share| share.n_tokens).sum();
        self.account(began.elapsed(), &outcome);
    }

    fn run_model(&mut self, shares: &[Share]) -> Result<LogitRows, crate::forward::Error> {
        let Scheduler { running, exports, .. } = &mut self.scheduler;
        let tokens: Vec<Vec<u32>> = shares
            .iter()
            .map(|share| {
                let sequence = &running[share.idx];
                let (drafted, n_drafted) = match share.stream {
                    true => (sequence.speculation.draft(), share.n_tokens - 1),
                    false => (&[][..], 0),
                };
                let known = &sequence.tokens[sequence.computed..][..share.n_tokens - n_drafted];
                [known, &drafted[..n_drafted]].concat()
            })
            .collect();
        let slices: Vec<Slice<'_>> = shares
            .iter()
            .zip(&tokens)
            .map(|(share, tokens)| {
                let sequence = &running[share.idx];
                let end = sequence.computed + share.n_tokens;
                Slice {
                    tokens,
                    start: sequence.computed,
                    blocks: &sequence.table[..end.div_ceil(BLOCK_TOKENS)],
                    logits: match (share.stream, share.sample) {
                        (true, _) => Logits::All,
                        (false, true) => Logits::Last,
                        (false, false) => Logits::None,
                    },
                }
            })
            .collect();
        self.forward
            .run(&mut self.arena, &slices, &mut |layer_idx, arena| exports.layer_written(layer_idx, arena))
    }

    /// The model refused the step: a defect, since prompts were checked. Its sequences fail, the engine goes on.
    fn fail(&mut self, shares: &[Share], error: &crate::forward::Error) {
        tracing::error!(%error, "a step failed");
        let ids: Vec<SequenceId> = shares.iter().map(|share| self.scheduler.running[share.idx].id).collect();
        for id in ids {
            self.fail_one(id, Error::Model(error.to_string()));
        }
    }

    fn fail_one(&mut self, id: SequenceId, error: Error) {
        if let Some(idx) = self.scheduler.running.iter().position(|sequence| sequence.id == id) {
            self.scheduler.remove(idx).tell(Event::Failed(error));
        }
    }

    /// Ends a turn after which nothing may follow, and that no stop token ends.
    fn complete(&mut self, id: SequenceId) {
        let Some(idx) = self.scheduler.running.iter().position(|sequence| sequence.id == id) else { return };
        let sequence = &self.scheduler.running[idx];
        if sequence.tokens.len() > sequence.prompt_tokens || self.prefilled(idx) {
            self.finish(idx, Some(FinishReason::Stop));
        }
    }

    /// Hands on the tokens of one step, until the turn ends with one of them.
    fn deliver_run(&mut self, id: SequenceId, outputs: Vec<Output>) {
        for (i, output) in outputs.into_iter().enumerate() {
            let Some(idx) = self.scheduler.running.iter().position(|sequence| sequence.id == id) else {
                return;
            };
            let sequence = &mut self.scheduler.running[idx];
            if i > 0 {
                // The token before this one was drafted, so its KV is in place.
                sequence.computed += 1;
                sequence.seal_full(&mut self.scheduler.pool);
            }
            if sequence.tokens.len() == sequence.prompt_tokens && !self.prefilled(idx) {
                return;
            }
            self.deliver(idx, output);
        }
    }

    /// Tells that the prompt's KV is complete; false when the turn was cancelled by it.
    fn prefilled(&mut self, idx: usize) -> bool {
        let sequence = &mut self.scheduler.running[idx];
        let computed_tokens = sequence.prompt_computed;
        self.metrics.cached_tokens.increment(sequence.prompt_tokens.saturating_sub(computed_tokens) as u64);
        if sequence.tell(Event::Prefilled { computed_tokens }) {
            return true;
        }
        self.finish(idx, None);
        false
    }

    fn deliver(&mut self, idx: usize, output: Output) {
        let context = self.context;
        let sequence = &mut self.scheduler.running[idx];
        let end = sequence.push(output.id, context);
        if !sequence.tell(Event::Token(output)) {
            self.finish(idx, None);
        } else if end.is_some() {
            self.finish(idx, end);
        }
    }

    /// Ends the turns that only wanted their prompt's KV. True if there were any.
    fn finish_prefilled(&mut self) -> bool {
        let done = |sequence: &Sequence| {
            sequence.state == crate::sequence::State::Running
                && sequence.remaining() == 0
                && !sequence.wants_output()
        };
        let mut any = false;
        while let Some(idx) = self.scheduler.running.iter().position(done) {
            any = true;
            let sequence = &self.scheduler.running[idx];
            let n_blocks = sequence.table.len();
            self.scheduler.exports.queue(
                sequence.id,
                &sequence.table,
                n_blocks,
                n_blocks,
                &mut self.scheduler.pool,
            );
            if self.prefilled(idx) {
                self.finish(idx, Some(FinishReason::Prefilled));
            }
        }
        any
    }

    fn finish(&mut self, idx: usize, reason: Option<FinishReason>) {
        let mut sequence = self.scheduler.remove(idx);
        self.speculation.remember(&sequence);
        // Blocks to reuse and a place that is free: routers hear of both before the client can ask for more.
        self.publish(true);
        if let Some(reason) = reason {
            sequence.tell(Event::Finished(reason));
        }
    }

    fn account(&mut self, took: Duration, outcome: &Outcome) {
        let Outcome { n_tokens, n_prefill, n_streams, n_output, proposed, accepted } = *outcome;
        let costs = &self.scheduler.costs;
        let longer = took.as_secs_f64() - costs.of(n_prefill + n_streams);
        let plain = costs.of(n_streams.max(1)) / n_streams.max(1) as f64;
        self.speculation.account(proposed, accepted, plain, longer);
        self.scheduler.costs.observe(n_tokens, took);
        let us = u64::try_from(took.as_micros()).unwrap_or(u64::MAX);
        let prefill_us = us * n_prefill as u64 / n_tokens.max(1) as u64;
        self.totals.prefill_tokens_total += n_prefill as u64;
        self.totals.decode_tokens_total += n_output as u64;
        self.totals.prefill_busy_us_total += prefill_us;
        self.totals.decode_busy_us_total += us - prefill_us;
        self.metrics.prefill_tokens.increment(n_prefill as u64);
        self.metrics.decode_tokens.increment(n_output as u64);
        self.metrics.step_seconds.record(took.as_secs_f64());
    }

    fn publish(&mut self, idle: bool) {
        self.announcer.publish_changes(&self.scheduler.pool.take_changes());
        let scheduler = &mut self.scheduler;
        self.metrics.preemptions.increment(std::mem::take(&mut scheduler.n_preempted));
        let narrow = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        let mut now = proto::v1::Load {
            queued_prefill_tokens: self.load_sent.queued_prefill_tokens,
            waiting_sequences: narrow(scheduler.n_waiting()),
            running_sequences: narrow(scheduler.running.len()),
            free_blocks: narrow(scheduler.pool.available()),
            ..self.totals.clone()
        };
        self.metrics.running.set(f64::from(now.running_sequences));
        self.metrics.free_blocks.set(f64::from(now.free_blocks));
        let urgent = idle
            || !scheduler.admitted_turns.is_empty()
            || now.running_sequences != self.load_sent.running_sequences
            || now.waiting_sequences != self.load_sent.waiting_sequences;
        if !urgent && self.load_sent_at.elapsed() < LOAD_INTERVAL {
            return;
        }
        // The one figure that costs more than a look.
        now.queued_prefill_tokens = narrow(scheduler.queued_tokens());
        if now == self.load_sent && scheduler.admitted_turns.is_empty() {
            return;
        }
        let admitted_turns = std::mem::take(&mut scheduler.admitted_turns);
        self.load_sent = now;
        self.load_sent_at = Instant::now();
        self.announcer.publish_load(proto::v1::Load { admitted_turns, ..self.load_sent.clone() });
    }
}

enum Flow {
    Continue,
    Stop,
}

/// What a step did.
#[derive(Debug, Default)]
struct Outcome {
    /// Through the model, drafts included.
    n_tokens: usize,
    n_prefill: usize,
    n_streams: usize,
    /// Output tokens of the streams.
    n_output: usize,
    /// Draft tokens by source, and those of them that were right.
    proposed: [usize; N_SOURCES],
    accepted: [usize; N_SOURCES],
}

impl Metrics {
    fn new(worker: String) -> Self {
        let labels = [("worker", worker)];
        Self {
            prefill_tokens: metrics::counter!(names::PREFILL_TOKENS, &labels),
            cached_tokens: metrics::counter!(names::CACHED_TOKENS, &labels),
            decode_tokens: metrics::counter!(names::DECODE_TOKENS, &labels),
            step_seconds: metrics::histogram!(names::STEP_SECONDS, &labels),
            running: metrics::gauge!(names::RUNNING_TURNS, &labels),
            free_blocks: metrics::gauge!(names::FREE_BLOCKS, &labels),
            preemptions: metrics::counter!(names::PREEMPTIONS, &labels),
        }
    }
}
