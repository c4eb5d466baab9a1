//! Compares with another implementation on any model: ids of texts, and greedy continuations; where one leaves, the
//! plain reference judges.
//!
//! `agree MODEL REFERENCE.json`; the reference holds `cases` (`text`, `no_special`, `parse_special`) and `prompts`
//! (`name`, `text`, `ids`, `greedy`, `gaps` of the two best logits), as recorded from llama.cpp.
#![expect(clippy::print_stdout, reason = "it prints its findings")]

use std::num::NonZeroUsize;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use engine::arena::KvArena;
use engine::forward::{Forward, Logits, Slice};
use engine::reference::Reference;
use engine::sample::{Sampler, SamplingParams};
use engine::weights::Weights;
use kernels::pool::ThreadPool;
use model::TextModel;
use model::checkpoint::Checkpoint;
use serde::Deserialize;

type Failure = Box<dyn std::error::Error>;

#[derive(Deserialize)]
struct Recorded {
    cases: Vec<Case>,
    prompts: Vec<Prompt>,
}

#[derive(Deserialize)]
struct Case {
    text: String,
    no_special: Vec<u32>,
    parse_special: Vec<u32>,
}

#[derive(Deserialize)]
struct Prompt {
    name: String,
    text: String,
    ids: Vec<u32>,
    greedy: Vec<u32>,
    gaps: Vec<f32>,
}

fn main() -> Result<(), Failure> {
    let mut args = std::env::args().skip(1);
    let usage = "usage: agree MODEL REFERENCE.json";
    let (path, recorded) = (args.next().ok_or(usage)?, args.next().ok_or(usage)?);
    let recorded: Recorded = serde_json::from_slice(&std::fs::read(recorded)?)?;
    let checkpoint = Checkpoint::open(Path::new(&path))?;
    let text = TextModel::new(&checkpoint, Path::new(&path))?;
    println!(
        "{}: template {:?}, ends {:?}",
        text.name,
        text.prompts.class(),
        text.tokenizer.end_of_turn_ids()
    );
    let tokenizer = &text.tokenizer;
    for case in &recorded.cases {
        let ordinary = tokenizer.encode_ordinary(&case.text);
        let special = tokenizer.encode_with_specials(&case.text);
        if ordinary != case.no_special || special != case.parse_special {
            println!("ids of {:?} differ: {ordinary:?} / {special:?}", case.text);
        }
    }
    println!("{} texts compared", recorded.cases.len());
    let threads =
        Arc::new(ThreadPool::new(std::thread::available_parallelism().unwrap_or(NonZeroUsize::MIN)));
    let began = Instant::now();
    let weights = Arc::new(Weights::load(&checkpoint, &threads)?);
    println!("loaded in {:.1?}, {:.0} MB", began.elapsed(), weights.n_bytes() as f64 / 1e6);
    for prompt in &recorded.prompts {
        if tokenizer.encode_with_specials(&prompt.text) != prompt.ids {
            println!("{}: the prompt's ids differ", prompt.name);
        }
        if let Some((step, got)) = compare(prompt, &weights, &threads)? {
            let judge = Reference::new(&checkpoint)?;
            let rows = judge.logits(&[&prompt.ids[..], &prompt.greedy[..step]].concat())?;
            let last = rows.last().ok_or("a prompt has tokens")?;
            let (got, want) = (last[got as usize], last[prompt.greedy[step] as usize]);
            println!("  the plain reference gives {got:.3} to ours, {want:.3} to the recorded one");
        }
    }
    Ok(())
}

/// Where our continuation leaves the recorded one, and with which token.
fn compare(
    prompt: &Prompt,
    weights: &Arc<Weights>,
    threads: &Arc<ThreadPool>,
) -> Result<Option<(usize, u32)>, Failure> {
    let n_blocks = (prompt.ids.len() + prompt.greedy.len()).div_ceil(kv::BLOCK_TOKENS);
    let table: Vec<u32> = (0..u32::try_from(n_blocks)?).collect();
    let mut arena = KvArena::new(weights.shape().kv_geometry(), n_blocks);
    let mut forward = Forward::new(Arc::clone(weights), Arc::clone(threads), prompt.ids.len());
    let (mut tokens, mut start) = (prompt.ids.clone(), 0);
    for (step, (want, gap)) in prompt.greedy.iter().zip(&prompt.gaps).enumerate() {
        let slice = Slice { tokens: &tokens, start, blocks: &table, logits: Logits::Last };
        let rows = forward.run(&mut arena, &[slice], &mut |_, _| ())?;
        start += tokens.len();
        let got = Sampler::default().sample(rows.row(0), &SamplingParams::GREEDY, 0);
        if got != *want {
            println!(
                "{}: leaves at step {step}: {got}, not {want}; the two best are {gap:.3} apart",
                prompt.name
            );
            return Ok(Some((step, got)));
        }
        tokens = vec![got];
    }
    println!("{}: all {} tokens agree", prompt.name, prompt.greedy.len());
    Ok(None)
}
