use super::*;

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

fn measured() -> StepCosts {
    let mut costs = StepCosts::default();
    costs.set(&[ms(10), ms(11), ms(12), ms(13), ms(15), ms(17)]);
    costs
}

#[test]
fn interpolates_between_widths_and_extrapolates_beyond() {
    let costs = measured();
    for (n_tokens, seconds) in [(1, 0.010), (4, 0.013), (5, 0.014), (8, 0.017), (15, 0.024), (200, 0.209)] {
        assert!((costs.of(n_tokens) - seconds).abs() < 1e-6, "{n_tokens} tokens: {}", costs.of(n_tokens));
    }
}

#[test]
fn follows_a_machine_that_becomes_slower_and_one_width_that_is_dearer() {
    let mut costs = measured();
    for _ in 0..200 {
        costs.observe(1, ms(20));
    }
    assert!((costs.of(1) - 0.020).abs() < 0.001, "the level follows: {}", costs.of(1));
    assert!(costs.of(4) > costs.of(1), "dearer steps stay dearer");
    for _ in 0..400 {
        costs.observe(1, ms(20));
        costs.observe(4, ms(40));
    }
    let ratio = costs.of(4) / costs.of(1);
    assert!((1.7..2.1).contains(&ratio), "the shape follows: {ratio}");
}

#[test]
fn a_slow_phase_leaves_nothing_behind() {
    let mut costs = measured();
    for took in [30, 10] {
        for _ in 0..400 {
            costs.observe(1, ms(took));
        }
    }
    for (n_tokens, seconds) in [(1, 0.010), (2, 0.011), (4, 0.013), (8, 0.017)] {
        assert!(
            (costs.of(n_tokens) / seconds - 1.0).abs() < 0.05,
            "{n_tokens} tokens: {}",
            costs.of(n_tokens)
        );
    }
}

#[test]
fn a_disturbed_step_changes_little() {
    let mut costs = measured();
    costs.observe(1, Duration::from_secs(5));
    assert!(costs.of(1) < 0.0115, "{}", costs.of(1));
}

#[test]
fn says_how_much_prefill_fits_beside_a_stream() {
    let costs = measured();
    assert_eq!(costs.room_within(1, 2.0, 64), 10, "11 tokens take 20 ms, twice a step of one");
    assert_eq!(costs.room_within(1, 2.0, 4), 4, "the limit holds");
    assert_eq!(costs.room_within(1, 1.0, 64), 0);
}
