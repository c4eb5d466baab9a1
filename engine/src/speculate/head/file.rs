//! The head's safetensors file: an 8-byte length, a JSON table of tensors, their bytes.

use std::collections::HashMap;

use kernels::quant::{self, DType};
use serde::Deserialize as _;

/// Why a draft head cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    #[error("the draft head's file is damaged: {0}")]
    Damaged(String),
    #[error("the draft head was made for another model: {0}")]
    OtherModel(String),
}

/// One tensor as the table describes it.
#[derive(Debug, serde::Deserialize)]
struct Entry {
    dtype: String,
    shape: Vec<usize>,
    data_offsets: (usize, usize),
}

pub(super) struct File<'a> {
    entries: HashMap<String, Entry>,
    data: &'a [u8],
}

impl<'a> File<'a> {
    pub(super) fn parse(bytes: &'a [u8]) -> Result<Self, Error> {
        let damaged = |what: &str| Error::Damaged(what.to_owned());
        let (len, rest) = bytes.split_first_chunk().ok_or(damaged("it has no header"))?;
        let len = usize::try_from(u64::from_le_bytes(*len)).unwrap_or(usize::MAX);
        let (header, data) = rest.split_at_checked(len).ok_or(damaged("its header is cut off"))?;
        let table: HashMap<String, serde_json::Value> =
            serde_json::from_slice(header).map_err(|error| damaged(&error.to_string()))?;
        let mut entries = HashMap::new();
        for (name, value) in table.into_iter().filter(|(name, _)| name != "__metadata__") {
            let entry = Entry::deserialize(value).map_err(|error| damaged(&format!("`{name}`: {error}")))?;
            entries.insert(name, entry);
        }
        Ok(Self { entries, data })
    }

    /// The shape of a matrix that must have `n_rows` rows.
    pub(super) fn rows(&self, name: &str, n_rows: usize) -> Result<(usize, usize), Error> {
        match self.entry(name)?.shape[..] {
            [found, n_in] if found == n_rows && n_in > 0 => Ok((found, n_in)),
            ref shape => Err(Error::OtherModel(format!("`{name}` is {shape:?}, {n_rows} rows are needed"))),
        }
    }

    /// A tensor of f16 numbers of this shape.
    pub(super) fn floats(&self, name: &str, shape: &[usize]) -> Result<Vec<f32>, Error> {
        let entry = self.entry(name)?;
        if entry.shape != shape {
            return Err(Error::OtherModel(format!("`{name}` is {:?}, {shape:?} is needed", entry.shape)));
        }
        let bytes = self.bytes(name, "F16", 2)?;
        let mut out = vec![0.0; bytes.len() / 2];
        quant::dequantize(DType::F16, bytes, &mut out).map_err(|error| Error::Damaged(error.to_string()))?;
        Ok(out)
    }

    /// A list of token ids.
    pub(super) fn ids(&self, name: &str) -> Result<Vec<u32>, Error> {
        let bytes = self.bytes(name, "I32", 4)?;
        let ids = bytes.as_chunks().0.iter().map(|id| u32::from_le_bytes(*id)).collect::<Vec<_>>();
        if ids.is_empty() { Err(Error::Damaged(format!("`{name}` is empty"))) } else { Ok(ids) }
    }

    fn entry(&self, name: &str) -> Result<&Entry, Error> {
        self.entries.get(name).ok_or_else(|| Error::Damaged(format!("`{name}` is missing")))
    }

    fn bytes(&self, name: &str, dtype: &str, width: usize) -> Result<&'a [u8], Error> {
        let entry = self.entry(name)?;
        let (start, end) = entry.data_offsets;
        let n_bytes = entry.shape.iter().try_fold(width, |n, &dim| n.checked_mul(dim));
        match self.data.get(start..end) {
            Some(bytes) if entry.dtype == dtype && Some(bytes.len()) == n_bytes => Ok(bytes),
            _ => Err(Error::Damaged(format!("`{name}` is not {dtype} {:?} at {start}..{end}", entry.shape))),
        }
    }
}
