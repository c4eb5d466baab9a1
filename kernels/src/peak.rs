//! What the arithmetic units can do at most, to hold the kernels against: dot products of registers, no memory.

use std::hint::black_box;
use std::time::Instant;

use crate::isa::{Isa, Op};
use crate::simd::{LANES, Line, Simd};

/// Independent chains, enough to hide the latency of an addition.
const N_CHAINS: usize = 12;
/// Rounds of one burst: a few ten microseconds.
const N_ROUNDS: usize = 4_000;

/// Operations per second of one thread in one burst; a multiplication and an addition count as two.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Peak {
    /// Products of unsigned and signed bytes, added up in 32 bits.
    pub int8: f64,
    /// Fused multiply-adds of 32-bit floats.
    pub f32: f64,
}

/// Measures one burst of each kind on the calling thread.
pub fn burst(isa: Isa) -> Peak {
    let n_dots = (N_ROUNDS * N_CHAINS * LANES) as f64;
    let began = Instant::now();
    isa.run(Bytes);
    let int8 = 8.0 * n_dots / began.elapsed().as_secs_f64();
    let began = Instant::now();
    isa.run(Floats);
    let f32 = 2.0 * n_dots / began.elapsed().as_secs_f64();
    Peak { int8, f32 }
}

struct Bytes;

impl Op for Bytes {
    type Output = ();

    #[inline(always)]
    fn call<S: Simd>(self, s: S) {
        let w = s.load_line(black_box(&Line([3; 64])));
        let x = black_box(0x0102_0304);
        let mut acc = [s.splat_i32(0); N_CHAINS];
        for _ in 0..black_box(N_ROUNDS) {
            acc = acc.map(|acc| s.dot_bytes(acc, w, x));
        }
        for acc in acc {
            black_box(s.sum(s.to_f32(acc)));
        }
    }
}

struct Floats;

impl Op for Floats {
    type Output = ();

    #[inline(always)]
    fn call<S: Simd>(self, s: S) {
        let w = s.splat(black_box(0.5));
        let mut acc = [s.splat(black_box(1.0)); N_CHAINS];
        for _ in 0..black_box(N_ROUNDS) {
            acc = acc.map(|acc| s.fma(acc, w, w));
        }
        for acc in acc {
            black_box(s.sum(acc));
        }
    }
}
