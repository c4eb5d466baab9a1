//! `cargo xtask compare-llama-cpp`: llama.cpp and the engine on the same file, in turns, on this machine.

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::mpsc;
use std::time::Duration;

use anyhow::{Context, bail};

/// Built from source with this machine's instructions; carries the library that steps are timed with.
const LLAMA_CPP: &str = "llama-cpp-python==0.3.36";
/// How long a cluster may take to start.
const START_TIMEOUT: Duration = Duration::from_secs(120);
/// Brings llama.cpp's server.
const LLAMA_SERVER: &str = "xllamacpp==2026.10.11549";

/// (name, request, tokens of a step)
const CASES: [(&str, &str, f64); 8] = [
    ("prefill 128", "prefill 128", 128.0),
    ("prefill 512", "prefill 512", 512.0),
    ("prefill 2048", "prefill 2048", 2048.0),
    ("decode, batch 1, context 16", "decode 16 1", 1.0),
    ("decode, batch 1, context 512", "decode 512 1", 1.0),
    ("decode, batch 4, context 64", "decode 64 4", 4.0),
    ("decode, batch 8, context 64", "decode 64 8", 8.0),
    ("decode, batch 16, context 64", "decode 64 16", 16.0),
];

const USAGE: &str = "usage: cargo xtask compare-llama-cpp MODEL.gguf [--rounds N] [--threads N] [--only TEXT] \
                     [--server] [--dir FOLDER]";

/// What was asked for.
struct Options {
    model: PathBuf,
    rounds: usize,
    threads: usize,
    only: Option<String>,
    server: bool,
    dir: PathBuf,
}

/// Runs the command with the arguments after its name.
pub(crate) fn run(args: &[String]) -> anyhow::Result<()> {
    let options = parse(args)?;
    let python = install(&options)?;
    let build = ["build", "--release", "-p", "node", "-p", "engine", "--bin", "baton", "--example", "steps"];
    status(crate::cargo().args(build))?;
    if options.server { compare_servers(&options, &python) } else { compare_steps(&options, &python) }
}

/// Where cargo puts what it builds.
fn target_dir() -> PathBuf {
    std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| PathBuf::from("target"), PathBuf::from)
}

fn parse(args: &[String]) -> anyhow::Result<Options> {
    let dir = target_dir().join("llama-cpp");
    let mut options =
        Options { model: PathBuf::new(), rounds: 5, threads: 2, only: None, server: false, dir };
    let mut args = args.iter();
    while let Some(arg) = args.next() {
        let mut value = || args.next().with_context(|| format!("{arg} needs a value; {USAGE}"));
        match arg.as_str() {
            "--rounds" => options.rounds = value()?.parse().context("--rounds is a number")?,
            "--threads" => options.threads = value()?.parse().context("--threads is a number")?,
            "--only" => options.only = Some(value()?.clone()),
            "--dir" => options.dir = PathBuf::from(value()?),
            "--server" => options.server = true,
            flag if flag.starts_with('-') => bail!("{flag} is no option; {USAGE}"),
            model => options.model = PathBuf::from(model),
        }
    }
    if !options.model.is_file() {
        bail!("name a GGUF file, such as the one `cargo run --release -- model fetch` prints; {USAGE}");
    }
    if options.rounds == 0 || options.threads == 0 {
        bail!("--rounds and --threads are at least 1");
    }
    Ok(options)
}

/// A Python environment with llama.cpp, made once. Building takes minutes.
fn install(options: &Options) -> anyhow::Result<PathBuf> {
    let python = std::path::absolute(options.dir.join("bin/python"))?;
    let ready = |package: &str| Command::new(&python).args(["-c", &format!("import {package}")]).output();
    let has = |package| ready(package).is_ok_and(|output| output.status.success());
    if !python.is_file() {
        status(Command::new("python3").args(["-m", "venv"]).arg(&options.dir))?;
    }
    let mut pip = Command::new(&python);
    pip.args(["-m", "pip", "install", "--quiet"]);
    if options.server && !has("xllamacpp") {
        status(pip.arg(LLAMA_SERVER))?;
    } else if !options.server && !has("llama_cpp") {
        pip.env("CMAKE_ARGS", "-DGGML_NATIVE=ON -DGGML_OPENMP=OFF");
        status(pip.args(["--no-binary", "llama-cpp-python", LLAMA_CPP]))?;
    }
    Ok(python)
}

fn status(command: &mut Command) -> anyhow::Result<()> {
    let status = command.status().with_context(|| format!("{command:?} did not start"))?;
    if status.success() { Ok(()) } else { bail!("{command:?} failed") }
}

/// A program that answers each line with seconds.
struct Stopwatch {
    child: Child,
    requests: ChildStdin,
    answers: BufReader<ChildStdout>,
}

impl Stopwatch {
    fn start(command: &mut Command) -> anyhow::Result<Self> {
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let requests = child.stdin.take().context("the program has an input")?;
        let answers = BufReader::new(child.stdout.take().context("the program has an output")?);
        Ok(Self { child, requests, answers })
    }

    fn time(&mut self, request: &str) -> anyhow::Result<f64> {
        writeln!(self.requests, "{request}")?;
        let mut line = String::new();
        self.answers.read_line(&mut line)?;
        line.trim().parse().with_context(|| format!("`{request}` was answered by `{}`", line.trim()))
    }
}

impl Drop for Stopwatch {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn compare_steps(options: &Options, python: &Path) -> anyhow::Result<()> {
    let threads = options.threads.to_string();
    let script = Path::new("xtask/python/llama_cpp_steps.py");
    let mut theirs = Stopwatch::start(Command::new(python).arg(script).arg(&options.model).arg(&threads))?;
    let steps = target_dir().join("release/examples/steps");
    let mut ours = Stopwatch::start(Command::new(steps).arg(&options.model).arg(&threads))?;
    let mut out = std::io::stdout();
    let head = ["tokens/s, medians", "llama.cpp", "baton", "ratio", "ratios"];
    writeln!(out, "{:<30} {:>10} {:>10} {:>7} {:>15}", head[0], head[1], head[2], head[3], head[4])?;
    let wanted = |name: &str| options.only.as_ref().is_none_or(|only| name.contains(only.as_str()));
    for (name, request, n_tokens) in CASES.into_iter().filter(|(name, ..)| wanted(name)) {
        // The first step of a kind touches memory for the first time.
        ours.time(request)?;
        let (mut times, mut ratios) = ([Vec::new(), Vec::new()], Vec::new());
        for round in 0..options.rounds {
            let (their, our) = if round % 2 == 0 {
                let their = theirs.time(request)?;
                (their, ours.time(request)?)
            } else {
                let our = ours.time(request)?;
                (theirs.time(request)?, our)
            };
            times[0].push(their);
            times[1].push(our);
            ratios.push(their / our);
        }
        let [their, our] = times.map(|mut times| median(&mut times));
        let ratio = median(&mut ratios);
        let (low, high) = (ratios[0], ratios[ratios.len() - 1]);
        writeln!(
            out,
            "{name:<30} {:>10.1} {:>10.1} {ratio:>7.2} {low:>7.2}..{high:.2}",
            n_tokens / their,
            n_tokens / our
        )?;
    }
    Ok(())
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Eight clients at once on both servers, each started anew for every round.
fn compare_servers(options: &Options, python: &Path) -> anyhow::Result<()> {
    let (mut theirs, mut ours) = (Vec::new(), Vec::new());
    for _ in 0..options.rounds {
        theirs.push(ttft(
            python,
            &["llama.cpp", &options.model.display().to_string(), &options.threads.to_string()],
        )?);
        ours.push(baton_ttft(options, python)?);
    }
    let mut ratios: Vec<f64> = theirs.iter().zip(&ours).map(|(their, our)| their / our).collect();
    let text = format!(
        "8 clients, one prefix, cold: TTFT p50 {:.2} s with llama.cpp's server, {:.3} s with baton; ratio {:.1} ({:.1}..{:.1})\n",
        median(&mut theirs),
        median(&mut ours),
        median(&mut ratios),
        ratios[0],
        ratios[ratios.len() - 1]
    );
    std::io::stdout().write_all(text.as_bytes())?;
    Ok(())
}

/// The median time to first token that the script measures.
fn ttft(python: &Path, args: &[&str]) -> anyhow::Result<f64> {
    let output = Command::new(python).arg("xtask/python/ttft.py").args(args).output()?;
    let text = String::from_utf8_lossy(&output.stdout);
    let line = text
        .lines()
        .find(|line| line.starts_with("{\"p50\""))
        .with_context(|| format!("ttft.py {}: {}", args[0], String::from_utf8_lossy(&output.stderr)))?;
    let p50 = line.split(['{', ',', ':', ' ']).filter(|word| !word.is_empty()).nth(1);
    p50.and_then(|p50| p50.parse().ok()).with_context(|| format!("`{line}` names no p50"))
}

fn baton_ttft(options: &Options, python: &Path) -> anyhow::Result<f64> {
    const LISTEN: &str = "127.0.0.1:18080";
    let mut cluster = Command::new(target_dir().join("release/baton"))
        .args(["up", "--listen", LISTEN, "--threads", &options.threads.to_string(), "--model"])
        .arg(&options.model)
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()?;
    let banner = BufReader::new(cluster.stdout.take().context("it has an output")?);
    let (ready, is_ready) = mpsc::channel();
    let reader = std::thread::spawn(move || {
        let up = banner.lines().map_while(Result::ok).any(|line| line.starts_with("Ready after"));
        ready.send(up)
    });
    let result = if is_ready.recv_timeout(START_TIMEOUT) == Ok(true) {
        ttft(python, &["baton", &format!("http://{LISTEN}")])
    } else {
        Err(anyhow::anyhow!("baton up did not become ready"))
    };
    cluster.kill()?;
    cluster.wait()?;
    // It ends with the process whose output it reads.
    let _ = reader.join();
    result
}
