//! Roles die; the client sees nothing but a pause.

use anyhow::ensure;
use serde_json::{Value, json};

use crate::client::{Chat, Turn};
use crate::cluster::{Cluster, Spec, until};
use crate::plain::Plain;

const FIRST: &str =
    "Hello! Please remember the word lighthouse, and tell me something nice about it in a few words.";
const SECOND: &str = "Now think about the sea, the wind and the ships that pass the lighthouse in the night, and about the \
    keeper who climbs the stairs each evening to light the lamp. Which word did I ask you to remember?";
const THIRD: &str = "Thank you. And what else?";
const LIMIT: usize = 14;

/// A conversation with its undisturbed twin.
pub(crate) struct Watched {
    pub(crate) chat: Chat,
    pub(crate) plain: Plain,
}

impl Watched {
    pub(crate) async fn open(cluster: &Cluster) -> anyhow::Result<Self> {
        Ok(Self { chat: Chat::open(cluster.address()).await?, plain: Plain::new() })
    }

    /// A turn that must say what it would have said undisturbed.
    pub(crate) async fn say(&mut self, input: &str) -> anyhow::Result<Turn> {
        let turn = self.chat.say(input, LIMIT).await?;
        self.check(&turn, input, LIMIT);
        Ok(turn)
    }

    pub(crate) fn check(&mut self, turn: &Turn, input: &str, limit: usize) {
        assert_eq!(turn.output_ids(), self.plain.say(input, limit), "{}", turn.last());
        let computed = turn.account("computed_tokens");
        assert_eq!(turn.usage("/input_tokens_details/cached_tokens"), turn.usage("/input_tokens") - computed);
    }
}

#[tokio::test]
async fn a_decode_worker_dies_between_turns() -> anyhow::Result<()> {
    let mut cluster = Cluster::start(Spec::split(1, 2)).await?;
    cluster.forgive_warnings();
    let mut watched = Watched::open(&cluster).await?;
    let turn = watched.say(FIRST).await?;
    let dead = turn.worker("decode_worker").to_owned();
    cluster.decode_named(&dead).kill().await;
    let turn = watched.say(SECOND).await?;
    assert_ne!(turn.worker("decode_worker"), dead);
    watched.say(THIRD).await?;
    Ok(())
}

#[tokio::test]
async fn a_prefill_worker_dies_between_turns() -> anyhow::Result<()> {
    let mut cluster = Cluster::start(Spec::split(1, 1)).await?;
    cluster.forgive_warnings();
    let mut watched = Watched::open(&cluster).await?;
    let turn = watched.say(SECOND).await?;
    assert_eq!(turn.worker("prefill_worker"), "prefill-0");
    cluster.prefill[0].kill().await;
    let turn = watched.say(SECOND).await?;
    assert_eq!(turn.worker("prefill_worker"), "", "the decode worker computes it");
    watched.say(THIRD).await?;
    Ok(())
}

#[tokio::test]
async fn the_router_dies_and_comes_back() -> anyhow::Result<()> {
    let mut cluster = Cluster::start(Spec::split(1, 2)).await?;
    cluster.forgive_warnings();
    let mut watched = Watched::open(&cluster).await?;
    let turn = watched.say(FIRST).await?;
    let before = turn.worker("decode_worker").to_owned();
    cluster.kill_router().await;
    let turn = watched.say(SECOND).await?;
    assert_eq!(turn.worker("decode_worker"), before, "without a router the last worker serves");
    let delta = turn.account("tokenized_tokens");
    ensure!(turn.account("computed_tokens") <= delta + 32, "and it has the conversation: {}", turn.last());

    cluster.restart_router().await?;
    let turn = watched.say(THIRD).await?;
    let delta = turn.account("tokenized_tokens");
    ensure!(
        turn.account("computed_tokens") <= delta + 32,
        "the new router learned who holds it: {}",
        turn.last()
    );
    let turn = watched.say(SECOND).await?;
    assert_eq!(turn.worker("prefill_worker"), "prefill-0", "the new router plans handovers again");
    Ok(())
}

#[tokio::test]
async fn a_draining_worker_finishes_its_turn_and_takes_no_other() -> anyhow::Result<()> {
    let mut cluster = Cluster::start(Spec::aggregated(2)).await?;
    cluster.forgive_warnings();
    let mut watched = Watched::open(&cluster).await?;
    let frame = watched.chat.frame(FIRST, 40);
    watched.chat.socket.send(&frame).await?;
    let events = watched.chat.socket.until("response.output_text.delta").await?;
    let busy = cluster.decode.iter_mut().find(|worker| worker.engine.live_turns() > 0);
    let busy = busy.expect("the turn runs somewhere");
    busy.drain();
    let drained = busy.info.id.clone();
    let turn = watched.chat.socket.rest(events).await?;
    watched.chat.answered(&turn);
    assert_eq!((turn.account("resubmissions"), turn.worker("decode_worker")), (0, drained.as_str()));
    watched.check(&turn, FIRST, 40);
    let turn = watched.say(SECOND).await?;
    assert_ne!(turn.worker("decode_worker"), drained);
    Ok(())
}

/// Says what a turn's failure was, as an error frame or as a failed response.
fn failure(turn: &Turn) -> &Value {
    match turn.end() {
        "error" => &turn.last()["error"],
        "response.failed" => &turn.response()["error"],
        _ => panic!("no failure: {}", turn.last()),
    }
}

#[tokio::test]
async fn with_all_decode_workers_gone_clients_are_told_and_served_later() -> anyhow::Result<()> {
    let mut cluster = Cluster::start(Spec::aggregated(2)).await?;
    cluster.forgive_warnings();
    let mut watched = Watched::open(&cluster).await?;
    watched.say(FIRST).await?;
    for worker in &mut cluster.decode {
        worker.kill().await;
    }
    // The client waits at most 30 s for this.
    let turn = watched.chat.socket.turn(&watched.chat.frame(SECOND, LIMIT)).await?;
    let error = failure(&turn);
    assert_eq!(error["code"], "server_is_overloaded", "{error}");
    if turn.end() == "error" {
        assert_eq!(turn.last()["status"], 503);
    }
    let over_http = crate::http::post(cluster.address(), &crate::client::create("Hello")).await?;
    assert_eq!(over_http.status, 503, "{over_http:?}");
    assert_eq!(over_http.json()["error"]["code"], "server_is_overloaded");
    ensure!(over_http.head.contains("retry-after"), "{over_http:?}");

    cluster.restart_decode(1)?;
    let socket = &mut watched.chat.socket;
    until("a new worker serves the old socket", async || {
        let turn = socket.turn(&crate::client::create("Hello")).await;
        turn.is_ok_and(|turn| turn.end() == "response.incomplete" || turn.end() == "response.completed")
    })
    .await;
    Ok(())
}

#[tokio::test]
async fn an_unreachable_cluster_is_no_reason_to_lose_a_stored_conversation() -> anyhow::Result<()> {
    let mut cluster = Cluster::start(Spec::aggregated(1)).await?;
    cluster.forgive_warnings();
    let mut watched = Watched::open(&cluster).await?;
    let stored = crate::client::with(watched.chat.frame(FIRST, LIMIT), json!({"store": true}));
    let turn = watched.chat.socket.turn(&stored).await?;
    watched.chat.answered(&turn);
    watched.check(&turn, FIRST, LIMIT);
    cluster.decode[0].kill().await;
    cluster.restart_decode(0)?;
    let frame = watched.chat.frame(SECOND, LIMIT);
    let socket = &mut watched.chat.socket;
    let mut answer = None;
    until("the restarted worker continues it", async || {
        answer = socket.turn(&frame).await.ok().filter(|turn| turn.response()["usage"].is_object());
        answer.is_some()
    })
    .await;
    let turn = answer.expect("it was just seen");
    watched.check(&turn, SECOND, LIMIT);
    assert_eq!(turn.account("computed_tokens"), turn.usage("/input_tokens"), "its cache was lost with it");
    Ok(())
}
