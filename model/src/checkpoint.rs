//! A model's weights and sizes, whatever the form of its files.

use std::path::Path;

use crate::dims::{self, Dims};
use crate::folder::{self, Folder};
use crate::gguf::{self, Gguf};
use crate::tensor::{Tensor, TensorInfo};

/// Why a model's files cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Gguf(#[from] gguf::Error),
    #[error(transparent)]
    Folder(#[from] folder::Error),
    #[error(transparent)]
    Dims(#[from] dims::Error),
    #[error("the model has no tensor `{0}`")]
    MissingTensor(String),
}

/// An open model; tensors borrow from it.
#[derive(Debug)]
pub enum Checkpoint {
    Gguf(Gguf),
    /// `config.json`, `tokenizer.json` and safetensors.
    Folder(Folder),
}

impl Checkpoint {
    /// Opens a GGUF file, or a folder, which may also be named by its `config.json` or a safetensors file in it.
    ///
    /// # Errors
    /// What is wrong with which file.
    pub fn open(path: &Path) -> Result<Self, Error> {
        Ok(match Folder::named_by(path) {
            Some(folder) => Self::Folder(Folder::open(&folder)?),
            None => Self::Gguf(Gguf::open(path)?),
        })
    }

    /// Sizes and constants, as the files state them.
    ///
    /// # Errors
    /// Architectures and features that are not supported, by name; missing keys.
    pub fn dims(&self) -> Result<Dims, Error> {
        Ok(match self {
            Self::Gguf(gguf) => dims::of_gguf(gguf)?,
            Self::Folder(folder) => folder.dims()?,
        })
    }

    /// The tensor called `name` in GGUF.
    ///
    /// # Errors
    /// [`Error::MissingTensor`].
    pub fn tensor(&self, name: &str) -> Result<Tensor<'_>, Error> {
        let found = match self {
            Self::Gguf(gguf) => gguf.tensor(name).ok(),
            Self::Folder(folder) => folder.safetensors.tensor(name),
        };
        found.ok_or_else(|| Error::MissingTensor(name.to_owned()))
    }

    /// All tensors, under their GGUF names.
    pub fn tensors(&self) -> Vec<&TensorInfo> {
        match self {
            Self::Gguf(gguf) => gguf.tensors().collect(),
            Self::Folder(folder) => folder.safetensors.tensors().collect(),
        }
    }

    /// A name for the content, see [`Gguf::fingerprint`]; a folder's covers its small files whole.
    pub fn fingerprint(&self) -> [u8; 32] {
        match self {
            Self::Gguf(gguf) => gguf.fingerprint(),
            Self::Folder(folder) => {
                let mut hasher = blake3::Hasher::new();
                folder.sample(&mut hasher);
                *hasher.finalize().as_bytes()
            }
        }
    }
}
