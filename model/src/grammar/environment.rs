//! A tokenizer as llguidance wants to see it.

use std::sync::Arc;

use llguidance::toktrie::{INVALID_TOKEN, TokRxInfo, TokTrie, TokenId, TokenizerEnv};

use crate::tokenizer::{SpecialToken, Tokenizer};

/// The trie has no room for longer tokens.
const MAX_TOKEN_BYTES: usize = 1000;

/// Tokens in a trie of their bytes; special ones by their names.
pub(super) struct Environment {
    tokenizer: Arc<Tokenizer>,
    trie: TokTrie,
}

impl Environment {
    pub(super) fn new(tokenizer: &Arc<Tokenizer>) -> anyhow::Result<Self> {
        let vocab_size = tokenizer.vocab_size();
        let mut words: Vec<Vec<u8>> = (0..vocab_size).map(|id| ordinary(tokenizer.token_bytes(id))).collect();
        for token in tokenizer.specials().iter().filter(|token| is_marker(token)) {
            let mut name = vec![TokTrie::SPECIAL_TOKEN_MARKER];
            name.extend(token.text.bytes().take(MAX_TOKEN_BYTES));
            words[token.id as usize] = name;
        }
        anyhow::ensure!(!words.is_empty(), "it has no tokens");
        // Without an end of turn: who samples knows better which tokens end it.
        let trie = TokTrie::from(&TokRxInfo::new(vocab_size, INVALID_TOKEN), &words);
        Ok(Self { tokenizer: Arc::clone(tokenizer), trie })
    }
}

impl TokenizerEnv for Environment {
    fn tok_trie(&self) -> &TokTrie {
        &self.trie
    }

    /// As the tokenizer would, if that keeps every byte: some vocabularies lack a few.
    fn tokenize_bytes(&self, bytes: &[u8]) -> Vec<TokenId> {
        let ids = self.trie.tokenize_with_greedy_fallback(bytes, |text| self.tokenizer.encode_ordinary(text));
        let n_bytes: usize = ids.iter().map(|&id| self.tokenizer.token_bytes(id).len()).sum();
        if n_bytes == bytes.len() { ids } else { self.trie.greedy_tokenize(bytes) }
    }
}

/// The bytes of an ordinary token; none of one that the trie would take for a special one.
fn ordinary(bytes: &[u8]) -> Vec<u8> {
    let fits = bytes.len() <= MAX_TOKEN_BYTES && bytes.first() != Some(&TokTrie::SPECIAL_TOKEN_MARKER);
    if fits { bytes.to_vec() } else { Vec::new() }
}

/// False for added tokens that are text like any other, such as runs of spaces.
fn is_marker(token: &SpecialToken) -> bool {
    let framed = |open, close| token.text.starts_with(open) && token.text.ends_with(close);
    token.control || framed('<', '>') || framed('[', ']')
}
