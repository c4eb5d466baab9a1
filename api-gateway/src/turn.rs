//! One turn from request to terminal event.
//!
//! ```text
//! prepare (parent, delta, tokens) ─▶ plan ─▶ generate ─▶ tokens ─▶ text deltas ─▶ append, store, terminal event
//!                                     ▲─────────┘ a lost worker: plan again, send prompt + generated ids
//! ```

mod asked;
mod finish;
mod stop;

use std::sync::Arc;
use std::time::{Duration, Instant};

use model::calls::Piece;
use model::prompt::LogEnd;
use proto::reason::Reason;
use proto::v1;
use proto::v1::generate_event::Event as WorkerEvent;
use tokio::time::timeout;
use tonic::{Status, Streaming};
use tracing::field::Empty;
use tracing::{Instrument, Span};

use crate::cluster::{Counted, RouteQuery, may_retry};
use crate::compact;
use crate::constraint::Spelling;
use crate::conversation::{Cut, Item, TokenLog};
use crate::conversations::ListedItem;
use crate::emit::{Emitter, EventSink, Phase};
use crate::error::ApiError;
use crate::history::Entry;
use crate::metrics as names;
use crate::output::{Output, Part};
use crate::prepare::{Prepared, TOKEN_BYTES, too_long};
use crate::state::Gateway;
use crate::store::Stored;
use crate::wire::{self, Create, Status as ItemStatus, Usage};
use asked::{Asked, prepare_off_thread, shortened};
pub(crate) use finish::Finish;
use finish::{Outcome, api_error};
pub(crate) use stop::{Partial, Stop};

/// A turn that started is announced after this long, even if no worker has taken it yet.
const ANNOUNCE_AFTER: Duration = Duration::from_millis(300);

/// The pause before the second resubmission; it doubles with each.
const RESUBMIT_PAUSE: Duration = Duration::from_millis(25);

/// How a turn ended, for whoever asked.
#[derive(Debug)]
pub(crate) struct Ended {
    /// The final response object as JSON.
    pub(crate) response: String,
    pub(crate) stored: Option<Arc<Stored>>,
}

/// Where a turn's request came from and what it may use.
#[derive(Debug, Clone)]
pub(crate) struct Origin {
    /// On whose behalf: nothing stored is shared between tenants.
    pub(crate) tenant: Arc<str>,
    /// The id the response will have.
    pub(crate) response_id: String,
    /// A response that only this connection knows.
    pub(crate) latest: Option<Arc<Stored>>,
}

/// Runs one turn. Dropping the future cancels it: the worker stops before its next step.
///
/// When `stop` says so, the response ends as incomplete, with what was generated so far or without the item that is not
/// complete.
///
/// # Errors
/// When nothing was sent to `events` yet and the request cannot be served; later failures are events.
pub(crate) async fn run_turn(
    gateway: &Gateway,
    create: Create,
    origin: Origin,
    events: EventSink,
    stop: &Stop,
) -> Result<Ended, ApiError> {
    let span =
        tracing::info_span!("turn", role = "gateway", response = origin.response_id, conversation = Empty);
    turn(gateway, create, origin, events, stop).instrument(span).await
}

async fn turn(
    gateway: &Gateway,
    create: Create,
    origin: Origin,
    events: EventSink,
    stop: &Stop,
) -> Result<Ended, ApiError> {
    let began = Instant::now();
    let mut asked = prepare_off_thread(gateway, create, origin.clone()).await?;
    let due = asked.due.take();
    Span::current().record("conversation", &asked.prepared.conversation);
    let mut outcome = Outcome { outcome: "cancelled", conversation: &asked.prepared.conversation };
    let mut emitter = Emitter::new(gateway, &asked.create, &asked.prepared, events);
    let shortened = match due {
        None => Ok(None),
        Some(due) => shortened(gateway, &asked, due, origin, stop, &mut emitter).await,
    };
    let shortened = match shortened {
        Ok(shortened) => shortened,
        Err(error) => {
            outcome.outcome = if error.is_client_gone() { "cancelled" } else { "failed" };
            return failed(emitter, error, Run::new(gateway, &asked, stop).account()).await;
        }
    };
    let asked = shortened.as_ref().unwrap_or(&asked);
    if let Some(sealed) = asked.sealed_summary() {
        emitter.goes_on(&asked.create, &asked.prepared);
        emitter.open(wire::Body::Compaction { sealed }).await?;
        emitter.close(ItemStatus::Completed).await?;
    }
    let mut run = Run::new(gateway, asked, stop);
    let result = run.drive(&mut emitter).await;
    outcome.outcome = match &result {
        Ok(finish) if finish.incomplete_reason().is_some() => "incomplete",
        Ok(_) => "completed",
        Err(error) if error.is_client_gone() => "cancelled",
        Err(_) => "failed",
    };
    match result {
        Ok(finish) => {
            emitter.begin().await?;
            run.complete(emitter, finish, began).await
        }
        Err(error) => failed(emitter, error, run.account()).await,
    }
}

/// Ends a response with an error: by an event when it has begun, else as the answer to the request.
async fn failed(emitter: Emitter<'_>, error: ApiError, account: wire::BatonTurn) -> Result<Ended, ApiError> {
    if !emitter.has_begun() || error.is_client_gone() {
        return Err(error);
    }
    tracing::warn!(%error, "turn failed");
    let response = emitter.fail(&error, account).await?;
    Ok(Ended { response, stored: None })
}

/// Why an attempt ended early.
enum Failure {
    Worker { status: Status, worker: Option<v1::WorkerRef> },
    Client(ApiError),
}

/// What a worker is sent of what it may hold already.
struct Sent {
    cut: Cut,
    spelling: Spelling,
}

/// A turn at a worker.
struct Running {
    stream: Streaming<v1::GenerateEvent>,
    worker: v1::WorkerRef,
    _counted: Counted,
}

/// A turn on its way.
struct Run<'a> {
    gateway: &'a Gateway,
    create: &'a Create,
    prepared: &'a Prepared,
    stop: &'a Stop,
    turn: u64,
    generated: Vec<u32>,
    output: Output<'a>,
    /// What has been generated of a summary.
    summary: String,
    started: Option<v1::Started>,
    decode_worker: String,
    avoid: Vec<v1::WorkerRef>,
    n_attempts: usize,
}

impl<'a> Run<'a> {
    fn new(gateway: &'a Gateway, asked: &'a Asked, stop: &'a Stop) -> Self {
        let Asked { create, prepared, .. } = asked;
        let turn = rand::random();
        let (generated, avoid) = (Vec::new(), Vec::new());
        let decode_worker = prepared.last_decode.clone();
        Self {
            gateway,
            create,
            prepared,
            stop,
            turn,
            generated,
            output: Output::new(gateway, create, prepared),
            summary: String::new(),
            started: None,
            decode_worker,
            avoid,
            n_attempts: 0,
        }
    }

    /// Attempts until the turn is done or there is nothing left to try.
    async fn drive(&mut self, emitter: &mut Emitter<'_>) -> Result<Finish, ApiError> {
        if self.prepared.log.len() == 0 {
            // A warm-up without input: there is nothing to compute, but its id can be continued.
            return Ok(Finish::Prefilled);
        }
        loop {
            if self.stop.is_stopped() {
                return Ok(Finish::Interrupted);
            }
            if self.create.generate && self.prepared.max_output_tokens == 0 {
                return Err(too_long(self.gateway, self.prepared.log.len()));
            }
            match self.attempt(emitter).await {
                Ok(finish) => return Ok(finish),
                Err(failure) => match (self.give_up(failure), self.said_all()) {
                    (Some(error), _) => return Err(error),
                    (None, Some(finish)) => return Ok(finish),
                    // Who failed may be on its way back.
                    (None, None) => tokio::time::sleep(RESUBMIT_PAUSE * (1 << self.n_attempts.min(5))).await,
                },
            }
        }
    }

    /// How the turn ended, when a lost worker owes nothing but its last word.
    fn said_all(&self) -> Option<Finish> {
        let last = self.generated.last()?;
        if self.gateway.text().tokenizer.is_end_of_turn(*last) {
            return Some(Finish::Stop);
        }
        (self.generated.len() >= self.prepared.max_output_tokens).then_some(Finish::Length)
    }

    /// Plans and runs the rest of the turn; what was generated so far is part of the prompt.
    async fn attempt(&mut self, emitter: &mut Emitter<'_>) -> Result<Finish, Failure> {
        self.n_attempts += 1;
        let mut log = self.prepared.log.clone();
        if !self.generated.is_empty() {
            log.append(self.generated.clone(), Vec::new(), LogEnd::Generated { closed: false });
        }
        let mut running = {
            let start = self.start(&log);
            let mut start = std::pin::pin!(start);
            match timeout(ANNOUNCE_AFTER, &mut start).await {
                Ok(started) => started?,
                Err(_) => {
                    emitter.begin().await.map_err(Failure::Client)?;
                    tokio::select! {
                        started = emitter.waiting(start) => started.map_err(Failure::Client)??,
                        () = self.stop.stopped() => return Ok(Finish::Interrupted),
                    }
                }
            }
        };
        emitter.begin().await.map_err(Failure::Client)?;
        self.read(&mut running, emitter).await
    }

    async fn start(&self, log: &TokenLog) -> Result<Running, Failure> {
        let query = RouteQuery {
            log,
            cut: &self.prepared.cut,
            fingerprint: &self.gateway.text().fingerprint,
            conversation: &self.prepared.conversation,
            turn: self.turn,
            avoid: &self.avoid,
            last_decode: &self.decode_worker,
        };
        let cluster = self.gateway.cluster();
        let plan = cluster.route(&query).await.map_err(|status| Failure::Worker { status, worker: None })?;
        let decode = plan.decode.clone().unwrap_or_default();
        let failure = |status| Failure::Worker { status, worker: Some(decode.clone()) };
        let form = self.prepared.constraint.as_ref();
        let mut sent = Sent {
            cut: self.prepared.cut.clone(),
            spelling: form.map_or(Spelling::Full, |form| cluster.spelling(&decode, form.hash())),
        };
        // A worker may have forgotten the prompt's beginning, and the grammar: each is sent once.
        let (stream, counted) = loop {
            let result = cluster.generate(&decode, self.request(log, &plan, &sent)).await;
            match result.as_ref().err().and_then(Reason::of) {
                Some(Reason::ParentUnknown) if sent.cut.n_blocks > 0 => {
                    metrics::counter!(names::FULL_PROMPTS).increment(1);
                    sent.cut = Cut::root();
                }
                Some(Reason::GrammarUnknown) if sent.spelling == Spelling::Hash => {
                    sent.spelling = Spelling::Full;
                }
                _ => break result.map_err(failure)?,
            }
        };
        if let Some(form) = form.filter(|_| sent.spelling == Spelling::Full) {
            cluster.holds(&decode, form.hash());
        }
        Ok(Running { stream, worker: decode, _counted: counted })
    }

    fn request(&self, log: &TokenLog, plan: &v1::RoutePlan, sent: &Sent) -> v1::GenerateRequest {
        let cut = &sent.cut;
        let narrow = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        let prompt = v1::Prompt {
            model_fingerprint: bytes::Bytes::copy_from_slice(&self.gateway.text().fingerprint),
            tenant_salt: bytes::Bytes::new(),
            parent: cut.parent_bytes(),
            parent_blocks: narrow(cut.n_blocks),
            ids: log.ids_from(cut.n_blocks * kv::BLOCK_TOKENS),
        };
        v1::GenerateRequest {
            conversation: self.prepared.conversation.clone(),
            turn: self.turn,
            prompt: Some(prompt),
            sampling: Some(self.prepared.sampling),
            max_output_tokens: narrow(self.prepared.max_output_tokens - self.generated.len()),
            stop_ids: self.gateway.text().tokenizer.end_of_turn_ids().to_vec(),
            prefill: plan.prefill.clone(),
            source: plan.source.clone(),
            source_blocks: plan.source_blocks,
            prefill_cached_blocks: plan.prefill_cached_blocks,
            constraint: self
                .prepared
                .constraint
                .as_ref()
                .map(|form| form.to_wire(self.generated.len(), sent.spelling)),
        }
    }

    async fn read(&mut self, running: &mut Running, emitter: &mut Emitter<'_>) -> Result<Finish, Failure> {
        let stop = self.stop;
        let mut stopped = std::pin::pin!(stop.stopped());
        loop {
            // Only here may a cancel strike: between events, never within one.
            let message = tokio::select! {
                message = emitter.waiting(running.stream.message()) => message.map_err(Failure::Client)?,
                () = &mut stopped => return Ok(Finish::Interrupted),
            };
            let lost = |status| Failure::Worker { status, worker: Some(running.worker.clone()) };
            let event = message.map_err(lost)?.and_then(|message| message.event);
            match event {
                Some(WorkerEvent::Started(started)) => {
                    self.decode_worker.clone_from(&started.decode_worker);
                    match &mut self.started {
                        // What was cached and computed is told of the first start, who serves of the last.
                        Some(first) => first.decode_worker = started.decode_worker,
                        none => *none = Some(started),
                    }
                }
                Some(WorkerEvent::Tokens(tokens)) => {
                    let parts = self.output.push(&tokens);
                    self.generated.extend(tokens.ids);
                    self.emit(parts, emitter).await.map_err(Failure::Client)?;
                }
                Some(WorkerEvent::Finished(finished)) => return Ok(Finish::from_wire(finished.reason())),
                None => {
                    let status = Status::unavailable("the worker ended the turn without a word");
                    return Err(lost(status));
                }
            }
        }
    }

    /// Sends parts of the output. Those of a summary are kept.
    async fn emit(&mut self, parts: Vec<Part>, emitter: &mut Emitter<'_>) -> Result<(), ApiError> {
        for (piece, logprobs) in parts {
            match piece {
                Piece::Text(text) if self.prepared.compacts => self.summary.push_str(&text),
                _ if self.prepared.compacts => {}
                piece => emitter.piece(piece, logprobs).await?,
            }
        }
        Ok(())
    }

    /// Decides after a failed attempt: nothing to try again, or the error for the client.
    fn give_up(&mut self, failure: Failure) -> Option<ApiError> {
        let (status, worker) = match failure {
            Failure::Client(error) => return Some(error),
            Failure::Worker { status, worker } => (status, worker),
        };
        let Some(worker) = worker else {
            // Those that failed before may be back, and are better than nobody.
            let again = Reason::of(&status) == Some(Reason::NoWorker) && !self.avoid.is_empty();
            self.avoid.clear();
            return (!again).then(|| api_error(&status));
        };
        if may_retry(&status) && self.n_attempts <= self.gateway.config().max_resubmissions {
            let (worker_id, error) = (&worker.id, status.message());
            if Reason::of(&status) == Some(Reason::Overloaded) {
                tracing::info!(worker_id, error, "worker is full: the turn is planned again");
            } else {
                tracing::warn!(worker_id, error, "worker failed: the turn is sent to another one");
            }
            metrics::counter!(names::RESUBMISSIONS).increment(1);
            self.avoid.push(worker);
            return None;
        }
        Some(api_error(&status))
    }

    fn usage(&self) -> Usage {
        let started = self.started.clone().unwrap_or_default();
        Usage {
            input_tokens: self.prepared.log.len(),
            cached_tokens: (started.cached_tokens as usize).min(self.prepared.log.len()),
            output_tokens: self.generated.len(),
            reasoning_tokens: self.output.n_reasoning(),
        }
    }

    fn account(&self) -> wire::BatonTurn {
        let started = self.started.clone().unwrap_or_default();
        wire::BatonTurn {
            decode_worker: started.decode_worker,
            prefill_worker: started.prefill_worker,
            prompt_tokens: self.prepared.log.len(),
            computed_tokens: started.computed_tokens as usize,
            tokenized_tokens: self.prepared.n_tokenized,
            moved_blocks: started.moved_blocks as usize,
            moved_bytes: started.moved_bytes,
            resubmissions: self.n_attempts.saturating_sub(1),
            output_ids: self.generated.clone(),
            cache_break: self.prepared.cache_break.clone(),
        }
    }

    /// Appends what was generated to the log, stores it, and ends the stream.
    async fn complete(
        mut self,
        mut emitter: Emitter<'_>,
        finish: Finish,
        began: Instant,
    ) -> Result<Ended, ApiError> {
        // A summary that became too long is one all the same.
        let is_cut = finish == Finish::Length;
        let finish = if self.prepared.compacts && is_cut { Finish::Stop } else { finish };
        let reason = finish.incomplete_reason();
        let status = if reason.is_some() { ItemStatus::Incomplete } else { ItemStatus::Completed };
        let usage = self.usage();
        if self.stop.discards() && finish == Finish::Interrupted {
            self.generated.truncate(self.output.n_complete());
            emitter.discard();
        } else {
            let parts = self.output.finish();
            self.emit(parts, &mut emitter).await?;
        }
        let account = self.account();
        if self.prepared.compacts && finish == Finish::Stop && self.summary.trim().is_empty() {
            return failed(emitter, compact::no_summary(), account).await;
        }
        self.close_output(status, &mut emitter).await?;
        let baton = self.create.include.baton.then_some(&account);
        // A response in the background is cancelled, one with a reader is interrupted.
        let is_cancelled = self.create.background && finish == Finish::Interrupted;
        let status = if is_cancelled { ItemStatus::Cancelled } else { status };
        let incomplete_reason = reason.filter(|_| !is_cancelled);
        let phase = Phase { status, usage: Some(usage), error: None, incomplete_reason, baton };
        let response = emitter.json(&phase);
        // Whoever has seen the end of a response can continue it.
        let stored = Arc::new(self.stored(
            LogEnd::Generated { closed: finish == Finish::Stop && !is_cut },
            &emitter,
            &response,
        ));
        let text = if self.create.store { response.len() / TOKEN_BYTES } else { 0 };
        let own = self.prepared.n_own_tokens + self.generated.len() + text;
        if !self.create.aside {
            let put = self.gateway.store().put(Arc::clone(&stored), own);
            if let Err(error) = emitter.waiting(put).await? {
                return failed(emitter, error, account).await;
            }
            emitter.waiting(self.add_to_conversation(&stored)).await?;
        }
        self.record(usage, &emitter, began);
        emitter.end(status, &response).await?;
        Ok(Ended { response, stored: Some(stored) })
    }

    /// Closes what is open; a turn that was to say something has said it then.
    async fn close_output(&self, status: ItemStatus, emitter: &mut Emitter<'_>) -> Result<(), ApiError> {
        let answers =
            |body: &wire::Body| !matches!(body, wire::Body::Reasoning { .. } | wire::Body::Compaction { .. });
        let has_answer = emitter.items().iter().any(|item| answers(&item.body));
        if self.prepared.compacts {
            if status != ItemStatus::Completed {
                return Ok(());
            }
            let text = self.summary.trim().to_owned();
            let summary = compact::Summary { text, kept: None };
            let sealed = summary.sealed(self.gateway, &self.prepared.tenant);
            emitter.open(wire::Body::Compaction { sealed }).await?;
        } else if self.create.generate && !has_answer && !self.stop.discards() {
            // An empty answer is a message all the same.
            emitter.open(wire::Body::Message { text: String::new(), logprobs: Vec::new() }).await?;
        }
        emitter.close(status).await
    }

    /// Adds what the turn brought and made to the conversation that the client named.
    async fn add_to_conversation(&self, stored: &Arc<Stored>) {
        let Some(id) = &self.create.conversation else { return };
        let output = stored.history.newest(stored.n_output_items).into_iter().cloned().map(ListedItem::from);
        let items = self.prepared.own.iter().cloned().chain(output).collect();
        let conversations = self.gateway.conversations();
        let added = async {
            let conversation = conversations.recall(id, &stored.tenant).await?;
            conversations.answered(&conversation, items, stored, self.prepared.version).await
        };
        // It may have been deleted meanwhile, or be full; the response is there all the same.
        if let Err(error) = added.await {
            tracing::warn!(%error, conversation = id, "the response was not added to its conversation");
        }
    }

    /// What was generated, as the log keeps it.
    fn generated_item(&self) -> Item {
        let prompts = &self.gateway.text().prompts;
        if prompts.thinks() == self.prepared.thinks {
            return Item::Generated;
        }
        // The prompt has ended the thought that the template begins: where it is rendered again, that belongs to it.
        let ids = [prompts.end_of_thinking().as_slice(), &self.generated].concat();
        Item::GeneratedBefore { ids: ids.into() }
    }

    fn stored(&self, end: LogEnd, emitter: &Emitter<'_>, response: &str) -> Stored {
        let prepared = self.prepared;
        let mut log = prepared.log.clone();
        if self.create.generate {
            log.append(self.generated.clone(), vec![self.generated_item()], end);
        }
        let is_known = |item: &wire::OutputItem| {
            self.create.summary.is_some() && matches!(item.body, wire::Body::Compaction { .. })
        };
        let output: Vec<Entry> = emitter
            .items()
            .iter()
            .map(|item| match Entry::of_output(item) {
                entry if is_known(item) => entry.silent(),
                entry => entry,
            })
            .collect();
        let n_output_items = output.len();
        let mut history = prepared.history.clone();
        history.append(output);
        Stored {
            id: emitter.id().to_owned(),
            tenant: Arc::clone(&prepared.tenant),
            conversation: prepared.conversation.clone(),
            log,
            history,
            n_own_items: prepared.n_own_items + n_output_items,
            n_output_items,
            instructions: prepared.instructions.clone(),
            tools: Arc::clone(&prepared.tools),
            decode_worker: self.decode_worker.clone(),
            cache_key: self.create.prompt_cache_key.clone(),
            base: prepared.base.clone(),
            response: self.create.store.then(|| response.into()),
        }
    }

    fn record(&self, usage: Usage, emitter: &Emitter<'_>, began: Instant) {
        let took = began.elapsed();
        let ttft = emitter.first_output().map(|first| first.duration_since(began));
        let computed = self.started.as_ref().map_or(0, |started| started.computed_tokens);
        metrics::counter!(names::PROMPT_TOKENS).increment(usage.input_tokens as u64);
        metrics::counter!(names::CACHED_TOKENS).increment(usage.cached_tokens as u64);
        metrics::counter!(names::COMPUTED_TOKENS).increment(computed.into());
        metrics::counter!(names::OUTPUT_TOKENS).increment(usage.output_tokens as u64);
        metrics::histogram!(names::TURN_SECONDS).record(took.as_secs_f64());
        if let Some(ttft) = ttft {
            metrics::histogram!(names::TTFT_SECONDS).record(ttft.as_secs_f64());
        }
        let started = self.started.clone().unwrap_or_default();
        tracing::info!(
            decode = started.decode_worker,
            prefill = started.prefill_worker,
            input_tokens = usage.input_tokens,
            cached_tokens = usage.cached_tokens,
            output_tokens = usage.output_tokens,
            ttft_ms = ttft.map(|ttft| ttft.as_millis()),
            ms = took.as_millis(),
            "turn finished"
        );
    }
}
