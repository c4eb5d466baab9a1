use std::time::Duration;

use super::*;

/// 10 ms for one token, and `dearer_us` for each more.
fn costs(dearer_us: u64) -> StepCosts {
    let mut costs = StepCosts::default();
    let of = |n: usize| Duration::from_micros(10_000 + dearer_us * (n as u64 - 1));
    costs.set(&StepCosts::widths().map(of).collect::<Vec<_>>());
    costs
}

const ALONE: Base = Base { n_tokens: 1, n_streams: 1 };

#[test]
fn checks_as_much_as_pays() {
    let draft = vec![vec![0.9, 0.8, 0.5, 0.1, 0.1]];
    assert_eq!(choose(&costs(100), ALONE, &draft, 32), [4], "wider steps cost almost nothing");
    assert_eq!(choose(&costs(1_500), ALONE, &draft, 32), [3], "the doubtful end does not pay");
    assert_eq!(choose(&costs(100), ALONE, &draft, 2), [2], "the limit holds");
    assert_eq!(choose(&costs(12_000), ALONE, &draft, 32), [0], "a step twice as long for 0.9 tokens");
    assert_eq!(choose(&costs(100), ALONE, &[], 32), [0; 0]);
}

#[test]
fn spends_the_width_on_the_surer_drafts() {
    let base = Base { n_tokens: 2, n_streams: 2 };
    let drafts = vec![vec![0.2, 0.2], vec![0.95, 0.95, 0.95]];
    assert_eq!(choose(&costs(2_500), base, &drafts, 32), [0, 3]);
}

#[test]
fn switches_itself_off_in_wide_batches() {
    let base = Base { n_tokens: 16, n_streams: 16 };
    let drafts = vec![vec![0.45]; 16];
    assert_eq!(choose(&costs(1_000), base, &drafts, 32), [0; 16]);
    assert!(!base.pays(&costs(1_000), 0, 0.45, 0.0));
    assert!(ALONE.pays(&costs(1_000), 0, 0.45, 0.000_2));
}

#[test]
fn a_lumpy_cost_is_crossed_when_the_far_side_pays() {
    let mut costs = StepCosts::default();
    // The second token costs a lot, the third to eighth nothing.
    let ms = |ms| Duration::from_millis(ms);
    costs.set(&[ms(10), ms(20), ms(20), ms(20), ms(20), ms(20)]);
    let draft = vec![vec![0.95; 7]];
    assert_eq!(choose(&costs, ALONE, &draft, 32), [7]);
}
