//! What outlives a gateway that has a data folder.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::ensure;
use serde_json::{Value, json};

use crate::client::{Socket, create, with};
use crate::cluster::{Cluster, Spec};
use crate::conformance::ask;
use crate::http::{self, request};

/// A data folder that goes when the test ends.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let folder = std::env::temp_dir().join(format!("baton-e2e-{}-{name}", std::process::id()));
        let _ = std::fs::remove_dir_all(&folder);
        Self(folder)
    }

    /// A small cluster that keeps its responses here.
    fn spec(&self) -> Spec {
        let ttl = Duration::from_secs(3600);
        let disk = api_gateway::DiskConfig { folder: self.0.clone(), ttl, max_bytes: 64 << 20 };
        let mut spec = Spec::aggregated(1);
        spec.api.disk = Some(disk);
        spec
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

async fn get(cluster: &Cluster, path: &str) -> anyhow::Result<http::Reply> {
    request(cluster.address(), "GET", path, "").await
}

#[tokio::test]
async fn a_conversation_goes_on_after_its_gateway_was_restarted() -> anyhow::Result<()> {
    let folder = Folder::new("goes-on");
    let mut cluster = Cluster::start(folder.spec()).await?;
    let mut socket = Socket::open(cluster.address()).await?;
    let first = with(
        create("Let us talk about the moon."),
        json!({"instructions": "Be brief.", "metadata": {"a": "b"}}),
    );
    let root = socket.turn(&first).await?;
    let follow = |input: &str, turn: &str| {
        with(create(input), json!({"previous_response_id": turn, "instructions": "Be brief."}))
    };
    let second = socket.turn(&follow("Is it round?", root.id())).await?;
    let uninterrupted = socket.turn(&follow("How far is it?", second.id())).await?;
    let before = get(&cluster, &format!("/v1/responses/{}", second.id())).await?;
    let items = get(&cluster, &format!("/v1/responses/{}/input_items", second.id())).await?;
    drop(socket);

    cluster.restart_gateway().await?;
    let after = get(&cluster, &format!("/v1/responses/{}", second.id())).await?;
    assert_eq!((after.status, after.json()), (200, before.json()), "it looks as it did");
    assert_eq!(&after.json()["output"], &second.response()["output"]);
    assert_eq!(
        get(&cluster, &format!("/v1/responses/{}/input_items", second.id())).await?.json(),
        items.json()
    );
    let mut socket = Socket::open(cluster.address()).await?;
    let resumed = socket.turn(&follow("How far is it?", second.id())).await?;
    assert_eq!(resumed.output_ids(), uninterrupted.output_ids());
    assert_eq!(resumed.usage("/input_tokens"), uninterrupted.usage("/input_tokens"));
    ensure!(resumed.account("tokenized_tokens") < 24, "only the new part is tokenized");
    ensure!(
        resumed.usage("/input_tokens_details/cached_tokens") > 0,
        "the workers know the prefix by its hashes"
    );
    // A fork of the very first response, and one step further after another restart.
    socket.turn(&follow("Is it made of cheese?", root.id())).await?.expect_answer();
    drop(socket);
    cluster.restart_gateway().await?;
    let next = http::post(cluster.address(), &follow("Thanks.", resumed.id())).await?;
    assert_eq!(next.status, 200, "{next:?}");
    Ok(())
}

#[tokio::test]
async fn a_history_sent_again_after_a_restart_is_recognized() -> anyhow::Result<()> {
    let folder = Folder::new("recognized");
    let mut cluster = Cluster::start(folder.spec()).await?;
    let mut history =
        json!([{"role": "user", "content": "Let us talk about the moon and its many craters."}]);
    let push = |items: &Value, history: &mut Value| {
        if let (Some(history), Some(items)) = (history.as_array_mut(), items.as_array()) {
            history.extend(items.iter().cloned());
        }
    };
    for question in ["Is it round?", "How far is it?"] {
        let turn = http::post(cluster.address(), &create(history.clone())).await?.json();
        push(&turn["output"], &mut history);
        push(&json!([{"role": "user", "content": question}]), &mut history);
    }
    let known = http::post(cluster.address(), &create(history.clone())).await?.json();
    cluster.restart_gateway().await?;
    let again = http::post(cluster.address(), &create(history.clone())).await?.json();
    assert_eq!(again["baton"]["output_ids"], known["baton"]["output_ids"]);
    assert_eq!(
        again["baton"]["tokenized_tokens"], known["baton"]["tokenized_tokens"],
        "only the tail is tokenized"
    );

    // An item is found by its id, too.
    let item = known["output"][0]["id"].clone();
    cluster.restart_gateway().await?;
    let referring = json!([{"role": "user", "content": "Hello"}, {"type": "item_reference", "id": item}, {"role": "user", "content": "Go on."}]);
    let referred = http::post(cluster.address(), &create(referring)).await?;
    assert_eq!(referred.status, 200, "{referred:?}");
    Ok(())
}

#[tokio::test]
async fn what_was_deleted_or_not_stored_does_not_come_back() -> anyhow::Result<()> {
    let folder = Folder::new("deleted");
    let mut cluster = Cluster::start(folder.spec()).await?;
    let kept = http::post(cluster.address(), &create("Hello")).await?.json();
    let gone = http::post(cluster.address(), &create("Good day")).await?.json();
    let unstored =
        http::post(cluster.address(), &with(create("Psst"), json!({"store": false}))).await?.json();
    let path = |response: &Value| format!("/v1/responses/{}", response["id"].as_str().unwrap_or_default());
    assert_eq!(request(cluster.address(), "DELETE", &path(&gone), "").await?.status, 200);
    cluster.restart_gateway().await?;
    assert_eq!(get(&cluster, &path(&kept)).await?.status, 200);
    for response in [&gone, &unstored] {
        assert_eq!(get(&cluster, &path(response)).await?.status, 404);
        let next = with(create("And now?"), json!({"previous_response_id": response["id"]}));
        assert_eq!(
            http::post(cluster.address(), &next).await?.json()["error"]["code"],
            "previous_response_not_found"
        );
    }
    assert_eq!(request(cluster.address(), "DELETE", &path(&kept), "").await?.status, 200);
    assert_eq!(get(&cluster, &path(&kept)).await?.status, 404);
    Ok(())
}

#[tokio::test]
async fn a_conversation_with_a_name_is_there_after_a_restart() -> anyhow::Result<()> {
    let folder = Folder::new("named");
    let mut cluster = Cluster::start(folder.spec()).await?;
    let address = cluster.address();
    let item = |text: &str| json!({"type": "message", "role": "user", "content": text});
    let begun = json!({"items": [item("My ship is the Ada.")], "metadata": {"a": "b"}});
    let (_, made) = ask::json(address, "POST", "/v1/conversations", &begun).await?;
    let path = format!("/v1/conversations/{}", made["id"].as_str().unwrap_or_default());
    let asked = |text: &str| with(create(text), json!({"conversation": made["id"]}));
    let first = ask::whole(address, &asked("What is it called?")).await?;
    ask::json(address, "POST", &format!("{path}/items"), &json!({"items": [item("Never mind.")]})).await?;
    ask::json(address, "POST", &path, &json!({"metadata": {"c": "d"}})).await?;
    let list = format!("{path}/items?order=asc");
    let items = get(&cluster, &list).await?.json();
    assert_eq!(items["data"].as_array().map(Vec::len), Some(4), "{items}");
    let removed = format!("{path}/items/{}", items["data"][3]["id"].as_str().unwrap_or_default());
    ask::json(address, "DELETE", &removed, &Value::Null).await?;

    cluster.restart_gateway().await?;
    let head = get(&cluster, &path).await?.json();
    assert_eq!((&head["metadata"], &head["created_at"]), (&json!({"c": "d"}), &made["created_at"]));
    let after = get(&cluster, &list).await?.json();
    assert_eq!(after["data"].as_array(), items["data"].as_array().map(|all| all[..3].to_vec()).as_ref());
    let address = cluster.address();
    let next = ask::whole(address, &asked("Whose ship is it?")).await?;
    let tokens = |response: &Value| response["usage"]["input_tokens"].as_u64().unwrap_or_default();
    ensure!(tokens(&next) > tokens(&first) + 5, "it knows what was said: {next}");
    let again = ask::whole(address, &asked("Really?")).await?;
    ensure!(
        again["baton"]["tokenized_tokens"].as_u64().is_some_and(|n| n < 24),
        "only the new part: {again}"
    );
    let (status, _) = ask::json(address, "DELETE", &path, &Value::Null).await?;
    assert_eq!(status, 200);
    cluster.restart_gateway().await?;
    assert_eq!(get(&cluster, &path).await?.status, 404);
    Ok(())
}
