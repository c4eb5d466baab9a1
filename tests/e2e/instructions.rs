//! Instructions of a turn: not taken over from the turn before, free when they stay the same.

use anyhow::ensure;
use serde_json::{Value, json};

use crate::client::{Chat, Turn, create, with};
use crate::cluster::{Cluster, Spec};
use crate::http;

const PIRATE: &str = "You are a pirate. You talk about treasure, rum and the sea, and you end each sentence with Arr. \
    You have sailed for forty years on all the oceans of the world and you remember every single island of them.";
const QUESTION: &str = "What do you do?";

async fn ask(chat: &mut Chat, fields: Value) -> anyhow::Result<Turn> {
    let turn = chat.socket.turn(&with(chat.frame(QUESTION, 6), fields)).await?;
    chat.answered(&turn);
    Ok(turn)
}

#[tokio::test]
async fn they_hold_for_one_turn_and_equal_ones_cost_nothing() -> anyhow::Result<()> {
    let cluster = Cluster::start(Spec::aggregated(1)).await?;
    let mut chat = Chat::open(cluster.address()).await?;
    let first = ask(&mut chat, json!({"instructions": PIRATE})).await?;
    assert_eq!(first.response()["instructions"], PIRATE);
    let whole = first.account("tokenized_tokens");

    let equal = ask(&mut chat, json!({"instructions": PIRATE})).await?;
    let delta = equal.account("tokenized_tokens");
    ensure!(delta < 24 && delta < whole, "{delta} tokens tokenized for a short question");
    ensure!(equal.account("computed_tokens") <= delta + 32, "equal text is not computed again");

    let other = ask(&mut chat, json!({"instructions": "You are a gardener."})).await?;
    assert_eq!(other.response()["instructions"], "You are a gardener.");
    assert_eq!(other.account("tokenized_tokens"), other.usage("/input_tokens"), "all is rendered again");

    let absent = ask(&mut chat, json!({})).await?;
    assert!(absent.response()["instructions"].is_null(), "they are not taken over");
    assert_eq!(absent.account("tokenized_tokens"), absent.usage("/input_tokens"));
    let still = ask(&mut chat, json!({"instructions": null})).await?;
    assert!(still.response()["instructions"].is_null());
    assert_eq!(still.account("tokenized_tokens"), delta, "from then on the log grows again");
    Ok(())
}

#[tokio::test]
async fn http_does_not_inherit_them() -> anyhow::Result<()> {
    let cluster = Cluster::start(Spec::aggregated(1)).await?;
    let say = async |fields: Value| -> anyhow::Result<Turn> {
        let reply = http::post(cluster.address(), &with(create(QUESTION), fields)).await?;
        Ok(Turn { events: vec![json!({"type": "response.completed", "response": reply.json()})] })
    };
    let first = say(json!({"instructions": PIRATE})).await?;
    let absent = say(json!({"previous_response_id": first.id()})).await?;
    assert!(absent.response()["instructions"].is_null());
    let equal = say(json!({"previous_response_id": first.id(), "instructions": PIRATE})).await?;
    assert_eq!(equal.response()["instructions"], PIRATE);
    ensure!(equal.account("tokenized_tokens") < 24, "the log is extended over HTTP too");
    Ok(())
}
