//! The vector vocabulary of the kernels: sixteen f32 lanes, sixteen i32 lanes and 64 packed bytes.
//!
//! An implementor is a token that proves the instructions exist, hence its methods are safe to call.
//! Contract: every lane rounds as IEEE f32 with one rounding per operation (`fma` is one operation), so that
//! all implementations agree bit for bit.

use half::{bf16, f16};

/// One intrinsic without memory access, for the modules of x86-64.
#[cfg(target_arch = "x86_64")]
macro_rules! op {
    ($intrinsic:ident $(::<{ $c:expr }>)? ($($arg:expr),*)) => {
        // SAFETY: the token proves that the instruction exists, or every processor has it; it reads no memory.
        unsafe { x86::$intrinsic $(::<{ $c }>)? ($($arg),*) }
    };
}

#[cfg(target_arch = "x86_64")]
pub(crate) mod avx2;
#[cfg(target_arch = "x86_64")]
pub(crate) mod avx512;
mod portable;
#[cfg(target_arch = "x86_64")]
mod sse2;
#[cfg(test)]
mod tests;

pub(crate) use portable::Portable;

/// Lanes of a vector; also tokens of a KV block and rows of a weight group.
pub const LANES: usize = 16;

/// 64 bytes of packed weights: one cache line, one 512-bit register.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(64))]
pub(crate) struct Line(pub(crate) [u8; 64]);

// SAFETY: bytes of zero are bytes; a line is aligned to 64.
unsafe impl crate::table::Zero for Line {}

pub(crate) trait Simd: Copy {
    /// Values are arrays in memory, not registers.
    const IS_PORTABLE: bool;
    /// Vector registers: what a tile may hold.
    const N_REGISTERS: usize;
    /// 16 x f32.
    type F: Copy;
    /// 16 x i32.
    type I: Copy;
    /// 64 x u8.
    type B: Copy;

    fn splat(self, x: f32) -> Self::F;
    fn load(self, from: &[f32; LANES]) -> Self::F;
    fn store(self, v: Self::F, to: &mut [f32; LANES]);
    /// Asks for the cache line at `at`, which may be anywhere.
    fn prefetch<T>(self, at: *const T);
    fn load_f16(self, from: &[f16; LANES]) -> Self::F;
    fn load_bf16(self, from: &[bf16; LANES]) -> Self::F;
    fn load_i8(self, from: &[i8; LANES]) -> Self::F;
    /// Rounds to nearest even; the caller keeps |v| within f16's range.
    fn store_f16(self, v: Self::F, to: &mut [f16; LANES]);
    fn add(self, a: Self::F, b: Self::F) -> Self::F;
    fn sub(self, a: Self::F, b: Self::F) -> Self::F;
    fn mul(self, a: Self::F, b: Self::F) -> Self::F;
    fn div(self, a: Self::F, b: Self::F) -> Self::F;
    /// a x b + c, rounded once.
    fn fma(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    /// `if a > b { a } else { b }` per lane.
    fn max(self, a: Self::F, b: Self::F) -> Self::F;
    /// `if a < b { a } else { b }` per lane.
    fn min(self, a: Self::F, b: Self::F) -> Self::F;
    /// v x 2^n for integral n in -126..=127 where the result is a normal number.
    fn scaled(self, v: Self::F, n: Self::F) -> Self::F;
    /// The first `n` lanes of `v`, the others from `fill`; n <= 16.
    fn keep_first(self, n: usize, v: Self::F, fill: Self::F) -> Self::F;
    /// `v` in lanes where x >= limit, 0 elsewhere.
    fn zero_below(self, x: Self::F, limit: f32, v: Self::F) -> Self::F;
    /// Nearest integer, ties to even; the caller keeps |v| <= 127.
    fn to_i8(self, v: Self::F) -> [i8; LANES];
    fn sum_i8(self, x: &[i8; LANES]) -> i32;

    fn load_line(self, line: &Line) -> Self::B;
    fn low_nibbles(self, v: Self::B) -> Self::B;
    fn high_nibbles(self, v: Self::B) -> Self::B;
    /// Per byte: `low` or (`plane` shifted left by `left` bits, or right if negative, and `mask`).
    /// `left` is a constant in -3..=4, and the bits that `mask` keeps come from the same byte.
    fn or_bits(self, low: Self::B, plane: Self::B, left: i32, mask: u8) -> Self::B;
    fn splat_i32(self, x: i32) -> Self::I;
    fn to_f32(self, v: Self::I) -> Self::F;
    /// Lane i: acc + sum over j < 4 of w[4i + j] (unsigned, at most 127) x byte j of `x` (signed).
    fn dot_small(self, acc: Self::I, w: Self::B, x: i32) -> Self::I;
    /// The same for any unsigned bytes `w`.
    fn dot_bytes(self, acc: Self::I, w: Self::B, x: i32) -> Self::I;

    /// e^v to about 2 ulp for v <= 88; exactly 0 below -87, exactly 1 at 0.
    /// Cody-Waite reduction and Cephes' `expf` polynomial.
    #[inline(always)]
    fn exp(self, v: Self::F) -> Self::F {
        const LOWEST: f32 = -87.0;
        const POLYNOMIAL: [f32; 5] = [1.398_2e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5];
        // Added to a number below 2^22, and taken away again, this leaves the nearest integer.
        const MAGIC: f32 = 12_582_912.0;
        let x = self.min(self.max(v, self.splat(LOWEST)), self.splat(88.0));
        let magic = self.splat(MAGIC);
        let n = self.sub(self.fma(x, self.splat(std::f32::consts::LOG2_E), magic), magic);
        let r = self.fma(n, self.splat(-0.693_359_4), x);
        let r = self.fma(n, self.splat(2.121_944_4e-4), r);
        let mut p = self.splat(1.987_569_1e-4);
        for c in POLYNOMIAL {
            p = self.fma(p, r, self.splat(c));
        }
        let p = self.fma(p, self.mul(r, r), self.add(r, self.splat(1.0)));
        self.zero_below(v, LOWEST, self.scaled(p, n))
    }

    /// Sum of all lanes, as a fixed tree: lane i and lane i + 8, then i and i + 4, and so on.
    fn sum(self, v: Self::F) -> f32;
    /// The greatest lane; no lane is NaN.
    fn highest(self, v: Self::F) -> f32;
}

/// Sum (or maximum) of all lanes of a 256-bit register pair, as [`Simd::sum`] orders it.
#[cfg(target_arch = "x86_64")]
macro_rules! reduce_256 {
    ($low:expr, $high:expr, $wide:ident, $half:ident, $single:ident) => {{
        let both = op!($wide($low, $high));
        let low = op!(_mm256_castps256_ps128(both));
        let high = op!(_mm256_extractf128_ps::<{ 1 }>(both));
        let half = op!($half(low, high));
        let swapped = op!(_mm_movehl_ps(half, half));
        let pair = op!($half(half, swapped));
        let second = op!(_mm_shuffle_ps::<{ 1 }>(pair, pair));
        let single = op!($single(pair, second));
        op!(_mm_cvtss_f32(single))
    }};
}
#[cfg(target_arch = "x86_64")]
pub(crate) use reduce_256;

/// Repeats the body for `$t` in 0..`$n`, at most 12 times. A loop that the compiler left rolled would keep its arrays in
/// memory instead of registers. Without registers (`$s` is portable) it stays rolled: less to compile.
macro_rules! unroll {
    ($s:ident, $t:ident < $n:expr, $body:expr) => {
        if $s::IS_PORTABLE {
            for $t in 0..$n {
                $body;
            }
        } else {
            $crate::simd::unroll!(@ $t, $n, $body, 0 1 2 3 4 5 6 7 8 9 10 11)
        }
    };
    (@ $t:ident, $n:expr, $body:expr, $($i:literal)*) => {{
        $({
            let $t = $i;
            if $t < $n {
                $body;
            }
        })*
    }};
}
pub(crate) use unroll;
