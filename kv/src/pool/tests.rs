use std::collections::{BTreeMap, HashSet};

use proptest::prelude::*;

use super::*;
use crate::hash::{HashChain, HashKey};

/// A chain of `n` blocks whose tokens depend on `seed`; chains with equal seeds share a prefix.
fn chain(seeds: &[u32]) -> Vec<(BlockHash, BlockHash, [u32; BLOCK_TOKENS])> {
    let mut hashes = HashChain::new(HashKey::derive(&[0; 32], b""));
    let mut parent = BlockHash::ROOT;
    seeds
        .iter()
        .map(|&seed| {
            let tokens = [seed; BLOCK_TOKENS];
            let hash = hashes.extend(&tokens)[0];
            (hash, std::mem::replace(&mut parent, hash), tokens)
        })
        .collect()
}

/// Stores a chain as a finished sequence would: reuse what is held, compute and seal the rest, keep the users.
fn store(pool: &mut BlockPool, seeds: &[u32]) -> Result<Vec<BlockId>, Exhausted> {
    let blocks = chain(seeds);
    let hashes: Vec<BlockHash> = blocks.iter().map(|block| block.0).collect();
    let mut table = pool.acquire_prefix(&hashes);
    let fresh = match pool.allocate(blocks.len() - table.len()) {
        Ok(fresh) => fresh,
        Err(error) => {
            table.into_iter().for_each(|id| pool.release(id));
            return Err(error);
        }
    };
    for id in fresh {
        let (hash, parent, tokens) = blocks[table.len()];
        table.push(pool.seal(id, hash, parent, tokens));
    }
    Ok(table)
}

fn release_all(pool: &mut BlockPool, table: &[BlockId]) {
    table.iter().for_each(|&id| pool.release(id));
}

#[test]
fn conversations_share_a_prefix_and_a_fork_copies_nothing() {
    let mut pool = BlockPool::new(8);
    let first = store(&mut pool, &[1, 2, 3]).expect("room");
    let second = store(&mut pool, &[1, 2, 9]).expect("room");
    assert_eq!(first[..2], second[..2]);
    assert_eq!(pool.available(), 4);
    let fork = first.clone();
    fork.iter().for_each(|&id| pool.retain(id));
    assert_eq!(pool.available(), 4);
    release_all(&mut pool, &first);
    release_all(&mut pool, &second);
    assert_eq!(pool.available(), 5);
    release_all(&mut pool, &fork);
    assert_eq!(pool.available(), 8);
}

#[test]
fn evicts_the_least_recently_used_leaf_first_and_never_a_parent() {
    let mut pool = BlockPool::new(4);
    let old = store(&mut pool, &[1, 2]).expect("room");
    let young = store(&mut pool, &[5, 6]).expect("room");
    release_all(&mut pool, &old);
    release_all(&mut pool, &young);
    pool.take_changes();
    let taken = pool.allocate(1).expect("one can be evicted");
    assert_eq!(pool.take_changes(), [Change::Removed { hash: chain(&[1, 2])[1].0 }]);
    release_all(&mut pool, &taken);
    assert_eq!(pool.held_prefix(&[chain(&[1])[0].0]), 1);
}

#[test]
fn what_is_in_use_is_never_evicted() {
    let mut pool = BlockPool::new(3);
    let used = store(&mut pool, &[1, 2]).expect("room");
    assert_eq!(pool.allocate(2), Err(Exhausted { wanted: 2, available: 1 }));
    assert_eq!(pool.held_prefix(&[chain(&[1])[0].0]), 1);
    release_all(&mut pool, &used);
    assert!(pool.allocate(3).is_ok());
}

#[test]
fn the_end_of_a_chain_in_use_keeps_its_beginning_and_leaves_the_rest_to_be_evicted() {
    let mut pool = BlockPool::new(6);
    let chain = store(&mut pool, &[1, 2, 3, 4]).expect("room");
    let suffix = chain[2..].to_vec();
    suffix.iter().for_each(|&id| pool.retain(id));
    release_all(&mut pool, &chain);
    assert_eq!(pool.available(), 2);
    assert_eq!(pool.allocate(3), Err(Exhausted { wanted: 3, available: 2 }));
    release_all(&mut pool, &suffix);
    assert_eq!(pool.available(), 6);
    assert!(pool.allocate(6).is_ok());
}

#[test]
fn sealing_a_name_that_is_held_hands_back_the_twin() {
    let mut pool = BlockPool::new(4);
    let first = store(&mut pool, &[1]).expect("room");
    let (hash, parent, tokens) = chain(&[1])[0];
    let private = pool.allocate(1).expect("room")[0];
    assert_eq!(pool.seal(private, hash, parent, tokens), first[0]);
    assert_eq!(pool.available(), 3);
}

#[test]
fn a_hash_leads_back_to_its_tokens() {
    let mut pool = BlockPool::new(4);
    store(&mut pool, &[1, 2]).expect("room");
    let blocks = chain(&[1, 2]);
    let expected: Vec<u32> = [[1; 16], [2; 16]].concat();
    assert_eq!(pool.tokens_of(&blocks[1].0), Some(expected));
    assert_eq!(pool.hashes_of(&blocks[1].0), Some(vec![blocks[0].0, blocks[1].0]));
    assert_eq!(pool.tokens_of(&chain(&[7])[0].0), None);
}

/// Checks every invariant from the outside: each block is exactly one of free, private, shared, cached.
fn check(pool: &BlockPool, tables: &BTreeMap<usize, Vec<BlockId>>) {
    let mut users: BTreeMap<BlockId, u32> = BTreeMap::new();
    tables.values().flatten().for_each(|&id| *users.entry(id).or_default() += 1);
    let parents =
        pool.blocks.iter().filter(|block| block.users > 0).filter_map(|block| block.sealed.as_ref()?.parent);
    parents.for_each(|id| *users.entry(id).or_default() += 1);
    let free: HashSet<BlockId> = pool.free.iter().copied().collect();
    assert_eq!(free.len(), pool.free.len(), "a block is free twice");
    for (id, block) in (0_u32..).zip(&pool.blocks) {
        assert_eq!(block.users, users.get(&id).copied().unwrap_or(0), "users of block {id}");
        assert_eq!(free.contains(&id), block.users == 0 && block.sealed.is_none(), "block {id}");
        if let Some(sealed) = &block.sealed {
            assert_eq!(pool.by_hash[&sealed.hash], id);
            let children =
                pool.blocks.iter().filter_map(|b| b.sealed.as_ref()).filter(|s| s.parent == Some(id));
            assert_eq!(children.count(), sealed.n_children as usize, "children of block {id}");
            let evictable = pool.evictable.contains(&(sealed.last_used, id));
            assert_eq!(evictable, block.users == 0 && sealed.n_children == 0, "block {id} in the queue");
            assert!(sealed.parent.is_none_or(|p| pool.blocks[p as usize].sealed.is_some()), "an orphan");
        }
    }
    let cached = pool.blocks.iter().filter(|b| b.users == 0 && b.sealed.is_some()).count();
    assert_eq!(pool.available(), pool.free.len() + cached);
}

#[derive(Debug, Clone)]
enum Step {
    Store(Vec<u32>),
    Private(usize),
    Release(usize),
    Fork(usize),
    /// Uses the end of a chain without its beginning, as an export does.
    Suffix(usize),
    Evict(usize),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => prop::collection::vec(0_u32..3, 1..6).prop_map(Step::Store),
        1 => (1_usize..4).prop_map(Step::Private),
        3 => (0_usize..8).prop_map(Step::Release),
        1 => (0_usize..8).prop_map(Step::Fork),
        2 => (0_usize..8).prop_map(Step::Suffix),
        1 => (1_usize..6).prop_map(Step::Evict),
    ]
}

proptest! {
    #[test]
    fn the_pool_never_loses_doubles_or_frees_a_used_block(steps in prop::collection::vec(step(), 1..80)) {
        let mut pool = BlockPool::new(12);
        let mut tables: BTreeMap<usize, Vec<BlockId>> = BTreeMap::new();
        let mut announced = HashSet::new();
        for (number, step) in steps.into_iter().enumerate() {
            match step {
                Step::Store(seeds) => tables.extend(store(&mut pool, &seeds).ok().map(|table| (number, table))),
                Step::Private(n) => tables.extend(pool.allocate(n).ok().map(|table| (number, table))),
                Step::Release(nth) => {
                    if let Some(&name) = tables.keys().nth(nth) {
                        let table = tables.remove(&name).expect("a key of the map");
                        release_all(&mut pool, &table);
                    }
                }
                Step::Suffix(nth) => {
                    if let Some(table) = tables.values().nth(nth).cloned() {
                        let suffix = table[table.len() / 2..].to_vec();
                        suffix.iter().for_each(|&id| pool.retain(id));
                        tables.insert(number, suffix);
                    }
                }
                Step::Evict(n) => {
                    let taken = pool.allocate(n.min(pool.available())).expect("no more than is available");
                    release_all(&mut pool, &taken);
                }
                Step::Fork(nth) => {
                    if let Some(table) = tables.values().nth(nth).cloned() {
                        table.iter().for_each(|&id| pool.retain(id));
                        tables.insert(number, table);
                    }
                }
            }
            // What is available can really be had, whatever is in use.
            prop_assert_eq!(pool.evictable.is_empty(), pool.n_cached == 0);
            for change in pool.take_changes() {
                match change {
                    Change::Stored { hash, parent } => {
                        prop_assert!(parent.is_root() || announced.contains(&parent));
                        prop_assert!(announced.insert(hash));
                    }
                    Change::Removed { hash } => prop_assert!(announced.remove(&hash)),
                }
            }
            check(&pool, &tables);
            prop_assert_eq!(announced.len(), pool.by_hash.len());
        }
    }
}
