//! What the server says of its workers on `/metrics`, and the memory of its process.

use std::collections::BTreeMap;
use std::time::Duration;

use futures::future::join_all;
use serde::Serialize;

use crate::client::Target;

const FREE_BLOCKS: &str = "baton_engine_free_blocks";
const RUNNING_TURNS: &str = "baton_engine_running_turns";
const PREEMPTIONS: &str = "baton_engine_preemptions_total";
const DRAFTS: &str = "baton_engine_drafts_total";
const DRAFT_TOKENS: &str = "baton_engine_draft_tokens_total";
const DRAFT_ACCEPTED: &str = "baton_engine_draft_accepted_tokens_total";

/// One worker's gauges and counters; those of drafts over all their sources.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Worker {
    pub free_blocks: f64,
    pub running_turns: f64,
    pub preemptions: f64,
    pub drafts: f64,
    pub draft_tokens: f64,
    pub draft_accepted: f64,
}

/// Workers by name.
pub type Workers = BTreeMap<String, Worker>;

/// The server at one time.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Sample {
    /// Seconds since the start of the run.
    pub at_s: f64,
    pub workers: Workers,
    pub rss_kb: Option<u64>,
}

/// Where to look.
#[derive(Debug, Clone)]
pub struct Source {
    pub pages: Vec<Target>,
    pub pid: Option<u32>,
}

impl Source {
    /// Looks at all pages, and at the process.
    ///
    /// # Errors
    /// What could not be read, in words.
    pub async fn sample(&self, now: Duration) -> Result<Sample, String> {
        let mut workers = Workers::new();
        let pages = self.pages.iter().map(|page| async { (page.url(), page.get().await) });
        for (url, page) in join_all(pages).await {
            let page = page.map_err(|problem| format!("{url}: {problem}"))?;
            workers.extend(parse(&page));
        }
        let rss_kb = self.pid.map(rss_kb).transpose()?;
        Ok(Sample { at_s: now.as_secs_f64(), workers, rss_kb })
    }
}

/// The workers in a page of Prometheus text; lines about other things, or in no known form, are skipped.
#[must_use]
pub fn parse(page: &str) -> Workers {
    let mut workers = Workers::new();
    for (name, worker, value) in page.lines().filter_map(parse_line) {
        let field: fn(&mut Worker) -> &mut f64 = match name {
            FREE_BLOCKS => |worker| &mut worker.free_blocks,
            RUNNING_TURNS => |worker| &mut worker.running_turns,
            PREEMPTIONS => |worker| &mut worker.preemptions,
            DRAFTS => |worker| &mut worker.drafts,
            DRAFT_TOKENS => |worker| &mut worker.draft_tokens,
            DRAFT_ACCEPTED => |worker| &mut worker.draft_accepted,
            _ => continue,
        };
        *field(workers.entry(worker).or_default()) += value;
    }
    workers
}

/// `name{..., worker="...", ...} value`: the name, the worker and the value.
fn parse_line(line: &str) -> Option<(&str, String, f64)> {
    let (name, mut rest) = line.split_once('{')?;
    let mut worker = None;
    while !rest.starts_with('}') {
        let (label, quoted) = rest.split_once("=\"")?;
        let (value, behind) = unquote(quoted)?;
        if label == "worker" {
            worker = Some(value);
        }
        rest = behind.strip_prefix(',').unwrap_or(behind).trim_start();
    }
    // A time may follow the value.
    let value = rest[1..].split_whitespace().next()?.parse().ok()?;
    Some((name.trim_end(), worker?, value))
}

/// The text up to the closing quote, without its escapes, and what is behind the quote.
fn unquote(quoted: &str) -> Option<(String, &str)> {
    let mut value = String::new();
    let mut chars = quoted.char_indices();
    while let Some((at, char)) = chars.next() {
        match char {
            '"' => return Some((value, &quoted[at + 1..])),
            '\\' => match chars.next()?.1 {
                'n' => value.push('\n'),
                escaped => value.push(escaped),
            },
            plain => value.push(plain),
        }
    }
    None
}

fn rss_kb(pid: u32) -> Result<u64, String> {
    let path = format!("/proc/{pid}/status");
    let status = std::fs::read_to_string(&path).map_err(|error| format!("{path}: {error}"))?;
    parse_rss(&status).ok_or_else(|| format!("{path}: it has no VmRSS"))
}

fn parse_rss(status: &str) -> Option<u64> {
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    line.trim().strip_suffix("kB")?.trim_end().parse().ok()
}

#[cfg(test)]
mod tests;
