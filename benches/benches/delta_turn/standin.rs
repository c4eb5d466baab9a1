//! A router and a decode worker without a model: they remember which prefixes they have seen and answer eight tokens, or
//! as many as they are told.

use std::collections::HashSet;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::Context;
use futures::{Stream, StreamExt};
use kv::BLOCK_TOKENS;
use kv::hash::{BlockHash, HashChain, HashKey};
use model::TextModel;
use proto::reason::Reason;
use proto::v1::decode_server::{Decode, DecodeServer};
use proto::v1::generate_event::Event;
use proto::v1::router_server::{Router, RouterServer};
use proto::{net, v1};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status};

/// Words of each answer; with the token that ends it there are eight.
const ANSWER: &str = "one two three four five six seven";
/// Tokens of an answer, unless another length is set.
pub(crate) const ANSWER_TOKENS: usize = 8;

/// A running stand-in.
#[derive(Debug)]
pub(crate) struct StandIn {
    pub(crate) address: SocketAddr,
    pace: Pace,
    n_tokens: Arc<AtomicUsize>,
    thread: JoinHandle<anyhow::Result<()>>,
}

/// Microseconds between two tokens of an answer; zero sends them at once.
#[derive(Debug, Clone, Default)]
struct Pace(Arc<AtomicU64>);

/// What both services share.
#[derive(Debug, Clone)]
struct Service {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    key: HashKey,
    worker: v1::WorkerRef,
    model: String,
    fingerprint: [u8; 32],
    /// Grows by about twenty blocks a turn.
    seen: Mutex<HashSet<BlockHash>>,
    /// Of these an answer is made: all but the last, again and again, then the last, which ends it.
    answer: Vec<u32>,
    n_tokens: Arc<AtomicUsize>,
    pace: Pace,
}

impl StandIn {
    /// Serves on a port and a thread of its own until `shutdown`.
    pub(crate) fn start(text: &TextModel, shutdown: CancellationToken) -> anyhow::Result<Self> {
        let (sender, address) = mpsc::sync_channel(1);
        let (text, pace) = (text.clone(), Pace::default());
        let n_tokens = Arc::new(AtomicUsize::new(ANSWER_TOKENS));
        let (paced, counted) = (pace.clone(), Arc::clone(&n_tokens));
        let thread = std::thread::Builder::new().name("stand-in".to_owned()).spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
            runtime.block_on(async {
                let listener = TcpListener::bind("127.0.0.1:0").await?;
                let address = listener.local_addr()?;
                sender.send(address)?;
                let service = Service::new(&text, address, paced, counted);
                let server = net::server().add_service(RouterServer::new(service.clone())).add_service(
                    DecodeServer::new(service).max_decoding_message_size(proto::MAX_MESSAGE_BYTES),
                );
                let incoming = net::incoming(listener);
                server.serve_with_incoming_shutdown(incoming, shutdown.cancelled_owned()).await?;
                Ok(())
            })
        })?;
        let address = address.recv().context("the stand-in did not start")?;
        Ok(Self { address, pace, n_tokens, thread })
    }

    /// Sets the time between two tokens of later answers; zero sends them at once.
    pub(crate) fn set_pace_us(&self, pace_us: u64) {
        self.pace.0.store(pace_us, Ordering::Relaxed);
    }

    /// Sets the length of later answers, in tokens; at least one.
    pub(crate) fn set_answer_tokens(&self, n_tokens: usize) {
        self.n_tokens.store(n_tokens, Ordering::Relaxed);
    }

    /// Waits for the end after `shutdown`.
    pub(crate) fn join(self) -> anyhow::Result<()> {
        self.thread.join().map_err(|_| anyhow::anyhow!("the stand-in panicked"))?
    }
}

impl Service {
    fn new(text: &TextModel, address: SocketAddr, pace: Pace, n_tokens: Arc<AtomicUsize>) -> Self {
        let mut answer = text.tokenizer.encode_ordinary(ANSWER);
        answer.truncate(7);
        answer.extend(text.tokenizer.end_of_turn_ids().first());
        let worker =
            v1::WorkerRef { id: "stand-in".to_owned(), address: format!("http://{address}"), epoch: 1 };
        let shared = Shared {
            key: HashKey::derive(&text.fingerprint, b""),
            worker,
            model: text.name.clone(),
            fingerprint: text.fingerprint,
            seen: Mutex::default(),
            answer,
            n_tokens,
            pace,
        };
        Self { shared: Arc::new(shared) }
    }

    fn knows(&self, parent: &[u8]) -> Result<Option<BlockHash>, Status> {
        let parent =
            BlockHash::from_wire(parent).map_err(|error| Status::invalid_argument(error.to_string()))?;
        let seen = self.shared.seen.lock().unwrap_or_else(PoisonError::into_inner);
        Ok((parent.is_root() || seen.contains(&parent)).then_some(parent))
    }

    fn answer(&self) -> Vec<u32> {
        let Some((end, words)) = self.shared.answer.split_last() else { return Vec::new() };
        let n_words = self.shared.n_tokens.load(Ordering::Relaxed) - 1;
        words.iter().cycle().take(n_words).chain([end]).copied().collect()
    }

    /// Remembers the blocks that prompt and answer fill.
    fn remember(&self, parent: BlockHash, prompt: &v1::Prompt, answer: &[u32]) {
        let mut chain = HashChain::after(self.shared.key, parent, prompt.parent_blocks as usize);
        let mut blocks = chain.extend(&prompt.ids);
        blocks.extend(chain.extend(answer));
        self.shared.seen.lock().unwrap_or_else(PoisonError::into_inner).extend(blocks);
    }

    fn events(&self, prompt: &v1::Prompt, answer: &[u32]) -> Vec<Event> {
        let cached = prompt.parent_blocks * u32::try_from(BLOCK_TOKENS).expect("a block is small");
        let computed = u32::try_from(prompt.ids.len()).unwrap_or(u32::MAX);
        let started = v1::Started {
            prompt_tokens: cached + computed,
            cached_tokens: cached,
            computed_tokens: computed,
            decode_worker: self.shared.worker.id.clone(),
            ..Default::default()
        };
        let output_tokens = u32::try_from(answer.len()).expect("a short answer");
        let reason = v1::FinishReason::Stop.into();
        let tokens =
            answer.iter().map(|&id| Event::Tokens(v1::Tokens { ids: vec![id], ..Default::default() }));
        std::iter::once(Event::Started(started))
            .chain(tokens)
            .chain([Event::Finished(v1::Finished { reason, output_tokens })])
            .collect()
    }
}

#[tonic::async_trait]
impl Router for Service {
    async fn route(&self, request: Request<v1::RouteRequest>) -> Result<Response<v1::RoutePlan>, Status> {
        let request = request.into_inner();
        let chain_unknown = self.knows(&request.parent)?.is_none();
        let decode = (!chain_unknown).then(|| self.shared.worker.clone());
        Ok(Response::new(v1::RoutePlan { chain_unknown, decode, ..Default::default() }))
    }

    async fn cluster(&self, _: Request<v1::ClusterRequest>) -> Result<Response<v1::ClusterState>, Status> {
        let worker = &self.shared.worker;
        let info = v1::WorkerInfo {
            id: worker.id.clone(),
            epoch: worker.epoch,
            role: v1::Role::Decode.into(),
            address: worker.address.clone(),
            model: self.shared.model.clone(),
            model_fingerprint: self.shared.fingerprint.to_vec().into(),
            ..Default::default()
        };
        Ok(Response::new(v1::ClusterState { workers: vec![info] }))
    }
}

#[tonic::async_trait]
impl Decode for Service {
    type GenerateStream = Pin<Box<dyn Stream<Item = Result<v1::GenerateEvent, Status>> + Send>>;

    async fn generate(
        &self,
        request: Request<v1::GenerateRequest>,
    ) -> Result<Response<Self::GenerateStream>, Status> {
        let prompt =
            request.into_inner().prompt.ok_or_else(|| Status::invalid_argument("a turn needs a prompt"))?;
        let Some(parent) = self.knows(&prompt.parent)? else {
            return Err(Reason::ParentUnknown.status("the parent was never seen here"));
        };
        let answer = self.answer();
        self.remember(parent, &prompt, &answer);
        let pace = Duration::from_micros(self.shared.pace.0.load(Ordering::Relaxed));
        let events = futures::stream::iter(self.events(&prompt, &answer)).then(move |event| async move {
            // Each token wakes the gateway anew, as real decoding steps do.
            if matches!(event, Event::Tokens(_)) && !pace.is_zero() {
                tokio::time::sleep(pace).await;
            }
            Ok(v1::GenerateEvent { event: Some(event) })
        });
        Ok(Response::new(Box::pin(events)))
    }
}
