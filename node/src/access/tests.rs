use std::ffi::OsString;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;

use super::*;
use crate::cli::{Cli, Command};

const KEY: &str = "sk-0123456789abcdef";

fn args(args: &[&str]) -> (ApiArgs, SocketAddr) {
    let all = ["baton", "up"].iter().chain(args).map(OsString::from);
    let cli: Cli = crate::config::parse(all).expect("a configuration");
    let Command::Up(up) = cli.command else { panic!("up") };
    (up.api, up.listen)
}

fn access(given: &[&str]) -> Result<Access, String> {
    let (api, listen) = args(given);
    read(&api, listen).map_err(|error| format!("{error:#}"))
}

fn folder(name: &str) -> PathBuf {
    let folder = std::env::temp_dir().join(format!("baton-access-{}-{name}", std::process::id()));
    let _ = std::fs::remove_dir_all(&folder);
    folder
}

#[test]
fn nobody_is_let_in_from_elsewhere_by_mistake() {
    let error = access(&["--listen", "0.0.0.0:8080"]).expect_err("nobody said so");
    for way_out in ["--api-keys-file", "127.0.0.1", "--allow-anonymous"] {
        assert!(error.contains(way_out), "{error}");
    }
    assert!(access(&["--listen", "[::]:8080"]).is_err());
    assert!(access(&["--listen", "0.0.0.0:8080", "--allow-anonymous"]).is_ok());
    assert!(access(&["--listen", "0.0.0.0:8080", "--api-keys", KEY]).is_ok());
    assert!(access(&[]).is_ok_and(|access| access.api_keys.is_empty()));
}

#[test]
fn keys_come_from_a_file_and_mistakes_in_it_are_named() {
    let folder = folder("keys");
    std::fs::create_dir_all(&folder).expect("a temporary folder");
    let file = folder.join("keys");
    let path = file.to_str().expect("UTF-8");
    std::fs::write(&file, format!("# mine\n{KEY}\n")).expect("writable");
    let both = access(&["--api-keys-file", path, "--api-keys", "sk-fedcba9876543210"]).expect("two keys");
    assert_eq!(format!("{:?}", both.api_keys), "ApiKeys(2)");
    for (text, expected) in [("# nothing\n", "has no API key"), ("short", "at least 16")] {
        std::fs::write(&file, text).expect("writable");
        let error = access(&["--api-keys-file", path]).expect_err(text);
        assert!(error.contains(expected), "{error}");
    }
    let error = access(&["--api-keys-file", "/nowhere/keys"]).expect_err("there is none");
    assert!(error.contains("--api-keys-file /nowhere/keys"), "{error}");
    let _ = std::fs::remove_dir_all(&folder);
}

#[test]
fn a_secret_is_made_once_and_only_its_owner_reads_it() {
    let folder = folder("seal");
    let path = folder.to_str().expect("UTF-8");
    let first = access(&["--data-dir", path]).expect("a secret").seal_secret;
    let second = access(&["--data-dir", path]).expect("the same secret").seal_secret;
    assert!(first.is_some() && first == second);
    let file = std::fs::metadata(folder.join(SEAL_FILE)).expect("it is there");
    let dir = std::fs::metadata(&folder).expect("it is there");
    assert_eq!((file.permissions().mode() & 0o777, dir.permissions().mode() & 0o777), (0o600, 0o700));
    assert_eq!(std::fs::read_dir(&folder).expect("readable").count(), 1, "nothing else is left");
    let given =
        access(&["--data-dir", path, "--seal-secret", "0123456789abcdef"]).expect("a secret").seal_secret;
    assert_ne!(given, first);
    assert!(access(&["--seal-secret", "short"]).is_err_and(|error| error.contains("too short")));
    assert!(access(&[]).is_ok_and(|access| access.seal_secret.is_none()));
    std::fs::write(folder.join(SEAL_FILE), "").expect("writable");
    assert!(access(&["--data-dir", path]).is_err_and(|error| error.contains("damaged")));
    let _ = std::fs::remove_dir_all(&folder);
}

#[test]
fn secrets_are_shown_nowhere() {
    let (api, _) = args(&["--api-keys", KEY, "--seal-secret", "0123456789abcdef"]);
    let access = read(&api, SocketAddr::from(([127, 0, 0, 1], 1))).expect("keys");
    let shown = format!("{api:?} {access:?}");
    assert!(!shown.contains(KEY) && !shown.contains("0123456789abcdef"), "{shown}");
}
