//! A conversation run by the engine's forward pass alone, in one process: no gateway, router, workers, cache or handover.
//!
//! `greedy MODEL.gguf < conversation.json > ids.json`; the input is `{"instructions", "turns", "max_output_tokens"}`, the
//! output one list of token ids per turn. What a cluster answers at temperature 0 must be the same.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::num::NonZeroUsize;
use std::path::Path;
use std::sync::Arc;

use engine::arena::KvArena;
use engine::forward::{Forward, Logits, Slice};
use engine::sample::{Sampler, SamplingParams};
use engine::weights::Weights;
use kernels::pool::ThreadPool;
use model::TextModel;
use model::chat_template::{Message, Reply, Role};
use model::checkpoint::Checkpoint;
use model::prompt::Entry;

type Failure = Box<dyn std::error::Error>;

const STEP_TOKENS: usize = 128;

fn main() -> Result<(), Failure> {
    let path = std::env::args().nth(1).ok_or("usage: greedy MODEL.gguf < conversation.json")?;
    let mut text = String::new();
    std::io::stdin().read_to_string(&mut text)?;
    let input: BTreeMap<String, serde_json::Value> = serde_json::from_str(&text)?;
    let string = |value: &serde_json::Value| value.as_str().unwrap_or_default().to_owned();
    let limit = input["max_output_tokens"].as_u64().ok_or("max_output_tokens is a number")?;
    let turns = input["turns"].as_array().ok_or("turns is a list")?;

    let model = TextModel::open(Path::new(&path))?;
    let mut engine = Plain::open(Path::new(&path))?;
    let system = Message { role: Role::System, content: string(&input["instructions"]).into() };
    let mut history: Vec<(Message, Vec<u32>)> = Vec::new();
    for turn in turns {
        history.push((Message { role: Role::User, content: string(turn).into() }, Vec::new()));
        let mut entries = vec![Entry::Message(&system)];
        for (idx, (question, answer)) in history.iter().enumerate() {
            entries.push(Entry::Message(question));
            if idx + 1 < history.len() {
                entries.push(Entry::Generated { ids: answer });
            }
        }
        let prompt = model.prompts.render_all(&entries, Reply::Expected, &[])?;
        let answer =
            engine.generate(&prompt, usize::try_from(limit)?, &|id| model.tokenizer.is_end_of_turn(id))?;
        history.last_mut().ok_or("a turn was just added")?.1 = answer;
    }
    let ids: Vec<&Vec<u32>> = history.iter().map(|(_, ids)| ids).collect();
    writeln!(std::io::stdout(), "{}", serde_json::to_string(&ids)?)?;
    Ok(())
}

/// The forward pass with a block table that is never shared.
struct Plain {
    forward: Forward,
    arena: KvArena,
    table: Vec<u32>,
}

impl Plain {
    fn open(path: &Path) -> Result<Self, Failure> {
        let threads =
            Arc::new(ThreadPool::new(std::thread::available_parallelism().unwrap_or(NonZeroUsize::MIN)));
        let weights = Arc::new(Weights::load(&Checkpoint::open(path)?, &threads)?);
        let n_blocks = weights.shape().context_len / kv::BLOCK_TOKENS;
        let arena = KvArena::new(weights.shape().kv_geometry(), n_blocks);
        let table = (0..u32::try_from(n_blocks)?).collect();
        Ok(Self { forward: Forward::new(weights, threads, STEP_TOKENS), arena, table })
    }

    /// Computes the whole prompt from nothing, then one token after the other.
    fn generate(
        &mut self,
        prompt: &[u32],
        limit: usize,
        is_end: &dyn Fn(u32) -> bool,
    ) -> Result<Vec<u32>, Failure> {
        let mut tokens = prompt.to_vec();
        let mut start = 0;
        while tokens.len() < prompt.len() + limit {
            let end = tokens.len().min(start + STEP_TOKENS);
            let logits = if end == tokens.len() { Logits::Last } else { Logits::None };
            let slice = Slice { tokens: &tokens[start..end], start, blocks: &self.table, logits };
            let rows = self.forward.run(&mut self.arena, &[slice], &mut |_, _| {})?;
            start = end;
            if logits == Logits::Last {
                let token =
                    Sampler::default().sample(rows.row(0), &SamplingParams::GREEDY, tokens.len() as u64);
                tokens.push(token);
                if is_end(token) {
                    break;
                }
            }
        }
        Ok(tokens.split_off(prompt.len()))
    }
}
