//! A conversation as an append-only log of token ids, shared by all responses that continue it.
//!
//! ```text
//!   resp_1 ──▶ segment {ids, hashes, items} ◀── segment ◀── resp_2
//!                         ▲
//!                         └──────────────────── segment ◀── resp_3 (a fork)
//! ```
//! Each turn adds one segment for its input and one for its output. Cloning a log is O(1); a fork shares its parent's
//! segments; reading is O(what is read). 128k tokens cost about half a megabyte, however many responses name them.

use std::sync::Arc;

use bytes::Bytes;
use kv::BLOCK_TOKENS;
use kv::hash::{BlockHash, HashChain, HashKey};
use model::chat_template::Message;
use model::prompt::{Entry, LogEnd};

/// What a part of the log stands for, needed when the log has to be rendered anew.
#[derive(Debug, Clone)]
pub(crate) enum Item {
    Message(Message),
    /// The whole segment, as the model generated it.
    Generated,
    /// A part of a segment that was rendered anew, as the model had generated it.
    GeneratedBefore {
        ids: Arc<[u32]>,
    },
}

impl Item {
    /// The item for rendering, unless only its segment knows its ids.
    pub(crate) fn entry(&self) -> Option<Entry<'_>> {
        match self {
            Self::Message(message) => Some(Entry::Message(message)),
            Self::GeneratedBefore { ids } => Some(Entry::Generated { ids }),
            Self::Generated => None,
        }
    }
}

#[derive(Debug)]
struct Segment {
    parent: Option<Arc<Segment>>,
    /// Tokens before this segment.
    start: usize,
    ids: Vec<u32>,
    /// Full blocks before this segment.
    blocks_before: usize,
    /// Hashes of the blocks that became full in this segment.
    hashes: Vec<BlockHash>,
    items: Vec<Item>,
}

/// The token ids of one conversation up to some response.
#[derive(Debug, Clone)]
pub(crate) struct TokenLog {
    head: Option<Arc<Segment>>,
    n_segments: usize,
    len: usize,
    chain: HashChain,
    end: LogEnd,
}

/// A place in a log where a worker may pick up: after a full block that it has computed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Cut {
    pub(crate) parent: BlockHash,
    pub(crate) n_blocks: usize,
}

impl Cut {
    /// Before everything: the whole prompt is sent.
    pub(crate) fn root() -> Self {
        Self { parent: BlockHash::ROOT, n_blocks: 0 }
    }

    /// The parent as it travels: empty at the root.
    pub(crate) fn parent_bytes(&self) -> Bytes {
        if self.parent.is_root() { Bytes::new() } else { Bytes::copy_from_slice(self.parent.as_bytes()) }
    }
}

impl TokenLog {
    pub(crate) fn new(key: HashKey) -> Self {
        Self { head: None, n_segments: 0, len: 0, chain: HashChain::new(key), end: LogEnd::Empty }
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Parts that were appended so far.
    pub(crate) fn n_segments(&self) -> usize {
        self.n_segments
    }

    /// Whether this log is `earlier`, which is not empty, or grew out of it. O(segments since).
    pub(crate) fn continues(&self, earlier: &Self) -> bool {
        let since = self.n_segments.checked_sub(earlier.n_segments);
        let then = since.and_then(|since| self.segments().nth(since));
        then.zip(earlier.head.as_deref()).is_some_and(|(then, earlier)| std::ptr::eq(then, earlier))
    }

    /// Ids and items of the segments after the first `n`, oldest first. O(segments read).
    pub(crate) fn segments_from(&self, n: usize) -> Vec<(&[u32], &[Item])> {
        let newest = self.segments().take(self.n_segments.saturating_sub(n));
        let mut parts: Vec<_> = newest.map(|segment| (&segment.ids[..], &segment.items[..])).collect();
        parts.reverse();
        parts
    }

    /// Where the log ends, for the chat template.
    pub(crate) fn end(&self) -> LogEnd {
        self.end
    }

    /// Appends one segment. O(ids).
    pub(crate) fn append(&mut self, ids: Vec<u32>, items: Vec<Item>, end: LogEnd) {
        let blocks_before = self.chain.n_blocks();
        let hashes = self.chain.extend(&ids);
        let start = self.len;
        self.len += ids.len();
        self.n_segments += 1;
        self.end = end;
        self.head =
            Some(Arc::new(Segment { parent: self.head.take(), start, ids, blocks_before, hashes, items }));
    }

    /// The newest full block whose KV a worker that finished this log has for sure: all but the last token.
    pub(crate) fn cut(&self) -> Cut {
        let n_blocks = self.len.saturating_sub(1) / BLOCK_TOKENS;
        let parent = n_blocks.checked_sub(1).and_then(|idx| self.hash(idx)).unwrap_or(BlockHash::ROOT);
        Cut { parent, n_blocks }
    }

    /// The ids from the `from`-th on. O(ids read).
    pub(crate) fn ids_from(&self, from: usize) -> Vec<u32> {
        let mut parts = Vec::new();
        for segment in self.segments() {
            parts.push(&segment.ids[from.saturating_sub(segment.start).min(segment.ids.len())..]);
            if segment.start <= from {
                break;
            }
        }
        parts.into_iter().rev().flatten().copied().collect()
    }

    /// The block hashes from the `from`-th on. O(hashes read).
    pub(crate) fn hashes_from(&self, from: usize) -> Vec<BlockHash> {
        let mut parts = Vec::new();
        for segment in self.segments() {
            parts.push(
                &segment.hashes[from.saturating_sub(segment.blocks_before).min(segment.hashes.len())..],
            );
            if segment.blocks_before <= from {
                break;
            }
        }
        parts.into_iter().rev().flatten().copied().collect()
    }

    /// Calls `read` with all entries in order, for rendering anew. O(conversation).
    pub(crate) fn with_entries<T>(&self, read: impl FnOnce(&[Entry<'_>]) -> T) -> T {
        let segments: Vec<&Segment> = self.segments().collect();
        let entries: Vec<Entry<'_>> = segments
            .iter()
            .rev()
            .flat_map(|segment| {
                let whole = Entry::Generated { ids: &segment.ids };
                segment.items.iter().map(move |item| item.entry().unwrap_or(whole))
            })
            .collect();
        read(&entries)
    }

    fn hash(&self, block_idx: usize) -> Option<BlockHash> {
        let segment = self.segments().find(|segment| segment.blocks_before <= block_idx)?;
        segment.hashes.get(block_idx - segment.blocks_before).copied()
    }

    /// Newest first.
    fn segments(&self) -> impl Iterator<Item = &Segment> {
        std::iter::successors(self.head.as_deref(), |segment| segment.parent.as_deref())
    }
}

/// Long conversations are long chains: dropping them must not recurse.
impl Drop for Segment {
    fn drop(&mut self) {
        let mut next = self.parent.take();
        while let Some(segment) = next {
            next = Arc::into_inner(segment).and_then(|mut segment| segment.parent.take());
        }
    }
}

#[cfg(test)]
mod tests;
