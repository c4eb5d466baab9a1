//! Conversations on the same disks.

use std::collections::BTreeMap;

use super::*;
use crate::conversations::{Conversations as All, Limits, ListedItem};

fn item(id: &str, n_bytes: usize) -> ListedItem {
    ListedItem { id: id.to_owned(), json: "x".repeat(n_bytes).into() }
}

fn all(store: &Store) -> All {
    All::new(store.clone(), Limits { n: 3, bytes_each: 1 << 20, bytes: 1 << 20 })
}

fn metadata(value: &str) -> BTreeMap<String, String> {
    BTreeMap::from([("key".to_owned(), value.to_owned())])
}

#[tokio::test]
async fn what_a_full_disk_refuses_has_not_happened() {
    let disk = RamDisk::default();
    let opened = store(disk.open(HOUR, 1 << 30));
    let (kept, me): (_, Arc<str>) = (all(&opened), "me".into());
    let talk = kept.create(&me, vec![item("a", 10)], metadata("old")).await.expect("kept");
    disk.0.is_full.store(true, Ordering::Relaxed);
    assert_eq!(kept.create(&me, Vec::new(), BTreeMap::new()).await.expect_err("full").code, "storage_error");
    assert_eq!(kept.append(&talk, vec![item("b", 10)]).await.expect_err("full").code, "storage_error");
    assert!(kept.remove(&talk, "a").await.is_err() && kept.delete(&talk).await.is_err());
    assert!(kept.set_metadata(&talk, metadata("new")).await.is_err());
    assert_eq!((talk.items(), talk.head().metadata), (vec![item("a", 10)], metadata("old")));
    disk.0.is_full.store(false, Ordering::Relaxed);
    tokio::time::sleep(REOPEN_PAUSE).await;
    kept.append(&talk, vec![item("c", 20), item("d", 30)]).await.expect("there is room");
    assert!(kept.remove(&talk, "c").await.expect("fine"));
    kept.set_metadata(&talk, metadata("new")).await.expect("fine");
    opened.close().await;
    let opened = store(disk.open(HOUR, 1 << 30));
    let after = all(&opened).recall(&talk.id, &me).await.expect("it is on disk");
    assert_eq!((after.items(), after.head()), (vec![item("a", 10), item("d", 30)], talk.head()));
    let stranger = all(&opened).recall(&talk.id, &"you".into()).await;
    assert_eq!(stranger.expect_err("it is not theirs").status, 404);
}

#[tokio::test]
async fn conversations_are_bounded_in_number_and_size_and_leave_nothing_behind() {
    let disk = RamDisk::default();
    let opened = store(disk.open(HOUR, 20_000));
    let (kept, me): (_, Arc<str>) = (all(&opened), "me".into());
    let mut talks = Vec::new();
    for _ in 0..3 {
        talks.push(kept.create(&me, vec![item("a", 3000)], BTreeMap::new()).await.expect("kept"));
    }
    // Another gateway process would have an empty memory; the disk counts for it.
    let refused = all(&opened).create(&me, Vec::new(), BTreeMap::new()).await.expect_err("a fourth one");
    assert!(refused.message.contains("delete some"), "{refused}");
    let refused = kept.append(&talks[0], vec![item("b", 3000)]).await.expect_err("half of the disk is taken");
    assert!(refused.message.contains("delete some"), "{refused}");
    kept.delete(&talks[1]).await.expect("fine");
    kept.append(&talks[0], vec![item("b", 3000)]).await.expect("there is room again");
    for talk in [&talks[0], &talks[2]] {
        kept.delete(talk).await.expect("fine");
    }
    opened.close().await;
    assert_eq!(disk.n_rows().iter().sum::<u64>(), 1, "only what the file is remains");
}

#[tokio::test]
async fn a_file_from_before_conversations_is_taken_on() {
    let disk = RamDisk::default();
    let opened = store(disk.open(HOUR, 1 << 30));
    let first = turn(None, "resp_1", "one", true);
    opened.put(Arc::clone(&first), 10).await.expect("kept");
    opened.close().await;
    disk.make_first_format();
    let opened = store(disk.open(HOUR, 1 << 30));
    assert_same(&recall(&opened, "resp_1").await.expect("it is still there"), &first);
    all(&opened).create(&"me".into(), Vec::new(), BTreeMap::new()).await.expect("there is a place for it");
}
