use proptest::prelude::*;

use super::*;

fn key() -> HashKey {
    HashKey::derive(&[1; 32], b"")
}

proptest! {
    #[test]
    fn a_log_of_segments_reads_like_one_list(
        segments in prop::collection::vec(prop::collection::vec(any::<u32>(), 0..40), 0..12),
        from in 0_usize..200,
    ) {
        let mut log = TokenLog::new(key());
        for ids in &segments {
            log.append(ids.clone(), Vec::new(), LogEnd::Message);
        }
        let all = segments.concat();
        let hashes = HashChain::new(key()).extend(&all);
        prop_assert_eq!(log.len(), all.len());
        prop_assert_eq!(log.ids_from(from), all[from.min(all.len())..].to_vec());
        prop_assert_eq!(log.hashes_from(from), hashes[from.min(hashes.len())..].to_vec());
        let cut = log.cut();
        prop_assert_eq!(cut.n_blocks, all.len().saturating_sub(1) / BLOCK_TOKENS);
        let expected = cut.n_blocks.checked_sub(1).map_or(BlockHash::ROOT, |idx| hashes[idx]);
        prop_assert_eq!(cut.parent, expected);
    }
}

#[test]
fn a_fork_shares_its_past_and_has_its_own_future() {
    let mut log = TokenLog::new(key());
    log.append(vec![1; 20], Vec::new(), LogEnd::Message);
    let mut fork = log.clone();
    log.append(vec![2; 4], Vec::new(), LogEnd::Message);
    fork.append(vec![3; 4], Vec::new(), LogEnd::Message);
    assert_eq!(log.ids_from(18), [1, 1, 2, 2, 2, 2]);
    assert_eq!(fork.ids_from(18), [1, 1, 3, 3, 3, 3]);
}

#[test]
fn a_very_long_conversation_is_dropped_without_recursion() {
    let mut log = TokenLog::new(key());
    for _ in 0..200_000 {
        log.append(vec![1], Vec::new(), LogEnd::Message);
    }
    drop(log);
}
