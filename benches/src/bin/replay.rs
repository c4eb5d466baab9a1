//! Replays a trace against a Responses API and reports latencies from the scheduled times; or soaks the server.
//!
//! Exit codes: 0 all answered, 1 some requests or the soak failed, 2 the run could not begin, 64 bad usage.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use benches::client::{self, Target};
use benches::drive::{self, Settings};
use benches::options::Options;
use benches::report::{Document, Summary, print};
use benches::soak;
use benches::workload::{self, Workload};
use clap::Parser;
use serde::Serialize;
use tokio::runtime::Runtime;

const REPLAYER: &str = concat!("benches ", env!("CARGO_PKG_VERSION"));
const FAILED_REQUESTS: u8 = 1;
const CANNOT_BEGIN: u8 = 2;
const BAD_USAGE: u8 = 64;

fn main() -> ExitCode {
    let options = match Options::try_parse() {
        Ok(options) => options,
        Err(error) => {
            // Nothing is left to try when the terminal is gone.
            let _ = error.print();
            return if error.use_stderr() { ExitCode::from(BAD_USAGE) } else { ExitCode::SUCCESS };
        }
    };
    let result = match options.soak.soak_s {
        Some(length_s) => soak(&options, Duration::from_secs_f64(length_s)),
        None => replay(&options),
    };
    match result {
        Ok(code) => code,
        Err(error) => {
            let _ = writeln!(std::io::stderr(), "replay: {error:#}");
            let usage = matches!(error.downcast_ref(), Some(workload::Error::Usage(_)))
                || matches!(error.downcast_ref(), Some(client::Error::Url { .. }))
                || matches!(error.downcast_ref(), Some(soak::Error::Client(client::Error::Url { .. })));
            ExitCode::from(if usage { BAD_USAGE } else { CANNOT_BEGIN })
        }
    }
}

fn soak(options: &Options, length: Duration) -> anyhow::Result<ExitCode> {
    let target = Target::new(&options.url)?;
    let json = create_json(options)?;
    let (model, report) = runtime()?.block_on(async {
        let settings = settings(target, options).await?;
        let model = settings.model.clone();
        let report = soak::run(options, length, settings, tokio::signal::ctrl_c()).await?;
        Ok::<_, anyhow::Error>((model, report))
    })?;
    report.print(&mut std::io::stdout().lock(), &model).context("the report")?;
    let is_fine = report.failures.is_empty();
    if let Some(file) = json {
        write_json(file, &soak::Document { replayer: REPLAYER, options, model: &model, soak: &report })?;
    }
    Ok(if is_fine { ExitCode::SUCCESS } else { ExitCode::from(FAILED_REQUESTS) })
}

fn replay(options: &Options) -> anyhow::Result<ExitCode> {
    let target = Target::new(&options.url)?;
    let Workload { sessions, mut notes } = Workload::new(options)?;
    let planned = sessions.iter().map(|session| session.turns.len()).sum();
    if sessions.iter().any(|session| session.start.is_none()) {
        notes.push(
            "closed loop: a session is due when a place is free, so waiting for a place is in no latency"
                .to_owned(),
        );
    }
    let json = create_json(options)?;
    let (model, outcome) = runtime()?.block_on(async {
        let settings = settings(target, options).await?;
        let model = settings.model.clone();
        let outcome = drive::run(sessions, settings, tokio::signal::ctrl_c()).await;
        Ok::<_, client::Error>((model, outcome))
    })?;
    let summary = Summary::new(&outcome, planned, notes);
    print(&mut std::io::stdout().lock(), &summary, &model).context("the report")?;
    if let Some(file) = json {
        let requests = &outcome.records;
        write_json(
            file,
            &Document { replayer: REPLAYER, options, model: &model, summary: &summary, requests },
        )?;
    }
    let fine = summary.n_errors() == 0 || options.allow_errors;
    Ok(if fine { ExitCode::SUCCESS } else { ExitCode::from(FAILED_REQUESTS) })
}

/// Opened before the run, so that a wrong path costs no run.
fn create_json(options: &Options) -> anyhow::Result<Option<File>> {
    let json =
        options.json.as_ref().map(|path| File::create(path).with_context(|| path.display().to_string()));
    json.transpose()
}

fn write_json(file: File, document: &impl Serialize) -> anyhow::Result<()> {
    let mut writer = BufWriter::new(file);
    serde_json::to_writer(&mut writer, document)?;
    writer.flush()?;
    Ok(())
}

fn runtime() -> std::io::Result<Runtime> {
    tokio::runtime::Builder::new_multi_thread().enable_all().build()
}

/// How to send requests, when the server is there.
async fn settings(target: Target, options: &Options) -> Result<Settings, client::Error> {
    let model = match &options.model {
        Some(model) => target.dial().await.map(|_| model.clone())?,
        None => target.first_model().await?,
    };
    Ok(Settings {
        target,
        model,
        concurrency: options.concurrency,
        temperature: options.temperature,
        timeout: Duration::from_secs_f64(options.timeout_s),
    })
}
