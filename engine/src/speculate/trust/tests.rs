use super::*;

#[test]
fn longer_matches_and_surer_guesses_are_likelier() {
    let rates = Rates::default();
    let of_matches = [3, 4, 7, 20, 40].map(|n| rates.of(Evidence::of_match(n)));
    assert!(of_matches.is_sorted(), "{of_matches:?}");
    let of_guesses = [0.0, 0.05, 0.3, 0.7, 1.0].map(|p| rates.of(Evidence::of_guess(Source::Head, p)));
    assert!(of_guesses.is_sorted(), "{of_guesses:?}");
}

#[test]
fn a_conversation_that_fails_is_trusted_less_and_forgiven_later() {
    let (mut rates, mut trust) = (Rates::default(), Trust::default());
    let evidence = Evidence::of_match(5);
    let before = trust.chance(&rates, evidence);
    for _ in 0..20 {
        trust.learn(&mut rates, &[evidence; 3], 0);
    }
    let after = trust.chance(&rates, evidence);
    assert!(after < before / 3.0, "{before} -> {after}");
    assert!(trust.factor() < 1.0);
    (0..300).for_each(|_| trust.forgive());
    assert!(trust.factor() > 0.9, "{}", trust.factor());
}

#[test]
fn rates_follow_what_is_seen_and_only_what_was_tested() {
    let (mut rates, mut trust) = (Rates::default(), Trust::default());
    let (sure, unsure) = (Evidence::of_guess(Source::Head, 0.97), Evidence::of_guess(Source::Head, 0.15));
    let unseen = rates.of(unsure);
    for _ in 0..500 {
        trust.learn(&mut rates, &[sure, sure, unsure], 1);
    }
    let rate = rates.of(sure);
    assert!((0.45..0.55).contains(&rate), "one of two was right: {rate}");
    assert!((rates.of(unsure) - unseen).abs() < 1e-9, "never tested");
    assert!((rates.typical(Source::Head) - 0.5).abs() < 0.05);
}
