//! The `baton` command.

use std::process::ExitCode;

use node::cli::{self, Command};
use node::{chat, config, models, roles, telemetry, up};

/// Exit status for a bad command line or configuration, as in BSD's sysexits.
const EXIT_CONFIG: u8 = 64;

fn main() -> ExitCode {
    let cli = match config::parse(std::env::args_os()) {
        Ok(cli) => cli,
        Err(config::Error::Usage(error)) => {
            // Help and version end well; clap prints to the right stream.
            let _ = error.print();
            return if error.use_stderr() { ExitCode::from(EXIT_CONFIG) } else { ExitCode::SUCCESS };
        }
        Err(error) => return fail(&error.into(), EXIT_CONFIG),
    };
    let runtime = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return fail(&error.into(), 1),
    };
    let result = runtime.block_on(run(cli));
    // A download that nobody waits for any more must not hold up the end.
    runtime.shutdown_background();
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) if error.is::<roles::BadConfig>() => fail(&error, EXIT_CONFIG),
        Err(error) => fail(&error, 1),
    }
}

async fn run(cli: cli::Cli) -> anyhow::Result<()> {
    let telemetry = telemetry::start(&cli.telemetry, cli.command.is_service())?;
    let result = match cli.command {
        Command::Up(args) => up::run(args, &telemetry).await,
        Command::Gateway(args) => roles::run_gateway(args, &telemetry).await,
        Command::Router(args) => roles::run_router(args, &telemetry).await,
        Command::Prefill(args) => roles::run_worker(roles::WorkerRole::Prefill, args, &telemetry).await,
        Command::Decode(args) => roles::run_worker(roles::WorkerRole::Decode, args, &telemetry).await,
        Command::Chat(args) => chat::run(args).await,
        Command::Model(args) => models::run(args).await,
    };
    telemetry.stop().await;
    result
}

fn fail(error: &anyhow::Error, code: u8) -> ExitCode {
    use std::io::Write;
    let mut message = error.to_string();
    for cause in error.chain().skip(1).map(ToString::to_string) {
        // Many errors name their cause already.
        if !message.contains(&cause) {
            message.push_str(": ");
            message.push_str(&cause);
        }
    }
    // Without a stderr there is nobody to tell.
    let _ = writeln!(std::io::stderr(), "baton: {message}");
    ExitCode::from(code)
}
