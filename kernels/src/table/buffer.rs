//! Intermediate results, in cache lines of their own: a vector register is written to one line, not to two.

use std::ops::{Deref, DerefMut};

use crate::simd::LANES;

/// A vector of numbers that begins at a cache line.
#[derive(Debug, Default)]
pub struct Buffer {
    lines: Vec<Line>,
    len: usize,
}

#[derive(Debug, Clone, Copy)]
#[repr(C, align(64))]
struct Line([f32; LANES]);

impl Buffer {
    /// Makes it `len` long. What is there stays, what is new may be anything.
    pub fn resize(&mut self, len: usize) {
        self.lines.resize(len.div_ceil(LANES), Line([0.0; LANES]));
        self.len = len;
    }
}

impl Deref for Buffer {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        // SAFETY: the lines are `len` numbers or more, without gaps between them.
        unsafe { std::slice::from_raw_parts(self.lines.as_ptr().cast(), self.len) }
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [f32] {
        // SAFETY: as for shared access; the lines are borrowed for as long.
        unsafe { std::slice::from_raw_parts_mut(self.lines.as_mut_ptr().cast(), self.len) }
    }
}
