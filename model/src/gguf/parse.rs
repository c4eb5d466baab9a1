//! From bytes to a checked [`Header`]. Nothing here trusts a number of the file: lengths are compared with the bytes
//! left before use, products and sums are checked, and counts are bounded before any allocation.

use std::collections::HashMap;
use std::fmt;
use std::ops::Range;

use kernels::quant::DType;

use super::value::{Array, Value};
use super::{Error, Header};
use crate::tensor::TensorInfo;

const MAGIC: &[u8; 4] = b"GGUF";
const VERSION: u32 = 3;
const DEFAULT_ALIGNMENT: u64 = 32;
/// A larger alignment is a corrupt file, not a wish.
const MAX_ALIGNMENT: u64 = 1 << 20;
/// The largest vocabularies have about 262,144 tokens and 520,000 merges.
const MAX_ARRAY_LEN: u64 = 1 << 22;
const MAX_DIMS: u32 = 4;
/// ggml itself stops at 64 bytes.
const MAX_TENSOR_NAME_BYTES: u64 = 256;
const MAX_KEY_BYTES: u64 = 65_535;
/// The smallest a key can be: empty name, type, one byte.
const MIN_KEY_BYTES: u64 = 8 + 4 + 1;
/// The smallest a tensor entry can be: empty name, one dimension.
const MIN_TENSOR_ENTRY_BYTES: u64 = 8 + 4 + 8 + 4 + 8;

/// Where in the file the reader is; becomes text only in an error.
#[derive(Clone, Copy)]
enum Place<'a> {
    Header,
    KeyName(u64),
    Value(&'a str),
    TensorName(u64),
    TensorEntry(&'a str),
    TensorData(&'a str),
}

impl fmt::Display for Place<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Header => write!(f, "the header"),
            Self::KeyName(index) => write!(f, "the name of metadata key number {index}"),
            Self::Value(key) => write!(f, "the value of metadata key `{key}`"),
            Self::TensorName(index) => write!(f, "the name of tensor number {index}"),
            Self::TensorEntry(name) => write!(f, "the description of tensor `{name}`"),
            Self::TensorData(name) => write!(f, "the data of tensor `{name}`"),
        }
    }
}

impl Place<'_> {
    fn corrupt(self, problem: impl Into<String>) -> Error {
        Error::Corrupt { place: self.to_string(), problem: problem.into() }
    }
}

/// A tensor entry as written, before its data is located.
struct Entry {
    name: String,
    shape: Vec<u64>,
    dtype: DType,
    offset: u64,
}

/// Parses and checks everything in front of the data, and where the data of each tensor lies.
pub(super) fn header(file: &[u8]) -> Result<Header, Error> {
    let mut cursor = Cursor { file, at: 0 };
    let (n_tensors, n_keys) = preamble(&mut cursor)?;
    let mut metadata = HashMap::with_capacity(n_keys as usize);
    for index in 0..n_keys {
        let key = cursor.string(Place::KeyName(index), MAX_KEY_BYTES)?;
        let value = value(&mut cursor, &key)?;
        if metadata.contains_key(&key) {
            return Err(Place::Value(&key).corrupt("the key appears twice"));
        }
        metadata.insert(key, value);
    }
    let mut entries = Vec::with_capacity(n_tensors as usize);
    for index in 0..n_tensors {
        entries.push(entry(&mut cursor, index)?);
    }
    let header_bytes = cursor.at;
    let data_start = (header_bytes as u64).next_multiple_of(alignment(&metadata)?);
    let tensors = locate(entries, data_start, file.len() as u64, alignment(&metadata)?)?;
    let tensor_index = index_by_name(&tensors)?;
    Ok(Header { metadata, tensors, tensor_index, header_bytes })
}

/// Magic, version and counts; the counts are already known to fit the file.
fn preamble(cursor: &mut Cursor<'_>) -> Result<(u64, u64), Error> {
    let magic = cursor.array::<4>(Place::Header)?;
    if magic != *MAGIC {
        return Err(Error::NotGguf { found: magic.escape_ascii().to_string() });
    }
    let version = cursor.u32(Place::Header)?;
    if version == VERSION.swap_bytes() {
        return Err(Place::Header.corrupt("the file is big-endian, which is not supported"));
    }
    if version != VERSION {
        return Err(Error::Version { found: version });
    }
    let n_tensors = cursor.u64(Place::Header)?;
    let n_keys = cursor.u64(Place::Header)?;
    cursor.check_count(Place::Header, n_keys, MIN_KEY_BYTES)?;
    cursor.check_count(Place::Header, n_tensors, MIN_TENSOR_ENTRY_BYTES)?;
    Ok((n_tensors, n_keys))
}

fn value(cursor: &mut Cursor<'_>, key: &str) -> Result<Value, Error> {
    let place = Place::Value(key);
    let kind = cursor.u32(place)?;
    Ok(match kind {
        0 | 2 | 4 | 10 => Value::U64(cursor.int(place, kind)? as u64),
        1 | 3 | 5 | 11 => Value::I64(cursor.int(place, kind)?),
        6 => Value::F64(f64::from(f32::from_le_bytes(cursor.array(place)?))),
        12 => Value::F64(f64::from_le_bytes(cursor.array(place)?)),
        7 => Value::Bool(cursor.bool(place)?),
        8 => Value::Str(cursor.string(place, u64::MAX)?),
        9 => Value::Array(array(cursor, key)?),
        other => return Err(place.corrupt(format!("unknown value type {other}"))),
    })
}

fn array(cursor: &mut Cursor<'_>, key: &str) -> Result<Array, Error> {
    let place = Place::Value(key);
    let kind = cursor.u32(place)?;
    let len = cursor.u64(place)?;
    if len > MAX_ARRAY_LEN {
        return Err(place.corrupt(format!("an array of {len} elements (at most {MAX_ARRAY_LEN} are read)")));
    }
    let element_bytes = match kind {
        0 | 1 | 7 => 1,
        2 | 3 => 2,
        4..=6 => 4,
        8 | 10..=12 => 8,
        9 => return Err(place.corrupt("arrays of arrays are not supported")),
        other => return Err(place.corrupt(format!("unknown element type {other}"))),
    };
    cursor.check_count(place, len, element_bytes)?;
    Ok(match kind {
        6 => Array::Floats(
            (0..len).map(|_| Ok(f32::from_le_bytes(cursor.array(place)?))).collect::<Result<_, _>>()?,
        ),
        12 => Array::Floats(
            (0..len)
                .map(|_| Ok(f64::from_le_bytes(cursor.array(place)?) as f32))
                .collect::<Result<_, _>>()?,
        ),
        7 => Array::Bools((0..len).map(|_| cursor.bool(place)).collect::<Result<_, _>>()?),
        8 => Array::Strings((0..len).map(|_| cursor.string(place, u64::MAX)).collect::<Result<_, _>>()?),
        _ => Array::Ints((0..len).map(|_| cursor.int(place, kind)).collect::<Result<_, _>>()?),
    })
}

fn entry(cursor: &mut Cursor<'_>, index: u64) -> Result<Entry, Error> {
    let name = cursor.string(Place::TensorName(index), MAX_TENSOR_NAME_BYTES)?;
    let place = Place::TensorEntry(&name);
    let n_dims = cursor.u32(place)?;
    if n_dims == 0 || n_dims > MAX_DIMS {
        return Err(place.corrupt(format!("{n_dims} dimensions (1 to {MAX_DIMS} are possible)")));
    }
    let shape = (0..n_dims).map(|_| cursor.u64(place)).collect::<Result<Vec<_>, _>>()?;
    let id = cursor.u32(place)?;
    let offset = cursor.u64(place)?;
    let dtype =
        DType::from_ggml_id(id).ok_or_else(|| Error::UnsupportedDtype { tensor: name.clone(), id })?;
    Ok(Entry { name, shape, dtype, offset })
}

fn alignment(metadata: &HashMap<String, Value>) -> Result<u64, Error> {
    let Some(value) = metadata.get("general.alignment") else { return Ok(DEFAULT_ALIGNMENT) };
    let alignment = value.as_u32().map_or(0, u64::from);
    if !alignment.is_power_of_two() || alignment > MAX_ALIGNMENT {
        return Err(Place::Value("general.alignment").corrupt(format!(
            "the alignment must be a power of two up to {MAX_ALIGNMENT}, it is {value:?}"
        )));
    }
    Ok(alignment)
}

/// Turns offsets into byte ranges of the file and refuses ranges that overlap.
fn locate(
    entries: Vec<Entry>,
    data_start: u64,
    file_len: u64,
    alignment: u64,
) -> Result<Vec<TensorInfo>, Error> {
    let mut tensors = Vec::with_capacity(entries.len());
    for entry in entries {
        let bytes = byte_range(&entry, data_start, file_len, alignment)?;
        tensors.push(TensorInfo { name: entry.name, dtype: entry.dtype, shape: entry.shape, bytes });
    }
    let mut by_position: Vec<&TensorInfo> = tensors.iter().collect();
    by_position.sort_by_key(|tensor| tensor.bytes.start);
    for pair in by_position.windows(2) {
        if pair[1].bytes.start < pair[0].bytes.end {
            return Err(
                Place::TensorData(&pair[1].name).corrupt(format!("it overlaps tensor `{}`", pair[0].name))
            );
        }
    }
    Ok(tensors)
}

fn byte_range(entry: &Entry, data_start: u64, file_len: u64, alignment: u64) -> Result<Range<usize>, Error> {
    let place = Place::TensorEntry(&entry.name);
    let (block_len, block_bytes) = (entry.dtype.block_len() as u64, entry.dtype.block_bytes() as u64);
    if entry.shape.contains(&0) {
        return Err(place.corrupt(format!("the shape {:?} holds no elements", entry.shape)));
    }
    if !entry.shape[0].is_multiple_of(block_len) {
        return Err(
            place.corrupt(format!("rows of {} elements do not fill blocks of {block_len}", entry.shape[0]))
        );
    }
    if !entry.offset.is_multiple_of(alignment) {
        return Err(place.corrupt(format!("its offset {} is not a multiple of {alignment}", entry.offset)));
    }
    let n_elements = entry.shape.iter().try_fold(1_u64, |n, dim| n.checked_mul(*dim));
    let n_bytes = n_elements.and_then(|n| (n / block_len).checked_mul(block_bytes));
    let start = data_start.checked_add(entry.offset);
    let end = start.zip(n_bytes).and_then(|(start, n_bytes)| start.checked_add(n_bytes));
    let (Some(start), Some(n_bytes), Some(end)) = (start, n_bytes, end) else {
        return Err(place.corrupt(format!("shape {:?} at offset {} is absurd", entry.shape, entry.offset)));
    };
    if end > file_len {
        let place = Place::TensorData(&entry.name).to_string();
        return Err(Error::Truncated { place, needed: n_bytes, left: file_len.saturating_sub(start) });
    }
    // Both are at most the length of a slice.
    Ok(start as usize..end as usize)
}

fn index_by_name(tensors: &[TensorInfo]) -> Result<HashMap<String, usize>, Error> {
    let mut by_name = HashMap::with_capacity(tensors.len());
    for (index, tensor) in tensors.iter().enumerate() {
        if by_name.insert(tensor.name.clone(), index).is_some() {
            return Err(Place::TensorEntry(&tensor.name).corrupt("the name appears twice"));
        }
    }
    Ok(by_name)
}

/// Reads little-endian values and never past the end.
struct Cursor<'a> {
    file: &'a [u8],
    at: usize,
}

impl<'a> Cursor<'a> {
    fn left(&self) -> u64 {
        (self.file.len() - self.at) as u64
    }

    fn bytes(&mut self, place: Place<'_>, n: u64) -> Result<&'a [u8], Error> {
        if n > self.left() {
            return Err(Error::Truncated { place: place.to_string(), needed: n, left: self.left() });
        }
        let from = self.at;
        self.at += n as usize;
        Ok(&self.file[from..self.at])
    }

    fn array<const N: usize>(&mut self, place: Place<'_>) -> Result<[u8; N], Error> {
        Ok(self.bytes(place, N as u64)?.try_into().expect("N bytes were asked for"))
    }

    fn u32(&mut self, place: Place<'_>) -> Result<u32, Error> {
        Ok(u32::from_le_bytes(self.array(place)?))
    }

    fn u64(&mut self, place: Place<'_>) -> Result<u64, Error> {
        Ok(u64::from_le_bytes(self.array(place)?))
    }

    fn bool(&mut self, place: Place<'_>) -> Result<bool, Error> {
        match self.array::<1>(place)? {
            [0] => Ok(false),
            [1] => Ok(true),
            [other] => Err(place.corrupt(format!("{other} is not a bool"))),
        }
    }

    /// An integer of GGUF type `kind`; u64 keeps its bits.
    fn int(&mut self, place: Place<'_>, kind: u32) -> Result<i64, Error> {
        Ok(match kind {
            0 => i64::from(u8::from_le_bytes(self.array(place)?)),
            1 => i64::from(i8::from_le_bytes(self.array(place)?)),
            2 => i64::from(u16::from_le_bytes(self.array(place)?)),
            3 => i64::from(i16::from_le_bytes(self.array(place)?)),
            4 => i64::from(u32::from_le_bytes(self.array(place)?)),
            5 => i64::from(i32::from_le_bytes(self.array(place)?)),
            10 | 11 => i64::from_le_bytes(self.array(place)?),
            other => return Err(place.corrupt(format!("unknown integer type {other}"))),
        })
    }

    fn string(&mut self, place: Place<'_>, max_bytes: u64) -> Result<String, Error> {
        let len = self.u64(place)?;
        if len > max_bytes {
            return Err(place.corrupt(format!("a string of {len} bytes (at most {max_bytes} are possible)")));
        }
        let bytes = self.bytes(place, len)?;
        let text = str::from_utf8(bytes).map_err(|e| place.corrupt(format!("not UTF-8: {e}")))?;
        Ok(text.to_owned())
    }

    /// Refuses a count of things of at least `min_bytes` each that the rest of the file cannot hold.
    fn check_count(&self, place: Place<'_>, count: u64, min_bytes: u64) -> Result<(), Error> {
        let needed = count.saturating_mul(min_bytes);
        if needed > self.left() {
            return Err(Error::Truncated { place: place.to_string(), needed, left: self.left() });
        }
        Ok(())
    }
}
