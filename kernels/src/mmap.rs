//! A read-only memory map of a file: gigabytes of weights without a copy.

use std::{fs::File, io, ops::Deref, path::Path};

use memmap2::Mmap;

/// A whole file mapped read-only; dereferences to its bytes.
///
/// The file must not be truncated or rewritten in place while it is mapped: reading past the new end kills the
/// process with SIGBUS. Replace a model file by renaming a new one over it, which leaves the mapped inode alone.
#[derive(Debug)]
pub struct MappedFile {
    map: Mmap,
}

impl MappedFile {
    /// Maps the whole of `path`. An empty file maps to an empty slice.
    pub fn open(path: &Path) -> io::Result<Self> {
        let file = File::open(path)?;
        // SAFETY: the map is read-only and private to us; that nobody truncates the file is the documented contract.
        let map = unsafe { Mmap::map(&file) }?;
        Ok(Self { map })
    }
}

impl Deref for MappedFile {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.map
    }
}
