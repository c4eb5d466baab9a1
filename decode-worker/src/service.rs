//! `Generate`: one call is one turn.

use std::pin::Pin;
use std::sync::Arc;

use engine::Engine;
use engine::constrain::Constraint;
use engine::job::{Error, FinishReason, Job, Output, Prompt, SequenceId};
use futures::Stream;
use kv::transfer::Links;
use proto::reason::Reason;
use proto::v1::generate_event::Event;
use proto::{trace, v1};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tonic::{Request, Response, Status};
use tracing::Instrument;

use crate::Config;
use crate::intake::{Intake, Origin, Received};
use crate::stream::{Next, Outbox, outbox};

/// Events a slow gateway may leave unread; further tokens coalesce in the outbox.
const EVENTS_IN_FLIGHT: usize = 16;

#[derive(Debug, Clone)]
pub(crate) struct DecodeService {
    config: Arc<Config>,
    engine: Engine,
    links: Links,
    turns: TaskTracker,
    phases: Phases,
}

/// The end of a worker, in two steps.
#[derive(Debug, Clone)]
pub(crate) struct Phases {
    /// No new turns from here on.
    pub(crate) draining: CancellationToken,
    /// Running turns end here.
    pub(crate) cut: CancellationToken,
}

/// Cancels the turn when its stream goes away.
struct Running {
    engine: Engine,
    id: SequenceId,
    worker: String,
    outcome: &'static str,
}

impl Drop for Running {
    fn drop(&mut self) {
        self.engine.cancel(self.id);
        let worker = std::mem::take(&mut self.worker);
        metrics::counter!(crate::metrics::TURNS, "worker" => worker, "outcome" => self.outcome).increment(1);
    }
}

impl DecodeService {
    pub(crate) fn new(
        config: Config,
        engine: Engine,
        links: Links,
        turns: TaskTracker,
        phases: Phases,
    ) -> Self {
        Self { config: Arc::new(config), engine, links, turns, phases }
    }

    fn job(
        &self,
        request: &v1::GenerateRequest,
        origin: &Origin,
        constraint: Option<Constraint>,
        sink: engine::job::Sink,
    ) -> Result<Job, Status> {
        let prompt =
            request.prompt.as_ref().ok_or_else(|| Status::invalid_argument("a turn needs a prompt"))?;
        let fingerprint = self.engine.geometry().model_fingerprint;
        if prompt.model_fingerprint[..] != fingerprint {
            return Err(Reason::Mismatch.status(format!("{} runs another model", self.config.info.id)));
        }
        Ok(Job {
            turn: request.turn,
            prompt: Prompt::from_wire(prompt.clone(), &fingerprint)
                .map_err(|error| Status::invalid_argument(error.to_string()))?,
            fill: origin.fill(),
            export: None,
            sampling: request.sampling.unwrap_or_default().into(),
            constraint,
            max_output_tokens: request.max_output_tokens as usize,
            stop_ids: request.stop_ids.clone(),
            sink,
        })
    }

    /// Checks what the output must look like, off the runtime's threads.
    async fn constraint(&self, request: &v1::GenerateRequest) -> Result<Option<Constraint>, Status> {
        let Some(wire) = request.constraint.clone() else { return Ok(None) };
        let engine = self.engine.clone();
        let checked = tokio::task::spawn_blocking(move || engine.constraint(wire)).await;
        let checked = checked.map_err(|_| Status::internal("checking the constraint was interrupted"))?;
        checked.map(Some).map_err(|error| status(&error))
    }

    fn own(&self) -> v1::WorkerRef {
        let info = &self.config.info;
        v1::WorkerRef { id: info.id.clone(), address: info.address.clone(), epoch: info.epoch }
    }

    /// Drives one admitted turn to its end, or until the gateway is gone.
    async fn drive(self, mut turn: Turn) {
        let events = turn.events.clone();
        let work = async {
            let intake = Intake {
                engine: &self.engine,
                links: &self.links,
                own: self.own(),
                id: turn.running.id,
                request: &turn.request,
                admitted: &turn.admitted,
                handover_deadline: self.config.handover_deadline,
                pull_deadline: self.config.pull_deadline,
            };
            let received = intake.fill(&turn.origin).await;
            turn.outcome = self.stream(&turn, received).await;
        };
        tokio::select! {
            () = work => {}
            () = events.closed() => {}
            () = self.phases.cut.cancelled() => {
                let _ = events.try_send(Err(Reason::Draining.status("the worker stops")));
            }
        }
        turn.running.outcome = turn.outcome;
    }

    async fn stream(&self, turn: &Turn, received: Received) -> &'static str {
        let mut n_output = 0;
        loop {
            let (message, outcome) = match turn.outbox.next().await {
                Next::Prefilled { computed_tokens } => {
                    (Ok(self.started(turn, &received, computed_tokens)), None)
                }
                Next::Tokens(outputs) => {
                    n_output += outputs.len();
                    (Ok(tokens(&outputs)), None)
                }
                Next::End(Ok(reason)) => (Ok(finished(reason, n_output)), Some("finished")),
                Next::End(Err(error)) => (Err(status(&error)), Some("failed")),
            };
            let message = message.map(|event| v1::GenerateEvent { event: Some(event) });
            if turn.events.send(message).await.is_err() {
                return "cancelled";
            }
            if let Some(outcome) = outcome {
                return outcome;
            }
        }
    }

    fn started(&self, turn: &Turn, received: &Received, computed_here: usize) -> Event {
        let narrow = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        let computed = received.computed_tokens + computed_here;
        Event::Started(v1::Started {
            prompt_tokens: narrow(turn.admitted.prompt_tokens),
            cached_tokens: narrow(turn.admitted.prompt_tokens.saturating_sub(computed)),
            computed_tokens: narrow(computed),
            moved_blocks: narrow(received.blocks),
            moved_bytes: received.bytes,
            decode_worker: self.config.info.id.clone(),
            prefill_worker: received.prefill_worker.clone(),
        })
    }
}

struct Turn {
    request: v1::GenerateRequest,
    origin: Origin,
    admitted: engine::job::Admitted,
    outbox: Outbox,
    events: mpsc::Sender<Result<v1::GenerateEvent, Status>>,
    running: Running,
    outcome: &'static str,
}

#[tonic::async_trait]
impl v1::decode_server::Decode for DecodeService {
    type GenerateStream = Pin<Box<dyn Stream<Item = Result<v1::GenerateEvent, Status>> + Send>>;

    async fn generate(
        &self,
        request: Request<v1::GenerateRequest>,
    ) -> Result<Response<Self::GenerateStream>, Status> {
        if self.phases.draining.is_cancelled() {
            return Err(Reason::Draining.status(format!("{} takes no new turns", self.config.info.id)));
        }
        let worker = self.config.info.id.clone();
        let span = tracing::info_span!(
            "turn",
            role = "decode",
            worker,
            conversation = request.get_ref().conversation,
            turn = request.get_ref().turn
        );
        trace::adopt(&span, request.metadata());
        let request = request.into_inner();
        let origin = origin(&request);
        let (outbox, sink) = outbox();
        let constraint = self.constraint(&request).await?;
        let job = self.job(&request, &origin, constraint, sink)?;
        let id = self.engine.submit(job).map_err(|error| status(&error))?;
        let running = Running { engine: self.engine.clone(), id, worker, outcome: "cancelled" };
        let admitted = tokio::select! {
            admitted = outbox.admitted() => admitted.map_err(|error| status(&error))?,
            () = self.phases.cut.cancelled() => return Err(Reason::Draining.status("the worker stops")),
        };
        let (events, receiver) = mpsc::channel(EVENTS_IN_FLIGHT);
        let turn = Turn { request, origin, admitted, outbox, events, running, outcome: "cancelled" };
        self.turns.spawn(self.clone().drive(turn).instrument(span));
        Ok(Response::new(Box::pin(ReceiverStream::new(receiver))))
    }
}

fn origin(request: &v1::GenerateRequest) -> Origin {
    let source = request.source.clone().filter(|_| request.source_blocks > 0);
    match (&request.prefill, source) {
        (Some(prefill), source) => Origin::Handover {
            prefill: prefill.clone().into(),
            source: source.map(|source| (source, request.source_blocks)),
        },
        (None, Some(source)) => {
            Origin::Pull { source: source.into(), n_blocks: request.source_blocks as usize }
        }
        (None, None) => Origin::Own,
    }
}

fn tokens(outputs: &[Output]) -> Event {
    Event::Tokens(v1::Tokens {
        ids: outputs.iter().map(|output| output.id).collect(),
        logprobs: outputs.iter().filter_map(|output| Some(output.logprobs.as_ref()?.to_wire())).collect(),
    })
}

fn finished(reason: FinishReason, n_output: usize) -> Event {
    let reason = match reason {
        FinishReason::Stop => v1::FinishReason::Stop,
        FinishReason::Length => v1::FinishReason::Length,
        FinishReason::Prefilled => v1::FinishReason::Prefilled,
    };
    let output_tokens = u32::try_from(n_output).unwrap_or(u32::MAX);
    Event::Finished(v1::Finished { reason: reason.into(), output_tokens })
}

fn status(error: &Error) -> Status {
    let message = error.to_string();
    match error {
        Error::ParentUnknown => Reason::ParentUnknown.status(message),
        Error::PromptTooLong { .. } => Reason::PromptTooLong.status(message),
        Error::BadPrompt => Status::invalid_argument(message),
        Error::GrammarUnknown => Reason::GrammarUnknown.status(message),
        Error::Constraint(_) => Reason::BadConstraint.status(message),
        Error::Overloaded { .. } => Reason::Overloaded.status(message),
        Error::Stopped => Reason::Draining.status(message),
        Error::Model(_) => Status::internal(message),
    }
}
