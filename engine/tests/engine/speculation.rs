//! Speculative decoding through a running engine: whatever drafts, the output is that of plain decoding.

use std::path::PathBuf;
use std::sync::Arc;

use engine::arena::KvArena;
use engine::forward::{Forward, Logits, Slice};
use engine::sample::SamplingParams;
use engine::speculate::head::{DraftHead, Error};
use engine::weights::Weights;
use engine::{Drafter, Speculate};
use model::checkpoint::Checkpoint;

use crate::host::{Host, accepted};
use crate::real::{WEIGHTS, pool};
use crate::tiny::{Tiny, VOCAB};

/// Reproducible numbers.
pub(crate) fn noise(seed: u64) -> impl FnMut(u64) -> u32 {
    let mut state = seed;
    move |below| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        u32::try_from((state >> 33) % below).expect("small")
    }
}

/// 100 prompts of ordinary words of the real model's vocabulary; many repeat parts of themselves.
fn prompts() -> Vec<Vec<u32>> {
    let mut noise = noise(3);
    let prompt = |i: usize| {
        let phrase: Vec<u32> = (0..3 + noise(9)).map(|_| 200 + noise(3000)).collect();
        let mut ids: Vec<u32> = (0..2 + noise(30)).map(|_| 200 + noise(20_000)).collect();
        for _ in 0..i % 4 {
            ids.extend(&phrase);
            ids.extend((0..noise(4)).map(|_| 200 + noise(20_000)));
        }
        ids
    };
    (0..100).map(prompt).collect()
}

#[test]
fn speculation_changes_no_token_of_a_hundred_prompts() {
    let head = DraftHead::built_in(&WEIGHTS, &pool(1)).expect("the test model has a head");
    let drafter = Drafter::Head(Arc::new(head));
    // Half of them greedy, half of them sampled.
    let sampling = |i: usize| match i % 4 {
        0 | 1 => SamplingParams::GREEDY,
        2 => SamplingParams { temperature: 0.8, top_p: 0.95, seed: i as u64, ..SamplingParams::GREEDY },
        _ => SamplingParams { temperature: 1.0, seed: i as u64, ..SamplingParams::GREEDY },
    };
    let turns: Vec<_> = prompts().into_iter().enumerate().map(|(i, ids)| (ids, sampling(i))).collect();
    let plain = Host::start(&WEIGHTS, Drafter::None, Speculate::Never);
    let fast = Host::start(&WEIGHTS, drafter.clone(), Speculate::Always);
    let careful = Host::start(&WEIGHTS, drafter, Speculate::WhenItPays);
    // Sometimes alone, where much is drafted, sometimes in company.
    for (turns, n_together) in [(&turns[..70], 1), (&turns[70..], 5)] {
        for turns in turns.chunks(n_together) {
            let wanted = plain.outputs(turns, 24);
            assert_eq!(fast.outputs(turns, 24), wanted);
            if n_together > 1 {
                assert_eq!(careful.outputs(turns, 24), wanted);
            }
        }
    }
    assert!(accepted("lookup") > 0, "look-ups were right sometimes");
    assert!(accepted("head") > 0, "the head was right sometimes");
}

fn tiny(name: &str, architecture: &'static str) -> Arc<Weights> {
    let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("speculation_{name}.gguf"));
    Tiny::new(architecture).write_gguf(&path).expect("the target directory is writable");
    let checkpoint = Checkpoint::open(&path).expect("the model is well-formed");
    Arc::new(Weights::load(&checkpoint, &pool(1)).expect("the model is supported"))
}

#[test]
fn a_draft_model_changes_no_token_and_is_right_when_it_is_the_model_itself() {
    let weights = tiny("draft", "qwen2");
    let mut noise = noise(5);
    // The context of the small models is 64 tokens.
    let turns: Vec<_> = (0..12)
        .map(|i| {
            let ids = (0..5 + noise(20)).map(|_| noise(VOCAB as u64)).collect();
            let temperature = if i % 2 == 0 { 0.0 } else { 0.7 };
            (ids, SamplingParams { temperature, seed: i, ..SamplingParams::GREEDY })
        })
        .collect();
    let plain = Host::start(&weights, Drafter::None, Speculate::Never);
    let fast = Host::start(&weights, Drafter::Model(Arc::clone(&weights)), Speculate::Always);
    let other = Host::start(&weights, Drafter::Model(tiny("other", "llama")), Speculate::Always);
    let before = accepted("model");
    for turns in turns.chunks(3) {
        let wanted = plain.outputs(turns, 30);
        assert_eq!(fast.outputs(turns, 30), wanted);
        assert_eq!(other.outputs(turns, 30), wanted, "a model that guesses badly");
    }
    assert!(accepted("model") > before, "the model knows itself");
}

/// A block whose last token was a draft when it was filled is sealed later; the draft model must not take it for sealed
/// (its pool would panic). Long turns of the real model, whose draft model is asked now and then only.
#[test]
fn a_draft_model_that_is_asked_rarely_keeps_its_books() {
    let plain = Host::start(&WEIGHTS, Drafter::None, Speculate::Never);
    let fast = Host::start(&WEIGHTS, Drafter::Model(Arc::clone(&WEIGHTS)), Speculate::Always);
    let turns: Vec<_> = prompts().into_iter().take(12).map(|ids| (ids, SamplingParams::GREEDY)).collect();
    for turns in turns.chunks(4) {
        assert_eq!(fast.outputs(turns, 80), plain.outputs(turns, 80));
    }
}

/// Sampled pairs of tokens against their exact probabilities; the second one was often drafted.
#[test]
fn sampled_tokens_follow_the_models_distribution_exactly() {
    const N_DRAWS: usize = 4000;
    const N_CELLS: usize = 12;
    // Makes the small model's flat distribution uneven, so that guesses are right sometimes.
    const TEMPERATURE: f32 = 0.2;
    let weights = tiny("draws", "llama");
    let prompt: Vec<u32> = (0..20).map(|i| 10 + i % 5).collect();
    let host = Host::start(&weights, Drafter::Model(Arc::clone(&weights)), Speculate::Always);
    let sampling = |seed| SamplingParams { temperature: TEMPERATURE, seed, ..SamplingParams::GREEDY };
    let before = accepted("model") + accepted("lookup");
    let mut counts = vec![0.0; VOCAB];
    for chunk in (0..N_DRAWS as u64).collect::<Vec<_>>().chunks(4) {
        let turns: Vec<_> = chunk.iter().map(|&seed| (prompt.clone(), sampling(seed))).collect();
        for output in host.outputs(&turns, 3) {
            // A stop token ends a turn early; the chain of events is the same in both counts.
            counts[output.get(1).map_or(0, |&token| token as usize)] += 1.0;
        }
    }
    assert!(accepted("model") + accepted("lookup") > before, "some draws were drafted");
    let wanted = second_token(&weights, &prompt, TEMPERATURE);
    // The likeliest tokens are cells of their own, the rest is one.
    let mut order: Vec<usize> = (0..VOCAB).collect();
    order.sort_by(|a, b| wanted[*b].total_cmp(&wanted[*a]));
    let mut chi2 = 0.0;
    let (head, tail) = order.split_at(N_CELLS - 1);
    for cell in head.iter().map(std::slice::from_ref).chain([tail]) {
        let of = |values: &[f64]| cell.iter().map(|&token| values[token]).sum::<f64>();
        let expected = of(&wanted) * N_DRAWS as f64;
        chi2 += (of(&counts) - expected).powi(2) / expected;
    }
    // 11 degrees of freedom: exceeded once in 100,000 when the distributions are equal, and the seeds are fixed.
    assert!(chi2 < 42.0, "chi-squared {chi2}");
}

/// The exact distribution of the second output token; index 0 also holds the turns that end after the first.
fn second_token(weights: &Arc<Weights>, prompt: &[u32], temperature: f32) -> Vec<f64> {
    let mut arena = KvArena::new(weights.shape().kv_geometry(), 2);
    let mut forward = Forward::new(Arc::clone(weights), Arc::new(pool(1)), 64);
    let mut after = |tokens: &[u32]| {
        let slice = Slice { tokens, start: 0, blocks: &[0, 1], logits: Logits::Last };
        let rows = forward.run(&mut arena, &[slice], &mut |_, _| ()).expect("the step is within the limits");
        softmax(rows.row(0), temperature)
    };
    let mut wanted = vec![0.0; VOCAB];
    for (token, first) in after(prompt).into_iter().enumerate() {
        if token == 2 {
            wanted[0] += first;
            continue;
        }
        let tokens = [prompt, &[u32::try_from(token).expect("small")]].concat();
        wanted.iter_mut().zip(after(&tokens)).for_each(|(sum, second)| *sum += first * second);
    }
    wanted
}

fn softmax(logits: &[f32], temperature: f32) -> Vec<f64> {
    let peak = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let weights: Vec<f64> =
        logits.iter().map(|&logit| (f64::from(logit - peak) / f64::from(temperature)).exp()).collect();
    let sum: f64 = weights.iter().sum();
    weights.into_iter().map(|weight| weight / sum).collect()
}

#[test]
fn a_damaged_or_foreign_draft_head_is_refused_by_name() {
    let file = include_bytes!("../../assets/smollm2_draft_head_fp16.safetensors");
    let load = |bytes: &[u8], weights| DraftHead::load(bytes, weights, &pool(1)).map(drop);
    assert_eq!(load(file, &WEIGHTS), Ok(()));
    for n_bytes in [0, 7, 8, 300, file.len() - 1] {
        let error = load(&file[..n_bytes], &WEIGHTS);
        assert!(matches!(error, Err(Error::Damaged(_))), "{n_bytes} bytes: {error:?}");
    }
    let mut long = file.to_vec();
    long[..8].copy_from_slice(&u64::MAX.to_le_bytes());
    assert!(matches!(load(&long, &WEIGHTS), Err(Error::Damaged(_))));
    let error = load(file, &tiny("foreign", "llama"));
    assert!(matches!(error, Err(Error::OtherModel(_))), "{error:?}");
}
