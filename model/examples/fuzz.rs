//! Mutates small sound model files and opens them: no input may panic, or allocate out of proportion to its size.
//!
//! `cargo xtask fuzz <gguf|safetensors> [--seconds N] [--seed N]`. What fails is kept in the temporary folder that is named
//! at the end.
#![expect(clippy::print_stdout, reason = "it prints its findings")]

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use model::checkpoint::Checkpoint;
use model::tokenizer::Tokenizer;
use peak_alloc::PeakAlloc;

#[path = "../tests/fixtures/tiny.rs"]
mod tiny;

use tiny::{HEAD_DIM, LLAMA3_DIVISORS, Tiny, VOCAB};

#[global_allocator]
static ALLOCATOR: PeakAlloc = PeakAlloc;

/// What opening a file may allocate: the BPE model's cache has a fixed size, the rest follows from the file.
const FREE_BYTES: usize = 2 << 20;
const BYTES_PER_FILE_BYTE: usize = 64;
const MAX_FAILURES: usize = 10;
const SHOWN_OUTCOMES: usize = 20;

type Failure = Box<dyn std::error::Error>;

/// A sound model: its files by name.
type Seed = BTreeMap<String, Vec<u8>>;

fn main() -> Result<(), Failure> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let option = |name: &str, default: u64| match args.iter().position(|arg| arg == name) {
        Some(at) => args.get(at + 1).and_then(|n| n.parse().ok()).ok_or(format!("{name} needs a number")),
        None => Ok(default),
    };
    let (seconds, seed) = (option("--seconds", 60)?, option("--seed", 1)?);
    let kind = args.first().map(String::as_str).unwrap_or_default();
    let work = std::env::temp_dir().join(format!("baton-fuzz-{}", std::process::id()));
    fs::create_dir_all(&work)?;
    let seeds = match kind {
        "gguf" => gguf_seeds(&work)?,
        "safetensors" => folder_seeds(&work)?,
        _ => return Err("usage: fuzz <gguf|safetensors> [--seconds N] [--seed N]".into()),
    };
    println!("{kind}: {} seeds, {seconds} s, --seed {seed}", seeds.len());
    std::panic::set_hook(Box::new(|_| ()));
    let failures = fuzz(&work, &seeds, Duration::from_secs(seconds), &mut Random(seed))?;
    if failures > 0 {
        return Err(format!("{failures} failures; their files are in {}", work.display()).into());
    }
    fs::remove_dir_all(work)?;
    Ok(())
}

/// Runs until the time is up and returns the number of failures.
fn fuzz(work: &Path, seeds: &[Seed], time: Duration, random: &mut Random) -> io::Result<usize> {
    let (mut n_runs, mut failures, mut most) = (0_u64, 0, 0);
    let mut outcomes: BTreeMap<String, u64> = BTreeMap::new();
    let began = Instant::now();
    while began.elapsed() < time && failures < MAX_FAILURES {
        let case = mutated(seeds, random);
        let folder = work.join("case");
        write(&folder, &case)?;
        let n_bytes: usize = case.values().map(Vec::len).sum();
        let (outcome, allocated) = open(&target(&folder, &case));
        n_runs += 1;
        most = most.max(allocated);
        let limit = FREE_BYTES + BYTES_PER_FILE_BYTE * n_bytes;
        if outcome.starts_with("panic") || allocated > limit {
            println!("run {n_runs}: {outcome}; {allocated} bytes allocated for {n_bytes}, limit {limit}");
            write(&work.join(format!("failure-{failures}")), &case)?;
            failures += 1;
        }
        *outcomes.entry(outcome).or_default() += 1;
    }
    let n_sound = outcomes.get("sound").copied().unwrap_or(0);
    println!("{n_runs} runs, {} distinct outcomes, {n_sound} sound, at most {most} bytes", outcomes.len());
    let mut by_number: Vec<_> = outcomes.iter().map(|(outcome, n)| (n, outcome)).collect();
    by_number.sort_unstable_by(|a, b| b.cmp(a));
    by_number.iter().take(SHOWN_OUTCOMES).for_each(|(n, outcome)| println!("{n:>9}  {outcome}"));
    Ok(failures)
}

/// What became of the model at `path`, and the most that was allocated at once meanwhile.
fn open(path: &Path) -> (String, usize) {
    ALLOCATOR.reset_peak_usage();
    let before = ALLOCATOR.peak_usage();
    let parse = || -> Result<(), Failure> {
        let checkpoint = Checkpoint::open(path)?;
        checkpoint.dims()?;
        checkpoint.fingerprint();
        let tokenizer = Tokenizer::new(&checkpoint)?;
        tokenizer.encode_with_specials("<|im_start|>hello 12\n");
        Ok(())
    };
    let outcome = match catch_unwind(AssertUnwindSafe(|| parse().map_err(|error| error.to_string()))) {
        Ok(Ok(())) => "sound".to_owned(),
        Ok(Err(message)) => class(&message),
        Err(panic) => {
            let text = panic.downcast_ref::<String>().cloned();
            let text = text.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()));
            format!("panic: {}", text.unwrap_or_default())
        }
    };
    (outcome, ALLOCATOR.peak_usage() - before)
}

/// The message without what differs from file to file: paths, names in quotes, numbers.
fn class(message: &str) -> String {
    let message = message.rsplit_once("/case/").map_or(message, |(_, rest)| rest);
    let plain = message.split(['`', '"', '\'']).step_by(2).collect::<Vec<_>>().join("`_`");
    let mut class = String::new();
    for char in plain.chars().take(120) {
        match char {
            '0'..='9' if class.ends_with('#') => {}
            '0'..='9' => class.push('#'),
            ' '..='~' => class.push(char),
            _ => class.push('?'),
        }
    }
    class
}

fn mutated(seeds: &[Seed], random: &mut Random) -> Seed {
    let mut case = seeds[random.below(seeds.len())].clone();
    let other = &seeds[random.below(seeds.len())];
    let file = case.keys().nth(random.below(case.len())).cloned().unwrap_or_default();
    let donor = other.get(&file).cloned().unwrap_or_default();
    if let Some(bytes) = case.get_mut(&file) {
        for _ in 0..=random.below(4) {
            mutate(bytes, &donor, random);
        }
    }
    case
}

/// One edit: bytes, a length, a number in text, a cut, a splice.
fn mutate(bytes: &mut Vec<u8>, donor: &[u8], random: &mut Random) {
    const LENGTHS: [u64; 9] = [0, 1, 2, 255, 1 << 16, 1 << 22, u32::MAX as u64, 1 << 62, u64::MAX];
    const NUMBERS: [&str; 8] =
        ["0", "-1", "4294967295", "4294967296", "18446744073709551615", "1e308", "null", "[]"];
    if bytes.is_empty() {
        bytes.extend(donor);
        return;
    }
    let at = random.below(bytes.len());
    match random.below(7) {
        0 => bytes[at] ^= 1 << random.below(8),
        1 => bytes[at] = random.below(256) as u8,
        2 => {
            let length = LENGTHS[random.below(LENGTHS.len())].wrapping_sub(random.below(2) as u64);
            let width = if random.below(2) == 0 { 4 } else { 8 };
            let field = bytes[at..].iter_mut().zip(length.to_le_bytes());
            field.take(width).for_each(|(byte, new)| *byte = new);
        }
        3 => {
            let is_digit = |byte: &u8| byte.is_ascii_digit();
            let Some(start) = bytes[at..].iter().position(is_digit).map(|offset| at + offset) else { return };
            let end = start + bytes[start..].iter().take_while(|byte| is_digit(byte)).count();
            bytes.splice(start..end, NUMBERS[random.below(NUMBERS.len())].bytes());
        }
        4 => bytes.truncate(at),
        5 => {
            let end = bytes.len().min(at + random.below(64));
            bytes.drain(at..end);
        }
        _ => {
            let from = random.below(donor.len().max(1)).min(donor.len());
            let piece = &donor[from..donor.len().min(from + 1 + random.below(256))];
            bytes.splice(at..at, piece.iter().copied());
        }
    }
}

/// What to open of a case: its folder, or its only file.
fn target(folder: &Path, case: &Seed) -> PathBuf {
    match case.keys().next() {
        Some(file) if case.len() == 1 => folder.join(file),
        _ => folder.to_owned(),
    }
}

fn write(folder: &Path, case: &Seed) -> io::Result<()> {
    fs::create_dir_all(folder)?;
    // New files, not overwritten ones: an old one may still be mapped.
    case.iter().try_for_each(|(file, bytes)| {
        let path = folder.join(file);
        let _ = fs::remove_file(&path);
        fs::write(path, bytes)
    })
}

/// Models of few bytes: of each tensor a corner is left, which is enough for everything in front of the engine.
fn models() -> Vec<Tiny> {
    let mut models = vec![Tiny::new("qwen2"), Tiny::new("qwen3").with_head(), Tiny::new("llama")];
    models[2].rope_divisors = Some(LLAMA3_DIVISORS);
    for tiny in &mut models {
        tiny.tensors.retain(|name, _| !name.contains("attn_q.") && !name.contains("attn_k."));
        for (shape, data) in tiny.tensors.values_mut() {
            shape.iter_mut().for_each(|n| *n = if *n == VOCAB { 3 } else { 2 });
            data.truncate(shape.iter().product());
        }
    }
    assert_eq!(LLAMA3_DIVISORS.len() * 2, HEAD_DIM, "a divisor per pair");
    models
}

fn gguf_seeds(work: &Path) -> io::Result<Vec<Seed>> {
    let read = |tiny: Tiny| {
        let path = work.join("seed.gguf");
        tiny.write_gguf(&path)?;
        Ok(BTreeMap::from([("model.gguf".to_owned(), fs::read(path)?)]))
    };
    models().into_iter().map(read).collect()
}

fn folder_seeds(work: &Path) -> io::Result<Vec<Seed>> {
    let read = |tiny: Tiny| {
        let folder = work.join("seed");
        tiny.write_folder(&folder)?;
        let files = fs::read_dir(folder)?.map(|entry| {
            let entry = entry?;
            Ok((entry.file_name().to_string_lossy().into_owned(), fs::read(entry.path())?))
        });
        files.collect()
    };
    models().into_iter().map(read).collect()
}

/// xorshift64*.
struct Random(u64);

impl Random {
    /// A number from 0 to n - 1; 0 for n = 0.
    fn below(&mut self, n: usize) -> usize {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 33) as usize % n.max(1)
    }
}
