//! The house rules that no compiler checks. Each test is a rule and lists who breaks it.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

/// Crates and the crates of ours that each may use. `xtask` stands alone.
const LAYERS: [(&str, &[&str]); 13] = [
    ("kernels", &[]),
    ("proto", &[]),
    ("model", &["kernels"]),
    ("kv", &["proto"]),
    ("engine", &["kernels", "proto", "model", "kv"]),
    ("api-gateway", &["proto", "model", "kv"]),
    ("router", &["proto", "kv"]),
    ("prefill-worker", &["proto", "model", "kv", "engine"]),
    ("decode-worker", &["proto", "model", "kv", "engine"]),
    ("node", BELOW_NODE),
    ("tests", ALL),
    ("benches", ALL),
    ("xtask", &[]),
];
const BELOW_NODE: &[&str] = &[
    "kernels",
    "proto",
    "model",
    "kv",
    "engine",
    "api-gateway",
    "router",
    "prefill-worker",
    "decode-worker",
];
const ALL: &[&str] = &[
    "kernels",
    "proto",
    "model",
    "kv",
    "engine",
    "api-gateway",
    "router",
    "prefill-worker",
    "decode-worker",
    "node",
];
const MAX_LINES: usize = 600;
const FORBIDDEN_NAMES: [&str; 7] = ["utils", "common", "helpers", "manager", "processor", "v2", "mod"];
/// Written so that this file does not contain the words it looks for.
const MARKER: &str = concat!("TO", "DO");
const KEYWORD: &str = concat!("un", "safe");

/// A source file of ours.
struct Source {
    /// Relative to the root.
    path: PathBuf,
    text: String,
}

impl Source {
    fn crate_name(&self) -> &str {
        self.path.iter().next().and_then(|part| part.to_str()).unwrap_or_default()
    }

    /// A file of unit tests below `src`.
    fn is_unit_test(&self) -> bool {
        self.path.iter().any(|part| part == "src")
            && self.path.file_name().is_some_and(|name| name == "tests.rs")
    }
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the crate lies below the root")
}

/// All Rust files of the workspace's crates.
fn sources() -> Vec<Source> {
    let mut paths = Vec::new();
    LAYERS.iter().for_each(|(name, _)| collect(&root().join(name), &mut paths));
    assert!(paths.len() > 100, "the sources lie below {}", root().display());
    let read = |path: PathBuf| Source {
        text: std::fs::read_to_string(&path).expect("sources are UTF-8"),
        path: path.strip_prefix(root()).expect("it was found below the root").to_owned(),
    };
    paths.into_iter().map(read).collect()
}

fn collect(folder: &Path, paths: &mut Vec<PathBuf>) {
    let entries = std::fs::read_dir(folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    for entry in entries {
        let path = entry.expect("a folder of ours can be read").path();
        if path.is_dir() {
            collect(&path, paths);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            paths.push(path);
        }
    }
}

/// Fails with the list of offenders, one a line.
fn check(rule: &str, offenders: impl IntoIterator<Item = String>) {
    let mut list = String::new();
    for offender in offenders {
        let _ = write!(list, "\n  {offender}");
    }
    assert!(list.is_empty(), "{rule}:{list}");
}

/// `path:line` of every line for which `bad` holds.
fn lines(source: &Source, bad: impl Fn(&str) -> bool) -> Vec<String> {
    let place =
        |(idx, line): (usize, &str)| bad(line).then(|| format!("{}:{}", source.path.display(), idx + 1));
    source.text.lines().enumerate().filter_map(place).collect()
}

/// The code of a line, without its comment.
fn code(line: &str) -> &str {
    line.split("//").next().unwrap_or_default()
}

/// True when `word` stands in `text` by itself.
fn has_word(text: &str, word: &str) -> bool {
    let part = |char: char| char.is_alphanumeric() || char == '_';
    text.match_indices(word)
        .any(|(at, _)| !text[..at].ends_with(part) && !text[at + word.len()..].starts_with(part))
}

/// What stands under a key of a manifest, such as `dependencies`.
fn names_of(manifest: &toml::Table, section: &str) -> Vec<String> {
    manifest
        .get(section)
        .and_then(toml::Value::as_table)
        .map(|table| table.keys().cloned().collect())
        .unwrap_or_default()
}

fn manifest(folder: &str) -> toml::Table {
    let path = root().join(folder).join("Cargo.toml");
    let text = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    text.parse().unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

#[test]
fn crates_use_only_what_lies_below_them() {
    let is_ours = |name: &String| LAYERS.iter().any(|(ours, _)| ours == name);
    let offenders = LAYERS.iter().flat_map(|(name, allowed)| {
        let used = names_of(&manifest(name), "dependencies").into_iter().filter(is_ours);
        let bad = used.filter(|used| !allowed.contains(&used.as_str()));
        bad.map(|used| format!("{name} uses {used}")).collect::<Vec<_>>()
    });
    check("a crate uses only crates below it", offenders);
}

#[test]
fn every_member_of_the_workspace_has_its_layer() {
    let workspace = manifest("");
    let members = workspace["workspace"]["members"].as_array().unwrap();
    let unknown = members.iter().filter_map(toml::Value::as_str);
    let unknown = unknown.filter(|member| !LAYERS.iter().any(|(name, _)| name == member));
    check("LAYERS names every member", unknown.map(str::to_owned));
}

#[test]
fn every_crate_obeys_the_lints() {
    let obeys = |name: &str| {
        manifest(name).get("lints").is_some_and(|lints| lints["workspace"].as_bool() == Some(true))
    };
    let offenders = LAYERS.iter().filter(|(name, _)| !obeys(name));
    check("a crate has `[lints] workspace = true`", offenders.map(|(name, _)| (*name).to_owned()));
}

#[test]
fn every_file_says_what_it_is_for() {
    let sources = sources();
    let offenders =
        sources.iter().filter(|source| !source.is_unit_test() && !source.text.starts_with("//! "));
    check("a file starts with a `//!` header", offenders.map(|source| source.path.display().to_string()));
}

#[test]
fn no_file_is_too_long() {
    let sources = sources();
    let long = sources.iter().filter(|source| !source.is_unit_test());
    let long =
        long.map(|source| (source, source.text.lines().count())).filter(|(_, n_lines)| *n_lines > MAX_LINES);
    let offenders = long.map(|(source, n_lines)| format!("{} has {n_lines}", source.path.display()));
    check(&format!("a file has at most {MAX_LINES} lines"), offenders);
}

#[test]
fn no_name_is_a_drawer_for_everything() {
    let is_forbidden = |name: &str| FORBIDDEN_NAMES.contains(&name);
    let sources = sources();
    let by_path = sources.iter().filter(|source| {
        source.path.with_extension("").iter().filter_map(|part| part.to_str()).any(is_forbidden)
    });
    let by_path = by_path.map(|source| source.path.display().to_string());
    let inline = |line: &str| {
        let line = code(line).trim_start();
        let line = line.strip_prefix("pub ").or_else(|| line.strip_prefix("pub(crate) ")).unwrap_or(line);
        line.strip_prefix("mod ").is_some_and(|rest| is_forbidden(rest.trim_end_matches([' ', '{', ';'])))
    };
    let inline: Vec<String> = sources.iter().flat_map(|source| lines(source, inline)).collect();
    check(&format!("nothing is named {}", FORBIDDEN_NAMES.join(", ")), by_path.chain(inline));
}

#[test]
fn only_kernels_is_allowed_to_be_dangerous() {
    let sources = sources();
    let elsewhere = sources.iter().filter(|source| source.crate_name() != "kernels");
    let offenders = elsewhere.flat_map(|source| lines(source, |line| has_word(code(line), KEYWORD)));
    check(&format!("`{KEYWORD}` stands in kernels only"), offenders);
}

#[test]
fn what_is_left_to_do_has_a_number() {
    let numbered = |rest: &str| {
        let number = rest.strip_prefix("(#").and_then(|rest| rest.split_once(')'));
        number.is_some_and(|(number, _)| {
            !number.is_empty() && number.chars().all(|digit| digit.is_ascii_digit())
        })
    };
    let bad = |line: &str| line.match_indices(MARKER).any(|(at, _)| !numbered(&line[at + MARKER.len()..]));
    let sources = sources();
    let others = [concat!("FIX", "ME"), concat!("XX", "X")];
    let offenders = sources
        .iter()
        .flat_map(|source| lines(source, |line| bad(line) || others.iter().any(|word| has_word(line, word))));
    check(&format!("write {MARKER}(#issue)"), offenders);
}

#[test]
fn the_map_names_every_crate() {
    let path = root().join("ARCHITECTURE.md");
    let map = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let missing = LAYERS.iter().filter(|(name, _)| !has_word(&map, name));
    check("ARCHITECTURE.md names every crate", missing.map(|(name, _)| (*name).to_owned()));
}

#[test]
fn the_symptoms_name_tests_that_exist() {
    let path = root().join("docs/protocol-symptoms.md");
    let table = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let named = table.split('`').skip(1).step_by(2);
    let exists = |module: &str, test: &str| {
        let file = root().join("tests/e2e").join(module).with_extension("rs");
        std::fs::read_to_string(file).is_ok_and(|text| has_word(&text, test))
    };
    let rules = std::fs::read_to_string(root().join("tests/conformance/validate.rs")).unwrap_or_default();
    let missing = named.filter_map(|name| {
        let (module, test) = name.split_once("::").filter(|(_, test)| *test != "test" && *test != "…")?;
        let found = if module == "Rule" { has_word(&rules, test) } else { exists(module, test) };
        (!found).then(|| name.to_owned())
    });
    let rows = table.lines().filter(|line| line.starts_with("| ") && !line.starts_with("| no.")).count();
    assert_eq!(rows, 32, "each symptom has its row");
    check("docs/protocol-symptoms.md names tests that exist", missing);
}
