//! The proof at the start of `baton up`: one real conversation of two turns through every part of the cluster.

use std::fmt::Write;
use std::net::SocketAddr;
use std::time::Duration;

use anyhow::ensure;
use api_gateway::Secret;

use crate::chat::figures;
use crate::client::{Client, Style, Turn};

/// Long enough that its KV travels from a prefill worker to a decode worker.
const INSTRUCTIONS: &str = "You are a careful assistant inside a cluster that has just been started. Answer each question \
    in one short and friendly sentence, and keep to what you know for certain. Do not repeat the question, do not greet \
    the user, do not apologize, and do not add lists, headings or explanations that nobody asked for. When a question \
    is about a place, name the place and one thing that it is known for. When a question is about a number, give the \
    number first and its unit right after it. When you do not know something, say so in a few words and stop there. \
    These instructions are long on purpose: their keys and values are computed once by a prefill worker, handed over \
    to a decode worker block by block, and used again in the next turn instead of being computed a second time.";

/// Sends the conversation and describes what happened.
///
/// # Errors
/// When any part of the path fails.
pub async fn run(api: SocketAddr, model: &str, key: Option<&Secret>) -> anyhow::Result<String> {
    let style = Style {
        model: model.to_owned(),
        instructions: Some(INSTRUCTIONS.to_owned()),
        temperature: 0.0,
        top_p: 1.0,
        max_output_tokens: 48,
    };
    let mut client = Client::connect(&format!("ws://{api}/v1/responses"), key).await?;
    let questions = ["What is the capital of France?", "And what is the capital of Italy?"];
    let mut report = String::new();
    for (idx, question) in questions.into_iter().enumerate() {
        let turn = client.turn(question, &style, |_| {}).await?;
        ensure!(!turn.text.trim().is_empty(), "the model gave an empty answer");
        if idx > 0 {
            ensure!(turn.cached_tokens > 0, "nothing of the first turn was reused in the second");
        }
        describe(&mut report, idx + 1, question, &turn);
    }
    Ok(report)
}

fn describe(report: &mut String, number: usize, question: &str, turn: &Turn) {
    let account = &turn.account;
    let filled = if account.prefill_worker.is_empty() {
        format!("computed by {} itself", account.decode_worker)
    } else {
        format!("computed by {}", account.prefill_worker)
    };
    let moved = match account.moved_blocks {
        0 => "no KV block moved".to_owned(),
        n => format!("{n} KV blocks ({} KB) moved", account.moved_bytes / 1000),
    };
    let _ = writeln!(report, "  turn {number}: {question}");
    let _ = writeln!(report, "          {}", turn.text.trim().replace('\n', " "));
    let _ = writeln!(
        report,
        "          {} prompt tokens {filled}, {moved}, decoded by {}; {} tokenized",
        account.computed_tokens, account.decode_worker, account.tokenized_tokens
    );
    let _ = writeln!(report, "          {} ({} ms in all)", figures(turn), millis(turn.total));
}

fn millis(time: Duration) -> u128 {
    time.as_millis()
}
