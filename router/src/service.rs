//! The cluster as this router sees it, and the gRPC service that plans turns over it.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use kv::hash::BlockHash;
use proto::reason::Reason;
use proto::{trace, v1};
use tonic::{Request, Response, Status};

use crate::index::{Chain, Index, WorkerIdx};
use crate::load::LoadView;
use crate::policy::{self, Candidate, Choice, Costs, Demand};

/// Until any worker has shown its speed, in microseconds per token.
const FIRST_GUESS_US: f64 = 1000.0;

/// How many workers are connected; readable from outside, for health checks.
#[derive(Debug, Clone, Default)]
pub struct Readiness(Arc<AtomicUsize>);

impl Readiness {
    /// Decode workers connected now: a router without one can plan nothing.
    #[must_use]
    pub fn decode_workers(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }
}

#[derive(Debug)]
struct Member {
    idx: WorkerIdx,
    info: v1::WorkerInfo,
    load: LoadView,
}

#[derive(Debug, Default)]
struct State {
    index: Index,
    /// Connected workers only.
    members: Vec<Member>,
    next_idx: u64,
}

/// Shared by the watchers, which write, and the service, which plans.
#[derive(Debug, Clone)]
pub(crate) struct Cluster {
    state: Arc<Mutex<State>>,
    costs: Costs,
    lease: Duration,
    readiness: Readiness,
}

impl Cluster {
    pub(crate) fn new(costs: Costs, lease: Duration, readiness: Readiness) -> Self {
        Self { state: Arc::default(), costs, lease, readiness }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A worker is connected. An earlier connection to the same worker is replaced.
    ///
    /// # Errors
    /// When a worker of the same name is connected at another address; returns that address.
    pub(crate) fn join(&self, info: v1::WorkerInfo) -> Result<WorkerIdx, String> {
        let mut state = self.lock();
        let same = state.members.iter().find(|member| member.info.id == info.id);
        if let Some(other) = same.filter(|member| member.info.address != info.address) {
            return Err(other.info.address.clone());
        }
        if let Some(old) = same.map(|member| member.idx) {
            state.leave(old);
        }
        let idx = WorkerIdx(state.next_idx);
        state.next_idx += 1;
        state.members.push(Member { idx, info, load: LoadView::default() });
        self.count(&state);
        Ok(idx)
    }

    /// A worker is gone, with all it held.
    pub(crate) fn leave(&self, idx: WorkerIdx) {
        let mut state = self.lock();
        state.leave(idx);
        self.count(&state);
    }

    pub(crate) fn store(&self, idx: WorkerIdx, pairs: &[(BlockHash, BlockHash)]) {
        let mut state = self.lock();
        pairs.iter().for_each(|(hash, parent)| state.index.store(idx, *hash, *parent));
    }

    pub(crate) fn remove(&self, idx: WorkerIdx, hashes: &[BlockHash]) {
        let mut state = self.lock();
        hashes.iter().for_each(|hash| state.index.remove(idx, hash));
    }

    pub(crate) fn report(&self, idx: WorkerIdx, load: v1::Load) {
        let mut state = self.lock();
        if let Some(member) = state.members.iter_mut().find(|member| member.idx == idx) {
            member.load.report(load);
        }
    }

    fn count(&self, state: &State) {
        let decode = |member: &&Member| member.info.role() == v1::Role::Decode;
        self.readiness.0.store(state.members.iter().filter(decode).count(), Ordering::Relaxed);
        let n_workers = u32::try_from(state.members.len()).unwrap_or(u32::MAX);
        metrics::gauge!(crate::metrics::WORKERS).set(f64::from(n_workers));
    }

    fn plan(&self, request: &v1::RouteRequest) -> Result<v1::RoutePlan, Status> {
        let bad = |error: kv::hash::WrongLength| Status::invalid_argument(error.to_string());
        let parent = BlockHash::from_wire(&request.parent).map_err(bad)?;
        let hashes = BlockHash::run_from_wire(&request.hashes).map_err(bad)?;
        let now = Instant::now();
        let mut state = self.lock();
        let usable = |role: v1::Role| {
            state.members.iter().filter(move |member| {
                member.info.role() == role
                    && member.info.model_fingerprint == request.model_fingerprint
                    && !member.load.is_draining()
                    && !request
                        .avoid
                        .iter()
                        .any(|avoid| avoid.id == member.info.id && avoid.epoch == member.info.epoch)
            })
        };
        let decode: Vec<&Member> = usable(v1::Role::Decode).collect();
        let prefill: Vec<&Member> = usable(v1::Role::Prefill).collect();
        let all: Vec<WorkerIdx> = decode.iter().chain(&prefill).map(|member| member.idx).collect();
        let Ok(held) = state.index.held(Chain { parent, hashes: &hashes }, &all) else {
            return Ok(v1::RoutePlan { chain_unknown: true, ..Default::default() });
        };
        let guess = Guess::from(&state.members);
        let candidates: Vec<Candidate> = decode
            .iter()
            .chain(&prefill)
            .zip(&held)
            .map(|(member, &held)| candidate(member, held, guess, now))
            .collect();
        let (decoders, prefillers) = candidates.split_at(decode.len());
        let last_decode =
            decode.iter().find(|member| member.info.id == request.last_decode).map(|member| member.idx);
        let demand = Demand { prompt_tokens: request.prompt_tokens, last_decode };
        let choice =
            policy::choose(&self.costs, demand, decoders, prefillers).ok_or_else(|| no_worker(request))?;
        let plan = to_wire(choice, &decode, &prefill, &held);
        let filler = choice.prefill.map_or(decode[choice.decode].idx, |p| prefill[p].idx);
        let uncached = request.prompt_tokens.saturating_sub(
            u32::try_from(held.iter().max().copied().unwrap_or(0) * kv::BLOCK_TOKENS).unwrap_or(u32::MAX),
        );
        let decoder = decode[choice.decode].idx;
        for member in &mut state.members {
            if member.idx == filler {
                member.load.predict(request.turn, uncached, now, self.lease);
            } else if member.idx == decoder {
                member.load.predict(request.turn, 0, now, self.lease);
            }
        }
        Ok(plan)
    }
}

impl State {
    fn leave(&mut self, idx: WorkerIdx) {
        self.members.retain(|member| member.idx != idx);
        self.index.forget(idx);
    }
}

/// The rates of a worker that has not shown its own yet: those of the others.
#[derive(Debug, Clone, Copy)]
struct Guess {
    us_per_token: f64,
    us_per_output: f64,
}

impl From<&Vec<Member>> for Guess {
    fn from(members: &Vec<Member>) -> Self {
        let least = |rates: &mut dyn Iterator<Item = f64>| rates.reduce(f64::min).unwrap_or(FIRST_GUESS_US);
        Self {
            us_per_token: least(&mut members.iter().filter_map(|member| member.load.us_per_token())),
            us_per_output: least(&mut members.iter().filter_map(|member| member.load.us_per_output())),
        }
    }
}

fn candidate(member: &Member, held: usize, guess: Guess, now: Instant) -> Candidate {
    Candidate {
        idx: member.idx,
        held,
        queued_tokens: member.load.queued_tokens(now),
        turns: member.load.turns(now),
        free_blocks: member.load.free_blocks(),
        us_per_token: member.load.us_per_token().unwrap_or(guess.us_per_token),
        us_per_output: member.load.us_per_output().unwrap_or(guess.us_per_output),
    }
}

fn no_worker(request: &v1::RouteRequest) -> Status {
    let failed: Vec<&str> = request.avoid.iter().map(|worker| worker.id.as_str()).collect();
    let besides = if failed.is_empty() { String::new() } else { format!(" besides {}", failed.join(", ")) };
    Reason::NoWorker.status(format!("no decode worker with this model is connected{besides}"))
}

/// `held` lists decode workers first, then prefill workers.
fn to_wire(choice: Choice, decode: &[&Member], prefill: &[&Member], held: &[usize]) -> v1::RoutePlan {
    let narrow = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
    let filler = choice.prefill.map_or(choice.decode, |p| decode.len() + p);
    let (holder, most) = held.iter().copied().enumerate().max_by_key(|(_, n)| *n).unwrap_or((filler, 0));
    let members: Vec<&&Member> = decode.iter().chain(prefill).collect();
    let source = (most > held[filler]).then(|| worker_ref(members[holder]));
    v1::RoutePlan {
        chain_unknown: false,
        decode: Some(worker_ref(decode[choice.decode])),
        prefill: choice.prefill.map(|p| worker_ref(prefill[p])),
        source_blocks: if source.is_some() { narrow(most) } else { 0 },
        source,
        prefill_cached_blocks: choice.prefill.map_or(0, |p| narrow(held[decode.len() + p])),
    }
}

fn worker_ref(member: &Member) -> v1::WorkerRef {
    let info = &member.info;
    v1::WorkerRef { id: info.id.clone(), address: info.address.clone(), epoch: info.epoch }
}

#[derive(Debug, Clone)]
pub(crate) struct RouterService {
    cluster: Cluster,
}

impl RouterService {
    pub(crate) fn new(cluster: Cluster) -> Self {
        Self { cluster }
    }
}

#[tonic::async_trait]
impl v1::router_server::Router for RouterService {
    async fn route(&self, request: Request<v1::RouteRequest>) -> Result<Response<v1::RoutePlan>, Status> {
        let span = tracing::info_span!(
            "turn",
            role = "router",
            conversation = request.get_ref().conversation,
            turn = request.get_ref().turn
        );
        trace::adopt(&span, request.metadata());
        let _entered = span.enter();
        let began = Instant::now();
        let plan = self.cluster.plan(request.get_ref());
        metrics::histogram!(crate::metrics::PLAN_SECONDS).record(began.elapsed().as_secs_f64());
        let kind = match &plan {
            Err(_) => "no_worker",
            Ok(plan) if plan.chain_unknown => "chain_unknown",
            Ok(plan) if plan.prefill.is_some() => "handover",
            Ok(plan) if plan.source.is_some() => "pull",
            Ok(_) => "own",
        };
        metrics::counter!(crate::metrics::PLANS, "kind" => kind).increment(1);
        #[expect(clippy::cast_precision_loss, reason = "a gauge needs no 53 bits")]
        metrics::gauge!(crate::metrics::INDEX_BLOCKS).set(self.cluster.lock().index.len() as f64);
        plan.map(Response::new)
    }

    async fn cluster(&self, _: Request<v1::ClusterRequest>) -> Result<Response<v1::ClusterState>, Status> {
        let workers = self.cluster.lock().members.iter().map(|member| member.info.clone()).collect();
        Ok(Response::new(v1::ClusterState { workers }))
    }
}
