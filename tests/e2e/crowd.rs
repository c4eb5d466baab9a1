//! Many conversations at once.

use std::sync::LazyLock;

use futures::future::try_join_all;

use crate::client::Chat;
use crate::cluster::{Cluster, Spec, until};
use crate::plain::Plain;

const TOPICS: [&str; 4] = ["rivers", "the moon", "old bridges", "bread"];
const LIMIT: usize = 12;
/// Conversations per topic: they share their prefixes.
const COPIES: usize = 3;

fn script(topic: &str) -> [String; 3] {
    [
        format!(
            "Let us talk about {topic}. Begin with the most surprising thing that you know about it, please."
        ),
        format!("Tell me more about {topic}."),
        "Summarize what you said in one sentence, and then add one question of your own for me to answer."
            .to_owned(),
    ]
}

/// What each topic's conversation is when it is alone.
static ALONE: LazyLock<Vec<Vec<Vec<u32>>>> = LazyLock::new(|| {
    let alone = |topic: &&str| {
        let mut plain = Plain::new();
        script(topic).iter().map(|input| plain.say(input, LIMIT)).collect()
    };
    TOPICS.iter().map(alone).collect()
});

async fn converse(cluster: &Cluster, topic: usize) -> anyhow::Result<()> {
    let mut chat = Chat::open(cluster.address()).await?;
    for (idx, input) in script(TOPICS[topic]).iter().enumerate() {
        let turn = chat.say(input, LIMIT).await?;
        assert_eq!(turn.output_ids(), ALONE[topic][idx], "{}, turn {idx}: {}", TOPICS[topic], turn.last());
    }
    Ok(())
}

#[tokio::test]
async fn twelve_conversations_at_once_say_what_each_says_alone() -> anyhow::Result<()> {
    LazyLock::force(&ALONE);
    let cluster = Cluster::start(Spec::split(1, 2)).await?;
    try_join_all((0..TOPICS.len() * COPIES).map(|idx| converse(&cluster, idx % TOPICS.len()))).await?;
    until("all places are given back", async || cluster.live_turns() == 0).await;
    Ok(())
}
