//! What the engine is asked to do for one turn, and what it tells back.

use std::fmt;

use kv::hash::{BlockHash, HashKey, WrongLength};
use kv::pool::BlockId;
use kv::port::FrameSender;
use proto::v1;

use crate::constrain::Constraint;
use crate::sample::{Logprobs, SamplingParams};

/// Names one sequence of one engine for as long as it lives; also the id of its grant.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SequenceId(pub u64);

/// Token ids after the block `parent`; the whole prompt when `parent` is the root.
#[derive(Debug, Clone)]
pub struct Prompt {
    pub key: HashKey,
    pub parent: BlockHash,
    pub ids: Vec<u32>,
}

impl Prompt {
    /// Reads a prompt for a model of `fingerprint`.
    ///
    /// # Errors
    /// When the parent is no block hash.
    pub fn from_wire(wire: v1::Prompt, fingerprint: &[u8; 32]) -> Result<Self, WrongLength> {
        let key = HashKey::derive(fingerprint, &wire.tenant_salt);
        Ok(Self { key, parent: BlockHash::from_wire(&wire.parent)?, ids: wire.ids })
    }
}

/// Whose work fills the prompt's KV.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fill {
    /// This engine computes what is not cached.
    Compute,
    /// The first `n` blocks are pulled from elsewhere; this engine computes the rest.
    PullPrefix(usize),
    /// Another worker computes everything and the first token.
    Handover,
}

/// Prompt KV to copy out for another worker while it is computed.
#[derive(Debug)]
pub struct ExportTo {
    /// Index within the prompt of the first block to copy.
    pub first_block: usize,
    /// The receiver's blocks, one per prompt block from `first_block` on.
    pub targets: Vec<BlockId>,
    pub frames: FrameSender,
}

/// One turn.
pub struct Job {
    /// The cluster's name for this turn.
    pub turn: u64,
    pub prompt: Prompt,
    pub fill: Fill,
    pub export: Option<ExportTo>,
    pub sampling: SamplingParams,
    /// What the output must look like.
    pub constraint: Option<Constraint>,
    /// 0: only the prompt's KV is wanted.
    pub max_output_tokens: usize,
    pub stop_ids: Vec<u32>,
    pub sink: Sink,
}

impl fmt::Debug for Job {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Job").field("turn", &self.turn).field("fill", &self.fill).finish_non_exhaustive()
    }
}

/// Takes a turn's events on the engine's thread; it must not wait. False: nobody listens, cancel the turn.
pub type Sink = Box<dyn FnMut(Event) -> bool + Send>;

/// One output token.
#[derive(Debug, Clone, PartialEq)]
pub struct Output {
    pub id: u32,
    /// When they were asked for.
    pub logprobs: Option<Box<Logprobs>>,
}

/// What happened to a turn.
#[derive(Debug, Clone, PartialEq)]
pub enum Event {
    /// The turn has its place. With `Fill::PullPrefix` and `Fill::Handover` it now waits for `Engine::filled`.
    Admitted(Admitted),
    /// The prompt's KV is complete; `computed_tokens` of it went through this engine's model.
    Prefilled { computed_tokens: usize },
    /// The next output token.
    Token(Output),
    /// The last event of a turn that went well.
    Finished(FinishReason),
    /// The last event of a turn that did not.
    Failed(Error),
}

/// A turn's place in KV memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Admitted {
    pub prompt_tokens: usize,
    /// Prompt tokens whose KV was held already.
    pub cached_tokens: usize,
    /// Hashes of all full blocks of the prompt; empty when nothing is granted.
    pub hashes: Vec<BlockHash>,
    /// The whole prompt, for whoever lacks its parent; empty when nothing is granted.
    pub ids: Vec<u32>,
    /// Blocks that wait for bytes under the grant of this sequence, in prompt order after the cached ones.
    pub granted: Vec<BlockId>,
}

/// Why a turn ended well.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FinishReason {
    /// A stop token was generated, or nothing more may follow.
    Stop,
    /// The output or the context is full.
    Length,
    /// No output was asked for and the prompt's KV is complete.
    Prefilled,
}

/// Why a turn cannot run.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    #[error("the parent block is not held here: send the full prompt")]
    ParentUnknown,
    #[error("the prompt has {tokens} tokens, {limit} fit")]
    PromptTooLong { tokens: usize, limit: usize },
    #[error("the prompt is empty or names a token outside the vocabulary")]
    BadPrompt,
    #[error("the grammar with this hash is not held here: send the grammar")]
    GrammarUnknown,
    #[error("the output's constraint cannot be used: {0}")]
    Constraint(String),
    #[error("all {limit} places for turns are taken: try again later")]
    Overloaded { limit: usize },
    #[error("the engine has stopped")]
    Stopped,
    #[error("the model failed: {0}")]
    Model(String),
}
