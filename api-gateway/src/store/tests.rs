use kv::hash::HashKey;

use super::*;

fn response(id: &str) -> Arc<Stored> {
    let tools = Tools::none();
    let history = History::new(ContentHash::start("", Some(id), &tools));
    Arc::new(Stored {
        id: id.into(),
        tenant: "me".into(),
        conversation: id.into(),
        log: TokenLog::new(HashKey::derive(&[0; 32], b"")),
        history,
        n_own_items: 0,
        n_output_items: 0,
        instructions: None,
        tools,
        decode_worker: String::new(),
        cache_key: None,
        response: Some("{}".into()),
    })
}

fn kept(limits: StoreLimits) -> Vec<&'static str> {
    let store = Store::new(limits);
    for id in ["a", "b", "c"] {
        store.put(response(id), 10);
    }
    ["a", "b", "c"].into_iter().filter(|id| store.get(id, "me").is_some()).collect()
}

#[test]
fn the_oldest_go_first_when_any_limit_is_reached() {
    let limits = StoreLimits { max_responses: 9, max_tokens: 999, ttl: Duration::from_secs(60) };
    assert_eq!(kept(limits), ["a", "b", "c"]);
    assert_eq!(kept(StoreLimits { max_responses: 2, ..limits }), ["b", "c"]);
    assert_eq!(kept(StoreLimits { max_tokens: 10, ..limits }), ["c"]);
    assert!(
        kept(StoreLimits { ttl: Duration::ZERO, ..limits }).is_empty(),
        "expired responses are not found"
    );
}

#[test]
fn responses_belong_to_tenants_and_can_be_deleted() {
    let limits = StoreLimits { max_responses: 9, max_tokens: 999, ttl: Duration::from_secs(60) };
    let store = Store::new(limits);
    let stored = response("a");
    store.put(Arc::clone(&stored), 1);
    assert!(store.get("a", "you").is_none() && !store.delete("a", "you"), "it is not theirs");
    assert!(store.after(&stored.history.content()).is_some());
    assert!(store.delete("a", "me") && store.get("a", "me").is_none());
    assert!(store.after(&stored.history.content()).is_none(), "nor is it found by what was said");
}
