use super::*;

const PARAMS: SamplingParams = SamplingParams { seed: 42, temperature: 1.0, ..SamplingParams::GREEDY };

/// How often each token came up in 40000 draws at consecutive positions.
fn frequencies(logits: &[f32], params: &SamplingParams) -> Vec<f64> {
    let (mut sampler, mut counts) = (Sampler::default(), vec![0.0; logits.len()]);
    for position in 0..40_000 {
        counts[sampler.sample(logits, params, position) as usize] += 1.0 / 40_000.0;
    }
    counts
}

/// Compares with the wanted distribution; 0.01 is more than four standard deviations.
fn check(params: &SamplingParams, wanted: [f64; 5]) {
    let logits = [0.4f32, 0.3, 0.15, 0.1, 0.05].map(f32::ln);
    for (got, want) in frequencies(&logits, params).iter().zip(wanted) {
        assert!((got - want).abs() < 0.011 && (want > 0.0 || *got == 0.0), "{got} {want} {params:?}");
    }
}

#[test]
fn draws_follow_the_distribution() {
    let top_k = NonZeroU32::new(2);
    check(&PARAMS, [0.4, 0.3, 0.15, 0.1, 0.05]);
    check(&SamplingParams { top_k, ..PARAMS }, [4.0 / 7.0, 3.0 / 7.0, 0.0, 0.0, 0.0]);
    check(&SamplingParams { top_p: 0.8, ..PARAMS }, [8.0 / 17.0, 6.0 / 17.0, 3.0 / 17.0, 0.0, 0.0]);
    check(&SamplingParams { top_p: 0.0, ..PARAMS }, [1.0, 0.0, 0.0, 0.0, 0.0]);
    // Top-p counts within the survivors of top-k: 0.4 / 0.7 reaches one half.
    check(&SamplingParams { top_k, top_p: 0.5, ..PARAMS }, [1.0, 0.0, 0.0, 0.0, 0.0]);
    let squares = [0.16, 0.09, 0.0225, 0.01, 0.0025];
    check(&SamplingParams { temperature: 0.5, ..PARAMS }, squares.map(|w| w / squares.iter().sum::<f64>()));
    check(&SamplingParams { temperature: 0.0, ..PARAMS }, [1.0, 0.0, 0.0, 0.0, 0.0]);
}

#[test]
fn top_p_reaches_far_into_a_flat_distribution() {
    let logits = vec![0.0; 5000];
    let params = SamplingParams { top_p: 0.5, ..PARAMS };
    let kept = likeliest(&[1.0 / 4096.0; 4096], 4096, 0.5);
    assert_eq!(kept, (0..2048).collect::<Vec<_>>());
    let mut sampler = Sampler::default();
    assert!((0..1000).all(|position| sampler.sample(&logits, &params, position) < 2500 + 1));
}

#[test]
fn a_draw_depends_on_seed_and_position_only() {
    let logits: Vec<f32> = (0..100).map(|i| (i as f32).sin()).collect();
    let stream = |seed, positions: std::ops::Range<u64>| -> Vec<u32> {
        let mut sampler = Sampler::default();
        positions.map(|p| sampler.sample(&logits, &SamplingParams { seed, ..PARAMS }, p)).collect()
    };
    assert_eq!(stream(1, 0..50)[20..], stream(1, 20..50));
    assert_ne!(stream(1, 0..50), stream(2, 0..50));
}

#[test]
fn greedy_takes_the_lowest_id_of_equals() {
    let mut sampler = Sampler::default();
    assert_eq!(sampler.sample(&[f32::NAN, 1.0, 3.0, 3.0], &SamplingParams::GREEDY, 0), 2);
    assert_eq!(sampler.sample(&[0.0; 4], &SamplingParams::GREEDY, 0), 0);
}

#[test]
fn impossible_logits_still_give_a_token() {
    let mut sampler = Sampler::default();
    let top_k = NonZeroU32::new(2);
    for params in [PARAMS, SamplingParams { top_k, ..PARAMS }, SamplingParams { top_p: 0.5, ..PARAMS }] {
        assert_eq!(sampler.sample(&[0.0, f32::INFINITY, 1.0], &params, 0), 1);
        assert!(sampler.sample(&[f32::NEG_INFINITY; 3], &params, 0) < 3);
        assert_eq!(sampler.sample(&[f32::NAN, 2.0, f32::NEG_INFINITY], &params, 0), 1);
    }
}

#[test]
fn uniform_numbers_fill_the_unit_interval_evenly() {
    let mut buckets = [0; 10];
    (0..10_000).for_each(|position| buckets[(uniform(7, position) * 10.0) as usize] += 1);
    assert!(buckets.iter().all(|n| (880..1120).contains(n)), "{buckets:?}");
}

fn mask(n_tokens: usize, ids: &[u32]) -> Mask {
    let mut mask = Mask::none(n_tokens);
    ids.iter().for_each(|&id| mask.allow(id));
    mask
}

#[test]
fn masked_draws_follow_the_distribution_of_the_allowed() {
    let logits = [0.4f32, 0.3, 0.15, 0.1, 0.05].map(f32::ln);
    let check = |params: &SamplingParams, ids: &[u32], wanted: [f64; 5]| {
        let (mut sampler, mut counts) = (Sampler::default(), [0.0; 5]);
        let mask = mask(5, ids);
        for position in 0..40_000 {
            counts[sampler.sample_allowed(&logits, &mask, params, position) as usize] += 1.0 / 40_000.0;
        }
        for (got, want) in counts.iter().zip(wanted) {
            assert!(
                (got - want).abs() < 0.011 && (want > 0.0 || *got == 0.0),
                "{counts:?} {ids:?} {params:?}"
            );
        }
    };
    let top_k = NonZeroU32::new(2);
    check(&PARAMS, &[0, 1, 2, 3, 4], [0.4, 0.3, 0.15, 0.1, 0.05]);
    check(&PARAMS, &[1, 3], [0.0, 0.75, 0.0, 0.25, 0.0]);
    check(&PARAMS, &[2, 3, 4], [0.0, 0.0, 0.5, 1.0 / 3.0, 1.0 / 6.0]);
    check(&SamplingParams { top_k, ..PARAMS }, &[2, 3, 4], [0.0, 0.0, 0.6, 0.4, 0.0]);
    check(&SamplingParams { top_p: 0.7, ..PARAMS }, &[2, 3, 4], [0.0, 0.0, 0.6, 0.4, 0.0]);
    check(&SamplingParams::GREEDY, &[2, 3, 4], [0.0, 0.0, 1.0, 0.0, 0.0]);
    check(&PARAMS, &[4], [0.0, 0.0, 0.0, 0.0, 1.0]);
}

#[test]
fn a_mask_may_be_longer_or_shorter_than_the_logits() {
    let logits: Vec<f32> = (0..100).map(|i| i as f32).collect();
    let greedy = |n_tokens, ids: &[u32]| {
        Sampler::default().sample_allowed(&logits, &mask(n_tokens, ids), &SamplingParams::GREEDY, 0)
    };
    assert_eq!(greedy(70, &[3, 69]), 69);
    assert_eq!(greedy(300, &[3, 99, 299]), 99);
    let all: Vec<u32> = (0..100).collect();
    assert_eq!(greedy(100, &all), 99);
    // What the sampler cannot choose by logits it still chooses from the mask.
    let impossible = [f32::NAN, f32::NEG_INFINITY, 5.0, f32::NEG_INFINITY];
    let token = Sampler::default().sample_allowed(&impossible, &mask(4, &[1, 3]), &PARAMS, 0);
    assert_eq!(token, 1);
}

#[test]
fn log_probabilities_are_those_of_the_row_best_first() {
    let logits = [0.1f32, 0.4, f32::NAN, 0.1, 0.4].map(f32::ln);
    let found = Sampler::default().logprobs(&logits, 0, 3);
    let close = |got: f32, want: f32| (got - want.ln()).abs() < 1e-6;
    assert!(close(found.logprob, 0.1));
    assert_eq!(found.top.iter().map(|(id, _)| *id).collect::<Vec<_>>(), [1, 4, 0]);
    assert!(found.top.iter().zip([0.4, 0.4, 0.1]).all(|((_, got), want)| close(*got, want)));
    assert!(Sampler::default().logprobs(&logits, 0, 0).top.is_empty());
    assert_eq!(Sampler::default().logprobs(&logits, 0, 20).top.len(), 4);
}
