//! Lanes: several chains of turns on one socket, told apart by `stream_id`.

use std::collections::{BTreeMap, VecDeque};

use anyhow::{Context, ensure};
use proptest::collection::vec;
use proptest::option;
use proptest::test_runner::{Config, TestCaseError, TestRunner};
use serde_json::{Value, json};

use crate::client::{Socket, Turn, with};
use crate::cluster::{Cluster, Spec};
use crate::conformance::ask;
use crate::conformance::validate::Stream;

const LANES: u8 = 5;
/// Cases of the property: each is a socket with up to 14 turns.
const CASES: u32 = 12;

/// A create: its lane, if it names one, and its output tokens.
type Planned = (Option<u8>, u32);

fn short(fields: Value) -> Value {
    with(ask::frame("Count from one to five."), with(json!({"max_output_tokens": 4, "store": false}), fields))
}

fn error_code(turn: &Turn) -> &Value {
    &turn.last()["error"]["code"]
}

#[test]
fn any_interleaving_gives_each_lane_its_own_gapless_sequences() -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    let cluster = runtime.block_on(Cluster::start(Spec { n_blocks: 600, ..Spec::aggregated(2) }))?;
    let plan = vec((option::of(0..LANES), 1..12_u32), 1..14);
    let mut runner = TestRunner::new(Config { cases: CASES, failure_persistence: None, ..Config::default() });
    let outcome = runner.run(&plan, |plan| {
        let checked = runtime.block_on(interleave(&cluster, &plan));
        checked.map_err(|error| TestCaseError::fail(format!("{error:#}")))
    });
    outcome.map_err(|error| anyhow::anyhow!("{error}"))
}

/// Sends all creates at once. Each lane must answer its own, in their order, one at a time.
async fn interleave(cluster: &Cluster, plan: &[Planned]) -> anyhow::Result<()> {
    let mut socket = Socket::open(cluster.address()).await?;
    let mut lanes: BTreeMap<String, VecDeque<(String, Stream)>> = BTreeMap::new();
    for (number, (lane, n_tokens)) in plan.iter().enumerate() {
        let mut create =
            short(json!({"max_output_tokens": n_tokens, "metadata": {"number": number.to_string()}}));
        let name = lane.map(|lane| format!("lane-{lane}")).unwrap_or_default();
        if lane.is_some() {
            create["stream_id"] = name.as_str().into();
        }
        socket.send(&create).await?;
        lanes.entry(name).or_default().push_back((number.to_string(), Stream::answering(&create)));
    }
    while lanes.values().any(|waiting| !waiting.is_empty()) {
        let event = socket.event().await?;
        let lane = event["stream_id"].as_str().unwrap_or_default();
        let waiting = lanes.get_mut(lane).with_context(|| format!("nobody asked on {event}"))?;
        let (number, stream) = waiting.front_mut().with_context(|| format!("nothing is due: {event}"))?;
        stream.feed(&event).with_context(|| format!("create {number} on `{lane}`: {event}"))?;
        if let Some(response) = event.get("response") {
            ensure!(
                response["metadata"]["number"] == number.as_str(),
                "{number} is due on `{lane}`: {event}"
            );
        }
        ensure!(event["type"] != "error", "{event}");
        if stream.has_ended() {
            waiting.pop_front();
        }
    }
    Ok(())
}

#[tokio::test]
async fn names_are_checked_and_echoed() -> anyhow::Result<()> {
    let cluster = Cluster::start(Spec::aggregated(1)).await?;
    let mut socket = Socket::open(cluster.address()).await?;
    for bad in ["", "a b", "ä", &"x".repeat(257)] {
        let refused = socket.turn(&short(json!({"stream_id": bad}))).await?;
        assert_eq!(
            (error_code(&refused), &refused.last()["status"]),
            (&json!("invalid_stream_id"), &json!(400))
        );
        ensure!(refused.last().get("stream_id").is_none(), "a bad name is not echoed: {}", refused.last());
    }
    for good in ["a", "A.b-c_9", &"x".repeat(256)] {
        ask::on_socket(&mut socket, &short(json!({"stream_id": good}))).await?.expect_answer();
    }
    let fields = json!({"stream_id": "a", "previous_response_id": "resp_0123456789abcdef01234567"});
    let refused = ask::on_socket(&mut socket, &short(fields)).await?;
    assert_eq!(error_code(&refused), "previous_response_not_found");
    Ok(())
}

#[tokio::test]
async fn there_are_thirty_two_names_and_the_default() -> anyhow::Result<()> {
    let cluster = Cluster::start(Spec::aggregated(1)).await?;
    let mut socket = Socket::open(cluster.address()).await?;
    for lane in 0..32 {
        let fields = json!({"stream_id": format!("lane-{lane}"), "max_output_tokens": 1});
        ask::on_socket(&mut socket, &short(fields)).await?.expect_answer();
    }
    ask::on_socket(&mut socket, &short(json!({}))).await?.expect_answer();
    let refused = socket.turn(&short(json!({"stream_id": "one-more"}))).await?;
    assert_eq!(error_code(&refused), "websocket_stream_limit_reached");
    ask::on_socket(&mut socket, &short(json!({"stream_id": "lane-7"}))).await?.expect_answer();
    Ok(())
}

#[tokio::test]
async fn more_than_sixteen_creates_wait_for_their_turn() -> anyhow::Result<()> {
    let cluster = Cluster::start(Spec { n_blocks: 600, ..Spec::aggregated(1) }).await?;
    let plan: Vec<Planned> = (0..24).map(|create| (Some(create), 3)).collect();
    interleave(&cluster, &plan).await
}

/// Sends a create that continues `parent` on a lane.
async fn continued(socket: &mut Socket, lane: &str, parent: &Turn) -> anyhow::Result<Turn> {
    ask::on_socket(socket, &short(json!({"stream_id": lane, "previous_response_id": parent.id()}))).await
}

#[tokio::test]
async fn a_fork_shares_its_parent_and_a_failed_one_leaves_it() -> anyhow::Result<()> {
    let cluster = Cluster::start(Spec::aggregated(1)).await?;
    let mut socket = Socket::open(cluster.address()).await?;
    let root = ask::on_socket(&mut socket, &short(json!({"stream_id": "main"}))).await?;
    let fork = continued(&mut socket, "fork", &root).await?;
    fork.expect_answer();
    ensure!(fork.usage("/input_tokens") > root.usage("/input_tokens"), "the fork has the parent's context");
    // A fork that fails does not cost the lane its parent; a continuation that fails does.
    let unknown = json!([{"type": "function_call_output", "call_id": "call_unknown", "output": "x"}]);
    let failing = |lane: &str| {
        let fields = json!({"stream_id": lane, "previous_response_id": root.id(), "input": unknown});
        short(fields)
    };
    assert_eq!(ask::on_socket(&mut socket, &failing("other")).await?.end(), "error");
    continued(&mut socket, "third", &root).await?.expect_answer();
    assert_eq!(ask::on_socket(&mut socket, &failing("main")).await?.end(), "error");
    let lost = continued(&mut socket, "main", &root).await?;
    assert_eq!(error_code(&lost), "previous_response_not_found");
    // A known name without a parent begins anew.
    let anew = ask::on_socket(&mut socket, &short(json!({"stream_id": "fork"}))).await?;
    assert_eq!(anew.usage("/input_tokens"), root.usage("/input_tokens"));
    Ok(())
}

#[tokio::test]
async fn an_interrupt_stops_one_lane() -> anyhow::Result<()> {
    let cluster = Cluster::start(Spec::aggregated(1)).await?;
    let mut socket = Socket::open(cluster.address()).await?;
    let long = |lane: &str| {
        short(json!({"stream_id": lane, "max_output_tokens": 120, "input": "Tell a long story."}))
    };
    let mut streams: BTreeMap<&str, Stream> = BTreeMap::new();
    for lane in ["a", "b"] {
        socket.send(&long(lane)).await?;
        streams.insert(lane, Stream::answering(&long(lane)));
    }
    let mut ends: BTreeMap<String, Value> = BTreeMap::new();
    while ends.len() < 2 {
        let event = socket.event().await?;
        let lane = event["stream_id"].as_str().unwrap_or_default();
        streams.get_mut(lane).context("a lane of ours")?.feed(&event).with_context(|| event.to_string())?;
        if event["type"] == "response.created" && lane == "a" {
            let id = &event["response"]["id"];
            socket
                .send(&json!({"type": "response.interrupt", "response_id": id, "mode": "discard_partial_items"}))
                .await?;
        }
        if streams[lane].has_ended() {
            ends.insert(lane.to_owned(), event["response"].clone());
        }
    }
    assert_eq!(ends["a"]["incomplete_details"]["reason"], "interrupted");
    assert_eq!(ends["b"]["incomplete_details"]["reason"], "max_output_tokens");
    Ok(())
}
