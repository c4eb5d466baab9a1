//! What is left when a soak is over: checks, and a table for people.

use std::collections::BTreeMap;
use std::io::{self, Write};

use serde::Serialize;

use super::metrics::{Sample, Workers};
use super::tally::Tally;

/// A soak in numbers.
#[derive(Debug, Serialize)]
pub struct Report {
    /// From the first request until all turns were over.
    pub wall_s: f64,
    pub interrupted: bool,
    pub turns: Tally,
    pub memory: Option<Memory>,
    /// What is wrong; empty: nothing.
    pub failures: Vec<String>,
    /// The first before any turn, the last when all were over.
    pub samples: Vec<Sample>,
}

/// Resident memory of the server's process.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Memory {
    /// After 10 % of the run, half of it, and at its end.
    pub kb: [u64; 3],
    /// Least squares over the second half.
    pub kb_per_hour: f64,
}

impl Report {
    /// Judges a soak. There is at least one sample.
    #[must_use]
    pub fn new(wall_s: f64, interrupted: bool, turns: Tally, samples: Vec<Sample>) -> Self {
        let mut failures = Vec::new();
        if let [first, .., last] = samples.as_slice() {
            failures = leftovers(&first.workers, &last.workers);
        }
        if turns.n_errors() > 0 {
            failures.push(format!("{} errors", turns.n_errors()));
        }
        if turns.n_open() > 0 {
            failures.push(format!("{} turns did not end", turns.n_open()));
        }
        if turns.answered == 0 {
            failures.push("no turn was answered".to_owned());
        }
        Self { wall_s, interrupted, memory: Memory::of(&samples), turns, failures, samples }
    }

    /// Prints the table.
    ///
    /// # Errors
    /// When `out` cannot be written.
    pub fn print(&self, out: &mut impl Write, model: &str) -> io::Result<()> {
        let turns = &self.turns;
        writeln!(out, "model              {model}")?;
        writeln!(
            out,
            "soak               {:.1} s{}",
            self.wall_s,
            if self.interrupted { ", interrupted" } else { "" }
        )?;
        writeln!(
            out,
            "turns              {} answered, {} cancelled before text, {} cancelled in the stream",
            turns.answered, turns.cancelled_before_text, turns.cancelled_in_stream
        )?;
        writeln!(
            out,
            "                   {} refused as too long, {} refused for overload; {} of all were forks",
            turns.refused_too_long, turns.refused_overload, turns.forked
        )?;
        texts(out, "refused", &turns.refusals)?;
        texts(out, "ERROR", &turns.errors)?;
        let per_s = |n: u64| n as f64 / self.wall_s.max(1e-9);
        writeln!(
            out,
            "tokens/s           {:.1} out, {:.1} in, of answered turns; {:.1} % of those in cached",
            per_s(turns.output_tokens),
            per_s(turns.input_tokens),
            100.0 * turns.cached_tokens as f64 / turns.input_tokens.max(1) as f64
        )?;
        writeln!(
            out,
            "longest wait       {:.2} s without text on any connection, {:.2} s between texts of an answer, \
             {:.2} s for the first",
            turns.longest_silence_s, turns.longest_gap_s, turns.longest_ttft_s
        )?;
        self.print_workers(out)?;
        self.print_memory(out)?;
        for failure in &self.failures {
            writeln!(out, "FAILED: {failure}")?;
        }
        if self.failures.is_empty() {
            writeln!(out, "passed: all turns are over, all blocks are free, no errors")?;
        }
        Ok(())
    }

    fn print_workers(&self, out: &mut impl Write) -> io::Result<()> {
        let [first, .., last] = self.samples.as_slice() else { return Ok(()) };
        writeln!(
            out,
            "{:<18} {:>12} {:>11} {:>8} {:>8} {:>12} {:>9}",
            "worker", "blocks free", "least free", "at end", "running", "preemptions", "drafts"
        )?;
        for (name, start) in &first.workers {
            let seen = self.samples.iter().filter_map(|sample| sample.workers.get(name));
            let least = seen.map(|worker| worker.free_blocks).fold(f64::INFINITY, f64::min);
            let Some(end) = last.workers.get(name) else { continue };
            writeln!(
                out,
                "{name:<18} {:>12} {least:>11} {:>8} {:>8} {:>12} {:>9} ({} of {} tokens right)",
                start.free_blocks,
                end.free_blocks,
                end.running_turns,
                end.preemptions - start.preemptions,
                end.drafts - start.drafts,
                end.draft_accepted - start.draft_accepted,
                end.draft_tokens - start.draft_tokens
            )?;
        }
        Ok(())
    }

    fn print_memory(&self, out: &mut impl Write) -> io::Result<()> {
        let Some(Memory { kb, kb_per_hour }) = &self.memory else { return Ok(()) };
        let [early, middle, end] = kb.map(|kb| kb as f64 / 1024.0);
        writeln!(
            out,
            "memory             {early:.1} MiB at 10 %, {middle:.1} at 50 %, {end:.1} at the end; \
             {:+.1} MiB/h in the second half",
            kb_per_hour / 1024.0
        )
    }
}

impl Memory {
    /// Memory over `samples`, if it was watched.
    #[must_use]
    pub fn of(samples: &[Sample]) -> Option<Self> {
        let points: Vec<(f64, u64)> =
            samples.iter().filter_map(|sample| Some((sample.at_s, sample.rss_kb?))).collect();
        let &(end_s, end_kb) = points.last()?;
        let since = |share: f64| points.iter().filter(move |(at, _)| *at >= share * end_s);
        let at = |share| since(share).next().map_or(end_kb, |(_, kb)| *kb);
        let second_half: Vec<_> = since(0.5).map(|&(at, kb)| (at, kb as f64)).collect();
        Some(Self { kb: [at(0.1), at(0.5), end_kb], kb_per_hour: 3600.0 * slope(&second_half) })
    }
}

/// What workers hold at the end and did not hold at the start.
#[must_use]
pub fn leftovers(start: &Workers, end: &Workers) -> Vec<String> {
    let mut wrong = Vec::new();
    for (name, before) in start {
        let Some(after) = end.get(name) else {
            wrong.push(format!("{name} is gone"));
            continue;
        };
        if after.free_blocks != before.free_blocks {
            let (n, m) = (after.free_blocks, before.free_blocks);
            wrong.push(format!("{name} has {n} free blocks, and had {m} at the start"));
        }
        if after.running_turns != 0.0 {
            wrong.push(format!("{name} still runs {} turns", after.running_turns));
        }
        if after.preemptions < before.preemptions || after.drafts < before.drafts {
            wrong.push(format!("{name} has started anew: its counters went back"));
        }
    }
    wrong
}

/// Least squares; 0 where there is no telling.
fn slope(points: &[(f64, f64)]) -> f64 {
    let n = points.len() as f64;
    let mean = |of: fn(&(f64, f64)) -> f64| points.iter().map(of).sum::<f64>() / n;
    let (x, y) = (mean(|point| point.0), mean(|point| point.1));
    let spread: f64 = points.iter().map(|point| (point.0 - x).powi(2)).sum();
    let common: f64 = points.iter().map(|point| (point.0 - x) * (point.1 - y)).sum();
    if spread > 0.0 { common / spread } else { 0.0 }
}

fn texts(out: &mut impl Write, label: &str, texts: &BTreeMap<String, u64>) -> io::Result<()> {
    for (text, n) in texts {
        writeln!(out, "  {label:<16} {n} x {text}")?;
    }
    Ok(())
}

#[cfg(test)]
mod tests;
