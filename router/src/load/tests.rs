use super::*;

#[test]
fn a_routed_turn_counts_until_it_is_reported_or_its_lease_ends() {
    let (now, lease) = (Instant::now(), Duration::from_secs(1));
    let mut view = LoadView::default();
    view.predict(7, 100, now, lease);
    view.predict(8, 50, now, lease);
    assert_eq!((view.queued_tokens(now), view.turns(now)), (150, 2));
    view.report(v1::Load {
        queued_prefill_tokens: 100,
        admitted_turns: vec![7],
        running_sequences: 1,
        ..Default::default()
    });
    assert_eq!((view.queued_tokens(now), view.turns(now)), (150, 2));
    let later = now + lease;
    assert_eq!((view.queued_tokens(later), view.turns(later)), (100, 1));
}

#[test]
fn rates_follow_what_the_worker_reports() {
    let mut view = LoadView::default();
    for n in 1..=20 {
        view.report(v1::Load {
            prefill_tokens_total: n * 100,
            prefill_busy_us_total: n * 50_000,
            ..Default::default()
        });
    }
    let us = view.us_per_token().expect("it has shown its speed");
    assert!((us - 500.0).abs() < 1.0, "{us}");
}
