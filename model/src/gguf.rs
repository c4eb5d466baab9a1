//! Reads a GGUF v3 file: typed metadata and tensors as borrowed slices of the mapped file.
//!
//! ```text
//! magic "GGUF" | version u32 | tensor count u64 | key count u64
//! keys:    name, type, value                     (general.alignment sets the padding, 32 by default)
//! tensors: name, dims, dtype, offset             (offsets count from the start of the data section)
//! padding to the alignment | data section
//! ```
//! Everything is checked while opening, so that later reads cannot fail on the file's content: each tensor has a
//! known dtype, a size that follows from its shape, and bytes of its own inside the file. Counts are compared with
//! the bytes left before anything is allocated. Layout: the "GGUF" page in ggml's documentation.

mod parse;
mod value;

use std::collections::HashMap;
use std::io;
use std::path::{Path, PathBuf};

use kernels::mmap::MappedFile;

use crate::tensor::{Tensor, TensorInfo};

pub use value::{Array, Value};

/// Why a GGUF file, or something asked of it, is not usable. Messages name the key or tensor.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot read the model file {}: {source}", path.display())]
    Io { path: PathBuf, source: io::Error },
    #[error("this is not a GGUF file: it starts with {found:?} instead of \"GGUF\"")]
    NotGguf { found: String },
    #[error("GGUF version {found} is not supported (only version 3 is): convert the model again")]
    Version { found: u32 },
    #[error(
        "the file ends inside {place}: {needed} bytes needed, {left} left; the download is probably incomplete"
    )]
    Truncated { place: String, needed: u64, left: u64 },
    #[error("the file is corrupt at {place}: {problem}")]
    Corrupt { place: String, problem: String },
    #[error(
        "tensor `{tensor}` has ggml dtype {id}, which is not supported \
         (supported: F32 F16 BF16 Q4_0 Q4_1 Q8_0 Q4_K Q5_K Q6_K)"
    )]
    UnsupportedDtype { tensor: String, id: u32 },
    #[error("the file has no tensor `{0}`")]
    MissingTensor(String),
    #[error("the file has no metadata key `{0}`")]
    MissingKey(String),
    #[error("metadata key `{key}` is {found}, but {expected} is needed")]
    WrongType { key: String, expected: &'static str, found: &'static str },
}

/// An open model file. Holds the mapping; tensors borrow from it.
#[derive(Debug)]
pub struct Gguf {
    file: MappedFile,
    header: Header,
}

/// The parsed part of a file in front of its data.
#[derive(Debug)]
struct Header {
    metadata: HashMap<String, Value>,
    /// In file order.
    tensors: Vec<TensorInfo>,
    tensor_index: HashMap<String, usize>,
    /// Bytes from the file's start to the end of the tensor list.
    header_bytes: usize,
}

impl Gguf {
    /// Maps and checks the file at `path`.
    ///
    /// # Errors
    /// [`Error::Io`] when it cannot be opened; otherwise what is wrong with its content, naming key or tensor.
    pub fn open(path: &Path) -> Result<Self, Error> {
        let file = MappedFile::open(path).map_err(|source| Error::Io { path: path.to_owned(), source })?;
        let header = parse::header(&file)?;
        Ok(Self { file, header })
    }

    /// The tensor called `name`.
    ///
    /// # Errors
    /// [`Error::MissingTensor`].
    pub fn tensor(&self, name: &str) -> Result<Tensor<'_>, Error> {
        let index =
            self.header.tensor_index.get(name).ok_or_else(|| Error::MissingTensor(name.to_owned()))?;
        let info = &self.header.tensors[*index];
        Ok(info.tensor(&self.file))
    }

    /// All tensors in file order.
    pub fn tensors(&self) -> impl ExactSizeIterator<Item = &TensorInfo> {
        self.header.tensors.iter()
    }

    /// The value of a metadata key, whatever its type.
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.header.metadata.get(key)
    }

    /// A string value.
    ///
    /// # Errors
    /// [`Error::MissingKey`], [`Error::WrongType`]; the same holds for the getters below.
    pub fn str(&self, key: &str) -> Result<&str, Error> {
        self.typed(key, "a string", Value::as_str)
    }

    /// An integer value that fits `u32`, whatever its width in the file.
    pub fn u32(&self, key: &str) -> Result<u32, Error> {
        self.typed(key, "an integer from 0 to 4294967295", Value::as_u32)
    }

    /// A float value.
    pub fn f32(&self, key: &str) -> Result<f32, Error> {
        self.typed(key, "a float", Value::as_f32)
    }

    /// A truth value.
    pub fn bool(&self, key: &str) -> Result<bool, Error> {
        self.typed(key, "a bool", Value::as_bool)
    }

    /// An array of strings.
    pub fn strings(&self, key: &str) -> Result<&[String], Error> {
        self.typed(key, "an array of strings", Value::as_strings)
    }

    /// An array of integers.
    pub fn ints(&self, key: &str) -> Result<&[i64], Error> {
        self.typed(key, "an array of integers", Value::as_ints)
    }

    /// An array of floats.
    pub fn floats(&self, key: &str) -> Result<&[f32], Error> {
        self.typed(key, "an array of floats", Value::as_floats)
    }

    /// A name for the content: BLAKE3 over the file's length, its whole header (metadata with vocabulary and template,
    /// tensor list) and the first and last 4 KiB of each tensor. Cheap (a few ms) and enough to tell models,
    /// quantizations and fine-tunes apart; it is not a check against deliberate tampering, which the sha256 of the
    /// download is for.
    pub fn fingerprint(&self) -> [u8; 32] {
        let mut hasher = blake3::Hasher::new();
        hasher.update(&(self.file.len() as u64).to_le_bytes());
        hasher.update(&self.file[..self.header.header_bytes]);
        for tensor in &self.header.tensors {
            tensor.tensor(&self.file).sample(&mut hasher);
        }
        *hasher.finalize().as_bytes()
    }

    fn typed<'a, T>(
        &'a self,
        key: &str,
        expected: &'static str,
        read: impl Fn(&'a Value) -> Option<T>,
    ) -> Result<T, Error> {
        let value = self.get(key).ok_or_else(|| Error::MissingKey(key.to_owned()))?;
        read(value).ok_or_else(|| Error::WrongType { key: key.to_owned(), expected, found: value.kind() })
    }
}

#[cfg(test)]
mod tests;
#[cfg(test)]
mod write;
