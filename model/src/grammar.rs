//! Grammars that an output has to follow, by the crate `llguidance`: which tokens may come next, which must.
//!
//! A grammar's source ([`source`]) is Lark in llguidance's dialect: rules, regular expressions, `%json {schema}`, special
//! tokens by name (`<tool_call>`) or by id (`<[1234]>`). [`GrammarEngine::compile`] checks it once and keeps it;
//! [`Grammar::matcher`] follows one output token by token.
//!
//! llguidance knows no end of a turn here: whoever samples allows his stop tokens where [`Matcher::is_accepting`].
//! What a matcher says is a function of the tokens that it has consumed, whatever was tried and rolled back in between.

pub mod source;

mod environment;
mod matcher;

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use llguidance::api::TopLevelGrammar;
use llguidance::earley::SlicedBiasComputer;
use llguidance::toktrie::{InferenceCapabilities, TokEnv};
use llguidance::{ParserFactory, TokenParser, panic_utils};

use crate::detokenize::ByteTable;
use crate::tokenizer::Tokenizer;
use environment::Environment;
pub use matcher::{Mask, Matcher};

/// The longest source, in bytes.
pub const MAX_SOURCE_BYTES: usize = 1 << 20;

/// Brackets within brackets, wherever they stand: the compilers below call themselves for each.
pub const MAX_NESTING: usize = 256;

/// The stack of a compilation; [`MAX_NESTING`] levels need a small part of it.
const STACK_BYTES: usize = 32 << 20;

/// Compiled grammars that are kept, and the bytes of their lexers; a usual one takes less than a megabyte.
const MAX_COMPILED: usize = 64;
const MAX_COMPILED_BYTES: usize = 128 << 20;

/// States of one output's lexer, 1 to 2 kB each; usual schemas need hundreds.
const MAX_LEXER_STATES: usize = 10_000;

/// Symbols of a grammar; the largest schemas that are in use need less.
const MAX_GRAMMAR_SYMBOLS: usize = 250_000;

/// Longer messages say no more.
const MAX_MESSAGE_CHARS: usize = 300;

/// Why a grammar cannot be used. Every message is one line.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    #[error("the grammar has {n_bytes} bytes, at most {MAX_SOURCE_BYTES} are allowed")]
    TooLong { n_bytes: usize },
    #[error("the grammar is nested more than {MAX_NESTING} levels deep")]
    TooDeep,
    /// The source is wrong; the message names line and column where they are known.
    #[error("{0}")]
    Invalid(String),
    /// The vocabulary cannot be used with grammars.
    #[error("no grammars for this vocabulary: {0}")]
    Vocabulary(String),
    /// A matcher cannot go on.
    #[error("the grammar failed: {0}")]
    Failed(String),
}

/// Compiles grammars for one vocabulary. Share it with `Arc`.
///
/// What all its grammars share (a trie of the tokens, masks of common kinds of text) is made at the first compilation:
/// a third of a second and 30 MB for 50 thousand tokens.
pub struct GrammarEngine {
    tokenizer: Arc<Tokenizer>,
    factory: OnceLock<Result<ParserFactory, Error>>,
    compiled: Mutex<Compiled>,
    /// Held while a grammar is compiled: one at a time leaves the cores to the model.
    compiling: Mutex<()>,
}

/// Grammars by the hash of their source. All are forgotten when they become too many.
#[derive(Default)]
struct Compiled {
    grammars: HashMap<blake3::Hash, Grammar>,
    n_bytes: usize,
}

/// A checked grammar. Cheap to clone.
#[derive(Clone)]
pub struct Grammar {
    /// At its start; nothing has consumed by it.
    start: Arc<TokenParser>,
}

impl Compiled {
    fn keep(&mut self, hash: blake3::Hash, grammar: &Grammar) {
        let n_bytes = grammar.start.parser.lexer_stats().num_bytes;
        if self.grammars.len() >= MAX_COMPILED || self.n_bytes + n_bytes > MAX_COMPILED_BYTES {
            *self = Self::default();
        }
        self.n_bytes += n_bytes;
        self.grammars.insert(hash, grammar.clone());
    }
}

impl GrammarEngine {
    /// Does no work yet.
    pub fn new(tokenizer: &Arc<Tokenizer>) -> Self {
        Self {
            tokenizer: Arc::clone(tokenizer),
            factory: OnceLock::new(),
            compiled: Mutex::default(),
            compiling: Mutex::default(),
        }
    }

    /// Checks and compiles `source`, or finds it among those compiled before. Blocks for some milliseconds, at the first
    /// call for a third of a second.
    ///
    /// # Errors
    /// What is wrong with the source; a grammar that allows no output at all; too complex ones.
    pub fn compile(&self, source: &str) -> Result<Grammar, Error> {
        if source.len() > MAX_SOURCE_BYTES {
            return Err(Error::TooLong { n_bytes: source.len() });
        }
        if nesting(source) > MAX_NESTING {
            return Err(Error::TooDeep);
        }
        let hash = blake3::hash(source.as_bytes());
        if let Some(grammar) = self.find(&hash) {
            return Ok(grammar);
        }
        let _one_at_a_time = self.compiling.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(grammar) = self.find(&hash) {
            return Ok(grammar);
        }
        let start = std::thread::scope(|scope| {
            let work = || start(self.factory()?, source);
            let thread = std::thread::Builder::new().name("grammar".to_owned()).stack_size(STACK_BYTES);
            let thread =
                thread.spawn_scoped(scope, work).map_err(|error| Error::Failed(error.to_string()))?;
            thread.join().unwrap_or_else(|_| Err(Error::Failed("compiling it was interrupted".to_owned())))
        })?;
        let grammar = Grammar { start: Arc::new(start) };
        self.compiled.lock().unwrap_or_else(PoisonError::into_inner).keep(hash, &grammar);
        Ok(grammar)
    }

    /// The bytes of the tokens that grammars are about.
    pub fn byte_table(&self) -> Arc<ByteTable> {
        self.tokenizer.byte_table()
    }

    fn factory(&self) -> Result<&ParserFactory, Error> {
        let factory = self.factory.get_or_init(|| {
            caught(|| {
                let environment: TokEnv = Arc::new(Environment::new(&self.tokenizer)?);
                let slices = SlicedBiasComputer::general_slices();
                // By default nothing is added that nobody sampled, and nothing is taken back.
                let capabilities = InferenceCapabilities::default();
                let mut factory = ParserFactory::new(&environment, capabilities, &slices)?;
                factory.quiet();
                factory.limits_mut().max_lexer_states = MAX_LEXER_STATES;
                factory.limits_mut().max_grammar_size = MAX_GRAMMAR_SYMBOLS;
                factory.limits_mut().verbose_errors = false;
                Ok(factory)
            })
            .map_err(Error::Vocabulary)
        });
        factory.as_ref().map_err(Clone::clone)
    }

    fn find(&self, hash: &blake3::Hash) -> Option<Grammar> {
        self.compiled.lock().unwrap_or_else(PoisonError::into_inner).grammars.get(hash).cloned()
    }
}

impl fmt::Debug for GrammarEngine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GrammarEngine").field("tokenizer", &self.tokenizer).finish_non_exhaustive()
    }
}

impl Grammar {
    /// Follows one output from its beginning. What other matchers run into does not touch it.
    pub fn matcher(&self) -> Matcher {
        Matcher::new(self.start.deep_clone())
    }
}

impl fmt::Debug for Grammar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Grammar").finish_non_exhaustive()
    }
}

/// The parser of `source` at its start. It has made its first mask, the one that costs most.
fn start(factory: &ParserFactory, source: &str) -> Result<TokenParser, Error> {
    let compile = || {
        let mut parser = factory.create_parser(TopLevelGrammar::from_lark(source.to_owned()))?;
        parser.parser.grammar().lexer_spec().check_rollback()?;
        parser.start_without_prompt();
        Ok(parser)
    };
    let mut matcher = Matcher::new(caught(compile).map_err(Error::Invalid)?);
    matcher.mask().map_err(|error| Error::Invalid(format!("no output is possible: {error}")))?;
    Ok(matcher.into_parser())
}

/// The deepest nesting of brackets. Those in strings and regular expressions count too: it is a limit, not a reading.
fn nesting(source: &str) -> usize {
    let (mut depth, mut deepest, mut escaped) = (0usize, 0, false);
    for byte in source.bytes() {
        match byte {
            _ if escaped => {}
            b'(' | b'[' | b'{' => depth += 1,
            b')' | b']' | b'}' => depth = depth.saturating_sub(1),
            _ => {}
        }
        escaped = byte == b'\\' && !escaped;
        deepest = deepest.max(depth);
    }
    deepest
}

/// Runs llguidance: whatever goes wrong in there, panics included, is one line of text.
fn caught<T>(work: impl FnOnce() -> anyhow::Result<T>) -> Result<T, String> {
    panic_utils::catch_unwind(std::panic::AssertUnwindSafe(work))
        .map_err(|error| one_line(&format!("{error:#}")))
}

/// The first line of a message of llguidance; its `3(5): ` and `at 3(5): ` become `line 3, column 5: `.
fn one_line(message: &str) -> String {
    let line = message.lines().find(|line| !line.trim().is_empty()).unwrap_or("unknown error").trim();
    let place = |line: &str| -> Option<String> {
        let (row, rest) = line.strip_prefix("at ").unwrap_or(line).split_once('(')?;
        let (column, rest) = rest.split_once("): ")?;
        let (row, column): (u32, u32) = (row.parse().ok()?, column.parse().ok()?);
        Some(format!("line {row}, column {column}: {rest}"))
    };
    place(line).unwrap_or_else(|| line.to_owned()).chars().take(MAX_MESSAGE_CHARS).collect()
}

#[cfg(test)]
mod tests;
