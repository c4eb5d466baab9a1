use super::*;
use crate::hash::{HashChain, HashKey};

fn hashes(n: u32) -> Vec<BlockHash> {
    HashChain::new(HashKey::derive(&[0; 32], b"")).extend(&(0..n * 16).collect::<Vec<_>>())
}

#[test]
fn a_watcher_gets_the_snapshot_and_then_each_later_event_once() {
    let announcer = Announcer::default();
    let names = hashes(3);
    announcer.publish_changes(&[
        Change::Stored { hash: names[0], parent: BlockHash::ROOT },
        Change::Stored { hash: names[1], parent: names[0] },
    ]);
    let (parts, mut events) = announcer.watch(v1::WorkerInfo { id: "w".into(), ..Default::default() });
    let Event::Snapshot(snapshot) = &parts[0] else { panic!("a snapshot comes first") };
    assert!(snapshot.last);
    let pairs = pairs_from_wire(&snapshot.blocks).expect("whole pairs");
    assert_eq!(pairs, [(names[0], BlockHash::ROOT), (names[1], names[0])]);

    announcer.publish_changes(&[Change::Removed { hash: names[1] }]);
    let Event::Delta(delta) = &*events.try_recv().expect("one event") else { panic!("a delta") };
    assert_eq!(&delta.removed[..], names[1].as_bytes());
    assert!(events.try_recv().is_err());
}

#[test]
fn a_block_removed_and_stored_again_is_told_in_that_order() {
    let announcer = Announcer::default();
    let names = hashes(1);
    let stored = Change::Stored { hash: names[0], parent: BlockHash::ROOT };
    let (_, mut events) = announcer.watch(v1::WorkerInfo::default());
    announcer.publish_changes(&[stored, Change::Removed { hash: names[0] }, stored]);
    let mut kinds = Vec::new();
    while let Ok(event) = events.try_recv() {
        let Event::Delta(delta) = &*event else { panic!("only deltas") };
        kinds.push((delta.stored.len() / 32, delta.removed.len() / 16));
    }
    assert_eq!(kinds, [(1, 1), (1, 0)]);
}
