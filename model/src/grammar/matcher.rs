//! One output on its way through a grammar.

use std::fmt;

use llguidance::TokenParser;
use llguidance::api::StopReason;
use llguidance::toktrie::SimpleVob;

use super::{Error, caught};

/// The tokens that may come next.
#[derive(Clone, PartialEq, Eq)]
pub struct Mask {
    allowed: SimpleVob,
}

impl Mask {
    /// Allows none of `n_tokens`.
    pub fn none(n_tokens: usize) -> Self {
        Self { allowed: SimpleVob::alloc(n_tokens) }
    }

    /// False for ids outside the vocabulary.
    pub fn allows(&self, id: u32) -> bool {
        self.words().get(id as usize / 32).is_some_and(|word| word >> (id % 32) & 1 == 1)
    }

    /// Adds a token; ids outside the vocabulary are ignored.
    pub fn allow(&mut self, id: u32) {
        if (id as usize) < self.allowed.len() {
            self.allowed.allow_token(id);
        }
    }

    /// A bit per token from the lowest on, at least `[ceil(vocab / 32)]`.
    pub fn words(&self) -> &[u32] {
        self.allowed.as_slice()
    }

    pub fn n_allowed(&self) -> usize {
        self.allowed.num_set()
    }

    /// The lowest allowed token.
    pub fn first(&self) -> Option<u32> {
        let (idx, word) = (0..).zip(self.words()).find(|(_, word)| **word != 0)?;
        Some(idx * 32 + word.trailing_zeros())
    }
}

impl fmt::Debug for Mask {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Mask({} tokens)", self.n_allowed())
    }
}

/// See the header of [`crate::grammar`]. After an error it is of no more use.
pub struct Matcher {
    parser: TokenParser,
}

impl Matcher {
    pub(super) fn new(parser: TokenParser) -> Self {
        Self { parser }
    }

    pub(super) fn into_parser(self) -> TokenParser {
        self.parser
    }

    /// What may come next; nothing when the grammar is complete. 10 to 100 µs as a rule, some milliseconds at worst.
    ///
    /// # Errors
    /// When the grammar is too complex at this place, or the vocabulary has no token that fits.
    pub fn mask(&mut self) -> Result<Mask, Error> {
        self.run(|parser| {
            let none = Mask::none(parser.token_env.tok_trie().vocab_size());
            if parser.stopped() || parser.check_stop()? {
                return Ok(none);
            }
            match parser.compute_mask() {
                Ok(allowed) => Ok(Mask { allowed }),
                Err(error) if parser.stop_reason() != StopReason::NoExtensionBias => Err(error),
                // It turned out only now that the grammar goes on no further.
                Err(_) if parser.is_accepting() => Ok(none),
                Err(_) => anyhow::bail!("no token of the vocabulary fits here"),
            }
        })
    }

    /// Goes on by one token, 2 to 5 µs.
    ///
    /// # Errors
    /// When the token does not fit.
    pub fn consume(&mut self, token: u32) -> Result<(), Error> {
        self.run(|parser| {
            let n_tokens = parser.num_tokens();
            parser.consume_token(token)?;
            anyhow::ensure!(parser.num_tokens() == n_tokens + 1, "token {token} would take others back");
            parser.check_stop()?;
            Ok(())
        })
    }

    /// Goes on by bytes that are no token of their own. False, and nothing has changed: they do not fit.
    ///
    /// # Errors
    /// As for [`Self::consume`].
    pub fn consume_bytes(&mut self, bytes: &[u8]) -> Result<bool, Error> {
        let trie = self.parser.token_env.tok_trie();
        let tokens = trie.greedy_tokenize(bytes);
        let n_bytes: usize = tokens.iter().map(|&token| trie.token(token).len()).sum();
        if n_bytes != bytes.len() || self.n_fitting(&tokens)? < tokens.len() {
            return Ok(false);
        }
        tokens.into_iter().try_for_each(|token| self.consume(token))?;
        Ok(true)
    }

    /// How many of `tokens`, from the first on, fit one after the other. The mask may allow fewer: where the grammar
    /// forces text, it allows only the tokens that the tokenizer would make of it.
    ///
    /// # Errors
    /// When the grammar is too complex at this place.
    pub fn n_fitting(&mut self, tokens: &[u32]) -> Result<usize, Error> {
        let vocab_size = self.parser.token_env.tok_trie().vocab_size();
        let known = tokens.iter().take_while(|&&token| (token as usize) < vocab_size).count();
        self.run(|parser| parser.validate_tokens_raw(&tokens[..known]))
    }

    /// Takes the last `n_tokens` back.
    ///
    /// # Errors
    /// When it has not consumed so many.
    pub fn rollback(&mut self, n_tokens: usize) -> Result<(), Error> {
        self.run(|parser| parser.rollback(n_tokens))
    }

    /// The tokens that must come next, as far as that is certain. 5 to 50 µs.
    ///
    /// # Errors
    /// When the grammar is too complex at this place.
    pub fn forced(&mut self) -> Result<Vec<u32>, Error> {
        self.run(|parser| Ok(if parser.stopped() { Vec::new() } else { parser.compute_ff_tokens() }))
    }

    /// True when the output may end here.
    ///
    /// # Errors
    /// When the grammar is too complex at this place.
    pub fn is_accepting(&mut self) -> Result<bool, Error> {
        self.run(|parser| Ok(parser.is_accepting()))
    }

    /// True when the output may end here and cannot go on.
    pub fn is_complete(&self) -> bool {
        self.parser.stop_reason() != StopReason::NotStopped && self.parser.stop_reason().is_ok()
    }

    fn run<T>(&mut self, work: impl FnOnce(&mut TokenParser) -> anyhow::Result<T>) -> Result<T, Error> {
        caught(|| work(&mut self.parser)).map_err(Error::Failed)
    }
}

impl fmt::Debug for Matcher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Matcher").field("n_tokens", &self.parser.num_tokens()).finish_non_exhaustive()
    }
}
