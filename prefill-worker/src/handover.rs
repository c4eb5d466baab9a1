//! One prompt on its way: pull what another worker holds, compute the rest, push all of it into the granted blocks.

use std::time::Duration;

use engine::Engine;
use engine::constrain::Constraint;
use engine::job::{Admitted, Error, Event, ExportTo, Fill, Job, Output, Prompt, SequenceId, Sink};
use engine::sample::SamplingParams;
use kv::port::{Frame, FrameSender};
use kv::transfer::{self, Links, Moved, Peer, Pull};
use proto::v1;
use tokio::sync::mpsc;

/// Frames that may wait for the network; what is beyond waits in the engine's memory, where it lies anyway.
const FRAMES_IN_FLIGHT: usize = 16;
/// A prompt has four events.
const EVENTS: usize = 8;

/// Why a prompt was not handed over.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Failure {
    #[error(transparent)]
    Engine(#[from] Error),
    #[error("the blocks could not be pushed: {0}")]
    Push(#[from] transfer::Error),
    #[error("the request is malformed: {0}")]
    Malformed(String),
}

/// A checked request.
#[derive(Debug)]
pub(crate) struct Order {
    pub(crate) turn: u64,
    pub(crate) prompt: Prompt,
    pub(crate) sampling: SamplingParams,
    pub(crate) sample_first: bool,
    /// What the output that the first token begins must look like.
    pub(crate) constraint: Option<Constraint>,
    pub(crate) stop_ids: Vec<u32>,
    pub(crate) receiver: Peer,
    pub(crate) grant: u64,
    pub(crate) first_block: usize,
    pub(crate) targets: Vec<u32>,
    pub(crate) deadline: Duration,
    pub(crate) source: Option<(Peer, usize)>,
}

impl Order {
    /// Converts and checks a request for a worker of `fingerprint`; its constraint was checked before.
    pub(crate) fn from_wire(
        request: v1::PrefillRequest,
        constraint: Option<Constraint>,
        fingerprint: &[u8; 32],
    ) -> Result<Self, Failure> {
        let missing = |what: &str| Failure::Malformed(format!("{what} is missing"));
        let prompt = request.prompt.ok_or_else(|| missing("the prompt"))?;
        let grant = request.grant.ok_or_else(|| missing("the grant"))?;
        let source = request.source.map(|source| (Peer::from(source), request.source_blocks as usize));
        Ok(Self {
            turn: request.turn,
            prompt: Prompt::from_wire(prompt, fingerprint)
                .map_err(|error| Failure::Malformed(error.to_string()))?,
            sampling: request.sampling.unwrap_or_default().into(),
            sample_first: request.sample_first,
            constraint,
            stop_ids: request.stop_ids,
            receiver: grant.worker.ok_or_else(|| missing("the owner of the grant"))?.into(),
            grant: grant.id,
            first_block: grant.first_block as usize,
            targets: grant.blocks,
            deadline: Duration::from_millis(grant.deadline_ms.into()),
            source: source.filter(|(_, n_blocks)| *n_blocks > 0),
        })
    }
}

/// What was done for a prompt.
#[derive(Debug, Default)]
pub(crate) struct Done {
    pub(crate) prompt_tokens: usize,
    pub(crate) computed_tokens: usize,
    pub(crate) first: Option<Output>,
    pub(crate) pulled: Moved,
    pub(crate) pushed: Moved,
}

/// Cancels the prompt when its caller goes away.
struct Running<'a>(&'a Engine, SequenceId);

impl Drop for Running<'_> {
    fn drop(&mut self) {
        self.0.cancel(self.1);
    }
}

/// Runs one order to its end.
pub(crate) async fn run(
    engine: &Engine,
    links: &Links,
    order: Order,
    pull_deadline: Duration,
) -> Result<Done, Failure> {
    let (sink, mut events) = channel();
    let (frames, outgoing) = FrameSender::new(FRAMES_IN_FLIGHT);
    let Order { receiver, grant, deadline, source, .. } = order;
    let job = Job {
        turn: order.turn,
        prompt: order.prompt,
        fill: source.as_ref().map_or(Fill::Compute, |(_, n_blocks)| Fill::PullPrefix(*n_blocks)),
        export: Some(ExportTo { first_block: order.first_block, targets: order.targets, frames }),
        sampling: order.sampling,
        constraint: order.constraint,
        max_output_tokens: usize::from(order.sample_first),
        stop_ids: order.stop_ids,
        sink,
    };
    let id = engine.submit(job)?;
    let running = Running(engine, id);
    let admitted = match events.recv().await {
        Some(Event::Admitted(admitted)) => admitted,
        Some(Event::Failed(error)) => return Err(error.into()),
        _ => return Err(Error::Stopped.into()),
    };
    let compute = async {
        let pulled = match &source {
            Some((source, _)) => pull(engine, links, source, id, &admitted, pull_deadline).await,
            None => Moved::default(),
        };
        let mut done = Done { prompt_tokens: admitted.prompt_tokens, pulled, ..Done::default() };
        collect(&mut events, &mut done).await?;
        Ok(done)
    };
    let (mut done, pushed) = tokio::try_join!(compute, push(links, &receiver, grant, outgoing, deadline))?;
    drop(running);
    done.pushed = pushed;
    Ok(done)
}

async fn push(
    links: &Links,
    receiver: &Peer,
    grant: u64,
    frames: mpsc::Receiver<Frame>,
    deadline: Duration,
) -> Result<Moved, Failure> {
    Ok(links.push(receiver, grant, frames, deadline).await?)
}

/// Fills the prefix from `source`; what does not arrive is computed.
async fn pull(
    engine: &Engine,
    links: &Links,
    source: &Peer,
    id: SequenceId,
    admitted: &Admitted,
    deadline: Duration,
) -> Moved {
    if admitted.granted.is_empty() {
        return Moved::default();
    }
    let first = admitted.cached_tokens / kv::BLOCK_TOKENS;
    let targets = &admitted.granted;
    let hashes = &admitted.hashes[first..first + targets.len()];
    let pull = Pull { hashes, targets, grant: id.0, port: &engine.port() };
    match links.pull(source, pull, deadline).await {
        Ok(moved) => {
            engine.filled(id, None);
            moved
        }
        Err(error) => {
            tracing::warn!(%error, source = source.id, "a prefix did not arrive: it is computed here");
            engine.not_filled(id);
            Moved::default()
        }
    }
}

async fn collect(events: &mut mpsc::Receiver<Event>, done: &mut Done) -> Result<(), Failure> {
    loop {
        match events.recv().await {
            Some(Event::Admitted(_)) => {}
            Some(Event::Prefilled { computed_tokens }) => done.computed_tokens = computed_tokens,
            Some(Event::Token(output)) => done.first = Some(output),
            Some(Event::Finished(_)) => return Ok(()),
            Some(Event::Failed(error)) => return Err(error.into()),
            None => return Err(Error::Stopped.into()),
        }
    }
}

fn channel() -> (Sink, mpsc::Receiver<Event>) {
    let (sender, receiver) = mpsc::channel(EVENTS);
    (Box::new(move |event| sender.try_send(event).is_ok()), receiver)
}
