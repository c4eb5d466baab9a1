//! What the machine gives while we measure: read bandwidth and integer operations, in short bursts, best of many.

use std::hint::black_box;
use std::time::Instant;

use kernels::isa::Isa;
use kernels::peak;
use kernels::pool::ThreadPool;

/// As large as the weights of the default model: mostly beyond the caches.
const READ_BYTES: usize = 96 << 20;
const N_BURSTS: usize = 24;

/// Limits of a number of threads together.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limits {
    /// Bytes per second.
    pub read: f64,
    /// Integer operations per second, a multiplication and an addition counting as two.
    pub int8: f64,
    /// Floating-point operations per second, counted alike.
    pub f32: f64,
}

/// Measures all threads of `pool` at once.
pub(crate) fn measure(pool: &ThreadPool) -> Limits {
    let words = vec![1_u64; READ_BYTES / 8];
    let mut best = Limits { read: 0.0, int8: 0.0, f32: 0.0 };
    for _ in 0..N_BURSTS {
        let began = Instant::now();
        pool.run(|thread, n_threads| {
            let part = words.len() / n_threads;
            black_box(sum(&words[thread * part..(thread + 1) * part]));
        });
        best.read = best.read.max(READ_BYTES as f64 / began.elapsed().as_secs_f64());
    }
    for _ in 0..N_BURSTS {
        let mut bursts = vec![(0.0, 0.0); pool.n_threads()];
        pool.each(&mut bursts, |burst| {
            let peak = peak::burst(Isa::detect());
            *burst = (peak.int8, peak.f32);
        });
        best.int8 = best.int8.max(bursts.iter().map(|burst| burst.0).sum());
        best.f32 = best.f32.max(bursts.iter().map(|burst| burst.1).sum());
    }
    best
}

/// Eight sums, so that loads and not additions set the pace.
fn sum(words: &[u64]) -> u64 {
    let mut sums = [0_u64; 64];
    for chunk in words.as_chunks::<64>().0 {
        sums.iter_mut().zip(chunk).for_each(|(sum, word)| *sum = sum.wrapping_add(*word));
    }
    sums.iter().fold(0, |sum, part| sum.wrapping_add(*part))
}
