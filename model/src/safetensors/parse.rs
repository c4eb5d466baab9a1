//! From bytes to checked tensor descriptions. No number of the file is used before it is compared with the file.

use std::fmt;

use kernels::quant::DType;
use serde::Deserialize;
use serde::de::{Deserializer, Error as _, IgnoredAny, MapAccess, Visitor};

use super::{Problem, corrupt};
use crate::tensor::TensorInfo;

/// The format's own limit.
const MAX_HEADER_BYTES: u64 = 100_000_000;
const MAX_DIMS: usize = 8;
const LENGTH_BYTES: usize = 8;
const METADATA: &str = "__metadata__";

#[derive(Deserialize)]
struct Entry {
    dtype: String,
    /// Row-major: the slowest dimension first.
    shape: Vec<u64>,
    data_offsets: [u64; 2],
}

/// The entries of the header in file order, names as they are.
struct Entries(Vec<(String, Entry)>);

/// Bytes in front of the data, and the tensors in the order of their bytes.
pub(super) fn header(file: &[u8]) -> Result<(usize, Vec<TensorInfo>), Problem> {
    let Some((length, rest)) = file.split_first_chunk::<LENGTH_BYTES>() else {
        let (place, left) = ("the header's length".to_owned(), file.len() as u64);
        return Err(Problem::Truncated { place, needed: LENGTH_BYTES as u64, left });
    };
    let length = u64::from_le_bytes(*length);
    if length > MAX_HEADER_BYTES {
        let problem = format!(
            "a header of {length} bytes (at most {MAX_HEADER_BYTES} are possible); is it safetensors?"
        );
        return Err(corrupt("the header's length", problem));
    }
    if length > rest.len() as u64 {
        let place = "the header".to_owned();
        return Err(Problem::Truncated { place, needed: length, left: rest.len() as u64 });
    }
    let (json, data) = rest.split_at(length as usize);
    let Entries(entries) =
        serde_json::from_slice(json).map_err(|error| corrupt("the header", error.to_string()))?;
    let header_bytes = LENGTH_BYTES + json.len();
    let mut tensors = entries
        .into_iter()
        .map(|(name, entry)| tensor(name, entry, header_bytes as u64, data.len() as u64))
        .collect::<Result<Vec<_>, _>>()?;
    tensors.sort_by_key(|tensor| tensor.bytes.start);
    check_order(&tensors, header_bytes, file.len())?;
    Ok((header_bytes, tensors))
}

fn tensor(name: String, entry: Entry, data_start: u64, n_data: u64) -> Result<TensorInfo, Problem> {
    let place = || format!("the description of tensor `{name}`");
    let dtype = match entry.dtype.as_str() {
        "F32" => DType::F32,
        "F16" => DType::F16,
        "BF16" => DType::BF16,
        other => {
            let dtype = other.chars().take(32).collect();
            return Err(Problem::UnsupportedDtype { tensor: name, dtype });
        }
    };
    if entry.shape.len() > MAX_DIMS || entry.shape.contains(&0) {
        return Err(corrupt(
            &place(),
            format!(
                "{} dimensions, none of which may be 0 (0 to {MAX_DIMS} are possible)",
                entry.shape.len()
            ),
        ));
    }
    let [from, to] = entry.data_offsets;
    let n_elements = entry.shape.iter().try_fold(1_u64, |n, dim| n.checked_mul(*dim));
    let needed = n_elements.and_then(|n| n.checked_mul(dtype.block_bytes() as u64));
    if needed.is_none() || to.checked_sub(from) != needed {
        return Err(corrupt(
            &place(),
            format!("shape {:?} in {dtype:?} does not fit the bytes {from} to {to}", entry.shape),
        ));
    }
    if to > n_data {
        let place = format!("the data of tensor `{name}`");
        return Err(Problem::Truncated { place, needed: to - from, left: n_data.saturating_sub(from) });
    }
    // Both ends are at most the length of a slice.
    let bytes = (data_start + from) as usize..(data_start + to) as usize;
    Ok(TensorInfo { name, dtype, shape: entry.shape.into_iter().rev().collect(), bytes })
}

/// Each tensor begins where the one before ends, and the last one ends the file.
fn check_order(tensors: &[TensorInfo], data_start: usize, file_len: usize) -> Result<(), Problem> {
    let mut end = data_start;
    let mut before = "the header";
    for tensor in tensors {
        let place = || format!("the data of tensor `{}`", tensor.name);
        if tensor.bytes.start < end {
            return Err(corrupt(&place(), format!("it overlaps `{before}`")));
        }
        if tensor.bytes.start > end {
            return Err(corrupt(&place(), format!("there is a gap after `{before}`")));
        }
        (end, before) = (tensor.bytes.end, &tensor.name);
    }
    if end < file_len {
        return Err(corrupt("its end", format!("{} bytes belong to no tensor", file_len - end)));
    }
    Ok(())
}

impl<'de> Deserialize<'de> for Entries {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(EntriesVisitor)
    }
}

struct EntriesVisitor;

impl<'de> Visitor<'de> for EntriesVisitor {
    type Value = Entries;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of tensors")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Entries, A::Error> {
        let mut entries = Vec::new();
        while let Some(name) = map.next_key::<String>()? {
            if name == METADATA {
                map.next_value::<IgnoredAny>()?;
                continue;
            }
            let entry = map
                .next_value::<Entry>()
                .map_err(|error| A::Error::custom(format!("tensor `{name}`: {error}")))?;
            entries.push((name, entry));
        }
        Ok(Entries(entries))
    }
}
