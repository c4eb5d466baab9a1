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
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use llguidance::api::TopLevelGrammar;
use llguidance::earley::SlicedBiasComputer;
use llguidance::toktrie::{InferenceCapabilities, TokEnv};
use llguidance::{ParserFactory, TokenParser, panic_utils};

use crate::detokenize::ByteTable;
use crate::tokenizer::Tokenizer;
use environment::Environment;
pub use matcher::{Mask, Matcher};

/// The longest source, in bytes.
pub const MAX_SOURCE_BYTES: usize = 512 << 10;

/// The most lines of a source, of which each can be a rule.
pub const MAX_LINES: usize = 4096;

/// The stack of a compilation, of which only what is used takes memory: llguidance calls itself for a rule within a rule
/// (4 kB) and for a schema within a schema or behind a `$ref` (up to 16 kB, and 36 bytes of source), however many follow.
const STACK_BYTES: usize = 512 << 20;

/// How long a compilation may take, and how long one may wait to begin. What takes longer goes on for nobody.
const MAX_COMPILE_TIME: Duration = Duration::from_secs(5);

/// Compilations at the same time: the other cores are the model's.
const MAX_COMPILING: usize = 2;

/// Compiled grammars that are kept, and the bytes of their lexers; a usual one takes less than a megabyte.
const MAX_COMPILED: usize = 64;
const MAX_COMPILED_BYTES: usize = 128 << 20;

/// States of one output's lexer, 1 to 2 kB each; usual schemas need hundreds.
const MAX_LEXER_STATES: usize = 10_000;

/// Symbols of a grammar; the largest schemas that are in use need less.
const MAX_GRAMMAR_SYMBOLS: usize = 100_000;

/// Longer messages say no more.
const MAX_MESSAGE_CHARS: usize = 300;

/// Why a grammar cannot be used. Every message is one line.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    #[error("the grammar has {n_bytes} bytes, at most {MAX_SOURCE_BYTES} are allowed")]
    TooLong { n_bytes: usize },
    #[error("the grammar has {n_lines} lines, at most {MAX_LINES} are allowed")]
    TooManyLines { n_lines: usize },
    #[error("compiling the grammar takes more than {MAX_COMPILE_TIME:?}: make it simpler")]
    TooSlow,
    #[error("too many grammars are being compiled: try again later")]
    Busy,
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
/// a third of a second and 20 MB for 50 thousand tokens.
pub struct GrammarEngine {
    compiler: Arc<Compiler>,
    compiled: Mutex<Compiled>,
    places: Arc<Places>,
}

/// What compilations share.
struct Compiler {
    tokenizer: Arc<Tokenizer>,
    factory: OnceLock<Result<ParserFactory, Error>>,
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
    source: Arc<str>,
    hash: blake3::Hash,
    /// At its start; nothing has consumed by it.
    start: Arc<TokenParser>,
}

impl Compiled {
    fn keep(&mut self, grammar: &Grammar) {
        let n_bytes = grammar.start.parser.lexer_stats().num_bytes + grammar.source.len();
        if self.grammars.len() >= MAX_COMPILED || self.n_bytes + n_bytes > MAX_COMPILED_BYTES {
            *self = Self::default();
        }
        self.n_bytes += n_bytes;
        self.grammars.insert(grammar.hash, grammar.clone());
    }
}

impl GrammarEngine {
    /// Does no work yet.
    pub fn new(tokenizer: &Arc<Tokenizer>) -> Self {
        let compiler = Compiler { tokenizer: Arc::clone(tokenizer), factory: OnceLock::new() };
        Self { compiler: Arc::new(compiler), compiled: Mutex::default(), places: Arc::default() }
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
        let n_lines = source.lines().count();
        if n_lines > MAX_LINES {
            return Err(Error::TooManyLines { n_lines });
        }
        let hash = blake3::hash(source.as_bytes());
        if let Some(grammar) = self.find(&hash) {
            return Ok(grammar);
        }
        let place = Places::take(&self.places)?;
        // Who had the place before may have compiled the same.
        if let Some(grammar) = self.find(&hash) {
            return Ok(grammar);
        }
        let (answer, compiled) = sync_channel(1);
        let source: Arc<str> = source.into();
        let (compiler, text) = (Arc::clone(&self.compiler), Arc::clone(&source));
        let work = move || {
            let _place = place;
            // Nobody waits any more when it took too long.
            let _ = answer.send(compiler.start(&text));
        };
        let thread = std::thread::Builder::new().name("grammar".to_owned()).stack_size(STACK_BYTES);
        thread.spawn(work).map_err(|error| Error::Failed(error.to_string()))?;
        let start = compiled.recv_timeout(MAX_COMPILE_TIME).map_err(|error| match error {
            RecvTimeoutError::Timeout => Error::TooSlow,
            RecvTimeoutError::Disconnected => Error::Failed("compiling it was interrupted".to_owned()),
        })??;
        let grammar = Grammar { source, hash, start: Arc::new(start) };
        self.compiled.lock().unwrap_or_else(PoisonError::into_inner).keep(&grammar);
        Ok(grammar)
    }

    /// The grammar whose source has this BLAKE3 hash, if it was compiled before and is still kept.
    pub fn known(&self, hash: &[u8]) -> Option<Grammar> {
        self.find(&blake3::Hash::from_bytes(hash.try_into().ok()?))
    }

    /// The bytes of the tokens that grammars are about.
    pub fn byte_table(&self) -> Arc<ByteTable> {
        self.compiler.tokenizer.byte_table()
    }

    fn find(&self, hash: &blake3::Hash) -> Option<Grammar> {
        self.compiled.lock().unwrap_or_else(PoisonError::into_inner).grammars.get(hash).cloned()
    }
}

impl fmt::Debug for GrammarEngine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GrammarEngine").field("tokenizer", &self.compiler.tokenizer).finish_non_exhaustive()
    }
}

/// Places for compilations, of which a few are taken.
#[derive(Default)]
struct Places {
    n_taken: Mutex<usize>,
    given_back: Condvar,
}

/// One of them, until it is dropped.
struct Place(Arc<Places>);

impl Places {
    fn take(places: &Arc<Self>) -> Result<Place, Error> {
        let n_taken = places.n_taken.lock().unwrap_or_else(PoisonError::into_inner);
        let full = |n_taken: &mut usize| *n_taken >= MAX_COMPILING;
        let waited = places.given_back.wait_timeout_while(n_taken, MAX_COMPILE_TIME, full);
        let (mut n_taken, timeout) = waited.unwrap_or_else(PoisonError::into_inner);
        if timeout.timed_out() {
            return Err(Error::Busy);
        }
        *n_taken += 1;
        Ok(Place(Arc::clone(places)))
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        *self.0.n_taken.lock().unwrap_or_else(PoisonError::into_inner) -= 1;
        self.0.given_back.notify_one();
    }
}

impl Compiler {
    /// The parser of `source` at its start. It has made its first mask, the one that costs most.
    fn start(&self, source: &str) -> Result<TokenParser, Error> {
        let factory = self.factory()?;
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
}

impl Grammar {
    /// What it was compiled from.
    pub fn source(&self) -> Arc<str> {
        Arc::clone(&self.source)
    }

    /// BLAKE3 of its source: what [`GrammarEngine::known`] finds it by.
    pub fn hash(&self) -> &[u8; 32] {
        self.hash.as_bytes()
    }

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
