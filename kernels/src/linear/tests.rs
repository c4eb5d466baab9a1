use std::num::NonZeroUsize;

use proptest::prelude::*;

use super::*;

const DTYPES: [DType; 9] = [
    DType::F32,
    DType::F16,
    DType::BF16,
    DType::Q4_0,
    DType::Q4_1,
    DType::Q8_0,
    DType::Q4K,
    DType::Q5K,
    DType::Q6K,
];

/// Reproducible numbers in -1..1.
struct Noise(u64);

impl Noise {
    fn next(&mut self) -> f32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 40) as f32 / (1 << 23) as f32 - 1.0
    }
    fn values(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.next()).collect()
    }
    /// Bytes of `n` weights with sane scales.
    fn weights(&mut self, dtype: DType, n: usize) -> Vec<u8> {
        let mut bytes = Vec::new();
        for _ in 0..n / dtype.block_len() {
            let start = bytes.len();
            bytes.extend((0..dtype.block_bytes()).map(|_| (self.next() * 128.0) as i8 as u8));
            let x = self.next();
            let head = match dtype {
                DType::F32 => x.to_le_bytes().to_vec(),
                DType::BF16 => half::bf16::from_f32(x).to_le_bytes().to_vec(),
                _ => f16::from_f32(x * 0.1).to_le_bytes().to_vec(),
            };
            let head_at = if dtype == DType::Q6K { start + 208 } else { start };
            bytes[head_at..head_at + head.len()].copy_from_slice(&head);
            if matches!(dtype, DType::Q4_1 | DType::Q4K | DType::Q5K) {
                bytes[start + 2..start + 4].copy_from_slice(&f16::from_f32(self.next()).to_le_bytes());
            }
        }
        bytes
    }
}

fn pool(n: usize) -> ThreadPool {
    ThreadPool::new(NonZeroUsize::new(n).unwrap())
}

fn quantized(isa: Isa, n_in: usize, plain: &[f32]) -> Vec<QuantBlock> {
    let mut blocks = vec![QuantBlock::default(); plain.len() / BLOCK_LEN];
    for (x, b) in plain.chunks(n_in).zip(blocks.chunks_mut(n_in / BLOCK_LEN)) {
        quantize(isa, x, b);
    }
    blocks
}

fn product(linear: &Linear, pool: &ThreadPool, isa: Isa, plain: &[f32]) -> Vec<f32> {
    let blocks = quantized(isa, linear.n_in(), plain);
    let mut out = vec![0.0; plain.len() / linear.n_in() * linear.n_out()];
    linear.forward(pool, isa, Input { plain, blocks: &blocks }, Write::Replace, &mut out);
    out
}

fn dequantized(source: &Source<'_>, n_in: usize) -> Vec<f32> {
    let mut out = vec![0.0; source.n_rows * n_in];
    quant::dequantize(source.dtype, source.bytes, &mut out).unwrap();
    out
}

/// Product of the plain weights with the activations as the layer sees them, in f64.
fn expected(
    linear: &Linear,
    dtype: DType,
    weights: &[f32],
    plain: &[f32],
    blocks: &[QuantBlock],
) -> Vec<f64> {
    let seen: Vec<f64> = if dtype.block_len() == 1 {
        plain.iter().map(|&x| f64::from(x)).collect()
    } else {
        let decode = |b: &QuantBlock| {
            b.words.map(|w| w.to_le_bytes().map(|q| f64::from(f32::from(q as i8) * b.scale)))
        };
        blocks.iter().flat_map(|b| decode(b).into_iter().flatten().collect::<Vec<_>>()).collect()
    };
    let dot = |x: &[f64], w: &[f32]| x.iter().zip(w).map(|(x, &w)| x * f64::from(w)).sum::<f64>();
    seen.chunks(linear.n_in())
        .flat_map(|x| weights.chunks(linear.n_in()).map(|w| dot(x, w)).collect::<Vec<_>>())
        .collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]
    #[test]
    fn equals_the_plain_product_whatever_the_shape(
        dtype_idx in 0..DTYPES.len(), n_rows in 1usize..70, n_blocks in 1usize..6, n_tokens in 1usize..20, seed: u64,
    ) {
        let dtype = DTYPES[dtype_idx];
        let n_in = n_blocks * BLOCK_LEN.max(dtype.block_len());
        let mut noise = Noise(seed);
        let bytes = noise.weights(dtype, n_rows * n_in);
        let source = Source { dtype, n_rows, bytes: &bytes };
        let plain = noise.values(n_tokens * n_in);
        let (one, three) = (pool(1), pool(3));
        let linear = Linear::pack(&[source], n_in, &three).unwrap();
        let weights = dequantized(&source, n_in);

        let reference = product(&linear, &one, Isa::PORTABLE, &plain);
        let blocks = quantized(Isa::PORTABLE, n_in, &plain);
        let exact = expected(&linear, dtype, &weights, &plain, &blocks);
        let bound = 1e-5 * exact.iter().fold(1.0, |m: f64, x| m.max(x.abs())) * n_blocks as f64;
        for (got, want) in reference.iter().zip(&exact) {
            prop_assert!((f64::from(*got) - want).abs() < bound, "{dtype:?}: {got} {want}");
        }
        for isa in Isa::available() {
            prop_assert_eq!(&product(&linear, &three, isa, &plain), &reference, "{:?} {:?}", isa, dtype);
            let alone: Vec<f32> = plain.chunks(n_in).flat_map(|x| product(&linear, &one, isa, x)).collect();
            prop_assert_eq!(&alone, &reference, "token by token, {:?} {:?}", isa, dtype);
        }
    }

    #[test]
    fn packing_loses_nothing(dtype_idx in 0..DTYPES.len(), n_rows in 1usize..40, n_blocks in 1usize..4, seed: u64) {
        let dtype = DTYPES[dtype_idx];
        let n_in = n_blocks * BLOCK_LEN.max(dtype.block_len());
        let bytes = Noise(seed).weights(dtype, n_rows * n_in);
        let source = Source { dtype, n_rows, bytes: &bytes };
        let linear = Linear::pack(&[source], n_in, &pool(1)).unwrap();
        let mut row = vec![0.0; n_in];
        for (i, want) in dequantized(&source, n_in).chunks(n_in).enumerate() {
            linear.row(i, &mut row);
            prop_assert_eq!(&row[..], want);
        }
    }
}

#[test]
fn stacked_sources_of_different_types_keep_their_rows() {
    let mut noise = Noise(7);
    let n_in = 256;
    let bytes: Vec<_> = DTYPES.iter().map(|&d| noise.weights(d, 21 * n_in)).collect();
    let sources: Vec<_> =
        DTYPES.iter().zip(&bytes).map(|(&dtype, bytes)| Source { dtype, n_rows: 21, bytes }).collect();
    let plain = noise.values(3 * n_in);
    let pool = pool(2);
    let all = product(&Linear::pack(&sources, n_in, &pool).unwrap(), &pool, Isa::detect(), &plain);
    for (i, source) in sources.iter().enumerate() {
        let linear = Linear::pack(std::slice::from_ref(source), n_in, &pool).unwrap();
        let alone = product(&linear, &pool, Isa::detect(), &plain);
        for token in 0..3 {
            let start = token * 21 * DTYPES.len() + i * 21;
            assert_eq!(all[start..start + 21], alone[token * 21..(token + 1) * 21], "{:?}", source.dtype);
        }
    }
}

#[test]
fn adds_to_the_old_output_when_asked() {
    let mut noise = Noise(3);
    let bytes = noise.weights(DType::Q4_1, 17 * 32);
    let pool = pool(2);
    let linear =
        Linear::pack(&[Source { dtype: DType::Q4_1, n_rows: 17, bytes: &bytes }], 32, &pool).unwrap();
    let plain = noise.values(32);
    let fresh = product(&linear, &pool, Isa::detect(), &plain);
    let old = noise.values(17);
    let mut sum = old.clone();
    let blocks = quantized(Isa::detect(), 32, &plain);
    linear.forward(&pool, Isa::detect(), Input { plain: &plain, blocks: &blocks }, Write::Add, &mut sum);
    assert_eq!(sum, fresh.iter().zip(&old).map(|(a, b)| a + b).collect::<Vec<_>>());
}

#[test]
fn refuses_rows_that_are_not_whole_blocks() {
    let source = Source { dtype: DType::F32, n_rows: 1, bytes: &[0; 132] };
    assert_eq!(Linear::pack(&[source], 33, &pool(1)).unwrap_err(), Error::Inputs(33));
    let source_of_256 = Source { dtype: DType::Q4K, n_rows: 2, bytes: &[0; 144] };
    let error = Linear::pack(&[source_of_256], 128, &pool(1)).unwrap_err();
    assert_eq!(error, Error::Blocks { dtype: DType::Q4K, n_in: 128 });
    let error = Linear::pack(&[source], 32, &pool(1)).unwrap_err();
    assert_eq!(error, Error::Quant(quant::Error::Length { dtype: DType::F32, elements: 32, bytes: 132 }));
}
