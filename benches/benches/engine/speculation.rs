//! Decoding with speculation against decoding without, the same prompts in turns; the outputs must be equal.

use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use engine::job::{Event, Fill, Job, Prompt};
use engine::sample::SamplingParams;
use engine::speculate::head::DraftHead;
use engine::weights::Weights;
use engine::{Drafter, Engine, EngineConfig, Model, Speculate};
use kernels::attention::KvDtype;
use kernels::pool::ThreadPool;
use kv::hash::{BlockHash, HashKey};
use model::TextModel;
use model::chat_template::{Message, Reply, Role};
use model::grammar::source;
use model::prompt::Entry;
use proto::v1;
use serde_json::json;

use crate::prompts::{AGENT, CHAT};

const MAX_OUTPUT_TOKENS: usize = 128;

const PLAIN: Speculate = Speculate::Never;
const FAST: Speculate = Speculate::WhenItPays;

/// A set of prompts, `batch` of them at a time.
struct Case {
    name: &'static str,
    prompts: &'static [&'static str],
    batch: usize,
    temperature: f32,
    /// What the answers must look like.
    grammar: Option<fn() -> String>,
}

const CASES: [Case; 9] = [
    Case { name: "agent text, batch 1", prompts: &AGENT, batch: 1, temperature: 0.0, grammar: None },
    Case { name: "chat, batch 1", prompts: &CHAT, batch: 1, temperature: 0.0, grammar: None },
    Case { name: "chat, batch 1, T = 0.7", prompts: &CHAT, batch: 1, temperature: 0.7, grammar: None },
    Case { name: "chat, batch 4", prompts: &CHAT, batch: 4, temperature: 0.0, grammar: None },
    Case { name: "chat, batch 8", prompts: &CHAT, batch: 8, temperature: 0.0, grammar: None },
    Case { name: "chat, batch 16", prompts: &CHAT, batch: 16, temperature: 0.0, grammar: None },
    Case { name: "strict JSON, batch 1", prompts: &CHAT, batch: 1, temperature: 0.0, grammar: Some(strict) },
    Case { name: "strict JSON, batch 8", prompts: &CHAT, batch: 8, temperature: 0.0, grammar: Some(strict) },
    Case {
        name: "any JSON, batch 1",
        prompts: &CHAT,
        batch: 1,
        temperature: 0.0,
        grammar: Some(source::json_object),
    },
];

/// A schema as tools have them.
fn strict() -> String {
    let text = |most: u32| json!({"type": "string", "maxLength": most});
    let step = json!({"type": "object", "properties": {"title": text(30), "explanation": text(80),
        "minutes": {"type": "integer", "minimum": 0, "maximum": 600}, "difficulty": {"enum": ["easy", "medium", "hard"]}},
        "required": ["title", "explanation", "minutes", "difficulty"], "additionalProperties": false});
    source::json_schema(
        &json!({"type": "object", "properties": {"answer": text(60), "confidence": {"enum": ["low", "high"]},
        "steps": {"type": "array", "items": step, "minItems": 2, "maxItems": 4}},
        "required": ["answer", "confidence", "steps"], "additionalProperties": false}),
    )
}

/// The decoding of one set.
struct Run {
    outputs: Vec<Vec<u32>>,
    /// Output tokens after the first of each batch, per second.
    rate: f64,
}

/// Prints tokens per second and ratios.
#[expect(clippy::print_stdout, reason = "it prints its findings")]
pub(crate) fn run(
    weights: &Arc<Weights>,
    pool: &Arc<ThreadPool>,
    text: &TextModel,
    alternations: usize,
) -> anyhow::Result<()> {
    println!(
        "\n{:<24} {:>8} {:>8} {:>6} {:>13}  (tokens/s, medians of {alternations} alternations)",
        "decoding", "plain", "spec.", "ratio", "ratios"
    );
    for case in &CASES {
        let (mut plain, mut fast, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
        for round in 0..alternations {
            // Who goes first changes, and every run begins with an empty cache.
            let mut pair =
                if round % 2 == 0 { [PLAIN, FAST] } else { [FAST, PLAIN] }.map(|mode| (mode, None));
            for (speculate, result) in &mut pair {
                *result = Some(decode(case, weights, pool, text, *speculate)?);
            }
            pair.sort_by_key(|(mode, _)| *mode != PLAIN);
            let [(_, Some(off)), (_, Some(on))] = pair else { continue };
            ensure!(off.outputs == on.outputs, "speculation changed the output of {}", case.name);
            plain.push(off.rate);
            fast.push(on.rate);
            ratios.push(on.rate / off.rate);
        }
        for values in [&mut plain, &mut fast, &mut ratios] {
            values.sort_by(f64::total_cmp);
        }
        let median = |values: &[f64]| values[values.len() / 2];
        println!(
            "{:<24} {:>8.0} {:>8.0} {:>6.2} {:>6.2}..{:.2}",
            case.name,
            median(&plain),
            median(&fast),
            median(&ratios),
            ratios[0],
            ratios[ratios.len() - 1]
        );
    }
    Ok(())
}

fn decode(
    case: &Case,
    weights: &Arc<Weights>,
    pool: &Arc<ThreadPool>,
    text: &TextModel,
    speculate: Speculate,
) -> anyhow::Result<Run> {
    let drafter =
        DraftHead::built_in(weights, pool).map_or(Drafter::None, |head| Drafter::Head(Arc::new(head)));
    let model = Model {
        weights: Arc::clone(weights),
        fingerprint: text.fingerprint,
        drafter,
        grammars: Some(Arc::clone(&text.grammars)),
    };
    let kv_dtype = KvDtype::F16;
    let config = EngineConfig {
        n_blocks: 1024,
        step_tokens: 256,
        max_running: 32,
        max_turns: 32,
        kv_dtype,
        speculate,
    };
    let engine = Engine::start(model, Arc::clone(pool), config, "bench")?;
    let (mut outputs, mut n_tokens, mut seconds) = (Vec::new(), 0, 0.0);
    for batch in case.prompts.chunks(case.batch) {
        let (events, inbox) = mpsc::channel();
        for (i, prompt) in batch.iter().enumerate() {
            let constraint = case.grammar.map(|grammar| {
                engine.constraint(v1::Constraint { grammar: grammar(), ..Default::default() })
            });
            let job = job(i, prompt, case.temperature, text, events.clone())?;
            engine.submit(Job { constraint: constraint.transpose()?, ..job })?;
        }
        drop(events);
        let mut answers = vec![Vec::new(); batch.len()];
        let (mut began, mut ended) = (None, Instant::now());
        loop {
            let (i, event) = match inbox.recv_timeout(Duration::from_secs(60)) {
                Ok(event) => event,
                Err(RecvTimeoutError::Disconnected) => break,
                Err(RecvTimeoutError::Timeout) => bail!("the engine stalls in {}", case.name),
            };
            match event {
                Event::Token(output) => {
                    answers[i].push(output.id);
                    ended = Instant::now();
                    // Decoding is measured from the moment at which all of the batch decode.
                    if began.is_none() && answers.iter().all(|answer| !answer.is_empty()) {
                        began = Some((ended, answers.iter().map(Vec::len).sum::<usize>()));
                    }
                }
                Event::Failed(error) => return Err(error.into()),
                Event::Admitted(_) | Event::Prefilled { .. } | Event::Finished(_) => {}
            }
        }
        let (began, n_before) = began.context("every prompt has an answer")?;
        n_tokens += answers.iter().map(Vec::len).sum::<usize>() - n_before;
        seconds += (ended - began).as_secs_f64();
        outputs.extend(answers);
    }
    engine.stop();
    Ok(Run { outputs, rate: n_tokens as f64 / seconds })
}

fn job(
    idx: usize,
    prompt: &str,
    temperature: f32,
    text: &TextModel,
    events: Sender<(usize, Event)>,
) -> anyhow::Result<Job> {
    let system = Message { role: Role::System, content: "You are a helpful assistant.".into() };
    let user = Message { role: Role::User, content: prompt.into() };
    let ids =
        text.prompts.render_all(&[Entry::Message(&system), Entry::Message(&user)], Reply::Expected, &[])?;
    let key = HashKey::derive(&text.fingerprint, b"");
    Ok(Job {
        turn: idx as u64,
        prompt: Prompt { key, parent: BlockHash::ROOT, ids },
        fill: Fill::Compute,
        export: None,
        sampling: SamplingParams { temperature, seed: 7, ..SamplingParams::GREEDY },
        constraint: None,
        max_output_tokens: MAX_OUTPUT_TOKENS,
        stop_ids: text.tokenizer.end_of_turn_ids().to_vec(),
        sink: Box::new(move |event| events.send((idx, event)).is_ok()),
    })
}
