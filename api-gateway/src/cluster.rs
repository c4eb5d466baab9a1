//! The gateway's view of the cluster: any router for plans, the last known workers when no router answers, and the
//! decode worker that the plan names.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::{BufMut, Bytes, BytesMut};
use dashmap::DashMap;
use kv::hash::BlockHash;
use prost::Message as _;
use proto::reason::{Reason, is_retryable};
use proto::v1::decode_client::DecodeClient;
use proto::v1::router_client::RouterClient;
use proto::{net, trace, v1};
use tokio_util::sync::CancellationToken;
use tonic::transport::Channel;
use tonic::{Code, Status, Streaming};

use crate::Readiness;
use crate::constraint::Spelling;
use crate::conversation::{Cut, TokenLog};
use crate::metrics as names;

/// Attempts to reach any router for one plan, when no worker is known either.
const ROUTE_ATTEMPTS: u32 = 20;
const ROUTE_RETRY: Duration = Duration::from_millis(100);
/// How often the list of workers is refreshed for the day no router answers.
const REFRESH: Duration = Duration::from_secs(2);

/// Handles to routers and workers. Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct ClusterClient {
    routers: Arc<[RouterClient<Channel>]>,
    /// The router that answered last.
    preferred: Arc<AtomicUsize>,
    /// Bounded by the number of workers of the cluster.
    workers: Arc<DashMap<String, DecodeClient<Channel>>>,
    known: Arc<Mutex<Known>>,
}

/// Workers whose grammars are remembered, and grammars of each: twice what a worker keeps.
const MAX_WORKERS_WITH_GRAMMARS: usize = 256;
const MAX_GRAMMARS: usize = 128;

/// The workers a router named last, how many turns this gateway runs on each, and what it has sent them.
#[derive(Debug, Default)]
struct Known {
    workers: Vec<v1::WorkerInfo>,
    running: HashMap<String, usize>,
    /// Hashes of grammars, by id and epoch.
    grammars: HashMap<(String, u64), HashSet<[u8; 32]>>,
}

/// A turn counted at its worker until dropped.
#[derive(Debug)]
pub(crate) struct Counted {
    known: Arc<Mutex<Known>>,
    worker: String,
}

/// What a plan is asked for.
#[derive(Debug)]
pub(crate) struct RouteQuery<'a> {
    pub(crate) log: &'a TokenLog,
    /// Where the workers may pick up.
    pub(crate) cut: &'a Cut,
    pub(crate) fingerprint: &'a [u8; 32],
    pub(crate) conversation: &'a str,
    pub(crate) turn: u64,
    pub(crate) avoid: &'a [v1::WorkerRef],
    pub(crate) last_decode: &'a str,
}

impl ClusterClient {
    /// Connects lazily to the routers at `addresses`.
    pub(crate) fn new(addresses: &[String]) -> Result<Self, net::BadAddress> {
        let routers: Result<Vec<_>, _> =
            addresses.iter().map(|address| net::channel(address).map(RouterClient::new)).collect();
        Ok(Self {
            routers: routers?.into(),
            preferred: Arc::default(),
            workers: Arc::default(),
            known: Arc::default(),
        })
    }

    /// Keeps the list of workers fresh until `shutdown`.
    pub(crate) async fn refresh(self, readiness: Readiness, shutdown: CancellationToken) {
        loop {
            let any = self.refresh_once().await;
            if any {
                readiness.0.store(true, Ordering::Relaxed);
            }
            let pause = if any { REFRESH } else { ROUTE_RETRY };
            tokio::select! {
                () = tokio::time::sleep(pause) => {}
                () = shutdown.cancelled() => return,
            }
        }
    }

    /// Asks the routers for their workers. True when at least one decode worker is known.
    async fn refresh_once(&self) -> bool {
        for router in self.in_order() {
            let mut router = self.routers[router].clone();
            let call = tokio::time::timeout(REFRESH, router.cluster(v1::ClusterRequest {}));
            if let Ok(Ok(state)) = call.await {
                let workers = state.into_inner().workers;
                let any = workers.iter().any(|worker| worker.role() == v1::Role::Decode);
                // A router that has just started knows nobody yet: the old list serves better.
                if any {
                    self.known.lock().unwrap_or_else(PoisonError::into_inner).workers = workers;
                }
                return any;
            }
        }
        false
    }

    fn in_order(&self) -> impl Iterator<Item = usize> + use<> {
        let (first, n) = (self.preferred.load(Ordering::Relaxed), self.routers.len());
        (0..n).map(move |idx| (first + idx) % n)
    }

    /// A plan from any router, or a makeshift one over the last known workers.
    ///
    /// # Errors
    /// When no router answers and no worker is known, or the router knows of no fitting worker.
    pub(crate) async fn route(&self, query: &RouteQuery<'_>) -> Result<v1::RoutePlan, Status> {
        let mut request = query.request(query.cut.n_blocks);
        let mut last = Status::unavailable("no router is configured");
        for attempt in 0..ROUTE_ATTEMPTS {
            for router in self.in_order() {
                match self.ask(router, &request).await {
                    Ok(plan) if plan.chain_unknown => {
                        request = query.request(0);
                        match self.ask(router, &request).await {
                            Ok(plan) if !plan.chain_unknown => return Ok(plan),
                            Ok(_) => last = Status::internal("the router does not take the whole chain"),
                            Err(status) if is_retryable(&status) => last = status,
                            Err(status) => return Err(status),
                        }
                    }
                    Ok(plan) => return Ok(plan),
                    // Waiting helps against an empty cluster, not against workers that were tried.
                    Err(status)
                        if Reason::of(&status) == Some(Reason::NoWorker) && !query.avoid.is_empty() =>
                    {
                        return Err(status);
                    }
                    Err(status) if is_retryable(&status) => last = status,
                    Err(status) => return Err(status),
                }
            }
            // With nobody to ask, or a router that has just started, the workers known from before serve.
            if let Some(plan) = self.fallback(query) {
                metrics::counter!(names::FALLBACK_PLANS).increment(1);
                return Ok(plan);
            }
            if attempt + 1 < ROUTE_ATTEMPTS {
                tokio::time::sleep(ROUTE_RETRY).await;
            }
        }
        Err(last)
    }

    async fn ask(&self, router: usize, request: &v1::RouteRequest) -> Result<v1::RoutePlan, Status> {
        count_sent(request.encoded_len());
        let mut client = self.routers[router].clone();
        let plan = client.route(trace::request(request.clone())).await?.into_inner();
        self.preferred.store(router, Ordering::Relaxed);
        Ok(plan)
    }

    /// The known decode worker that runs the fewest turns of this gateway; the conversation's last one wins ties.
    fn fallback(&self, query: &RouteQuery<'_>) -> Option<v1::RoutePlan> {
        let known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let usable = known.workers.iter().filter(|worker| {
            worker.role() == v1::Role::Decode
                && worker.model_fingerprint[..] == query.fingerprint[..]
                && !query.avoid.iter().any(|avoid| avoid.id == worker.id && avoid.epoch == worker.epoch)
        });
        let busy = |id: &str| known.running.get(id).copied().unwrap_or(0);
        let info = usable.min_by_key(|worker| (busy(&worker.id), worker.id != query.last_decode))?;
        let decode = v1::WorkerRef { id: info.id.clone(), address: info.address.clone(), epoch: info.epoch };
        Some(v1::RoutePlan { decode: Some(decode), ..Default::default() })
    }

    /// Starts a turn at `worker`.
    pub(crate) async fn generate(
        &self,
        worker: &v1::WorkerRef,
        request: v1::GenerateRequest,
    ) -> Result<(Streaming<v1::GenerateEvent>, Counted), Status> {
        let counted = Counted::new(&self.known, &worker.id);
        let mut client = self.worker(&worker.address)?;
        count_sent(request.encoded_len());
        Ok((client.generate(trace::request(request)).await?.into_inner(), counted))
    }

    /// How to send `worker` the grammar with this hash.
    pub(crate) fn spelling(&self, worker: &v1::WorkerRef, hash: &[u8; 32]) -> Spelling {
        let known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let holds =
            known.grammars.get(&(worker.id.clone(), worker.epoch)).is_some_and(|held| held.contains(hash));
        if holds { Spelling::Hash } else { Spelling::Full }
    }

    /// Remembers that `worker` has got the grammar with this hash.
    pub(crate) fn holds(&self, worker: &v1::WorkerRef, hash: &[u8; 32]) {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        // What is forgotten here is only sent once more.
        let worker = (worker.id.clone(), worker.epoch);
        if known.grammars.len() >= MAX_WORKERS_WITH_GRAMMARS && !known.grammars.contains_key(&worker) {
            known.grammars.clear();
        }
        let held = known.grammars.entry(worker).or_default();
        if held.len() >= MAX_GRAMMARS {
            held.clear();
        }
        held.insert(*hash);
    }

    fn worker(&self, address: &str) -> Result<DecodeClient<Channel>, Status> {
        if let Some(client) = self.workers.get(address) {
            return Ok(client.clone());
        }
        let channel = net::channel(address).map_err(|error| Status::internal(error.to_string()))?;
        let client = DecodeClient::new(channel).max_encoding_message_size(proto::MAX_MESSAGE_BYTES);
        self.workers.insert(address.to_owned(), client.clone());
        Ok(client)
    }
}

impl RouteQuery<'_> {
    /// The chain from the `from`-th block on.
    fn request(&self, from: usize) -> v1::RouteRequest {
        let hashes = self.log.hashes_from(from);
        let mut bytes = BytesMut::with_capacity(hashes.len() * BlockHash::BYTES);
        hashes.iter().for_each(|hash| bytes.put_slice(hash.as_bytes()));
        let narrow = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        v1::RouteRequest {
            model_fingerprint: Bytes::copy_from_slice(self.fingerprint),
            parent: if from == 0 { Bytes::new() } else { Bytes::copy_from_slice(self.cut.parent.as_bytes()) },
            parent_blocks: narrow(from),
            hashes: bytes.freeze(),
            prompt_tokens: narrow(self.log.len()),
            conversation: self.conversation.to_owned(),
            turn: self.turn,
            avoid: self.avoid.to_vec(),
            last_decode: self.last_decode.to_owned(),
        }
    }
}

impl Counted {
    fn new(known: &Arc<Mutex<Known>>, worker: &str) -> Self {
        *known
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .running
            .entry(worker.to_owned())
            .or_default() += 1;
        Self { known: Arc::clone(known), worker: worker.to_owned() }
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(n) = known.running.get_mut(&self.worker) {
            *n -= 1;
            if *n == 0 {
                known.running.remove(&self.worker);
            }
        }
    }
}

/// True when another attempt, with another worker or the same one, may go well.
pub(crate) fn may_retry(status: &Status) -> bool {
    is_retryable(status)
        || matches!(Reason::of(status), Some(Reason::Mismatch))
        || status.code() == Code::Unavailable
}

fn count_sent(n_bytes: usize) {
    metrics::counter!(names::WORKER_BYTES_OUT).increment(n_bytes as u64);
}
