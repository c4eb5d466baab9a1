use std::time::Duration;

use kv::hash::HashKey;

use super::*;
use crate::store::StoreLimits;

fn store() -> Store {
    let limits = StoreLimits { max_responses: 10, max_tokens: 1 << 20, ttl: Duration::from_secs(60) };
    Store::in_memory(limits, HashKey::derive(&[7; 32], b""))
}

fn conversations(n: usize, bytes: usize) -> Conversations {
    Conversations::new(store(), Limits { n, bytes_each: 100, bytes })
}

fn item(id: &str, n_bytes: usize) -> ListedItem {
    ListedItem { id: id.to_owned(), json: "x".repeat(n_bytes).into() }
}

#[tokio::test]
async fn limits_hold_for_each_and_for_all() {
    let all = conversations(2, 150);
    let me: Arc<str> = "me".into();
    let begin = async |items| all.create(&me, items, BTreeMap::new()).await;
    assert_eq!(begin(vec![item("a", 101)]).await.expect_err("too large").code, "conversation_too_large");
    let first = begin(vec![item("a", 60)]).await.expect("it fits");
    let second = begin(vec![item("b", 60)]).await.expect("it fits");
    assert_eq!(begin(Vec::new()).await.expect_err("a third one").status, 503);
    let add = async |to, n_bytes| all.append(to, vec![item("c", n_bytes)]).await;
    assert_eq!(add(&first, 41).await.expect_err("too large").code, "conversation_too_large");
    assert_eq!(add(&first, 31).await.expect_err("too much together").status, 503);
    add(&first, 30).await.expect("it fits");
    assert!(all.remove(&second, "b").await.expect("memory"));
    assert!(!all.remove(&second, "b").await.expect("memory"), "it is gone");
    add(&second, 60).await.expect("there is room again");
    all.delete(&first).await.expect("memory");
    assert_eq!(all.get(&first.id, "me").expect_err("it is gone").status, 404);
    begin(vec![item("d", 90)]).await.expect("there is room again");
    assert_eq!(all.get(&second.id, "you").expect_err("it is not theirs").status, 404);
}
