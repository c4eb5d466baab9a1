//! Who may use a gateway, and what it seals with: read from files, the environment and the data folder.

use std::fs::{DirBuilder, OpenOptions};
use std::io::{ErrorKind, Write};
use std::net::SocketAddr;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::Path;

use anyhow::Context;
use api_gateway::{ApiKeys, Secret};

use crate::cli::{AccessArgs, ApiArgs};
use crate::roles::BadConfig;

/// Where a secret that was made here is kept.
const SEAL_FILE: &str = "seal.secret";
/// Shorter secrets can be guessed.
const MIN_SECRET_CHARS: usize = 16;

/// What is known of the clients and their seals.
#[derive(Debug)]
pub(crate) struct Access {
    pub(crate) api_keys: ApiKeys,
    /// One of them, for conversations of our own.
    pub(crate) own_key: Option<Secret>,
    pub(crate) seal_secret: Option<Secret>,
}

/// Reads keys and secrets for a gateway at `listen`, and makes a secret in the data folder if there is none.
///
/// # Errors
/// When a file cannot be read or a key is too short, or everybody could come in by mistake.
pub(crate) fn read(api: &ApiArgs, listen: SocketAddr) -> anyhow::Result<Access> {
    let args = &api.access;
    let text = key_text(args)?;
    let api_keys = ApiKeys::parse(&text).map_err(|error| BadConfig(error.to_string()))?;
    if api_keys.is_empty() && !listen.ip().is_loopback() && !args.allow_anonymous {
        return Err(BadConfig(format!(
            "others can reach {listen}, and no API key is set: name a file of keys with --api-keys-file (or set \
             BATON_API_KEYS), listen on 127.0.0.1, or give --allow-anonymous to serve everybody"
        ))
        .into());
    }
    let seal_secret = seal_secret(args, api.keep.data_dir.as_deref())?;
    let own_key =
        text.lines().filter(|line| !line.trim_start().starts_with('#')).flat_map(|line| line.split(','));
    let own_key = own_key.map(str::trim).find(|key| !key.is_empty()).map(|key| key.to_owned().into());
    Ok(Access { api_keys, own_key, seal_secret })
}

/// The keys of the file and of the environment.
fn key_text(args: &AccessArgs) -> anyhow::Result<String> {
    let mut text = args.api_keys.as_ref().map_or_else(String::new, |keys| keys.reveal().to_owned());
    if let Some(path) = &args.api_keys_file {
        let file = read_file(path, "--api-keys-file")?;
        if ApiKeys::parse(&file).is_ok_and(|keys| keys.is_empty()) {
            return Err(BadConfig(format!("{} has no API key: write one a line", path.display())).into());
        }
        text.push('\n');
        text.push_str(&file);
    }
    Ok(text)
}

fn read_file(path: &Path, option: &str) -> anyhow::Result<String> {
    std::fs::read_to_string(path)
        .map_err(|error| BadConfig(format!("{option} {} cannot be read: {error}", path.display())).into())
}

fn seal_secret(args: &AccessArgs, data_dir: Option<&Path>) -> anyhow::Result<Option<Secret>> {
    let given = match (&args.seal_secret_file, &args.seal_secret) {
        (Some(path), _) => Some(read_file(path, "--seal-secret-file")?),
        (None, Some(secret)) => Some(secret.reveal().to_owned()),
        (None, None) => None,
    };
    if let Some(text) = given {
        let text = text.trim();
        if text.chars().count() < MIN_SECRET_CHARS {
            return Err(BadConfig(format!(
                "the seal secret is too short: use at least {MIN_SECRET_CHARS} random characters"
            ))
            .into());
        }
        return Ok(Some(text.to_owned().into()));
    }
    data_dir.map(kept_secret).transpose()
}

/// The secret in the data folder, made there when it is first wanted.
fn kept_secret(folder: &Path) -> anyhow::Result<Secret> {
    let path = folder.join(SEAL_FILE);
    let advice =
        || format!("the data folder {} cannot be used; make it writable for this user", folder.display());
    match std::fs::read_to_string(&path) {
        Ok(text) if text.trim().chars().count() >= MIN_SECRET_CHARS => {
            return Ok(text.trim().to_owned().into());
        }
        Ok(_) => anyhow::bail!("{} is damaged: put a copy of it back, or move it away", path.display()),
        Err(error) if error.kind() == ErrorKind::NotFound => {}
        Err(error) => return Err(error).with_context(|| format!("{} cannot be read", path.display())),
    }
    DirBuilder::new().recursive(true).mode(0o700).create(folder).with_context(advice)?;
    // Complete before it bears its name, so that no crash and no second gateway sees half of it.
    let half = folder.join(format!("{SEAL_FILE}.{}", std::process::id()));
    let secret: String = rand::random::<[u8; 32]>().iter().map(|byte| format!("{byte:02x}")).collect();
    let mut file = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(&half)
        .with_context(advice)?;
    file.write_all(secret.as_bytes()).and_then(|()| file.sync_all()).with_context(advice)?;
    let linked = std::fs::hard_link(&half, &path);
    // Whether it is still needed or not, it may stay if it cannot go.
    let _ = std::fs::remove_file(&half);
    match linked {
        Ok(()) => Ok(secret.into()),
        Err(error) if error.kind() == ErrorKind::AlreadyExists => {
            Ok(std::fs::read_to_string(&path).with_context(advice)?.trim().to_owned().into())
        }
        Err(error) => Err(error).with_context(advice),
    }
}

#[cfg(test)]
mod tests;
