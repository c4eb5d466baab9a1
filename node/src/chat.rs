//! `baton chat`: a terminal chat over the WebSocket.

use std::io::{IsTerminal, Write};

use tokio::io::{AsyncBufReadExt, BufReader};

use crate::cli::ChatArgs;
use crate::client::{Client, Style, Turn, served_model};

const HELP: &str = "Type a message; /new starts a new conversation, /quit ends.\n";

/// Runs `baton chat`.
///
/// # Errors
/// When the server cannot be reached or refuses a turn of `--once`.
pub async fn run(args: ChatArgs) -> anyhow::Result<()> {
    let model = match args.name {
        Some(name) => name,
        None => served_model(&args.url, args.api_key.as_ref()).await?,
    };
    let style = Style {
        model,
        instructions: Some(args.instructions),
        temperature: args.temperature,
        top_p: args.top_p,
        max_output_tokens: args.max_output_tokens,
    };
    let mut client = Client::connect(&args.url, args.api_key.as_ref()).await?;
    if let Some(text) = args.once {
        return one(&mut client, &text, &style).await;
    }
    let interactive = std::io::stdin().is_terminal();
    if interactive {
        say(&format!("{} at {}. {HELP}", style.model, args.url))?;
    }
    let mut lines = BufReader::new(tokio::io::stdin()).lines();
    loop {
        if interactive {
            say("\n> ")?;
        }
        let Some(line) = lines.next_line().await? else { return Ok(()) };
        match line.trim() {
            "" => {}
            "/quit" | "/exit" => return Ok(()),
            "/help" => say(HELP)?,
            "/new" => client.forget(),
            text => {
                if let Err(error) = one(&mut client, text, &style).await {
                    if !interactive {
                        return Err(error);
                    }
                    say(&format!("{error:#}\n"))?;
                    // A lost connection takes the conversation along unless the server has stored it; it has.
                    client = client.reconnected(&args.url, args.api_key.as_ref()).await?;
                }
            }
        }
    }
}

async fn one(client: &mut Client, text: &str, style: &Style) -> anyhow::Result<()> {
    let mut shown = Ok(());
    let turn = client
        .turn(text, style, |piece| {
            if shown.is_ok() {
                shown = say(piece);
            }
        })
        .await?;
    shown?;
    say("\n")?;
    // The figures go to stderr, so that the answer alone can be piped.
    let _ = writeln!(std::io::stderr(), "[{}]", figures(&turn));
    Ok(())
}

/// A turn's figures in one line.
#[must_use]
pub fn figures(turn: &Turn) -> String {
    let first = turn.first_text.unwrap_or(turn.total);
    let decoding = turn.total.saturating_sub(first).as_secs_f64();
    #[expect(clippy::cast_precision_loss, reason = "shown with few digits")]
    let rate = turn.output_tokens.saturating_sub(1) as f64 / decoding.max(1e-6);
    format!(
        "{} tokens, {rate:.0} tok/s, first token after {} ms, {} of {} prompt tokens cached",
        turn.output_tokens,
        first.as_millis(),
        turn.cached_tokens,
        turn.input_tokens
    )
}

fn say(text: &str) -> anyhow::Result<()> {
    let mut stdout = std::io::stdout();
    stdout.write_all(text.as_bytes())?;
    stdout.flush()?;
    Ok(())
}
