//! Blocks that other workers may write into, and how much of each has arrived.

use std::collections::HashMap;

use kv::pool::BlockId;
use kv::port::{Frame, ImportError};

use crate::arena::KvArena;
use crate::job::SequenceId;

/// Layers of one block that have arrived, one bit each.
type Layers = u128;

/// All open grants. A frame of a grant that is not open is refused, so a revoked grant can never write.
#[derive(Debug)]
pub(crate) struct Grants {
    n_layers: u32,
    layer_bytes: usize,
    open: HashMap<u64, HashMap<BlockId, Layers>>,
}

impl Grants {
    pub(crate) fn new(n_layers: u32, layer_bytes: usize) -> Self {
        assert!(n_layers <= Layers::BITS, "one bit per layer");
        Self { n_layers, layer_bytes, open: HashMap::new() }
    }

    pub(crate) fn open(&mut self, id: SequenceId, blocks: &[BlockId]) {
        self.open.insert(id.0, blocks.iter().map(|&block| (block, 0)).collect());
    }

    /// Writes a frame into the granted blocks.
    pub(crate) fn import(
        &mut self,
        grant: u64,
        frame: &Frame,
        arena: &mut KvArena,
    ) -> Result<(), ImportError> {
        let blocks = self.open.get_mut(&grant).ok_or(ImportError::Revoked(grant))?;
        let end = frame.first_layer.saturating_add(frame.n_layers);
        if frame.n_layers == 0 || end > self.n_layers {
            return Err(ImportError::Misfit(format!(
                "layers {}..{end} of {}",
                frame.first_layer, self.n_layers
            )));
        }
        let piece = frame.n_layers as usize * self.layer_bytes;
        if frame.payload.len() != piece * frame.blocks.len() {
            return Err(ImportError::Misfit(format!(
                "{} bytes for {} pieces of {piece} bytes",
                frame.payload.len(),
                frame.blocks.len()
            )));
        }
        if let Some(stranger) = frame.blocks.iter().find(|block| !blocks.contains_key(block)) {
            return Err(ImportError::Misfit(format!("block {stranger} is not granted")));
        }
        let layers = frame.first_layer as usize..end as usize;
        for (&block, bytes) in frame.blocks.iter().zip(frame.payload.chunks_exact(piece)) {
            arena
                .import(block, layers.clone(), bytes)
                .map_err(|error| ImportError::Misfit(error.to_string()))?;
            if let Some(arrived) = blocks.get_mut(&block) {
                *arrived |= mask(frame.first_layer, end);
            }
        }
        Ok(())
    }

    /// Ends a grant; returns how many of `blocks`, from the first on, are complete.
    pub(crate) fn close(&mut self, id: SequenceId, blocks: &[BlockId]) -> usize {
        let Some(arrived) = self.open.remove(&id.0) else { return 0 };
        let all = mask(0, self.n_layers);
        blocks.iter().take_while(|block| arrived.get(block) == Some(&all)).count()
    }

    /// Marks blocks as complete without moving bytes.
    #[cfg(test)]
    pub(crate) fn arrive_for_tests(&mut self, id: SequenceId, blocks: &[BlockId]) {
        let all = mask(0, self.n_layers);
        let open = self.open.get_mut(&id.0).expect("an open grant");
        blocks.iter().for_each(|block| *open.get_mut(block).expect("a granted block") = all);
    }
}

/// Bits `first..end`.
fn mask(first: u32, end: u32) -> Layers {
    let up_to = |n: u32| if n == Layers::BITS { Layers::MAX } else { (1 << n) - 1 };
    up_to(end) & !up_to(first)
}

#[cfg(test)]
mod tests;
