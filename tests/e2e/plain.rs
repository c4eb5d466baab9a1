//! The model by itself: loaded once, and decoded greedily in one thread's loop, with nothing of the cluster in between.

use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::sync::{Arc, LazyLock};

use engine::arena::KvArena;
use engine::forward::{Forward, Logits, Slice};
use engine::sample::{Sampler, SamplingParams};
use engine::speculate::head::DraftHead;
use engine::weights::Weights;
use engine::{Drafter, Model};
use kernels::pool::ThreadPool;
use kv::BLOCK_TOKENS;
use model::TextModel;
use model::chat_template::{Message, Reply, Role};
use model::checkpoint::Checkpoint;
use model::prompt::Entry;
use model::reference::ModelRef;

/// Blocks of a plain run's KV memory: 4096 tokens.
const N_BLOCKS: u32 = 256;
/// Tokens of one step.
const STEP_TOKENS: usize = 256;

static PATH: LazyLock<PathBuf> = LazyLock::new(find);

/// The weights, shared by all engines of all clusters.
pub(crate) static WEIGHTS: LazyLock<Arc<Weights>> = LazyLock::new(|| {
    let gguf = Checkpoint::open(&PATH).expect("the test model is a GGUF file");
    Arc::new(Weights::load(&gguf, &threads(2)).expect("the test model is supported"))
});

/// The model as workers get it, with its draft head.
pub(crate) static MODEL: LazyLock<Model> = LazyLock::new(|| {
    let head = DraftHead::built_in(&WEIGHTS, &threads(2)).expect("the test model has a head");
    Model {
        weights: Arc::clone(&WEIGHTS),
        fingerprint: TEXT.fingerprint,
        drafter: Drafter::Head(Arc::new(head)),
        grammars: Some(Arc::clone(&TEXT.grammars)),
    }
});

/// Tokenizer and chat template.
pub(crate) static TEXT: LazyLock<TextModel> =
    LazyLock::new(|| TextModel::open(&PATH).expect("the test model has a tokenizer and a template"));

#[expect(clippy::disallowed_methods, reason = "tests pick the model from the environment")]
fn find() -> PathBuf {
    if let Ok(path) = std::env::var("BATON_TEST_MODEL") {
        return PathBuf::from(path);
    }
    let cache = std::env::var("BATON_CACHE_DIR").map(PathBuf::from).unwrap_or_else(|_| {
        let home = std::env::var("HOME").expect("HOME, BATON_CACHE_DIR or BATON_TEST_MODEL is set");
        PathBuf::from(home).join(".cache/baton")
    });
    ModelRef::default().resolve(&cache, &mut |_| {}).expect("the default model can be fetched")
}

pub(crate) fn threads(n: usize) -> ThreadPool {
    ThreadPool::new(NonZeroUsize::new(n).expect("at least one thread"))
}

/// One conversation decoded greedily.
pub(crate) struct Plain {
    forward: Forward,
    arena: KvArena,
    messages: Vec<Message>,
    outputs: Vec<Vec<u32>>,
    /// Tokens whose keys and values are in the arena.
    computed: Vec<u32>,
}

impl Plain {
    pub(crate) fn new() -> Self {
        let forward = Forward::new(Arc::clone(&WEIGHTS), Arc::new(threads(1)), STEP_TOKENS);
        let arena = KvArena::new(WEIGHTS.shape().kv_geometry(), N_BLOCKS as usize);
        Self { forward, arena, messages: Vec::new(), outputs: Vec::new(), computed: Vec::new() }
    }

    /// The whole prompt of the next turn: every message rendered, generated ids as they are.
    pub(crate) fn prompt(&mut self, input: &str) -> Vec<u32> {
        self.messages.push(Message { role: Role::User, content: input.into() });
        let mut entries = Vec::new();
        for (idx, message) in self.messages.iter().enumerate() {
            entries.push(Entry::Message(message));
            if let Some(ids) = self.outputs.get(idx) {
                entries.push(Entry::Generated { ids });
            }
        }
        TEXT.prompts.render_all(&entries, Reply::Expected, &[]).expect("the template takes user messages")
    }

    /// The next turn's output, at most `limit` tokens.
    pub(crate) fn say(&mut self, input: &str, limit: usize) -> Vec<u32> {
        let prompt = self.prompt(input);
        let same = self.computed.iter().zip(&prompt).take_while(|(a, b)| a == b).count();
        self.computed.truncate(same.min(prompt.len() - 1));
        let mut pending = prompt[self.computed.len()..].to_vec();
        let mut output = Vec::new();
        loop {
            let token = self.next(&pending);
            output.push(token);
            if output.len() == limit || TEXT.tokenizer.is_end_of_turn(token) {
                self.outputs.push(output.clone());
                return output;
            }
            pending = vec![token];
        }
    }

    /// Computes `tokens` and returns the likeliest token after them.
    fn next(&mut self, tokens: &[u32]) -> u32 {
        let blocks: Vec<u32> = (0..N_BLOCKS).collect();
        let mut best = None;
        for chunk in tokens.chunks(STEP_TOKENS) {
            let start = self.computed.len();
            self.computed.extend(chunk);
            let blocks = &blocks[..self.computed.len().div_ceil(BLOCK_TOKENS)];
            let slice = Slice { tokens: chunk, start, blocks, logits: Logits::Last };
            let rows = self.forward.run(&mut self.arena, &[slice], &mut |_, _| ());
            let rows = rows.expect("the step is within the limits");
            best = Some(Sampler::default().sample(rows.row(0), &SamplingParams::GREEDY, 0));
        }
        best.expect("there was a token")
    }
}
