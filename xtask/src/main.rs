//! Commands longer than one line: `cargo xtask ci` runs what CI runs, `cargo xtask fuzz <gguf|safetensors> [--seconds 60]
//! [--seed 1]` opens mutated model files, `cargo xtask fuzz <frames|bodies>` sends a cluster damaged requests, `cargo xtask
//! compare-llama-cpp MODEL.gguf` measures the engine against llama.cpp.

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

const REQUESTS: [&str; 2] = ["frames", "bodies"];
const FUZZ: [&str; 7] = ["run", "--locked", "-p", "model", "--example", "fuzz", "--"];

fn main() -> anyhow::Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match args.split_first() {
        Some((command, [])) if command == "ci" => {
            CI.iter().try_for_each(|(what, args)| run(what, args.iter().copied(), &[]))
        }
        Some((command, [target, rest @ ..])) if command == "fuzz" && REQUESTS.contains(&target.as_str()) => {
            fuzz_requests(target, rest)
        }
        Some((command, rest)) if command == "fuzz" => {
            run("fuzz", FUZZ.into_iter().chain(rest.iter().map(String::as_str)), &[])
        }
        Some((command, rest)) if command == "compare-llama-cpp" => compare::run(rest),
        _ => bail!(
            "usage: cargo xtask ci | fuzz <gguf|safetensors|frames|bodies> [--seconds N] [--seed N] | \
             compare-llama-cpp MODEL.gguf [--rounds N] [--server]"
        ),
    }
}

/// Runs one of the tests that damage requests, for longer than the tests do.
fn fuzz_requests(target: &str, options: &[String]) -> anyhow::Result<()> {
    let mut settings = vec![("BATON_FUZZ_S", "60")];
    for option in options.chunks(2) {
        match option {
            [name, value] if name == "--seconds" => settings.push(("BATON_FUZZ_S", value)),
            [name, value] if name == "--seed" => settings.push(("BATON_FUZZ_SEED", value)),
            _ => bail!("usage: cargo xtask fuzz {target} [--seconds N] [--seed N]"),
        }
    }
    let test = format!("fuzz::{target}");
    let args = ["test", "--locked", "-p", "tests", "--test", "e2e", "--", "--exact", &test, "--nocapture"];
    run("fuzz", args.into_iter(), &settings)
}

/// Cargo, without what the one that runs this told about this crate: build scripts would take it for a change and run again.
fn cargo() -> Command {
    let mut cargo = Command::new("cargo");
    for (name, _) in std::env::vars_os() {
        let text = name.to_string_lossy();
        if ["CARGO_PKG_", "CARGO_MANIFEST_"].iter().any(|prefix| text.starts_with(prefix)) {
            cargo.env_remove(name);
        }
    }
    cargo
}

fn run<'a>(what: &str, args: impl Iterator<Item = &'a str>, settings: &[(&str, &str)]) -> anyhow::Result<()> {
    let args: Vec<&str> = args.collect();
    let status = cargo()
        .args(&args)
        .envs(settings.iter().copied())
        .status()
        .with_context(|| format!("cargo {} did not start", args[0]))?;
    if !status.success() {
        bail!("{what}: cargo {} failed", args.join(" "));
    }
    Ok(())
}
