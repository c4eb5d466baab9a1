use proptest::prelude::*;

use super::*;

/// What the index should find, by trying every place.
fn by_hand(tokens: &[u32], suffix: &[u32]) -> usize {
    (0..tokens.len()).map(|at| common_suffix(&tokens[..=at], suffix)).max().unwrap_or(0)
}

#[test]
fn finds_the_longest_match_and_what_followed_it() {
    let mut recent = Recent::default();
    recent.add(&[9, 1, 2, 3, 40, 41]);
    recent.add(&[8, 1, 2, 3, 50, 51]);
    let (found, after) = recent.longest(&[7, 9, 1, 2, 3]).expect("a match");
    assert_eq!((found.len, after), (4, &[40, 41][..]), "the longer match wins over the newer one");
    let (found, after) = recent.longest(&[1, 2, 3]).expect("a match");
    assert_eq!((found.len, after), (3, &[50, 51][..]), "the newest of equals");
    assert_eq!(recent.longest(&[41, 8, 1]), None, "no match runs over the border of two outputs");
    assert_eq!(recent.longest(&[3, 40, 41]), None, "nothing followed");
}

#[test]
fn forgets_the_oldest_outputs() {
    let mut recent = Recent::default();
    recent.add(&[1, 2, 3, 4]);
    let long: Vec<u32> = (100..100 + Recent::HALF_TOKENS as u32 - 10).collect();
    recent.add(&long);
    recent.add(&long);
    assert!(recent.longest(&[1, 2, 3]).is_some());
    recent.add(&long);
    assert!(recent.longest(&[1, 2, 3]).is_none());
    let held: usize = recent.halves.iter().map(|half| half.tokens.len()).sum();
    assert!(held <= 2 * (Recent::HALF_TOKENS + 1), "{held} tokens held");
}

proptest! {
    #[test]
    fn agrees_with_a_search_by_hand_however_the_text_grows(
        tokens in prop::collection::vec(0u32..3, 4..80),
        cuts in prop::collection::vec(1usize..20, 1..10),
    ) {
        let mut index = SuffixIndex::default();
        let mut end = 0;
        for cut in cuts {
            end = (end + cut).min(tokens.len());
            index.extend(&tokens[..end], 1);
            let text = &tokens[..end];
            let wanted = by_hand(&text[..end - 1], text);
            let found = index.longest(text, text);
            if let Some(found) = found {
                prop_assert!(found.next < end, "the end itself is left out");
                prop_assert_eq!(common_suffix(&text[..found.next], text), found.len);
            }
            // The walk is bounded, so in a longer text it may miss some.
            if end <= MAX_CANDIDATES {
                prop_assert_eq!(found.map_or(0, |found| found.len), if wanted < MIN_MATCH { 0 } else { wanted });
            }
        }
    }
}
