//! `Prefill`: one call is one prompt.

use std::sync::Arc;
use std::time::Instant;

use engine::Engine;
use engine::constrain::Constraint;
use engine::job::Error;
use kv::transfer::Links;
use proto::reason::Reason;
use proto::{trace, v1};
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status};
use tracing::Instrument;

use crate::Config;
use crate::handover::{self, Failure, Order};

#[derive(Debug, Clone)]
pub(crate) struct PrefillService {
    config: Arc<Config>,
    engine: Engine,
    links: Links,
    draining: CancellationToken,
}

impl PrefillService {
    pub(crate) fn new(config: Config, engine: Engine, links: Links, draining: CancellationToken) -> Self {
        Self { config: Arc::new(config), engine, links, draining }
    }

    async fn run(&self, request: v1::PrefillRequest) -> Result<v1::PrefillReply, Status> {
        let fingerprint = self.engine.geometry().model_fingerprint;
        if request.prompt.as_ref().is_some_and(|prompt| prompt.model_fingerprint[..] != fingerprint) {
            return Err(Reason::Mismatch.status(format!("{} runs another model", self.config.info.id)));
        }
        let constraint = self.constraint(&request).await?;
        let mut order =
            Order::from_wire(request, constraint, &fingerprint).map_err(|failure| status(&failure))?;
        order.deadline = order.deadline.min(self.config.max_deadline);
        let worker = self.config.info.id.clone();
        let began = Instant::now();
        let result = handover::run(&self.engine, &self.links, order, self.config.pull_deadline).await;
        let outcome = match &result {
            Ok(_) => "finished",
            Err(Failure::Engine(Error::ParentUnknown)) => "parent_unknown",
            Err(_) => "failed",
        };
        metrics::counter!(crate::metrics::PROMPTS, "worker" => worker.clone(), "outcome" => outcome)
            .increment(1);
        let done = result.map_err(|failure| status(&failure))?;
        let seconds = began.elapsed().as_secs_f64();
        metrics::histogram!(crate::metrics::PROMPT_SECONDS, "worker" => worker.clone()).record(seconds);
        metrics::counter!(crate::metrics::PUSHED_BYTES, "worker" => worker.clone())
            .increment(done.pushed.bytes);
        metrics::counter!(crate::metrics::PULLED_BLOCKS, "worker" => worker)
            .increment(done.pulled.blocks as u64);
        let narrow = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        Ok(v1::PrefillReply {
            first_token: done.first.as_ref().map(|output| output.id),
            cached_tokens: narrow(done.prompt_tokens.saturating_sub(done.computed_tokens)),
            computed_tokens: narrow(done.computed_tokens),
            pulled_blocks: narrow(done.pulled.blocks),
            pushed_bytes: done.pushed.bytes,
            first_logprobs: done.first.and_then(|output| Some(output.logprobs?.to_wire())),
        })
    }

    /// Checks what the output must look like, off the runtime's threads.
    async fn constraint(&self, request: &v1::PrefillRequest) -> Result<Option<Constraint>, Status> {
        let Some(wire) = request.constraint.clone() else { return Ok(None) };
        let engine = self.engine.clone();
        let checked = tokio::task::spawn_blocking(move || engine.constraint(wire)).await;
        let checked = checked.map_err(|_| Status::internal("checking the constraint was interrupted"))?;
        checked.map(Some).map_err(|error| status(&Failure::Engine(error)))
    }
}

#[tonic::async_trait]
impl v1::prefill_server::Prefill for PrefillService {
    async fn prefill(
        &self,
        request: Request<v1::PrefillRequest>,
    ) -> Result<Response<v1::PrefillReply>, Status> {
        if self.draining.is_cancelled() {
            return Err(Reason::Draining.status(format!("{} takes no new prompts", self.config.info.id)));
        }
        let worker = &self.config.info.id;
        let span = tracing::info_span!(
            "turn",
            role = "prefill",
            worker,
            conversation = request.get_ref().conversation,
            turn = request.get_ref().turn
        );
        trace::adopt(&span, request.metadata());
        self.run(request.into_inner()).instrument(span).await.map(Response::new)
    }
}

fn status(failure: &Failure) -> Status {
    let message = failure.to_string();
    match failure {
        Failure::Malformed(_) | Failure::Engine(Error::BadPrompt) => Status::invalid_argument(message),
        Failure::Engine(Error::GrammarUnknown) => Reason::GrammarUnknown.status(message),
        Failure::Engine(Error::Constraint(_)) => Reason::BadConstraint.status(message),
        Failure::Engine(Error::ParentUnknown) => Reason::ParentUnknown.status(message),
        Failure::Engine(Error::PromptTooLong { .. }) => Reason::PromptTooLong.status(message),
        Failure::Engine(Error::Overloaded { .. }) => Reason::Overloaded.status(message),
        Failure::Engine(Error::Stopped) => Reason::Draining.status(message),
        Failure::Engine(Error::Model(_)) => Status::internal(message),
        Failure::Push(_) => Status::aborted(message),
    }
}
