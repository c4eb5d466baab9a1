use super::{Text, prose};

#[test]
fn the_same_seed_gives_the_same_text() {
    assert_eq!(Text::words(7, 100).render(), Text::words(7, 100).render());
    assert_ne!(Text::words(7, 100).render(), Text::words(8, 100).render());
}

#[test]
fn shorter_text_is_a_prefix_of_longer_text() {
    let long = Text::words(3, 512).render();
    for n in [0, 1, 13, 14, 15, 200, 511] {
        assert!(long.starts_with(&Text::words(3, n).render()), "{n} units");
    }
}

#[test]
fn the_sequence_never_changes() {
    // Traces replayed today and next year must ask for the same text.
    assert_eq!(Text::words(1, 6).render(), "note was same as column file");
}

#[test]
fn pieces_are_rendered_one_after_the_other() {
    let mut text = Text::given("a: ");
    text.extend(&Text::words(1, 2));
    text.extend(&Text::given("!"));
    assert_eq!(text.render(), format!("a: {}!", Text::words(1, 2).render()));
    assert!(!text.is_empty() && Text::default().is_empty() && Text::words(9, 0).is_empty());
}

#[test]
fn prose_has_the_length_asked_for() {
    for n in [0, 1, 1024, 32 << 10] {
        assert_eq!(prose(5, n).len(), n);
    }
}
