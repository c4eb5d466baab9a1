//! What all of a gateway's connections share.

use std::sync::Arc;

use kv::hash::HashKey;
use model::TextModel;

use crate::Config;
use crate::background::Background;
use crate::cluster::ClusterClient;
use crate::conversations::{Conversations, Limits};
use crate::seal::Seal;
use crate::store::Store;

/// One gateway. Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct Gateway {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    config: Config,
    text: TextModel,
    hash_key: HashKey,
    cluster: ClusterClient,
    store: Store,
    background: Background,
    conversations: Conversations,
    seal: Seal,
    /// No text longer than this fits the model's context, whatever it says.
    max_prompt_bytes: usize,
}

impl Gateway {
    pub(crate) fn new(config: Config, text: TextModel, cluster: ClusterClient, store: Store) -> Self {
        let background = Background::new(config.max_background, config.max_request_bytes);
        let limits = Limits {
            n: config.max_conversations,
            bytes_each: config.max_request_bytes,
            bytes: config.max_conversation_bytes,
        };
        let conversations = Conversations::new(store.clone(), limits);
        let seal = match &config.seal_secret {
            Some(secret) => Seal::new(secret.reveal().as_bytes()),
            None => Seal::new(&rand::random::<[u8; 32]>()),
        };
        let hash_key = HashKey::derive(&text.fingerprint, b"");
        let table = text.tokenizer.byte_table();
        let longest = (0..table.n_tokens()).map(|id| table.bytes(id).len()).max().unwrap_or(1);
        let max_prompt_bytes = longest.saturating_mul(text.context_len as usize);
        let shared = Shared {
            config,
            text,
            hash_key,
            cluster,
            store,
            background,
            conversations,
            seal,
            max_prompt_bytes,
        };
        Self { shared: Arc::new(shared) }
    }

    pub(crate) fn config(&self) -> &Config {
        &self.shared.config
    }

    pub(crate) fn text(&self) -> &TextModel {
        &self.shared.text
    }

    pub(crate) fn max_prompt_bytes(&self) -> usize {
        self.shared.max_prompt_bytes
    }

    pub(crate) fn hash_key(&self) -> HashKey {
        self.shared.hash_key
    }

    pub(crate) fn cluster(&self) -> &ClusterClient {
        &self.shared.cluster
    }

    pub(crate) fn store(&self) -> &Store {
        &self.shared.store
    }

    pub(crate) fn background(&self) -> &Background {
        &self.shared.background
    }

    pub(crate) fn conversations(&self) -> &Conversations {
        &self.shared.conversations
    }

    pub(crate) fn seal(&self) -> &Seal {
        &self.shared.seal
    }
}
