//! Getting a prompt's KV from elsewhere: a handover from a prefill worker, or a pull from a worker that holds it.

use std::time::{Duration, Instant};

use bytes::Bytes;
use engine::Engine;
use engine::job::{Admitted, Fill, Output, SequenceId};
use kv::transfer::{Links, Peer, Pull};
use proto::reason::Reason;
use proto::v1::prefill_client::PrefillClient;
use proto::{trace, v1};
use tonic::Status;

/// Where a prompt's KV comes from, as the plan says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Origin {
    Own,
    Pull { source: Peer, n_blocks: usize },
    Handover { prefill: Peer, source: Option<(v1::WorkerRef, u32)> },
}

impl Origin {
    pub(crate) fn fill(&self) -> Fill {
        match self {
            Self::Own => Fill::Compute,
            Self::Pull { n_blocks, .. } => Fill::PullPrefix(*n_blocks),
            Self::Handover { .. } => Fill::Handover,
        }
    }
}

/// What arrived and from whom.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Received {
    /// Empty when the prompt is computed here.
    pub(crate) prefill_worker: String,
    /// Prompt tokens the prefill worker ran through its model.
    pub(crate) computed_tokens: usize,
    pub(crate) blocks: usize,
    pub(crate) bytes: u64,
}

/// A turn that waits for its KV.
pub(crate) struct Intake<'a> {
    pub(crate) engine: &'a Engine,
    pub(crate) links: &'a Links,
    pub(crate) own: v1::WorkerRef,
    pub(crate) id: SequenceId,
    pub(crate) request: &'a v1::GenerateRequest,
    pub(crate) admitted: &'a Admitted,
    pub(crate) handover_deadline: Duration,
    pub(crate) pull_deadline: Duration,
}

impl Intake<'_> {
    /// Fills the granted blocks and tells the engine. A failure is logged and counted; the engine then computes.
    pub(crate) async fn fill(&self, origin: &Origin) -> Received {
        let worker = self.own.id.clone();
        let count = |by: &'static str| {
            metrics::counter!(crate::metrics::FILLS, "worker" => worker.clone(), "by" => by).increment(1);
        };
        if self.admitted.granted.is_empty() {
            count("self");
            return Received::default();
        }
        let began = Instant::now();
        let result = match origin {
            Origin::Own => return Received::default(),
            Origin::Pull { source, .. } => self.pull(source).await.map(|received| (received, None)),
            Origin::Handover { prefill, source } => self.handover(prefill, source.as_ref()).await,
        };
        match result {
            Ok((received, first)) => {
                count(if received.prefill_worker.is_empty() { "pull" } else { "handover" });
                metrics::histogram!(crate::metrics::HANDOVER_SECONDS, "worker" => worker.clone())
                    .record(began.elapsed().as_secs_f64());
                metrics::counter!(crate::metrics::RECEIVED_BLOCKS, "worker" => worker.clone())
                    .increment(received.blocks as u64);
                self.engine.filled(self.id, first);
                received
            }
            Err(error) => {
                count("fallback");
                tracing::warn!(%error, "KV did not arrive: the prompt is computed here");
                self.engine.not_filled(self.id);
                Received::default()
            }
        }
    }

    async fn pull(&self, source: &Peer) -> Result<Received, Box<dyn std::error::Error + Send + Sync>> {
        let first = self.admitted.cached_tokens / kv::BLOCK_TOKENS;
        let targets = &self.admitted.granted;
        let hashes = &self.admitted.hashes[first..first + targets.len()];
        let pull = Pull { hashes, targets, grant: self.id.0, port: &self.engine.port() };
        let moved = self.links.pull(source, pull, self.pull_deadline).await?;
        Ok(Received { blocks: moved.blocks, bytes: moved.bytes, ..Received::default() })
    }

    async fn handover(
        &self,
        prefill: &Peer,
        source: Option<&(v1::WorkerRef, u32)>,
    ) -> Result<(Received, Option<Output>), Box<dyn std::error::Error + Send + Sync>> {
        let mut client = PrefillClient::new(self.links.channel(&prefill.address)?)
            .max_encoding_message_size(proto::MAX_MESSAGE_BYTES);
        let mut request = self.prefill_request(source);
        let deadline = self.handover_deadline;
        let reply = tokio::time::timeout(deadline, async {
            // It may have forgotten two things, and each is sent once.
            for _ in 0..2 {
                let result = client.prefill(trace::request(request.clone())).await;
                match result.as_ref().err().and_then(Reason::of) {
                    Some(Reason::ParentUnknown) => request.prompt = self.prompt_after(0),
                    Some(Reason::GrammarUnknown) => self.spell_out(&mut request),
                    _ => return result,
                }
            }
            client.prefill(trace::request(request)).await
        })
        .await
        .map_err(|_| Status::deadline_exceeded(format!("{} was not done after {deadline:?}", prefill.id)))??
        .into_inner();
        let received = Received {
            prefill_worker: prefill.id.clone(),
            computed_tokens: reply.computed_tokens as usize,
            blocks: self.admitted.granted.len(),
            bytes: reply.pushed_bytes,
        };
        let logprobs = reply.first_logprobs.map(|logprobs| Box::new(logprobs.into()));
        Ok((received, reply.first_token.map(|id| Output { id, logprobs })))
    }

    /// The prompt from the block on that the prefill worker holds no more.
    fn prompt_after(&self, n_blocks: usize) -> Option<v1::Prompt> {
        let mut prompt = self.request.prompt.clone()?;
        let n_blocks = n_blocks.min(self.admitted.hashes.len());
        let parent = n_blocks.checked_sub(1).map(|idx| self.admitted.hashes[idx]);
        prompt.parent = parent.map_or_else(Bytes::new, |hash| Bytes::copy_from_slice(hash.as_bytes()));
        prompt.parent_blocks = u32::try_from(n_blocks).unwrap_or(u32::MAX);
        prompt.ids = self.admitted.ids[n_blocks * kv::BLOCK_TOKENS..].to_vec();
        Some(prompt)
    }

    /// Sends the grammar itself where its hash was not enough.
    fn spell_out(&self, request: &mut v1::PrefillRequest) {
        if let Some(constraint) = &mut request.constraint
            && let Some(source) = self.engine.grammar_source(&constraint.grammar_hash)
        {
            constraint.grammar = source.to_string();
        }
    }

    fn prefill_request(&self, source: Option<&(v1::WorkerRef, u32)>) -> v1::PrefillRequest {
        let narrow = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        let grant = v1::Grant {
            id: self.id.0,
            worker: Some(self.own.clone()),
            first_block: narrow(self.admitted.cached_tokens / kv::BLOCK_TOKENS),
            blocks: self.admitted.granted.clone(),
            deadline_ms: u32::try_from(self.handover_deadline.as_millis()).unwrap_or(u32::MAX),
        };
        v1::PrefillRequest {
            conversation: self.request.conversation.clone(),
            turn: self.request.turn,
            prompt: self.prompt_after(self.request.prefill_cached_blocks as usize),
            sampling: self.request.sampling,
            grant: Some(grant),
            source: source.map(|(source, _)| source.clone()),
            source_blocks: source.map_or(0, |(_, n_blocks)| *n_blocks),
            sample_first: self.request.max_output_tokens > 0,
            constraint: self.request.constraint.clone().map(shortened),
            stop_ids: self.request.stop_ids.clone(),
        }
    }
}

/// The constraint with its grammar's hash in the grammar's place, if the sender told it.
fn shortened(mut constraint: v1::Constraint) -> v1::Constraint {
    if !constraint.grammar_hash.is_empty() {
        constraint.grammar.clear();
    }
    constraint
}
