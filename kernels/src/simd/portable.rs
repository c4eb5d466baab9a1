//! The vector vocabulary in plain Rust: the definition the others are tested against.

use std::array::from_fn;

use half::{bf16, f16};

use super::{LANES, Line, Simd};

#[derive(Debug, Clone, Copy)]
pub(crate) struct Portable;

impl Simd for Portable {
    const IS_PORTABLE: bool = true;
    const N_REGISTERS: usize = 16;
    type F = [f32; LANES];
    type I = [i32; LANES];
    type B = [u8; 64];

    #[inline(always)]
    fn splat(self, x: f32) -> Self::F {
        [x; LANES]
    }
    #[inline(always)]
    fn load(self, from: &[f32; LANES]) -> Self::F {
        *from
    }
    #[inline(always)]
    fn store(self, v: Self::F, to: &mut [f32; LANES]) {
        *to = v;
    }
    #[inline(always)]
    fn load_f16(self, from: &[f16; LANES]) -> Self::F {
        from.map(f16::to_f32)
    }
    #[inline(always)]
    fn load_bf16(self, from: &[bf16; LANES]) -> Self::F {
        from.map(bf16::to_f32)
    }
    #[inline(always)]
    fn load_i8(self, from: &[i8; LANES]) -> Self::F {
        from.map(f32::from)
    }
    #[inline(always)]
    fn store_f16(self, v: Self::F, to: &mut [f16; LANES]) {
        *to = v.map(f16::from_f32);
    }
    #[inline(always)]
    fn add(self, a: Self::F, b: Self::F) -> Self::F {
        from_fn(|i| a[i] + b[i])
    }
    #[inline(always)]
    fn sub(self, a: Self::F, b: Self::F) -> Self::F {
        from_fn(|i| a[i] - b[i])
    }
    #[inline(always)]
    fn mul(self, a: Self::F, b: Self::F) -> Self::F {
        from_fn(|i| a[i] * b[i])
    }
    #[inline(always)]
    fn div(self, a: Self::F, b: Self::F) -> Self::F {
        from_fn(|i| a[i] / b[i])
    }
    #[inline(always)]
    fn fma(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        from_fn(|i| a[i].mul_add(b[i], c[i]))
    }
    #[inline(always)]
    fn max(self, a: Self::F, b: Self::F) -> Self::F {
        from_fn(|i| if a[i] > b[i] { a[i] } else { b[i] })
    }
    #[inline(always)]
    fn min(self, a: Self::F, b: Self::F) -> Self::F {
        from_fn(|i| if a[i] < b[i] { a[i] } else { b[i] })
    }
    #[inline(always)]
    fn scaled(self, v: Self::F, n: Self::F) -> Self::F {
        from_fn(|i| v[i] * f32::from_bits(((n[i] as i32 + 127) << 23).cast_unsigned()))
    }
    #[inline(always)]
    fn prefetch<T>(self, _at: *const T) {}
    #[inline(always)]
    fn keep_first(self, n: usize, v: Self::F, fill: Self::F) -> Self::F {
        from_fn(|i| if i < n { v[i] } else { fill[i] })
    }
    #[inline(always)]
    fn zero_below(self, x: Self::F, limit: f32, v: Self::F) -> Self::F {
        from_fn(|i| if x[i] >= limit { v[i] } else { 0.0 })
    }
    #[inline(always)]
    fn to_i8(self, v: Self::F) -> [i8; LANES] {
        v.map(|x| x.round_ties_even() as i8)
    }
    #[inline(always)]
    fn sum_i8(self, x: &[i8; LANES]) -> i32 {
        x.iter().map(|&x| i32::from(x)).sum()
    }
    #[inline(always)]
    fn sum(self, v: Self::F) -> f32 {
        reduce(v, |a, b| a + b)
    }
    #[inline(always)]
    fn highest(self, v: Self::F) -> f32 {
        reduce(v, f32::max)
    }
    #[inline(always)]
    fn load_line(self, line: &Line) -> Self::B {
        line.0
    }
    #[inline(always)]
    fn low_nibbles(self, v: Self::B) -> Self::B {
        v.map(|b| b & 15)
    }
    #[inline(always)]
    fn high_nibbles(self, v: Self::B) -> Self::B {
        v.map(|b| b >> 4)
    }
    #[inline(always)]
    fn or_bits(self, low: Self::B, plane: Self::B, left: i32, mask: u8) -> Self::B {
        let shifted = |b: u8| if left >= 0 { b << left } else { b >> -left };
        from_fn(|i| low[i] | shifted(plane[i]) & mask)
    }
    #[inline(always)]
    fn splat_i32(self, x: i32) -> Self::I {
        [x; LANES]
    }
    #[inline(always)]
    fn to_f32(self, v: Self::I) -> Self::F {
        v.map(|x| x as f32)
    }
    #[inline(always)]
    fn dot_small(self, acc: Self::I, w: Self::B, x: i32) -> Self::I {
        self.dot_bytes(acc, w, x)
    }
    #[inline(always)]
    fn dot_bytes(self, acc: Self::I, w: Self::B, x: i32) -> Self::I {
        let x = x.to_le_bytes().map(|b| i32::from(b.cast_signed()));
        from_fn(|i| (0..4).fold(acc[i], |sum, j| sum + i32::from(w[4 * i + j]) * x[j]))
    }
}

#[inline(always)]
fn reduce(mut lanes: [f32; LANES], f: impl Fn(f32, f32) -> f32) -> f32 {
    let mut width = LANES / 2;
    while width > 0 {
        for i in 0..width {
            lanes[i] = f(lanes[i], lanes[i + width]);
        }
        width /= 2;
    }
    lanes[0]
}
