//! Which vector instructions this machine has, found once; every kernel is dispatched here.
//!
//! A kernel is written once, generic over [`Simd`], as an [`Op`]. All instruction sets give bit-equal results,
//! because lanes, order and rounding of every operation are part of the [`Simd`] contract.

use std::fmt;

use crate::simd::{Portable, Simd};
#[cfg(target_arch = "x86_64")]
use crate::simd::{avx2::Avx2, avx512::Avx512};

/// A set of vector instructions that this machine is known to have.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Isa(Kind);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    #[cfg(target_arch = "x86_64")]
    Avx512Vnni,
    #[cfg(target_arch = "x86_64")]
    AvxVnni,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    Portable,
}

impl Isa {
    /// Plain Rust; available everywhere.
    pub const PORTABLE: Self = Self(Kind::Portable);

    /// The fastest set of this machine.
    pub fn detect() -> Self {
        Self::available()[0]
    }

    /// All sets of this machine, fastest first; never empty.
    pub fn available() -> Vec<Self> {
        let mut found = Vec::new();
        #[cfg(target_arch = "x86_64")]
        {
            use std::arch::is_x86_feature_detected as has;
            let avx2 = has!("avx2") && has!("fma") && has!("f16c");
            if avx2 && has!("avx512f") && has!("avx512bw") && has!("avx512vl") && has!("avx512vnni") {
                found.push(Self(Kind::Avx512Vnni));
            }
            if avx2 && has!("avxvnni") {
                found.push(Self(Kind::AvxVnni));
            }
            if avx2 {
                found.push(Self(Kind::Avx2));
            }
        }
        found.push(Self::PORTABLE);
        found
    }

    /// Runs `op` compiled for this set.
    pub(crate) fn run<O: Op>(self, op: O) -> O::Output {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: this value is made only after the features were detected.
            Kind::Avx512Vnni => unsafe { run_avx512(op) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: this value is made only after the features were detected.
            Kind::AvxVnni => unsafe { run_avx_vnni(op) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: this value is made only after the features were detected.
            Kind::Avx2 => unsafe { run_avx2(op) },
            Kind::Portable => op.call(Portable),
        }
    }
}

impl fmt::Debug for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A kernel with its arguments. `call` must be `#[inline(always)]`, so that it is compiled with the features of
/// the set it was dispatched to.
pub(crate) trait Op {
    type Output;
    fn call<S: Simd>(self, simd: S) -> Self::Output;
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
fn run_avx512<O: Op>(op: O) -> O::Output {
    op.call(Avx512::new())
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
fn run_avx2<O: Op>(op: O) -> O::Output {
    op.call(Avx2::<false>::new())
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c,avxvnni")]
fn run_avx_vnni<O: Op>(op: O) -> O::Output {
    op.call(Avx2::<true>::new())
}
