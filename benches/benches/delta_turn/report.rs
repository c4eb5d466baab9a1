//! Medians over rounds, and what they are held against.

use std::io::{self, Write};
use std::time::Duration;

use crate::standin::ANSWER_TOKENS;

/// CPU time of a turn may differ this much between the largest and the smallest history.
const FLAT: f64 = 1.25;
/// CPU time that a turn may take, in microseconds.
const MAX_CPU_US: f64 = 250.0;
/// Ids travel as varints of up to three bytes, hashes of blocks beside them; plus names and settings of a turn.
const WORKER_BYTES_PER_DELTA_BYTE: f64 = 2.0;
const TURN_OVERHEAD_BYTES: f64 = 1024.0;

/// One history and what its turns cost.
#[derive(Debug)]
pub(crate) struct History {
    pub(crate) n_bytes: usize,
    pub(crate) n_tokens: u64,
    pub(crate) id: String,
    /// CPU time of the turn that made the history.
    pub(crate) first_turn: Duration,
    /// Turns whose tokens come at once, round by round.
    pub(crate) at_once: Vec<Sample>,
    /// Turns whose tokens come one by one.
    pub(crate) one_by_one: Vec<Sample>,
}

/// Averages of one round's turns.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sample {
    pub(crate) cpu_us: f64,
    pub(crate) wall_us: f64,
    pub(crate) tokenized: f64,
    pub(crate) bytes_up: f64,
    pub(crate) bytes_down: f64,
    pub(crate) worker_bytes: f64,
    /// Turns that sent or rendered the whole history.
    pub(crate) irregular: u64,
}

fn median(samples: &[Sample], of: impl Fn(&Sample) -> f64) -> f64 {
    let mut values: Vec<f64> = samples.iter().map(of).collect();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

fn cpu_us(sample: &Sample) -> f64 {
    sample.cpu_us
}

/// Prints the tables and the verdicts; true when all limits are kept. `resent_bytes` of each request are the same every
/// turn.
pub(crate) fn print(
    out: &mut impl Write,
    histories: &[History],
    delta_bytes: usize,
    resent_bytes: usize,
) -> io::Result<bool> {
    writeln!(out, "tokens of an answer at once")?;
    table(out, histories, |history| &history.at_once)?;
    writeln!(out, "tokens of an answer one by one")?;
    table(out, histories, |history| &history.one_by_one)?;
    for history in histories {
        let streamed = median(&history.one_by_one, cpu_us) - median(&history.at_once, cpu_us);
        let (kb, first_ms) = (history.n_bytes >> 10, history.first_turn.as_secs_f64() * 1e3);
        writeln!(
            out,
            "{kb:>4} KB: {:.1} us more for each token that comes alone; {first_ms:.2} ms for the turn that made the history",
            streamed / ANSWER_TOKENS as f64
        )?;
    }
    verdicts(out, histories, delta_bytes as f64, resent_bytes as f64)
}

fn table(out: &mut impl Write, histories: &[History], of: fn(&History) -> &[Sample]) -> io::Result<()> {
    writeln!(
        out,
        "{:>8} {:>8} {:>11} {:>17} {:>10} {:>9} {:>9} {:>10} {:>11}",
        "history", "tokens", "CPU/turn", "range", "tokenized", "client up", "down", "to workers", "wall/turn"
    )?;
    for history in histories {
        let samples = of(history);
        let cpu = samples.iter().map(cpu_us);
        let (low, high) = cpu.fold((f64::INFINITY, 0.0_f64), |(low, high), us| (low.min(us), high.max(us)));
        writeln!(
            out,
            "{:>5} KB {:>8} {:>8.1} us {:>14} us {:>10.1} {:>7.0} B {:>7.0} B {:>8.0} B {:>8.0} us",
            history.n_bytes >> 10,
            history.n_tokens,
            median(samples, cpu_us),
            format!("{low:.1} - {high:.1}"),
            median(samples, |sample| sample.tokenized),
            median(samples, |sample| sample.bytes_up),
            median(samples, |sample| sample.bytes_down),
            median(samples, |sample| sample.worker_bytes),
            median(samples, |sample| sample.wall_us),
        )?;
    }
    Ok(())
}

fn verdicts(
    out: &mut impl Write,
    histories: &[History],
    delta_bytes: f64,
    resent_bytes: f64,
) -> io::Result<bool> {
    let [smallest, .., largest] = histories else { return Ok(false) };
    let ratio = |of: fn(&Sample) -> f64, samples: fn(&History) -> &[Sample]| {
        median(samples(largest), of) / median(samples(smallest), of)
    };
    let most = |of: fn(&Sample) -> f64| histories.iter().map(|h| median(&h.at_once, of)).fold(0.0, f64::max);
    let at_once = ratio(cpu_us, |history| &history.at_once);
    let one_by_one = ratio(cpu_us, |history| &history.one_by_one);
    let tokenized = ratio(|sample| sample.tokenized, |history| &history.at_once);
    let cpu = most(cpu_us);
    let up = most(|sample| sample.bytes_up);
    let worker = most(|sample| sample.worker_bytes);
    let irregular: u64 = histories
        .iter()
        .flat_map(|h| h.at_once.iter().chain(&h.one_by_one))
        .map(|sample| sample.irregular)
        .sum();
    let worker_limit = WORKER_BYTES_PER_DELTA_BYTE * delta_bytes + TURN_OVERHEAD_BYTES;
    let up_limit = (delta_bytes + resent_bytes) * 1.1 + TURN_OVERHEAD_BYTES;
    let lines = [
        (
            at_once <= FLAT,
            format!("CPU, largest over smallest history, tokens at once: {at_once:.3}, at most {FLAT}"),
        ),
        (
            one_by_one <= FLAT,
            format!("CPU, largest over smallest history, one by one: {one_by_one:.3}, at most {FLAT}"),
        ),
        (cpu <= MAX_CPU_US, format!("CPU of a turn, tokens at once: {cpu:.1} us, at most {MAX_CPU_US} us")),
        (
            tokenized <= FLAT,
            format!("tokenized tokens, largest over smallest history: {tokenized:.3}, at most {FLAT}"),
        ),
        (up <= up_limit, format!("client to gateway: {up:.0} B, at most {up_limit:.0} B")),
        (worker <= worker_limit, format!("gateway to workers: {worker:.0} B, at most {worker_limit:.0} B")),
        (irregular == 0, format!("turns that sent or rendered the whole history: {irregular}")),
    ];
    for (kept, line) in &lines {
        writeln!(out, "{} {line}", if *kept { "PASS" } else { "FAIL" })?;
    }
    Ok(lines.iter().all(|(kept, _)| *kept))
}
