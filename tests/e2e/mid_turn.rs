//! Workers die in the middle of a turn; the client gets the same answer, a little later.

use anyhow::{Context, ensure};
use serde_json::{Value, json};

use crate::client::{Chat, Turn, create, with};
use crate::cluster::{Cluster, Spec, until};
use crate::failures::Watched;
use crate::plain::TEXT;
use crate::scripted::{Says, Script};

const FIRST: &str =
    "Hello! Please remember the word lighthouse, and tell me something nice about it in a few words.";
const SECOND: &str = "Now think about the sea, the wind and the ships that pass the lighthouse in the night, and about the \
    keeper who climbs the stairs each evening to light the lamp. Which word did I ask you to remember?";
const THIRD: &str = "Thank you. And what else?";
const LONG: usize = 48;

/// No token twice, none lost, no event twice.
fn check_seamless(turn: &Turn) {
    for (idx, event) in turn.events.iter().enumerate() {
        assert_eq!(event["sequence_number"], idx);
    }
    let count = |kind: &str| turn.kinds().iter().filter(|other| **other == kind).count();
    assert_eq!((count("response.created"), count("response.output_item.added")), (1, 1));
    let deltas: String = turn.events.iter().filter_map(|event| event["delta"].as_str()).collect();
    assert_eq!(deltas, turn.text());
}

/// Runs a turn and kills its decode worker once it has said something.
async fn kill_in_mid_stream(cluster: &mut Cluster, chat: &mut Chat, frame: &Value) -> anyhow::Result<Turn> {
    chat.socket.send(frame).await?;
    let mut events = chat.socket.until("response.output_text.delta").await?;
    while events.iter().filter(|event| event["type"] == "response.output_text.delta").count() < 4 {
        events.push(chat.socket.event().await?);
    }
    let busy = cluster.decode.iter_mut().find(|worker| worker.engine.live_turns() > 0);
    busy.context("the turn runs somewhere")?.kill().await;
    let turn = chat.socket.rest(events).await?;
    ensure!(turn.account("resubmissions") >= 1, "it was in mid-stream: {}", turn.last());
    check_seamless(&turn);
    Ok(turn)
}

#[tokio::test]
async fn a_decode_worker_dies_in_mid_stream() -> anyhow::Result<()> {
    let mut cluster = Cluster::start(Spec::split(1, 2)).await?;
    cluster.forgive_warnings();
    let mut watched = Watched::open(&cluster).await?;
    watched.say(FIRST).await?;
    let frame = watched.chat.frame(SECOND, LONG);
    let turn = kill_in_mid_stream(&mut cluster, &mut watched.chat, &frame).await?;
    watched.chat.answered(&turn);
    assert_eq!(turn.output_ids(), watched.plain.say(SECOND, LONG), "{}", turn.last());
    watched.say(THIRD).await?;
    Ok(())
}

#[tokio::test]
async fn sampling_goes_on_from_the_same_seed_on_another_worker() -> anyhow::Result<()> {
    let mut cluster = Cluster::start(Spec::aggregated(2)).await?;
    cluster.forgive_warnings();
    let sampled = with(
        create("Write a very long story about a lighthouse and its keeper."),
        json!({"temperature": 1.2, "seed": 7, "max_output_tokens": LONG, "store": false}),
    );
    let mut chat = Chat::open(cluster.address()).await?;
    let undisturbed = chat.socket.turn(&sampled).await?;
    undisturbed.expect_answer();
    ensure!(undisturbed.output_ids().len() > 20, "long enough to be disturbed: {}", undisturbed.last());
    let turn = kill_in_mid_stream(&mut cluster, &mut chat, &sampled).await?;
    assert_eq!(turn.output_ids(), undisturbed.output_ids());
    Ok(())
}

#[tokio::test]
async fn a_prefill_worker_dies_while_it_prefills() -> anyhow::Result<()> {
    let mut cluster = Cluster::start(Spec::split(1, 1)).await?;
    cluster.forgive_warnings();
    let mut watched = Watched::open(&cluster).await?;
    let long = SECOND.repeat(8);
    watched.chat.socket.send(&watched.chat.frame(&long, 12)).await?;
    until("the prompt is handed to the prefill worker", async || cluster.prefill[0].engine.live_turns() > 0)
        .await;
    cluster.prefill[0].kill().await;
    let turn = watched.chat.socket.rest(Vec::new()).await?;
    watched.chat.answered(&turn);
    check_seamless(&turn);
    assert_eq!((turn.worker("prefill_worker"), turn.account("resubmissions")), ("", 0), "{}", turn.last());
    watched.check(&turn, &long, 12);
    watched.say(THIRD).await?;
    Ok(())
}

#[tokio::test]
async fn a_decode_worker_dies_before_it_has_said_anything() -> anyhow::Result<()> {
    let mut cluster = Cluster::start(Spec::split(1, 2)).await?;
    cluster.forgive_warnings();
    let mut watched = Watched::open(&cluster).await?;
    let long = SECOND.repeat(8);
    watched.chat.socket.send(&watched.chat.frame(&long, 12)).await?;
    until("its prompt is being filled", async || cluster.prefill[0].engine.live_turns() > 0).await;
    let busy = cluster.decode.iter_mut().find(|worker| worker.engine.live_turns() > 0);
    let busy = busy.context("the turn waits somewhere")?;
    let died = busy.info.id.clone();
    busy.kill().await;
    let turn = watched.chat.socket.rest(Vec::new()).await?;
    watched.chat.answered(&turn);
    check_seamless(&turn);
    assert_eq!(turn.account("resubmissions"), 1, "{}", turn.last());
    assert_ne!(turn.worker("decode_worker"), died);
    assert_eq!(turn.output_ids(), watched.plain.say(&long, 12));
    Ok(())
}

#[tokio::test]
async fn the_only_decode_worker_restarts_in_mid_turn() -> anyhow::Result<()> {
    let mut cluster = Cluster::start(Spec::aggregated(1)).await?;
    cluster.forgive_warnings();
    let mut watched = Watched::open(&cluster).await?;
    watched.chat.socket.send(&watched.chat.frame(FIRST, LONG)).await?;
    let events = watched.chat.socket.until("response.output_text.delta").await?;
    cluster.decode[0].kill().await;
    cluster.restart_decode(0)?;
    let turn = watched.chat.socket.rest(events).await?;
    watched.chat.answered(&turn);
    check_seamless(&turn);
    assert_eq!(turn.output_ids(), watched.plain.say(FIRST, LONG), "{}", turn.last());
    Ok(())
}

#[tokio::test]
async fn a_worker_that_dies_after_the_last_token_owes_nothing() -> anyhow::Result<()> {
    const SAYS: &str = "All is well.";
    let n_words = TEXT.tokenizer.encode_ordinary(SAYS).len();
    let script = Script::default();
    let mut cluster = script.cluster(Spec::aggregated(0)).await?;
    cluster.forgive_warnings();
    let mut chat = Chat::open(cluster.address()).await?;
    for (limit, terminal, n_output) in
        [(100, "response.completed", n_words + 1), (n_words, "response.incomplete", n_words)]
    {
        script.say([Says::Text(SAYS), Says::Text("<|im_end|>"), Says::Death]);
        let turn = chat.socket.turn(&with(create("Hello"), json!({"max_output_tokens": limit}))).await?;
        assert_eq!((turn.end(), turn.text()), (terminal, SAYS), "{}", turn.last());
        assert_eq!(turn.output_ids().len(), n_output);
        check_seamless(&turn);
    }
    Ok(())
}
