//! Reads safetensors files, one or a set of shards: tensors as borrowed slices of the mapped files.
//!
//! ```text
//! header length u64 | JSON {"name": {"dtype": "BF16", "shape": [out, in], "data_offsets": [from, to]}, ...} | data
//! model.safetensors.index.json: {"weight_map": {"name": "model-00001-of-00002.safetensors", ...}}
//! ```
//! As for [`crate::gguf`], everything is checked while opening: lengths against the file, each tensor's bytes against
//! its shape and type, and that the tensors fill the data without gap or overlap. Layout: the format's README.

mod parse;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::io;
use std::path::{Path, PathBuf};

use kernels::mmap::MappedFile;
use serde::Deserialize;

use crate::tensor::{Tensor, TensorInfo};

pub(crate) const SINGLE_FILE: &str = "model.safetensors";
pub(crate) const INDEX_FILE: &str = "model.safetensors.index.json";
/// The largest models have about 100,000 tensors.
pub(crate) const MAX_INDEX_BYTES: u64 = 64 << 20;
const MAX_SHARDS: usize = 4096;

/// What is wrong with a file, and which file it is.
#[derive(Debug, thiserror::Error)]
#[error("{}: {problem}", path.display())]
pub struct Error {
    pub path: PathBuf,
    pub problem: Problem,
}

/// Why a safetensors file is not usable. Messages name the tensor.
#[derive(Debug, thiserror::Error)]
pub enum Problem {
    #[error("cannot be read: {0}")]
    Io(#[from] io::Error),
    #[error(
        "the file ends inside {place}: {needed} bytes needed, {left} left; the download is probably incomplete"
    )]
    Truncated { place: String, needed: u64, left: u64 },
    #[error("the file is corrupt at {place}: {problem}")]
    Corrupt { place: String, problem: String },
    #[error("tensor `{tensor}` has type {dtype}, which is not supported (supported: F32, F16, BF16)")]
    UnsupportedDtype { tensor: String, dtype: String },
}

/// Open safetensors files. Tensors have the names that they are asked for by, not those of the files (see [`Self::open`]).
#[derive(Debug)]
pub struct Safetensors {
    shards: Vec<Shard>,
    /// Shard and place in it.
    index: HashMap<String, (usize, usize)>,
}

#[derive(Debug)]
struct Shard {
    file: MappedFile,
    header_bytes: usize,
    /// In the order of their bytes.
    tensors: Vec<TensorInfo>,
}

#[derive(Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

impl Safetensors {
    /// Maps and checks the files of `folder`: those of the index if there is one, else the single file. `rename` makes
    /// the name that a tensor is known by; None leaves the tensor out.
    ///
    /// # Errors
    /// The file, and what is wrong with it.
    pub(crate) fn open(folder: &Path, rename: impl Fn(&str) -> Option<String>) -> Result<Self, Error> {
        let mut this = Self { shards: Vec::new(), index: HashMap::new() };
        for (name, expected) in shard_files(folder)? {
            let path = folder.join(name);
            let of_file = |problem| Error { path: path.clone(), problem };
            let file = MappedFile::open(&path).map_err(|error| of_file(error.into()))?;
            let (header_bytes, mut tensors) = parse::header(&file).map_err(of_file)?;
            let found: HashSet<&str> = tensors.iter().map(|tensor| tensor.name.as_str()).collect();
            if let Some(tensor) = expected.iter().find(|name| !found.contains(name.as_str())) {
                let problem = format!("the index places tensor `{tensor}` here, but it is not");
                return Err(of_file(corrupt("its list of tensors", problem)));
            }
            tensors.retain_mut(|tensor| match rename(&tensor.name) {
                Some(name) => {
                    tensor.name = name;
                    true
                }
                None => false,
            });
            for (place, tensor) in tensors.iter().enumerate() {
                if this.index.insert(tensor.name.clone(), (this.shards.len(), place)).is_some() {
                    let place = format!("the description of tensor `{}`", tensor.name);
                    return Err(of_file(corrupt(&place, "the name appears twice")));
                }
            }
            this.shards.push(Shard { file, header_bytes, tensors });
        }
        Ok(this)
    }

    /// The tensor called `name`.
    pub fn tensor(&self, name: &str) -> Option<Tensor<'_>> {
        let &(shard, place) = self.index.get(name)?;
        let shard = &self.shards[shard];
        Some(shard.tensors[place].tensor(&shard.file))
    }

    /// All tensors, shard by shard in the order of their bytes.
    pub fn tensors(&self) -> impl Iterator<Item = &TensorInfo> {
        self.shards.iter().flat_map(|shard| &shard.tensors)
    }

    /// Feeds lengths, headers and samples of all tensors to a fingerprint.
    pub(crate) fn sample(&self, hasher: &mut blake3::Hasher) {
        for shard in &self.shards {
            hasher.update(&(shard.file.len() as u64).to_le_bytes());
            hasher.update(&shard.file[..shard.header_bytes]);
            shard.tensors.iter().for_each(|tensor| tensor.tensor(&shard.file).sample(hasher));
        }
    }
}

/// The files with the tensors that the index expects in each.
fn shard_files(folder: &Path) -> Result<BTreeMap<String, Vec<String>>, Error> {
    let path = folder.join(INDEX_FILE);
    let of_index = |problem| Error { path: path.clone(), problem };
    if !path.is_file() {
        return Ok(BTreeMap::from([(SINGLE_FILE.to_owned(), Vec::new())]));
    }
    let bytes = read_bounded(&path, MAX_INDEX_BYTES).map_err(|error| of_index(error.into()))?;
    let index: Index =
        serde_json::from_slice(&bytes).map_err(|e| of_index(corrupt("the index", e.to_string())))?;
    let mut files: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for (tensor, file) in index.weight_map {
        // Nothing outside the folder is opened because a file says so.
        if file.contains(['/', '\\']) || !file.ends_with(".safetensors") {
            let problem = format!("tensor `{tensor}` is in `{file}`, which is no file of the model");
            return Err(of_index(corrupt("the index", problem)));
        }
        files.entry(file).or_default().push(tensor);
    }
    if files.is_empty() || files.len() > MAX_SHARDS {
        let problem = format!("it names {} files (1 to {MAX_SHARDS} are possible)", files.len());
        return Err(of_index(corrupt("the index", problem)));
    }
    Ok(files)
}

/// A whole file of at most `limit` bytes.
pub(crate) fn read_bounded(path: &Path, limit: u64) -> io::Result<Vec<u8>> {
    let len = std::fs::metadata(path)?.len();
    if len > limit {
        return Err(io::Error::other(format!(
            "{len} bytes are more than the {limit} that such a file may have"
        )));
    }
    std::fs::read(path)
}

fn corrupt(place: &str, problem: impl Into<String>) -> Problem {
    Problem::Corrupt { place: place.to_owned(), problem: problem.into() }
}

#[cfg(test)]
mod tests;
