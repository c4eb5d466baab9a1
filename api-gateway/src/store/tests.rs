use kv::hash::HashKey;

use super::*;

fn key() -> HashKey {
    HashKey::derive(&[0; 32], b"")
}

fn response(id: &str) -> Arc<Stored> {
    let tools = Tools::none();
    let history = History::new(ContentHash::start("", Some(id), &tools));
    Arc::new(Stored {
        id: id.into(),
        tenant: "me".into(),
        conversation: id.into(),
        log: TokenLog::new(key()),
        history,
        n_own_items: 0,
        n_output_items: 0,
        instructions: None,
        tools,
        decode_worker: String::new(),
        cache_key: None,
        base: None,
        response: Some("{}".into()),
    })
}

async fn kept(limits: StoreLimits) -> Vec<&'static str> {
    let store = Store::in_memory(limits, key());
    for id in ["a", "b", "c"] {
        store.put(response(id), 10).await.expect("memory");
    }
    ["a", "b", "c"].into_iter().filter(|id| store.get(id, "me").is_some()).collect()
}

#[tokio::test]
async fn the_oldest_go_first_when_any_limit_is_reached() {
    let limits = StoreLimits { max_responses: 9, max_tokens: 999, ttl: Duration::from_secs(60) };
    assert_eq!(kept(limits).await, ["a", "b", "c"]);
    assert_eq!(kept(StoreLimits { max_responses: 2, ..limits }).await, ["b", "c"]);
    assert_eq!(kept(StoreLimits { max_tokens: 10, ..limits }).await, ["c"]);
    assert!(
        kept(StoreLimits { ttl: Duration::ZERO, ..limits }).await.is_empty(),
        "expired responses are not found"
    );
}

#[tokio::test]
async fn responses_belong_to_tenants_and_can_be_deleted() {
    let limits = StoreLimits { max_responses: 9, max_tokens: 999, ttl: Duration::from_secs(60) };
    let store = Store::in_memory(limits, key());
    let stored = response("a");
    store.put(Arc::clone(&stored), 1).await.expect("memory");
    let theirs = store.get("a", "you").is_some() || store.delete("a", "you").await.expect("memory");
    assert!(!theirs, "it is not theirs");
    assert!(store.after(&stored.history.content()).is_some());
    assert!(store.delete("a", "me").await.expect("memory") && store.get("a", "me").is_none());
    assert!(store.after(&stored.history.content()).is_none(), "nor is it found by what was said");
}
