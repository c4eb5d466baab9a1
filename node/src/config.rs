//! One configuration from three places: flags win over environment variables, those over the TOML file.
//!
//! The file's values become the defaults of clap's arguments, so an option is declared once, in `cli.rs`.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use clap::{CommandFactory, FromArgMatches};

use crate::cli::Cli;

/// Why there is no configuration.
#[derive(Debug)]
pub enum Error {
    /// The command line is wrong, or help was asked for.
    Usage(clap::Error),
    /// The file cannot be read or is not TOML.
    File { path: PathBuf, message: String },
    /// The file has a key that no option bears.
    UnknownKey { path: PathBuf, key: String, known: String },
}

impl std::fmt::Display for Error {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Usage(error) => error.fmt(f),
            Self::File { path, message } => write!(f, "{}: {message}", path.display()),
            Self::UnknownKey { path, key, known } => {
                write!(f, "{}: `{key}` is no option; known here: {known}", path.display())
            }
        }
    }
}

impl std::error::Error for Error {}

/// Parses the command line, the environment and the file that either of them names.
///
/// # Errors
/// When any of them is wrong; nothing has been started then.
pub fn parse(args: impl IntoIterator<Item = OsString>) -> Result<Cli, Error> {
    let args: Vec<OsString> = args.into_iter().collect();
    let mut command = Cli::command();
    if let Some(path) = config_path(&args) {
        command = with_file(command, &path)?;
    }
    let matches = command.try_get_matches_from(args).map_err(Error::Usage)?;
    Cli::from_arg_matches(&matches).map_err(Error::Usage)
}

/// The file must be known before everything else is parsed.
fn config_path(args: &[OsString]) -> Option<PathBuf> {
    let mut args = args.iter().skip(1).map(|arg| arg.to_string_lossy());
    while let Some(arg) = args.next() {
        if arg == "--config" {
            return args.next().map(|path| PathBuf::from(path.as_ref()));
        }
        if let Some(path) = arg.strip_prefix("--config=") {
            return Some(PathBuf::from(path));
        }
    }
    std::env::var_os("BATON_CONFIG").map(PathBuf::from)
}

fn with_file(mut command: clap::Command, path: &Path) -> Result<clap::Command, Error> {
    let failed = |message: String| Error::File { path: path.to_owned(), message };
    let text = std::fs::read_to_string(path).map_err(|error| failed(error.to_string()))?;
    let file: toml::Table = text.parse().map_err(|error: toml::de::Error| failed(error.to_string()))?;
    for (key, value) in file {
        let toml::Value::Table(table) = value else {
            check(&command, &key, &key, path)?;
            command = set(command, &key, &value);
            continue;
        };
        let Some(subcommand) = command.find_subcommand(&key) else {
            let known = command.get_subcommands().map(clap::Command::get_name).collect::<Vec<_>>().join(", ");
            return Err(Error::UnknownKey { path: path.to_owned(), key, known });
        };
        for option in table.keys() {
            check(subcommand, option, &format!("{key}.{option}"), path)?;
        }
        command = command.mut_subcommand(key, |sub| {
            table.iter().fold(sub, |sub, (option, value)| set(sub, option, value))
        });
    }
    Ok(command)
}

/// Fails unless `command` has the option `key`, which the file calls `name`.
fn check(command: &clap::Command, key: &str, name: &str, path: &Path) -> Result<(), Error> {
    if command.get_arguments().any(|arg| arg.get_id() == key) {
        return Ok(());
    }
    let known = command.get_arguments().map(|arg| arg.get_id().as_str()).collect::<Vec<_>>().join(", ");
    Err(Error::UnknownKey { path: path.to_owned(), key: name.to_owned(), known })
}

/// Makes `value` the default of the option `key`.
fn set(command: clap::Command, key: &str, value: &toml::Value) -> clap::Command {
    let plain = |value: &toml::Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    let text = match value {
        toml::Value::Array(items) => items.iter().map(plain).collect::<Vec<_>>().join(","),
        value => plain(value),
    };
    command.mut_arg(key, |arg| arg.required(false).default_value(text))
}

#[cfg(test)]
mod tests;
