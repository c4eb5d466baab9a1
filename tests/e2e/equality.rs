//! One conversation, four ways to compute it, the same tokens.

use std::sync::LazyLock;

use anyhow::ensure;

use crate::client::{Chat, Turn};
use crate::cluster::{Cluster, Handover, Spec};
use crate::plain::Plain;

/// Blocks of 16 tokens: what a warm turn may compute beyond its delta.
const SLACK: u64 = 2 * 16;

const STORY: &str = "Read this and remember it. The old lighthouse stood at the end of a long pier of grey stone. Every \
    evening its keeper, a quiet woman named Mara, climbed the two hundred and twelve steps to the lamp, trimmed the wick \
    and wound the clockwork that turned the lens. Ships from the northern towns carried salt, timber and wool past the \
    reef, and none of them had run aground for thirty years. On the night of the great storm the clockwork broke. Mara \
    turned the lens by hand until the morning, counting the seconds aloud, while the waves broke over the gallery. At \
    dawn eleven ships lay safe in the bay, and the captains came up the stairs to thank her, one after the other.";

/// Long and short deltas in turn; some are answered fully, some to a limit that ends inside a block.
const SCRIPT: [(&str, usize); 6] = [
    ("Hello! Who are you?", 20),
    (STORY, 24),
    ("Who is Mara?", 17),
    ("Yes.", 5),
    (
        "Now think of the captains. They come from the northern towns, they have not slept, and their ships are full of \
         salt, timber and wool. What would they say to the keeper of the lighthouse when they meet her at last? Write \
         what the first of them says, in his own words, and do not forget to mention the storm and the broken clock.",
        33,
    ),
    ("Thank you. Say goodbye.", 16),
];

/// What the model says when nothing stands between it and the prompt.
static REFERENCE: LazyLock<Vec<Vec<u32>>> = LazyLock::new(|| {
    let mut plain = Plain::new();
    SCRIPT.iter().map(|(input, limit)| plain.say(input, *limit)).collect()
});

async fn converse(spec: Spec) -> anyhow::Result<Vec<Turn>> {
    let cluster = Cluster::start(spec).await?;
    let mut chat = Chat::open(cluster.address()).await?;
    let mut turns = Vec::new();
    for (input, limit) in SCRIPT {
        turns.push(chat.say(input, limit).await?);
    }
    Ok(turns)
}

fn check(turns: &[Turn]) {
    for (idx, (turn, want)) in turns.iter().zip(&*REFERENCE).enumerate() {
        assert_eq!(&turn.output_ids(), want, "turn {idx} by {}", turn.response()["baton"]);
        let (input, computed) = (turn.usage("/input_tokens"), turn.account("computed_tokens"));
        assert_eq!(turn.usage("/input_tokens_details/cached_tokens"), input - computed, "turn {idx}");
        if idx > 0 {
            let delta = turn.account("tokenized_tokens");
            assert!(
                computed <= delta + SLACK,
                "turn {idx} computes {computed} tokens for a delta of {delta}"
            );
            assert!(delta < input, "turn {idx} tokenizes {delta} of {input} tokens");
        }
    }
}

/// Long deltas go to a prefill worker and come back as blocks.
fn check_handed_over(turns: &[Turn]) {
    for idx in [1, 4] {
        assert!(
            turns[idx].worker("prefill_worker").starts_with("prefill-"),
            "turn {idx}: {}",
            turns[idx].last()
        );
        assert!(turns[idx].account("moved_blocks") > 0, "turn {idx}: {}", turns[idx].last());
    }
}

#[tokio::test]
async fn split_over_grpc_says_what_one_process_says() -> anyhow::Result<()> {
    let turns = converse(Spec::split(2, 2)).await?;
    check(&turns);
    check_handed_over(&turns);
    Ok(())
}

#[tokio::test]
async fn split_within_memory_says_what_one_process_says() -> anyhow::Result<()> {
    let turns = converse(Spec { handover: Handover::Memory, ..Spec::split(2, 2) }).await?;
    check(&turns);
    check_handed_over(&turns);
    Ok(())
}

#[tokio::test]
async fn every_turn_handed_over_says_what_one_process_says() -> anyhow::Result<()> {
    let turns = converse(Spec { local_prefill_tokens: 0, ..Spec::split(1, 1) }).await?;
    check(&turns);
    for turn in &turns {
        assert_eq!(turn.worker("prefill_worker"), "prefill-0");
    }
    Ok(())
}

#[tokio::test]
async fn aggregated_says_what_one_process_says() -> anyhow::Result<()> {
    let turns = converse(Spec::aggregated(2)).await?;
    check(&turns);
    for turn in &turns {
        ensure!(turn.worker("prefill_worker").is_empty(), "nobody else prefills");
    }
    Ok(())
}
