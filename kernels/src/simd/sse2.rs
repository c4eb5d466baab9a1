//! What both sets for x86-64 do with instructions that every such processor has.

use std::arch::x86_64 as x86;

use super::LANES;

/// See [`super::Simd::prefetch`].
#[inline(always)]
pub(super) fn prefetch<T>(at: *const T) {
    // SAFETY: every x86-64 processor has the instruction, which never fails, whatever the address.
    unsafe { x86::_mm_prefetch::<{ x86::_MM_HINT_T0 }>(at.cast()) };
}

/// See [`super::Simd::sum_i8`].
#[inline(always)]
pub(super) fn sum_i8(x: &[i8; LANES]) -> i32 {
    // SAFETY: every x86-64 processor has the instruction; the array covers 16 bytes.
    let bytes = unsafe { x86::_mm_loadu_si128(x.as_ptr().cast()) };
    // Sums exist for unsigned bytes only: 128 is added to each, and taken from the sum again.
    let (shift, zero) = (op!(_mm_set1_epi8(-128)), op!(_mm_setzero_si128()));
    let unsigned = op!(_mm_xor_si128(bytes, shift));
    let sums = op!(_mm_sad_epu8(unsigned, zero));
    let second = op!(_mm_unpackhi_epi64(sums, sums));
    let sum = op!(_mm_add_epi64(sums, second));
    op!(_mm_cvtsi128_si32(sum)) - 128 * LANES as i32
}
