//! What a conversation consists of, item by item: shared between the responses that continue it, as its tokens are.
//!
//! A [`ContentHash`] names a conversation by what was said in it. A client that sends its whole history again, after a
//! reconnect say, is recognized by it, and nothing but the new end of the history is rendered or tokenized.

use std::sync::Arc;

use model::chat_template::Role;

use crate::wire::{Body, InputItem, InputKind, OutputItem, Tools};

/// Names everything said so far, and the instructions and tools it was said under.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct ContentHash([u8; 32]);

impl ContentHash {
    /// Before the first item of a tenant's conversation.
    pub(crate) fn start(tenant: &str, instructions: Option<&str>, tools: &Tools) -> Self {
        let mut hasher = blake3::Hasher::new();
        let instructions = instructions.map_or("-".to_owned(), |text| format!("+{text}"));
        for part in [tenant, instructions.as_str(), &tools.raw] {
            hasher.update(&(part.len() as u64).to_le_bytes());
            hasher.update(part.as_bytes());
        }
        Self(hasher.finalize().into())
    }

    pub(crate) fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }

    fn after(self, item: &ItemHash) -> Self {
        let mut hasher = blake3::Hasher::new();
        hasher.update(&self.0).update(&item.0);
        Self(hasher.finalize().into())
    }
}

/// Names what one item says, whatever its id and status are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ItemHash([u8; 32]);

/// An item of a conversation.
#[derive(Debug, Clone)]
pub(crate) struct Entry {
    pub(crate) id: String,
    pub(crate) json: Arc<str>,
    /// None: the item says nothing to the model.
    hash: Option<ItemHash>,
    /// Of a call: the id that its result names.
    call_id: Option<String>,
}

impl Entry {
    /// `id` is used when the client has none.
    pub(crate) fn of_input(item: &InputItem, id: impl FnOnce(&'static str) -> String) -> Self {
        let call_id = match &item.kind {
            InputKind::Call { call_id, .. } => Some(call_id.clone()),
            _ => None,
        };
        let prefix = match &item.kind {
            InputKind::Call { call, .. } if call.is_text => "ctc",
            InputKind::Call { .. } => "fc",
            InputKind::Result { .. } => "fco",
            InputKind::Compaction { .. } => "cmp",
            InputKind::Reasoning { .. } => "rs",
            _ => "msg",
        };
        let id = item.id.clone().filter(|id| !id.is_empty()).unwrap_or_else(|| id(prefix));
        Self { id, json: Arc::clone(&item.json), hash: hash_of_input(&item.kind), call_id }
    }

    pub(crate) fn of_output(item: &OutputItem) -> Self {
        let json = serde_json::to_string(item).expect("our own types serialize");
        let call_id = match &item.body {
            Body::Call { call_id, .. } | Body::CustomCall { call_id, .. } => Some(call_id.clone()),
            _ => None,
        };
        Self { id: item.id.clone(), json: json.into(), hash: hash_of_output(&item.body), call_id }
    }

    pub(crate) fn hash(&self) -> Option<ItemHash> {
        self.hash
    }

    /// The same item, which says nothing that was not said already.
    pub(crate) fn silent(self) -> Self {
        Self { hash: None, ..self }
    }

    /// An entry as it was kept: its hash and its call's id.
    pub(crate) fn kept(id: String, json: Arc<str>, hash: Option<[u8; 32]>, call_id: Option<String>) -> Self {
        Self { id, json, hash: hash.map(ItemHash), call_id }
    }

    /// What [`kept`](Self::kept) needs besides id and JSON.
    pub(crate) fn to_keep(&self) -> (Option<&[u8; 32]>, Option<&str>) {
        (self.hash.as_ref().map(|hash| &hash.0), self.call_id.as_deref())
    }
}

fn hash(parts: &[&str]) -> Option<ItemHash> {
    let mut hasher = blake3::Hasher::new();
    for part in parts {
        hasher.update(&(part.len() as u64).to_le_bytes());
        hasher.update(part.as_bytes());
    }
    Some(ItemHash(hasher.finalize().into()))
}

fn hash_of_input(kind: &InputKind) -> Option<ItemHash> {
    match kind {
        InputKind::Message(message) => {
            let role = match message.role {
                Role::System => "system",
                Role::Developer => "developer",
                Role::User => "user",
                Role::Assistant => "assistant",
                Role::Tool => "tool",
            };
            hash(&["message", role, message.content.text()])
        }
        InputKind::Call { call_id, call } => hash(&["call", call_id, &call.name, &call.input]),
        InputKind::Result { call_id, text } => hash(&["result", call_id, text]),
        InputKind::Compaction { sealed, .. } => hash(&["compaction", sealed]),
        InputKind::Tools(_)
        | InputKind::CompactionTrigger
        | InputKind::Reasoning { .. }
        | InputKind::Reference(_)
        | InputKind::Silent => None,
    }
}

fn hash_of_output(body: &Body) -> Option<ItemHash> {
    match body {
        Body::Message { text, .. } => hash(&["message", "assistant", text]),
        Body::Call { call_id, name, namespace, arguments: input }
        | Body::CustomCall { call_id, name, namespace, input } => {
            let name = crate::wire::flat_name(namespace.as_deref(), name);
            hash(&["call", call_id, &name, input])
        }
        Body::Compaction { sealed } => hash(&["compaction", sealed]),
        Body::Reasoning { .. } => None,
    }
}

#[derive(Debug)]
struct Node {
    parent: Option<Arc<Node>>,
    entries: Vec<Entry>,
}

/// The items of a conversation up to some point. Cloning is O(1).
#[derive(Debug, Clone)]
pub(crate) struct History {
    head: Option<Arc<Node>>,
    content: ContentHash,
    n_entries: usize,
}

impl History {
    pub(crate) fn new(start: ContentHash) -> Self {
        Self { head: None, content: start, n_entries: 0 }
    }

    /// The same items under other instructions or tools. O(items).
    pub(crate) fn restarted(&self, start: ContentHash) -> Self {
        let entries = self.entries().into_iter().cloned().collect();
        let mut history = Self::new(start);
        history.append(entries);
        history
    }

    /// The name of everything in it.
    pub(crate) fn content(&self) -> ContentHash {
        self.content
    }

    pub(crate) fn len(&self) -> usize {
        self.n_entries
    }

    pub(crate) fn append(&mut self, entries: Vec<Entry>) {
        if entries.is_empty() {
            return;
        }
        for item in entries.iter().filter_map(|entry| entry.hash.as_ref()) {
            self.content = self.content.after(item);
        }
        self.n_entries += entries.len();
        self.head = Some(Arc::new(Node { parent: self.head.take(), entries }));
    }

    /// All items, oldest first. O(items).
    pub(crate) fn entries(&self) -> Vec<&Entry> {
        let nodes: Vec<&Node> = self.nodes().collect();
        nodes.into_iter().rev().flat_map(|node| &node.entries).collect()
    }

    /// The last `n` items, oldest first. O(n).
    pub(crate) fn newest(&self, n: usize) -> Vec<&Entry> {
        let newest = self.nodes().flat_map(|node| node.entries.iter().rev()).take(n);
        let mut entries: Vec<&Entry> = newest.collect();
        entries.reverse();
        entries
    }

    /// Whether a call with this id is among the items.
    pub(crate) fn has_call(&self, call_id: &str) -> bool {
        self.nodes().flat_map(|node| &node.entries).any(|entry| entry.call_id.as_deref() == Some(call_id))
    }

    /// The names of the conversation after each of the first items of `entries`, in order, beginning with none of them.
    pub(crate) fn contents_with(&self, entries: &[Entry]) -> Vec<ContentHash> {
        let mut content = self.content;
        let mut contents = vec![content];
        for entry in entries {
            if let Some(item) = &entry.hash {
                content = content.after(item);
            }
            contents.push(content);
        }
        contents
    }

    fn nodes(&self) -> impl Iterator<Item = &Node> {
        std::iter::successors(self.head.as_deref(), |node| node.parent.as_deref())
    }
}

/// Long conversations are long chains: dropping them must not recurse.
impl Drop for Node {
    fn drop(&mut self) {
        let mut next = self.parent.take();
        while let Some(node) = next {
            next = Arc::into_inner(node).and_then(|mut node| node.parent.take());
        }
    }
}

#[cfg(test)]
mod tests;
