//! The vector vocabulary in AVX2 with FMA and F16C: two registers per value (lanes 0..8 and 8..16). With AVX-VNNI, dot
//! products of bytes are one instruction.

use std::arch::x86_64 as x86;

use half::{bf16, f16};

use super::{LANES, Line, Simd, reduce_256, sse2};

/// Proof that the machine has AVX2, FMA and F16C, and AVX-VNNI where `VNNI`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Avx2<const VNNI: bool>(());

impl Avx2<false> {
    #[target_feature(enable = "avx2,fma,f16c")]
    pub(crate) fn new() -> Self {
        Self(())
    }
}

impl Avx2<true> {
    #[target_feature(enable = "avx2,fma,f16c,avxvnni")]
    pub(crate) fn new() -> Self {
        Self(())
    }
}

/// The same intrinsic on both halves.
macro_rules! both {
    ($intrinsic:ident $(::<{ $c:expr }>)? ($($arg:expr),*)) => {
        [op!($intrinsic $(::<{ $c }>)? ($($arg[0]),*)), op!($intrinsic $(::<{ $c }>)? ($($arg[1]),*))]
    };
}

impl<const VNNI: bool> Simd for Avx2<VNNI> {
    const IS_PORTABLE: bool = false;
    const N_REGISTERS: usize = 16;
    type F = [x86::__m256; 2];
    type I = [x86::__m256i; 2];
    type B = [x86::__m256i; 2];

    #[inline(always)]
    fn splat(self, x: f32) -> Self::F {
        [op!(_mm256_set1_ps(x)); 2]
    }
    #[inline(always)]
    fn load(self, from: &[f32; LANES]) -> Self::F {
        let (low, high) = from.split_at(8);
        // SAFETY: the token proves the instruction; the slice covers 32 bytes.
        let low = unsafe { x86::_mm256_loadu_ps(low.as_ptr()) };
        // SAFETY: the token proves the instruction; the slice covers 32 bytes.
        let high = unsafe { x86::_mm256_loadu_ps(high.as_ptr()) };
        [low, high]
    }
    #[inline(always)]
    fn store(self, v: Self::F, to: &mut [f32; LANES]) {
        let (low, high) = to.split_at_mut(8);
        // SAFETY: the token proves the instruction; the slice covers 32 bytes.
        unsafe { x86::_mm256_storeu_ps(low.as_mut_ptr(), v[0]) };
        // SAFETY: the token proves the instruction; the slice covers 32 bytes.
        unsafe { x86::_mm256_storeu_ps(high.as_mut_ptr(), v[1]) };
    }
    #[inline(always)]
    fn prefetch<T>(self, at: *const T) {
        sse2::prefetch(at);
    }
    #[inline(always)]
    fn load_f16(self, from: &[f16; LANES]) -> Self::F {
        let (low, high) = from.split_at(8);
        // SAFETY: the token proves the instruction; the slice covers 16 bytes.
        let low = unsafe { x86::_mm_loadu_si128(low.as_ptr().cast()) };
        // SAFETY: the token proves the instruction; the slice covers 16 bytes.
        let high = unsafe { x86::_mm_loadu_si128(high.as_ptr().cast()) };
        [op!(_mm256_cvtph_ps(low)), op!(_mm256_cvtph_ps(high))]
    }
    #[inline(always)]
    fn load_bf16(self, from: &[bf16; LANES]) -> Self::F {
        let (low, high) = from.split_at(8);
        // SAFETY: the token proves the instruction; the slice covers 16 bytes.
        let low = unsafe { x86::_mm_loadu_si128(low.as_ptr().cast()) };
        // SAFETY: the token proves the instruction; the slice covers 16 bytes.
        let high = unsafe { x86::_mm_loadu_si128(high.as_ptr().cast()) };
        let words = [op!(_mm256_cvtepu16_epi32(low)), op!(_mm256_cvtepu16_epi32(high))];
        let bits = both!(_mm256_slli_epi32::<{ 16 }>(words));
        both!(_mm256_castsi256_ps(bits))
    }
    #[inline(always)]
    fn load_i8(self, from: &[i8; LANES]) -> Self::F {
        let (low, high) = from.split_at(8);
        // SAFETY: the token proves the instruction; the slice covers 8 bytes.
        let low = unsafe { x86::_mm_loadl_epi64(low.as_ptr().cast()) };
        // SAFETY: the token proves the instruction; the slice covers 8 bytes.
        let high = unsafe { x86::_mm_loadl_epi64(high.as_ptr().cast()) };
        let words = [op!(_mm256_cvtepi8_epi32(low)), op!(_mm256_cvtepi8_epi32(high))];
        both!(_mm256_cvtepi32_ps(words))
    }
    #[inline(always)]
    fn store_f16(self, v: Self::F, to: &mut [f16; LANES]) {
        let halves = both!(_mm256_cvtps_ph::<{ x86::_MM_FROUND_TO_NEAREST_INT }>(v));
        let (low, high) = to.split_at_mut(8);
        // SAFETY: the token proves the instruction; the slice covers 16 bytes.
        unsafe { x86::_mm_storeu_si128(low.as_mut_ptr().cast(), halves[0]) };
        // SAFETY: the token proves the instruction; the slice covers 16 bytes.
        unsafe { x86::_mm_storeu_si128(high.as_mut_ptr().cast(), halves[1]) };
    }
    #[inline(always)]
    fn add(self, a: Self::F, b: Self::F) -> Self::F {
        both!(_mm256_add_ps(a, b))
    }
    #[inline(always)]
    fn sub(self, a: Self::F, b: Self::F) -> Self::F {
        both!(_mm256_sub_ps(a, b))
    }
    #[inline(always)]
    fn mul(self, a: Self::F, b: Self::F) -> Self::F {
        both!(_mm256_mul_ps(a, b))
    }
    #[inline(always)]
    fn div(self, a: Self::F, b: Self::F) -> Self::F {
        both!(_mm256_div_ps(a, b))
    }
    #[inline(always)]
    fn fma(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        both!(_mm256_fmadd_ps(a, b, c))
    }
    #[inline(always)]
    fn max(self, a: Self::F, b: Self::F) -> Self::F {
        both!(_mm256_max_ps(a, b))
    }
    #[inline(always)]
    fn min(self, a: Self::F, b: Self::F) -> Self::F {
        both!(_mm256_min_ps(a, b))
    }
    #[inline(always)]
    fn scaled(self, v: Self::F, n: Self::F) -> Self::F {
        let n = both!(_mm256_cvtps_epi32(n));
        let exponent = both!(_mm256_add_epi32(n, self.splat_i32(127)));
        let bits = both!(_mm256_slli_epi32::<{ 23 }>(exponent));
        let power = both!(_mm256_castsi256_ps(bits));
        self.mul(v, power)
    }
    #[inline(always)]
    fn keep_first(self, n: usize, v: Self::F, fill: Self::F) -> Self::F {
        let lane = [
            op!(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7)),
            op!(_mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15)),
        ];
        let keep = both!(_mm256_cmpgt_epi32(self.splat_i32(n as i32), lane));
        let keep = both!(_mm256_castsi256_ps(keep));
        both!(_mm256_blendv_ps(fill, v, keep))
    }
    #[inline(always)]
    fn zero_below(self, x: Self::F, limit: f32, v: Self::F) -> Self::F {
        let keep = both!(_mm256_cmp_ps::<{ x86::_CMP_GE_OQ }>(x, self.splat(limit)));
        both!(_mm256_and_ps(keep, v))
    }
    #[inline(always)]
    fn to_i8(self, v: Self::F) -> [i8; LANES] {
        let n = both!(_mm256_cvtps_epi32(v));
        let mut lanes = [0i32; LANES];
        let (low, high) = lanes.split_at_mut(8);
        // SAFETY: the token proves the instruction; the slice covers 32 bytes.
        unsafe { x86::_mm256_storeu_si256(low.as_mut_ptr().cast(), n[0]) };
        // SAFETY: the token proves the instruction; the slice covers 32 bytes.
        unsafe { x86::_mm256_storeu_si256(high.as_mut_ptr().cast(), n[1]) };
        lanes.map(|x| x as i8)
    }
    #[inline(always)]
    fn sum_i8(self, x: &[i8; LANES]) -> i32 {
        sse2::sum_i8(x)
    }
    #[inline(always)]
    fn sum(self, v: Self::F) -> f32 {
        reduce_256!(v[0], v[1], _mm256_add_ps, _mm_add_ps, _mm_add_ss)
    }
    #[inline(always)]
    fn highest(self, v: Self::F) -> f32 {
        reduce_256!(v[0], v[1], _mm256_max_ps, _mm_max_ps, _mm_max_ss)
    }
    #[inline(always)]
    fn load_line(self, line: &Line) -> Self::B {
        let (low, high) = line.0.split_at(32);
        // SAFETY: the token proves the instruction; half a line is 32 bytes aligned to 32.
        let low = unsafe { x86::_mm256_load_si256(low.as_ptr().cast()) };
        // SAFETY: the token proves the instruction; half a line is 32 bytes aligned to 32.
        let high = unsafe { x86::_mm256_load_si256(high.as_ptr().cast()) };
        [low, high]
    }
    #[inline(always)]
    fn low_nibbles(self, v: Self::B) -> Self::B {
        let mask = [op!(_mm256_set1_epi8(15)); 2];
        both!(_mm256_and_si256(v, mask))
    }
    #[inline(always)]
    fn high_nibbles(self, v: Self::B) -> Self::B {
        self.low_nibbles(both!(_mm256_srli_epi16::<{ 4 }>(v)))
    }
    #[inline(always)]
    fn or_bits(self, low: Self::B, plane: Self::B, left: i32, mask: u8) -> Self::B {
        let shifted = match left {
            4 => both!(_mm256_slli_epi16::<{ 4 }>(plane)),
            3 => both!(_mm256_slli_epi16::<{ 3 }>(plane)),
            2 => both!(_mm256_slli_epi16::<{ 2 }>(plane)),
            1 => both!(_mm256_slli_epi16::<{ 1 }>(plane)),
            -1 => both!(_mm256_srli_epi16::<{ 1 }>(plane)),
            -2 => both!(_mm256_srli_epi16::<{ 2 }>(plane)),
            -3 => both!(_mm256_srli_epi16::<{ 3 }>(plane)),
            _ => plane,
        };
        let mask = [op!(_mm256_set1_epi8(mask.cast_signed())); 2];
        let kept = both!(_mm256_and_si256(shifted, mask));
        both!(_mm256_or_si256(low, kept))
    }
    #[inline(always)]
    fn splat_i32(self, x: i32) -> Self::I {
        [op!(_mm256_set1_epi32(x)); 2]
    }
    #[inline(always)]
    fn to_f32(self, v: Self::I) -> Self::F {
        both!(_mm256_cvtepi32_ps(v))
    }
    #[inline(always)]
    fn dot_small(self, acc: Self::I, w: Self::B, x: i32) -> Self::I {
        if VNNI {
            return self.dot_bytes(acc, w, x);
        }
        // Pairs reach at most 2 x 127 x 128 in i16: no saturation.
        let ones = [op!(_mm256_set1_epi16(1)); 2];
        let x = self.splat_i32(x);
        let pairs = both!(_mm256_maddubs_epi16(w, x));
        let quads = both!(_mm256_madd_epi16(pairs, ones));
        both!(_mm256_add_epi32(acc, quads))
    }
    #[inline(always)]
    fn dot_bytes(self, acc: Self::I, w: Self::B, x: i32) -> Self::I {
        if VNNI {
            let x = self.splat_i32(x);
            return both!(_mm256_dpbusd_avx_epi32(acc, w, x));
        }
        // maddubs would saturate, so even and odd bytes are widened to i16 first.
        let x = self.splat_i32(x);
        let even_mask = [op!(_mm256_set1_epi16(0xFF)); 2];
        let w_even = both!(_mm256_and_si256(w, even_mask));
        let w_odd = both!(_mm256_srli_epi16::<{ 8 }>(w));
        let x_even = both!(_mm256_slli_epi16::<{ 8 }>(x));
        let x_even = both!(_mm256_srai_epi16::<{ 8 }>(x_even));
        let x_odd = both!(_mm256_srai_epi16::<{ 8 }>(x));
        let even = both!(_mm256_madd_epi16(w_even, x_even));
        let odd = both!(_mm256_madd_epi16(w_odd, x_odd));
        let sum = both!(_mm256_add_epi32(even, odd));
        both!(_mm256_add_epi32(acc, sum))
    }
}
