//! Measurements: `cargo test --release -p model --test real_model -- --ignored --nocapture speed`.

use std::time::{Duration, Instant};

use model::TextModel;
use model::chat_template::{Message, Reply, Role};
use model::prompt::LogEnd;

use crate::{MODEL, PATH, tokenizer};

const TEXT: &str = include_str!("../../src/prompt.rs");

fn best<T>(n: usize, mut work: impl FnMut() -> T) -> (Duration, T) {
    let mut best = Duration::MAX;
    let mut result = None;
    for _ in 0..n {
        let start = Instant::now();
        result = Some(work());
        best = best.min(start.elapsed());
    }
    (best, result.expect("n is not 0"))
}

#[test]
#[ignore = "a measurement, not a check"]
fn speed() {
    let (open, _) = best(3, || TextModel::open(&PATH).unwrap());
    println!("open: {open:?}");
    println!("class of the template: {:?}", MODEL.prompts.class());
    let (cold, first) = best(1, || tokenizer().encode_ordinary(TEXT).len());
    println!("{first} tokens for the first time: {cold:?}");
    for bytes in [256, 1024, 4096] {
        let (time, n) = best(300, || tokenizer().encode_ordinary(&TEXT[..bytes]).len());
        println!("encode {bytes} B, {n} tokens: {time:?}");
    }
    let result = [Message { role: Role::Tool, content: TEXT[..1024].into() }];
    let end = LogEnd::Generated { closed: true };
    let (time, n) = best(300, || MODEL.prompts.extend(end, &result, Reply::Expected).unwrap().len());
    println!("extend by a tool result of 1 KB, {n} tokens: {time:?}");
    let long = "a".repeat(1 << 20);
    let (time, n) = best(2, || tokenizer().encode_ordinary(&long).len());
    println!("encode a word of 1 MB, {n} tokens: {time:?}");
}
