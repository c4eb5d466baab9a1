//! Memory for large tables in huge pages: weights and KV are read from end to end in every step, and with pages of 4 KiB
//! the processor would spend a third of a decode step on finding out where they are (measured: 4.3 ms with small
//! pages, 3.2 ms with large ones, SmolLM2-135M on two threads).
//!
//! ```text
//!  chunk of 32 MiB, aligned to 2 MiB:   table | table | table | ... free        a large table has a mapping of its own
//! ```
//! A chunk lives as long as any of its tables. Pages are zero and claimed when first written.

use std::{
    fmt,
    marker::PhantomData,
    ops::{Deref, DerefMut},
    sync::{Arc, Mutex, PoisonError},
};

use half::{bf16, f16};
use memmap2::{MmapMut, MmapRaw};

mod buffer;
#[cfg(test)]
mod tests;

pub use buffer::Buffer;

const HUGE_PAGE: usize = 2 << 20;
const CHUNK_BYTES: usize = 32 << 20;
/// Tables begin at cache lines.
const ALIGN: usize = 64;

/// The chunk that small tables are cut from.
static OPEN: Mutex<Option<Chunk>> = Mutex::new(None);

/// A type whose zero bytes are a value, without drop.
///
/// # Safety
/// All-zero bytes must be a valid value, and its alignment at most 64.
pub unsafe trait Zero: Copy {}

// SAFETY: a number of zero bits is zero.
unsafe impl Zero for u16 {}
// SAFETY: a number of zero bits is zero.
unsafe impl Zero for i8 {}
// SAFETY: a number of zero bits is zero.
unsafe impl Zero for f32 {}
// SAFETY: a number of zero bits is zero.
unsafe impl Zero for f16 {}
// SAFETY: a number of zero bits is zero.
unsafe impl Zero for bf16 {}
// SAFETY: an array of such values is one.
unsafe impl<T: Zero, const N: usize> Zero for [T; N] {}

/// A fixed number of values, zero at first.
pub struct Table<T> {
    start: *mut T,
    len: usize,
    /// Keeps the memory.
    _mapping: Arc<MmapRaw>,
    values: PhantomData<T>,
}

// SAFETY: it owns its part of the mapping alone, as a vector does.
unsafe impl<T: Send> Send for Table<T> {}
// SAFETY: shared, it only gives shared references.
unsafe impl<T: Sync> Sync for Table<T> {}

struct Chunk {
    mapping: Arc<MmapRaw>,
    /// Bytes from the mapping's start that are given away.
    used: usize,
}

impl Chunk {
    /// A mapping with room for `n_bytes` from a huge page's border on.
    ///
    /// Panics when the system has no memory left, as a vector would.
    fn new(n_bytes: usize) -> Self {
        let n_mapped = n_bytes.checked_add(HUGE_PAGE).expect("a table fits the address space");
        let map = MmapMut::map_anon(n_mapped).expect("the system has memory for a model's tables");
        // Without huge pages it works too.
        let _ = map.advise(memmap2::Advice::HugePage);
        let mapping = Arc::new(MmapRaw::from(map));
        let used = mapping.as_ptr().align_offset(HUGE_PAGE);
        Self { mapping, used }
    }

    /// Cuts off `n_bytes`, if there is room.
    fn take(&mut self, n_bytes: usize) -> Option<(Arc<MmapRaw>, *mut u8)> {
        let end = self.used.checked_add(n_bytes)?;
        if end > self.mapping.len() {
            return None;
        }
        let start = self.mapping.as_mut_ptr().wrapping_add(self.used);
        self.used = end.next_multiple_of(ALIGN);
        Some((Arc::clone(&self.mapping), start))
    }
}

impl<T: Zero> Table<T> {
    /// `len` zeros.
    #[must_use]
    pub fn zeroed(len: usize) -> Self {
        let n_bytes = len.checked_mul(size_of::<T>()).expect("a table fits the address space");
        let (mapping, start) = allocate(n_bytes);
        Self { start: start.cast(), len, _mapping: mapping, values: PhantomData }
    }
}

fn allocate(n_bytes: usize) -> (Arc<MmapRaw>, *mut u8) {
    if n_bytes > CHUNK_BYTES / 4 {
        return Chunk::new(n_bytes).take(n_bytes).expect("the mapping was made for it");
    }
    let mut open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(part) = open.as_mut().and_then(|chunk| chunk.take(n_bytes)) {
        return part;
    }
    open.insert(Chunk::new(CHUNK_BYTES)).take(n_bytes).expect("a chunk is larger than that")
}

impl<T> Deref for Table<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: the part was cut off for `len` aligned values of a type that zero bytes are a value of.
        unsafe { std::slice::from_raw_parts(self.start, self.len) }
    }
}

impl<T> DerefMut for Table<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as for shared access, and nobody else has this part.
        unsafe { std::slice::from_raw_parts_mut(self.start, self.len) }
    }
}

impl<T> fmt::Debug for Table<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Table").field("len", &self.len).finish_non_exhaustive()
    }
}
