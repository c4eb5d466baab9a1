//! Commands longer than one line: `cargo xtask ci` runs what CI runs, `cargo xtask compare-llama-cpp` measures the engine
//! against llama.cpp.

mod compare;

use std::process::Command;

use anyhow::{Context, bail};

/// A command line and what it checks.
type Check = (&'static str, &'static [&'static str]);

const CI: [Check; 3] = [
    ("format", &["fmt", "--all", "--check"]),
    ("lints", &["clippy", "--workspace", "--all-targets", "--locked", "--", "-D", "warnings"]),
    ("tests", &["test", "--workspace", "--locked"]),
];

fn main() -> anyhow::Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match args.first().map(String::as_str) {
        Some("ci") => CI.iter().try_for_each(run),
        Some("compare-llama-cpp") => compare::run(&args[1..]),
        _ => bail!("usage: cargo xtask ci | compare-llama-cpp MODEL.gguf"),
    }
}

fn run((what, args): &Check) -> anyhow::Result<()> {
    let status = Command::new("cargo")
        .args(*args)
        .status()
        .with_context(|| format!("cargo {} did not start", args[0]))?;
    if !status.success() {
        bail!("{what}: cargo {} failed", args.join(" "));
    }
    Ok(())
}
