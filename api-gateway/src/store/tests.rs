use kv::hash::HashKey;

use super::*;

fn response(id: &str) -> Arc<Stored> {
    Arc::new(Stored {
        id: id.into(),
        conversation: id.into(),
        log: TokenLog::new(HashKey::derive(&[0; 32], b"")),
        instructions: None,
        tools: "[]".into(),
        decode_worker: String::new(),
    })
}

fn kept(limits: StoreLimits) -> Vec<&'static str> {
    let store = Store::new(limits);
    for id in ["a", "b", "c"] {
        store.put(response(id), 10);
    }
    ["a", "b", "c"].into_iter().filter(|id| store.get(id).is_some()).collect()
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
