//! Tensor operations on the CPU, and the only home of `unsafe`: everything above sees safe functions.
//!
//! Reading order: [`quant`] (how weights lie in a file), [`linear`] (how they lie in memory, and the product),
//! [`attention`], [`elementwise`], [`logits`], [`pool`] (who runs it), [`isa`] (which instructions), [`mmap`].
#![expect(unsafe_code, reason = "SIMD loads and stores, the memory map and the scoped thread pool need it")]

pub mod attention;
pub mod elementwise;
pub mod isa;
pub mod linear;
pub mod logits;
pub mod mmap;
pub mod peak;
pub mod pool;
pub mod quant;
mod simd;
pub mod table;

pub use simd::LANES;
