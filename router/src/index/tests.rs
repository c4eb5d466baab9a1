use std::collections::{HashMap as Map, HashSet};

use kv::hash::{HashChain, HashKey};
use proptest::prelude::*;

use super::*;

fn chain(seeds: &[u32]) -> Vec<BlockHash> {
    let mut chain = HashChain::new(HashKey::derive(&[0; 32], b""));
    seeds.iter().flat_map(|&seed| chain.extend(&[seed; 16])).collect()
}

fn store_all(index: &mut Index, worker: WorkerIdx, hashes: &[BlockHash]) {
    let mut parent = BlockHash::ROOT;
    for &hash in hashes {
        index.store(worker, hash, parent);
        parent = hash;
    }
}

const A: WorkerIdx = WorkerIdx(0);
const B: WorkerIdx = WorkerIdx(1);

#[test]
fn finds_the_longest_prefix_of_each_worker_from_the_tail_alone() {
    let mut index = Index::default();
    let hashes = chain(&[1, 2, 3, 4]);
    store_all(&mut index, A, &hashes[..4]);
    store_all(&mut index, B, &hashes[..2]);
    let whole = Chain { parent: BlockHash::ROOT, hashes: &hashes };
    assert_eq!(index.held(whole, &[A, B]), Ok(vec![4, 2]));
    let tail = Chain { parent: hashes[2], hashes: &hashes[3..] };
    assert_eq!(index.held(tail, &[A, B]), Ok(vec![4, 2]));
    index.forget(A);
    assert_eq!(index.held(tail, &[A, B]), Err(ChainUnknown));
    assert_eq!(index.held(whole, &[A, B]), Ok(vec![0, 2]));
}

proptest! {
    #[test]
    fn the_index_equals_a_plain_list_of_what_each_worker_holds(
        steps in prop::collection::vec((0_u64..3, prop::collection::vec(0_u32..3, 1..5), any::<bool>()), 1..60),
        prompt in prop::collection::vec(0_u32..3, 1..6),
    ) {
        let mut index = Index::default();
        let mut plain: Map<WorkerIdx, HashSet<BlockHash>> = Map::new();
        for (worker, seeds, store) in steps {
            let worker = WorkerIdx(worker);
            let hashes = chain(&seeds);
            let held = plain.entry(worker).or_default();
            if store {
                store_all(&mut index, worker, &hashes);
                held.extend(&hashes);
            } else if let Some(last) = hashes.iter().rev().find(|hash| held.contains(hash)) {
                // Leaves go first: only remove a block that nobody continues at this worker.
                let continued = chain_children(held, &hashes, last);
                if !continued {
                    index.remove(worker, last);
                    held.remove(last);
                }
            }
        }
        let workers = [WorkerIdx(0), WorkerIdx(1), WorkerIdx(2)];
        let hashes = chain(&prompt);
        let expected: Vec<usize> = workers
            .iter()
            .map(|worker| hashes.iter().take_while(|hash| plain.get(worker).is_some_and(|held| held.contains(hash))).count())
            .collect();
        prop_assert_eq!(index.held(Chain { parent: BlockHash::ROOT, hashes: &hashes }, &workers), Ok(expected));
    }
}

/// True when any one-block continuation of `last` is held.
fn chain_children(held: &HashSet<BlockHash>, hashes: &[BlockHash], last: &BlockHash) -> bool {
    let n_blocks = hashes.iter().position(|hash| hash == last).map_or(0, |idx| idx + 1);
    let key = HashKey::derive(&[0; 32], b"");
    (0_u32..3).any(|seed| held.contains(&HashChain::after(key, *last, n_blocks).extend(&[seed; 16])[0]))
}
