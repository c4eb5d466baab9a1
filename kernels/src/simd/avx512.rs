//! The vector vocabulary in AVX-512 (F, BW, VL, VNNI): one register per value.

use std::arch::x86_64 as x86;

use half::{bf16, f16};

use super::{LANES, Line, Simd, reduce_256, sse2};

const NEAREST: i32 = x86::_MM_FROUND_TO_NEAREST_INT | x86::_MM_FROUND_NO_EXC;

/// Proof that the machine has AVX-512 F, BW, VL and VNNI.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Avx512(());

impl Avx512 {
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
    pub(crate) fn new() -> Self {
        Self(())
    }
}

impl Avx512 {
    /// Lanes 0..8 and 8..16.
    #[inline(always)]
    fn halves(self, v: x86::__m512) -> (x86::__m256, x86::__m256) {
        let low = op!(_mm512_castps512_ps256(v));
        let pairs = op!(_mm512_castps_pd(v));
        let high = op!(_mm512_extractf64x4_pd::<{ 1 }>(pairs));
        (low, op!(_mm256_castpd_ps(high)))
    }
}

impl Simd for Avx512 {
    const IS_PORTABLE: bool = false;
    const N_REGISTERS: usize = 32;
    type F = x86::__m512;
    type I = x86::__m512i;
    type B = x86::__m512i;

    #[inline(always)]
    fn splat(self, x: f32) -> Self::F {
        op!(_mm512_set1_ps(x))
    }
    #[inline(always)]
    fn load(self, from: &[f32; LANES]) -> Self::F {
        // SAFETY: the token proves the instruction; the reference covers 64 bytes.
        unsafe { x86::_mm512_loadu_ps(from.as_ptr()) }
    }
    #[inline(always)]
    fn store(self, v: Self::F, to: &mut [f32; LANES]) {
        // SAFETY: the token proves the instruction; the reference covers 64 bytes.
        unsafe { x86::_mm512_storeu_ps(to.as_mut_ptr(), v) }
    }
    #[inline(always)]
    fn prefetch<T>(self, at: *const T) {
        sse2::prefetch(at);
    }
    #[inline(always)]
    fn load_f16(self, from: &[f16; LANES]) -> Self::F {
        // SAFETY: the token proves the instruction; the reference covers 32 bytes.
        let halves = unsafe { x86::_mm256_loadu_si256(from.as_ptr().cast()) };
        op!(_mm512_cvtph_ps(halves))
    }
    #[inline(always)]
    fn load_bf16(self, from: &[bf16; LANES]) -> Self::F {
        // SAFETY: the token proves the instruction; the reference covers 32 bytes.
        let halves = unsafe { x86::_mm256_loadu_si256(from.as_ptr().cast()) };
        let words = op!(_mm512_cvtepu16_epi32(halves));
        let bits = op!(_mm512_slli_epi32::<{ 16 }>(words));
        op!(_mm512_castsi512_ps(bits))
    }
    #[inline(always)]
    fn load_i8(self, from: &[i8; LANES]) -> Self::F {
        // SAFETY: the token proves the instruction; the reference covers 16 bytes.
        let bytes = unsafe { x86::_mm_loadu_si128(from.as_ptr().cast()) };
        let words = op!(_mm512_cvtepi8_epi32(bytes));
        op!(_mm512_cvtepi32_ps(words))
    }
    #[inline(always)]
    fn store_f16(self, v: Self::F, to: &mut [f16; LANES]) {
        let halves = op!(_mm512_cvtps_ph::<{ NEAREST }>(v));
        // SAFETY: the token proves the instruction; the reference covers 32 bytes.
        unsafe { x86::_mm256_storeu_si256(to.as_mut_ptr().cast(), halves) }
    }
    #[inline(always)]
    fn add(self, a: Self::F, b: Self::F) -> Self::F {
        op!(_mm512_add_ps(a, b))
    }
    #[inline(always)]
    fn sub(self, a: Self::F, b: Self::F) -> Self::F {
        op!(_mm512_sub_ps(a, b))
    }
    #[inline(always)]
    fn mul(self, a: Self::F, b: Self::F) -> Self::F {
        op!(_mm512_mul_ps(a, b))
    }
    #[inline(always)]
    fn div(self, a: Self::F, b: Self::F) -> Self::F {
        op!(_mm512_div_ps(a, b))
    }
    #[inline(always)]
    fn fma(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        op!(_mm512_fmadd_ps(a, b, c))
    }
    #[inline(always)]
    fn max(self, a: Self::F, b: Self::F) -> Self::F {
        op!(_mm512_max_ps(a, b))
    }
    #[inline(always)]
    fn min(self, a: Self::F, b: Self::F) -> Self::F {
        op!(_mm512_min_ps(a, b))
    }
    #[inline(always)]
    fn scaled(self, v: Self::F, n: Self::F) -> Self::F {
        op!(_mm512_scalef_ps(v, n))
    }
    #[inline(always)]
    fn keep_first(self, n: usize, v: Self::F, fill: Self::F) -> Self::F {
        op!(_mm512_mask_blend_ps(((1u32 << n) - 1) as u16, fill, v))
    }
    #[inline(always)]
    fn zero_below(self, x: Self::F, limit: f32, v: Self::F) -> Self::F {
        let keep = op!(_mm512_cmp_ps_mask::<{ x86::_CMP_GE_OQ }>(x, self.splat(limit)));
        op!(_mm512_maskz_mov_ps(keep, v))
    }
    #[inline(always)]
    fn to_i8(self, v: Self::F) -> [i8; LANES] {
        let n = op!(_mm512_cvtps_epi32(v));
        let bytes = op!(_mm512_cvtepi32_epi8(n));
        let mut out = [0; LANES];
        // SAFETY: the token proves the instruction; the array covers 16 bytes.
        unsafe { x86::_mm_storeu_si128(out.as_mut_ptr().cast(), bytes) };
        out
    }
    #[inline(always)]
    fn sum_i8(self, x: &[i8; LANES]) -> i32 {
        sse2::sum_i8(x)
    }
    #[inline(always)]
    fn sum(self, v: Self::F) -> f32 {
        let (low, high) = self.halves(v);
        reduce_256!(low, high, _mm256_add_ps, _mm_add_ps, _mm_add_ss)
    }
    #[inline(always)]
    fn highest(self, v: Self::F) -> f32 {
        let (low, high) = self.halves(v);
        reduce_256!(low, high, _mm256_max_ps, _mm_max_ps, _mm_max_ss)
    }
    #[inline(always)]
    fn load_line(self, line: &Line) -> Self::B {
        // SAFETY: the token proves the instruction; a line is 64 bytes aligned to 64.
        unsafe { x86::_mm512_load_si512(line.0.as_ptr().cast()) }
    }
    #[inline(always)]
    fn low_nibbles(self, v: Self::B) -> Self::B {
        let mask = op!(_mm512_set1_epi8(15));
        op!(_mm512_and_si512(v, mask))
    }
    #[inline(always)]
    fn high_nibbles(self, v: Self::B) -> Self::B {
        let shifted = op!(_mm512_srli_epi16::<{ 4 }>(v));
        self.low_nibbles(shifted)
    }
    #[inline(always)]
    fn or_bits(self, low: Self::B, plane: Self::B, left: i32, mask: u8) -> Self::B {
        let shifted = match left {
            4 => op!(_mm512_slli_epi16::<{ 4 }>(plane)),
            3 => op!(_mm512_slli_epi16::<{ 3 }>(plane)),
            2 => op!(_mm512_slli_epi16::<{ 2 }>(plane)),
            1 => op!(_mm512_slli_epi16::<{ 1 }>(plane)),
            -1 => op!(_mm512_srli_epi16::<{ 1 }>(plane)),
            -2 => op!(_mm512_srli_epi16::<{ 2 }>(plane)),
            -3 => op!(_mm512_srli_epi16::<{ 3 }>(plane)),
            _ => plane,
        };
        let mask = op!(_mm512_set1_epi8(mask.cast_signed()));
        let kept = op!(_mm512_and_si512(shifted, mask));
        op!(_mm512_or_si512(low, kept))
    }
    #[inline(always)]
    fn splat_i32(self, x: i32) -> Self::I {
        op!(_mm512_set1_epi32(x))
    }
    #[inline(always)]
    fn to_f32(self, v: Self::I) -> Self::F {
        op!(_mm512_cvtepi32_ps(v))
    }
    #[inline(always)]
    fn dot_small(self, acc: Self::I, w: Self::B, x: i32) -> Self::I {
        self.dot_bytes(acc, w, x)
    }
    #[inline(always)]
    fn dot_bytes(self, acc: Self::I, w: Self::B, x: i32) -> Self::I {
        op!(_mm512_dpbusd_epi32(acc, w, self.splat_i32(x)))
    }
}
