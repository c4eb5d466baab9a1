use super::*;

/// Feeds `pieces` as tokens 0, 1, 2, ...; what follows the triggers that end in each.
fn check(triggers: &[Trigger], pieces: &[&str], wanted: &[&[&str]]) {
    let mut tail = Tail::default();
    for ((token, piece), wanted) in (0..).zip(pieces).zip(wanted) {
        let rests = tail.push(token, piece.as_bytes(), triggers);
        let wanted: Vec<&[u8]> = wanted.iter().map(|rest| rest.as_bytes()).collect();
        assert_eq!(rests, wanted, "{piece} of {pieces:?}");
    }
}

#[test]
fn texts_are_found_across_tokens_and_with_what_follows_them() {
    let call = [Trigger::Text(b"<call>".to_vec())];
    check(&call, &["a <ca", "ll", ">"], &[&[], &[], &[""]]);
    check(&call, &["<call", "<call>{\""], &[&[], &["{\""]]);
    check(&call, &["<call><call>x"], &[&["<call>x", "x"]]);
    check(&call, &["<", "c", "a", "l", "l", ">", ">"], &[&[], &[], &[], &[], &[], &[""], &[]]);
    check(&call, &["<cal", "", "l> "], &[&[], &[], &[" "]]);
}

#[test]
fn tokens_are_found_by_their_ids_and_several_triggers_side_by_side() {
    let triggers = [Trigger::Token(1), Trigger::Text(b"ab".to_vec()), Trigger::Text(b"b".to_vec())];
    check(&triggers, &["a", "x", "a", "bb"], &[&[], &[""], &[], &["b", ""]]);
}
