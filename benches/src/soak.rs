//! A soak: random clients keep the server busy for a time, then nothing may be left of them.
//!
//! ```text
//! plan ─▶ session (a client; many) ─news─▶ tally ──┐
//!                                                  ├─▶ report: checks, table
//! /metrics, /proc ─▶ metrics ─────────samples──────┘
//! ```

pub mod metrics;
pub mod plan;
pub mod report;
mod session;
pub mod tally;

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use serde::Serialize;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;

use self::metrics::{Sample, Source};
use self::plan::Plan;
use self::report::{Report, leftovers};
use self::session::{Client, Shared};
use self::tally::Tally;
use crate::drive::Settings;
use crate::options::Options;
use crate::pacing::Clock;
use crate::{client, synth};

/// Between two samples.
const SAMPLE_INTERVAL: Duration = Duration::from_secs(10);
/// How long turns may take to end when no more are sent, and workers to free what those held.
const END_LIMIT: Duration = Duration::from_secs(30);
/// Between looks at workers that are not free yet.
const LOOK_INTERVAL: Duration = Duration::from_millis(500);
/// After so many errors the run ends.
const MAX_ERRORS: u64 = 200;
/// News and samples on their way.
const IN_FLIGHT: usize = 1024;

/// Why there is no soak.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("the metrics cannot be read: {0}")]
    Metrics(String),
    #[error("no worker is on the pages of metrics: name its process's page with --metrics-url")]
    NoWorker,
    #[error("{worker} is busy: a soak needs a server of its own")]
    Busy { worker: String },
    #[error(transparent)]
    Client(#[from] client::Error),
}

/// Everything about a soak, for `--json`.
#[derive(Debug, Serialize)]
pub struct Document<'a> {
    pub replayer: &'static str,
    pub options: &'a Options,
    pub model: &'a str,
    pub soak: &'a Report,
}

/// Soaks the server for `length`, or until `stop` is ready.
///
/// # Errors
/// When it cannot begin.
pub async fn run(
    options: &Options,
    length: Duration,
    settings: Settings,
    stop: impl Future,
) -> Result<Report, Error> {
    let source = source(options, &settings)?;
    let clock = Clock::start_in(Duration::ZERO);
    let first = source.sample(clock.now()).await.map_err(Error::Metrics)?;
    if first.workers.is_empty() {
        return Err(Error::NoWorker);
    }
    if let Some((worker, _)) = first.workers.iter().find(|(_, worker)| worker.running_turns > 0.0) {
        return Err(Error::Busy { worker: worker.clone() });
    }
    let n_clients = settings.concurrency;
    let shared = Shared {
        settings,
        plan: Plan::new(options),
        system: synth::system(options),
        max_input_tokens: options.max_input_tokens,
        clock,
        next: AtomicU64::new(0),
    };
    let mut soak =
        Soak { clock, end: clock.now() + length, tally: Tally::default(), samples: vec![first.clone()] };
    let interrupted = soak.drive(Arc::new(shared), n_clients, &source, stop).await;
    let wall_s = clock.now().as_secs_f64() - first.at_s;
    soak.settle(&source).await;
    Ok(Report::new(wall_s, interrupted, soak.tally, soak.samples))
}

fn source(options: &Options, settings: &Settings) -> Result<Source, Error> {
    let mut pages = vec![settings.target.page("/metrics")];
    for url in &options.soak.metrics_url {
        pages.push(client::Target::http(url)?);
    }
    Ok(Source { pages, pid: options.soak.pid })
}

/// A soak on its way.
struct Soak {
    clock: Clock,
    /// When no more turns are to be sent.
    end: Duration,
    tally: Tally,
    /// The first is from before any turn.
    samples: Vec<Sample>,
}

impl Soak {
    /// Runs the clients until all turns are over or nothing is to be hoped for; true when it was stopped.
    async fn drive(
        &mut self,
        shared: Arc<Shared>,
        n_clients: usize,
        source: &Source,
        stop: impl Future,
    ) -> bool {
        let clock = self.clock;
        let (sender, mut news) = mpsc::channel(IN_FLIGHT);
        let (samples_sender, mut samples) = mpsc::channel(IN_FLIGHT);
        let (announce_end, ending) = watch::channel(false);
        let mut clients = JoinSet::new();
        for _ in 0..n_clients {
            let (shared, news, ending) = (Arc::clone(&shared), sender.clone(), ending.clone());
            clients.spawn(Client { shared, news, ending, connection: None }.run());
        }
        drop(sender);
        let mut sampler = JoinSet::new();
        sampler.spawn(take_samples(source.clone(), clock, samples_sender));
        let mut stop = std::pin::pin!(stop);
        let mut interrupted = false;
        loop {
            let stalls_at = self.tally.stalls_at();
            let is_ending = *announce_end.borrow();
            tokio::select! {
                news = news.recv() => match news {
                    Some(news) => self.tally.book(news),
                    None => break,
                },
                Some(sample) = samples.recv() => self.keep(sample),
                () = clock.until(stalls_at.unwrap_or_default()), if stalls_at.is_some() => {
                    self.tally.stall();
                    break;
                }
                () = clock.until(self.end), if !is_ending => {
                    announce_end.send_replace(true);
                }
                () = clock.until(self.end + END_LIMIT), if is_ending => break,
                _ = &mut stop, if !interrupted => {
                    interrupted = true;
                    self.end = self.end.min(clock.now());
                }
            }
            if self.tally.n_errors() >= MAX_ERRORS {
                break;
            }
        }
        // The others, if any, are stopped.
        while let Some(ended) = clients.try_join_next() {
            ended.expect("a client does not panic");
        }
        interrupted
    }

    fn keep(&mut self, sample: Result<Sample, String>) {
        match sample {
            Ok(sample) => self.samples.push(sample),
            Err(problem) => self.tally.error(format!("metrics: {problem}")),
        }
    }

    /// Takes the last sample: when the workers are as free as before, or when they have had their time.
    async fn settle(&mut self, source: &Source) {
        let deadline = self.clock.now() + END_LIMIT;
        loop {
            let sample = source.sample(self.clock.now()).await;
            let is_settled = match &sample {
                Ok(sample) => leftovers(&self.samples[0].workers, &sample.workers).is_empty(),
                Err(_) => false,
            };
            if is_settled || self.clock.now() >= deadline {
                return self.keep(sample);
            }
            tokio::time::sleep(LOOK_INTERVAL).await;
        }
    }
}

/// Samples at regular times, for as long as somebody listens.
async fn take_samples(source: Source, clock: Clock, samples: mpsc::Sender<Result<Sample, String>>) {
    let mut due = clock.now();
    loop {
        due += SAMPLE_INTERVAL;
        clock.until(due).await;
        if samples.send(source.sample(clock.now()).await).await.is_err() {
            return;
        }
    }
}

#[cfg(test)]
mod tests;
