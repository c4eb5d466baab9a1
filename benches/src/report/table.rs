//! The report for people.

use std::io::{self, Write};

use super::{Summary, Times};

/// Prints `summary` of a run against `model`.
///
/// # Errors
/// When `out` cannot be written.
pub fn print(out: &mut impl Write, summary: &Summary, model: &str) -> io::Result<()> {
    let Summary { planned, answered, .. } = summary;
    let n_errors = summary.n_errors();
    writeln!(out, "model              {model}")?;
    writeln!(
        out,
        "requests           {answered} answered, {n_errors} failed, {} not sent or not finished, of {planned}",
        planned.saturating_sub(answered + n_errors)
    )?;
    for (code, n) in &summary.errors {
        writeln!(out, "  error            {n} x {code}")?;
    }
    if summary.interrupted {
        writeln!(out, "  interrupted      the run was stopped before its end")?;
    }
    writeln!(out, "wall time          {:.2} s", summary.wall_s)?;
    writeln!(
        out,
        "throughput         {:.2} requests/s, {:.1} output tokens/s",
        summary.requests_per_s, summary.output_tokens_per_s
    )?;
    writeln!(out, "tokens             {} in, {} out", summary.input_tokens, summary.output_tokens)?;
    let ratio = summary.cached_tokens as f64 / summary.input_tokens.max(1) as f64;
    writeln!(
        out,
        "cached             {} of the input tokens, {:.1} %",
        summary.cached_tokens,
        100.0 * ratio
    )?;
    let per_turn = |n: usize| n as f64 / (*answered).max(1) as f64;
    writeln!(
        out,
        "bytes per turn     {:.0} up, {:.0} down",
        per_turn(summary.bytes_up),
        per_turn(summary.bytes_down)
    )?;
    writeln!(out)?;
    times(out, summary)?;
    for note in &summary.notes {
        writeln!(out, "note: {note}")?;
    }
    if summary.unfaithful {
        writeln!(
            out,
            "UNFAITHFUL: the client was late itself (p99 of lateness); lower the load or use a faster client"
        )?;
    }
    Ok(())
}

fn times(out: &mut impl Write, summary: &Summary) -> io::Result<()> {
    writeln!(
        out,
        "{:<28} {:>7} {:>10} {:>10} {:>10} {:>10}",
        "milliseconds", "count", "p50", "p90", "p99", "max"
    )?;
    let rows = [
        ("TTFT", &summary.ttft),
        ("  of turns that open a chain", &summary.ttft_opening),
        ("  of turns that continue one", &summary.ttft_continuing),
        ("end to end", &summary.end_to_end),
        ("service time (from sent)", &summary.service),
        ("between text deltas", &summary.inter_token),
        ("lateness (sent - scheduled)", &summary.lateness),
        ("handshake", &summary.handshake),
    ];
    for (name, Times { count, p50_us, p90_us, p99_us, max_us, .. }) in rows {
        if *count > 0 {
            let ms = |us: &u64| format!("{:.2}", *us as f64 / 1e3);
            writeln!(
                out,
                "{name:<28} {count:>7} {:>10} {:>10} {:>10} {:>10}",
                ms(p50_us),
                ms(p90_us),
                ms(p99_us),
                ms(max_us)
            )?;
        }
    }
    Ok(())
}
