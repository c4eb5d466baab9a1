//! A running engine, and what its turns say.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc;
use std::sync::{Arc, Once};
use std::time::Duration;

use engine::constrain::Constraint;
use engine::job::{Error, Event, Fill, FinishReason, Job, Output, Prompt};
use engine::sample::SamplingParams;
use engine::weights::Weights;
use engine::{Drafter, Engine, EngineConfig, Model, Speculate, metrics as names};
use kernels::attention::KvDtype;
use kv::hash::{BlockHash, HashKey};
use metrics::{Counter, Gauge, Histogram, Key, KeyName, Metadata, Recorder, SharedString, Unit};
use model::grammar::GrammarEngine;

use crate::real::pool;

/// Draft tokens that were accepted by any engine of this process, by source.
static ACCEPTED: [AtomicU64; 4] = [const { AtomicU64::new(0) }; 4];
const SOURCES: [&str; 4] = ["grammar", "lookup", "head", "model"];

/// Counts accepted drafts and nothing else.
#[derive(Debug)]
struct Accepted(usize);

impl metrics::CounterFn for Accepted {
    fn increment(&self, value: u64) {
        ACCEPTED[self.0].fetch_add(value, Ordering::Relaxed);
    }
    fn absolute(&self, _: u64) {}
}

#[derive(Debug)]
struct Accounts;

impl Recorder for Accounts {
    fn describe_counter(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
    fn describe_gauge(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
    fn describe_histogram(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
    fn register_counter(&self, key: &Key, _: &Metadata<'_>) -> Counter {
        let source = key.labels().find(|label| label.key() == "source").map(metrics::Label::value);
        match SOURCES.iter().position(|name| source == Some(name)) {
            Some(source) if key.name() == names::DRAFT_ACCEPTED => {
                Counter::from_arc(Arc::new(Accepted(source)))
            }
            _ => Counter::noop(),
        }
    }
    fn register_gauge(&self, _: &Key, _: &Metadata<'_>) -> Gauge {
        Gauge::noop()
    }
    fn register_histogram(&self, _: &Key, _: &Metadata<'_>) -> Histogram {
        Histogram::noop()
    }
}

pub(crate) fn accepted(source: &str) -> u64 {
    let source = SOURCES.iter().position(|name| *name == source).expect("a source");
    ACCEPTED[source].load(Ordering::Relaxed)
}

/// An engine with one model.
pub(crate) struct Host {
    pub(crate) engine: Engine,
    key: HashKey,
}

/// What is asked of an engine.
#[derive(Debug)]
pub(crate) struct Turn {
    pub(crate) ids: Vec<u32>,
    pub(crate) sampling: SamplingParams,
    pub(crate) constraint: Option<Constraint>,
    pub(crate) max_output_tokens: usize,
    pub(crate) stop_ids: Vec<u32>,
}

/// What came of it.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Answer {
    pub(crate) outputs: Vec<Output>,
    pub(crate) end: Result<FinishReason, Error>,
}

impl Answer {
    pub(crate) fn ids(&self) -> Vec<u32> {
        self.outputs.iter().map(|output| output.id).collect()
    }
}

impl Host {
    pub(crate) fn start(weights: &Arc<Weights>, drafter: Drafter, speculate: Speculate) -> Self {
        Self::start_with(weights, drafter, speculate, None)
    }

    /// One whose outputs can be constrained.
    pub(crate) fn start_with(
        weights: &Arc<Weights>,
        drafter: Drafter,
        speculate: Speculate,
        grammars: Option<Arc<GrammarEngine>>,
    ) -> Self {
        let config = EngineConfig {
            n_blocks: 400,
            step_tokens: 64,
            max_running: 16,
            max_turns: 256,
            kv_dtype: KvDtype::F16,
            speculate,
        };
        let model = Model { weights: Arc::clone(weights), fingerprint: [7; 32], drafter, grammars };
        Self::with_config(model, config)
    }

    pub(crate) fn with_config(model: Model, config: EngineConfig) -> Self {
        static RECORD: Once = Once::new();
        RECORD.call_once(|| metrics::set_global_recorder(Accounts).expect("the first recorder"));
        let engine =
            Engine::start(model, Arc::new(pool(1)), config, "test").expect("a thread can be started");
        Self { engine, key: HashKey::derive(&[7; 32], b"") }
    }

    /// Runs turns together, as far as there is room.
    pub(crate) fn run(&self, turns: impl IntoIterator<Item = Turn>) -> Vec<Answer> {
        let (events, inbox) = mpsc::channel();
        let mut n_turns = 0;
        for (i, turn) in turns.into_iter().enumerate() {
            let events = events.clone();
            let job = Job {
                turn: i as u64,
                prompt: Prompt { key: self.key, parent: BlockHash::ROOT, ids: turn.ids },
                fill: Fill::Compute,
                export: None,
                sampling: turn.sampling,
                constraint: turn.constraint,
                max_output_tokens: turn.max_output_tokens,
                stop_ids: turn.stop_ids,
                sink: Box::new(move |event| events.send((i, event)).is_ok()),
            };
            self.engine.submit(job).expect("there is room");
            n_turns += 1;
        }
        drop(events);
        let mut outputs = vec![Vec::new(); n_turns];
        let mut ends: Vec<Option<Result<FinishReason, Error>>> = vec![None; n_turns];
        while ends.iter().any(Option::is_none) {
            match inbox.recv_timeout(Duration::from_secs(120)).expect("the engine answers") {
                (i, Event::Token(output)) => outputs[i].push(output),
                (i, Event::Finished(reason)) => ends[i] = Some(Ok(reason)),
                (i, Event::Failed(error)) => ends[i] = Some(Err(error)),
                (_, Event::Admitted(_) | Event::Prefilled { .. }) => {}
            }
        }
        let ends = ends.into_iter().map(|end| end.expect("the loop waits for all"));
        outputs.into_iter().zip(ends).map(|(outputs, end)| Answer { outputs, end }).collect()
    }

    /// The outputs of turns that run together, given as (prompt, sampling).
    pub(crate) fn outputs(
        &self,
        turns: &[(Vec<u32>, SamplingParams)],
        max_output_tokens: usize,
    ) -> Vec<Vec<u32>> {
        let turns = turns.iter().map(|(ids, sampling)| Turn {
            ids: ids.clone(),
            sampling: *sampling,
            constraint: None,
            max_output_tokens,
            stop_ids: vec![2],
        });
        let answers = self.run(turns).into_iter();
        answers.map(|answer| answer.end.map(|_| answer.outputs).expect("it goes well")).map(ids).collect()
    }
}

fn ids(outputs: Vec<Output>) -> Vec<u32> {
    outputs.into_iter().map(|output| output.id).collect()
}

impl Drop for Host {
    fn drop(&mut self) {
        self.engine.stop();
    }
}
