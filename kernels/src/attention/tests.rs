use std::num::NonZeroUsize;

use half::f16;
use proptest::prelude::*;

use super::*;

/// A score is a sum of up to 64 products of magnitude up to 4, of which f32 keeps 24 bits: some 1e-5 are lost, and a
/// weight's relative error is its score's absolute one. Values reach 2, and the errors of many weights add up at random.
const TOLERANCE: f64 = 1e-4;

const DTYPES: [KvDtype; 2] = [KvDtype::F16, KvDtype::I8];

/// Sequences with full histories in shuffled blocks of one arena.
struct Scene {
    heads: Heads,
    place: LayerPlace,
    /// Tokens before the batch, and in it, per sequence.
    lengths: Vec<(usize, usize)>,
    tables: Vec<Vec<u32>>,
    /// `[token][row_len]` per sequence, history included.
    rows: Vec<Vec<f32>>,
    kv: Vec<u16>,
}

impl Scene {
    fn new(dtype: KvDtype, heads: Heads, lengths: Vec<(usize, usize)>, seed: u64) -> Self {
        let mut state = seed;
        let mut noise = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 40) as f32 / (1 << 23) as f32 - 1.0
        };
        let block_len = heads.block_len(dtype);
        let place = LayerPlace { dtype, block_stride: 3 * block_len, layer_start: block_len };
        let n_blocks = |&(past, new): &(usize, usize)| (past + new).div_ceil(BLOCK_TOKENS);
        let total: usize = lengths.iter().map(n_blocks).sum();
        let mut free: Vec<u32> = (0..total as u32).collect();
        free.sort_by_key(|b| b.wrapping_mul(0x9E37_79B9));
        let tables = lengths.iter().map(|l| free.split_off(free.len() - n_blocks(l))).collect();
        let rows = lengths
            .iter()
            .map(|(past, new)| (0..(past + new) * heads.row_len()).map(|_| 2.0 * noise()).collect());
        let rows: Vec<Vec<f32>> = rows.collect();
        // Garbage where nothing was stored yet must not matter.
        let kv = vec![0x7FC1; total * place.block_stride];
        let mut scene = Self { heads, place, lengths, tables, rows, kv };
        let pool = ThreadPool::new(NonZeroUsize::new(2).unwrap());
        for seq in 0..scene.lengths.len() {
            let n_tokens = scene.lengths[seq].0 + scene.lengths[seq].1;
            let spans = [Span { rows: 0..n_tokens, start: 0, blocks: &scene.tables[seq] }];
            let mut kv = std::mem::take(&mut scene.kv);
            Attention { heads, place, spans: &spans, qkv: &scene.rows[seq] }.store(
                &pool,
                Isa::detect(),
                &mut kv,
            );
            scene.kv = kv;
        }
        scene
    }

    /// One call for all sequences.
    fn together(&self, n_threads: usize, isa: Isa) -> Vec<f32> {
        let (mut spans, mut qkv) = (Vec::new(), Vec::new());
        let mut n_rows = 0;
        for (seq, &(past, new)) in self.lengths.iter().enumerate() {
            spans.push(Span { rows: n_rows..n_rows + new, start: past, blocks: &self.tables[seq] });
            qkv.extend_from_slice(&self.rows[seq][past * self.heads.row_len()..]);
            n_rows += new;
        }
        self.run(n_threads, isa, &spans, &qkv)
    }

    /// One call per token.
    fn one_by_one(&self, isa: Isa) -> Vec<f32> {
        let mut out = Vec::new();
        for (seq, &(past, new)) in self.lengths.iter().enumerate() {
            for position in past..past + new {
                let span = Span { rows: 0..1, start: position, blocks: &self.tables[seq] };
                let row = &self.rows[seq][position * self.heads.row_len()..][..self.heads.row_len()];
                out.extend(self.run(1, isa, &[span], row));
            }
        }
        out
    }

    fn run(&self, n_threads: usize, isa: Isa, spans: &[Span<'_>], qkv: &[f32]) -> Vec<f32> {
        let pool = ThreadPool::new(NonZeroUsize::new(n_threads).unwrap());
        let n_tokens = qkv.len() / self.heads.row_len();
        let mut out = vec![f32::NAN; n_tokens * self.heads.n_heads * self.heads.head_dim];
        Attention { heads: self.heads, place: self.place, spans, qkv }.run(&pool, isa, &self.kv, &mut out);
        out
    }

    /// Softmax attention by the book, in f64, with keys and values rounded as they are stored.
    fn expected(&self) -> Vec<f64> {
        let Heads { n_heads, n_kv_heads, head_dim } = self.heads;
        let mut out = Vec::new();
        for (rows, &(past, new)) in self.rows.iter().zip(&self.lengths) {
            let at = |token: usize, head: usize| {
                &rows[token * self.heads.row_len() + head * head_dim..][..head_dim]
            };
            for (token, head) in (past..past + new).flat_map(|t| (0..n_heads).map(move |h| (t, h))) {
                let kv_head = head / (n_heads / n_kv_heads);
                let score = |t: usize| {
                    let key = self.rounded(at(t, n_heads + kv_head));
                    at(token, head).iter().zip(key).map(|(&q, k)| f64::from(q) * k).sum::<f64>()
                };
                let scores: Vec<f64> = (0..=token).map(score).collect();
                let peak = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let sum: f64 = scores.iter().map(|s| (s - peak).exp()).sum();
                let mut mixed = vec![0.0; head_dim];
                for (t, score) in scores.iter().enumerate() {
                    let value = self.rounded(at(t, n_heads + n_kv_heads + kv_head));
                    let weight = (score - peak).exp() / sum;
                    mixed.iter_mut().zip(value).for_each(|(m, v)| *m += weight * v);
                }
                out.extend(mixed);
            }
        }
        out
    }

    /// A key or value vector as it is stored.
    fn rounded(&self, x: &[f32]) -> Vec<f64> {
        match self.place.dtype {
            KvDtype::F16 => x.iter().map(|&x| f16::from_f32(x).to_f64()).collect(),
            KvDtype::I8 => {
                let peak = x.iter().fold(0f32, |m, x| m.max(x.abs()));
                let bits = (peak / 127.0).to_bits();
                let scale = f32::from_bits((bits + 0xFFFF) & 0xFFFF_0000);
                let round = |&x: &f32| f64::from((x * (1.0 / scale)).round_ties_even() * scale);
                let rounded: Vec<f64> = x.iter().map(round).collect();
                for (x, r) in x.iter().zip(&rounded) {
                    assert!((f64::from(*x) - r).abs() <= f64::from(peak) / 250.0, "{x} {r} of {peak}");
                }
                rounded
            }
        }
    }

    fn check(&self) {
        let reference = self.together(1, Isa::PORTABLE);
        for (got, want) in reference.iter().zip(self.expected()) {
            assert!(
                (f64::from(*got) - want).abs() < TOLERANCE,
                "{got} {want}, {:?} {:?}",
                self.heads,
                self.lengths
            );
        }
        for isa in Isa::available() {
            assert_eq!(
                self.together(3, isa),
                reference,
                "together, {isa:?} {:?} {:?}",
                self.heads,
                self.lengths
            );
            assert_eq!(
                self.one_by_one(isa),
                reference,
                "one by one, {isa:?} {:?} {:?}",
                self.heads,
                self.lengths
            );
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]
    #[test]
    fn equals_the_book_whatever_the_shape_and_the_batch(
        n_kv_heads in 1usize..4,
        group in 1usize..8,
        vectors in 1usize..5,
        lengths in proptest::collection::vec((0usize..70, 1usize..20), 1..4),
        dtype_idx in 0..2usize,
        seed: u64,
    ) {
        let heads = Heads { n_heads: n_kv_heads * group, n_kv_heads, head_dim: vectors * LANES };
        Scene::new(DTYPES[dtype_idx], heads, lengths, seed).check();
    }
}

#[test]
fn long_histories_cross_segments() {
    let heads = Heads { n_heads: 3, n_kv_heads: 1, head_dim: 32 };
    for dtype in DTYPES {
        Scene::new(dtype, heads, vec![(505, 15), (1040, 3), (0, 14)], 5).check();
    }
}

#[test]
fn more_query_heads_per_key_than_a_pass_holds() {
    let heads = Heads { n_heads: 17, n_kv_heads: 1, head_dim: 16 };
    Scene::new(KvDtype::F16, heads, vec![(20, 3)], 9).check();
}

#[test]
fn cuts_keys_and_values_to_the_range_of_f16() {
    let heads = Heads { n_heads: 1, n_kv_heads: 1, head_dim: 16 };
    let qkv = [[0.0; 16], [1e9; 16], [-1e9; 16]].concat();
    let pool = ThreadPool::new(NonZeroUsize::MIN);
    let stored = |dtype, isa| {
        let place = LayerPlace { dtype, block_stride: heads.block_len(dtype), layer_start: 0 };
        let mut kv = vec![0; heads.block_len(dtype)];
        let spans = [Span { rows: 0..1, start: 3, blocks: &[0] }];
        Attention { heads, place, spans: &spans, qkv: &qkv }.store(&pool, isa, &mut kv);
        kv
    };
    let (max, min) = (f16::MAX.to_bits(), f16::MIN.to_bits());
    for isa in Isa::available() {
        let kv = stored(KvDtype::F16, isa);
        assert!((0..16).all(|d| kv[d * 16 + 3] == max && kv[256 + 3 * 16 + d] == min), "{isa:?}");
        assert_eq!(kv.iter().filter(|x| **x != 0).count(), 32, "{isa:?}");
        let kv = stored(KvDtype::I8, isa);
        let (keys, values) = kv.split_at(kv.len() / 2);
        let scale = half::bf16::from_bits(keys[128 + 3]).to_f32();
        assert!((0..16).all(|d| keys[d * 8 + 1] == 127 << 8), "{isa:?}");
        assert!(values[3 * 8..4 * 8].iter().all(|&pair| pair == 0x8181), "{isa:?}");
        assert!((f16::MAX.to_f32()..66_000.0).contains(&(scale * 127.0)), "{scale} {isa:?}");
        assert_eq!(kv.iter().filter(|x| **x != 0).count(), 16 + 8 + 2, "{isa:?}");
    }
}
