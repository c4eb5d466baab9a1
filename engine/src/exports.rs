//! KV on its way out: blocks copied to other workers, layer group by layer group, while the model still runs.
//!
//! The engine never waits for a reader: what does not fit into the reader's channel stays queued here, with its
//! blocks kept in use, and is sent between later steps.

use std::collections::VecDeque;
use std::ops::Range;

use kv::pool::{BlockId, BlockPool};
use kv::port::{Frame, FrameSender, NotNow};

use crate::arena::KvArena;
use crate::job::SequenceId;

/// Groups a model's layers are pushed in, about.
const GROUPS: usize = 4;

/// Cuts layers and blocks into frames.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Cut {
    n_layers: usize,
    layers_per_group: usize,
    blocks_per_frame: usize,
}

impl Cut {
    /// Frames of at most `max_bytes` for blocks of `n_layers` layers of `layer_bytes` each.
    pub(crate) fn new(n_layers: usize, layer_bytes: usize, max_bytes: usize) -> Self {
        let layers_per_group = n_layers.div_ceil(GROUPS).min(max_bytes / layer_bytes).max(1);
        let blocks_per_frame = (max_bytes / (layers_per_group * layer_bytes)).max(1);
        Self { n_layers, layers_per_group, blocks_per_frame }
    }

    fn n_groups(self) -> usize {
        self.n_layers.div_ceil(self.layers_per_group)
    }

    fn layers(self, group: usize) -> Range<usize> {
        let first = group * self.layers_per_group;
        first..(first + self.layers_per_group).min(self.n_layers)
    }

    /// Groups that are complete once `layer_idx` has been written.
    fn groups_after(self, layer_idx: usize) -> usize {
        if layer_idx + 1 == self.n_layers { self.n_groups() } else { (layer_idx + 1) / self.layers_per_group }
    }
}

/// Blocks that travel together, one frame per layer group.
#[derive(Debug)]
struct Parcel {
    blocks: Vec<BlockId>,
    targets: Vec<BlockId>,
    n_ready: usize,
    n_sent: usize,
}

/// One receiver's run of frames.
#[derive(Debug)]
pub(crate) struct Export {
    /// The sequence that may still add blocks; none for a pull.
    owner: Option<SequenceId>,
    /// Prompt index of the first block that was not queued yet.
    cursor: usize,
    first_block: usize,
    targets: Vec<BlockId>,
    parcels: VecDeque<Parcel>,
    frames: FrameSender,
}

/// All exports of one engine.
#[derive(Debug)]
pub(crate) struct Exports {
    cut: Cut,
    running: Vec<Export>,
}

impl Exports {
    pub(crate) fn new(cut: Cut) -> Self {
        Self { cut, running: Vec::new() }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.running.is_empty()
    }

    /// True while frames wait for room in their reader's channel.
    pub(crate) fn has_backlog(&self) -> bool {
        self.running.iter().any(|export| export.parcels.iter().any(|parcel| parcel.n_sent < parcel.n_ready))
    }

    /// Begins the export of a sequence's prompt blocks from `first_block` on.
    pub(crate) fn begin(&mut self, owner: SequenceId, to: crate::job::ExportTo) {
        self.running.push(Export {
            owner: Some(owner),
            cursor: to.first_block,
            first_block: to.first_block,
            targets: to.targets,
            parcels: VecDeque::new(),
            frames: to.frames,
        });
    }

    /// Sends whole cached blocks; `blocks` are in use on behalf of the export. Targets are indices.
    pub(crate) fn send_cached(&mut self, blocks: Vec<BlockId>, frames: FrameSender) {
        let targets: Vec<BlockId> = (0..).take(blocks.len()).collect();
        let mut export = Export {
            owner: None,
            cursor: 0,
            first_block: 0,
            targets: Vec::new(),
            parcels: VecDeque::new(),
            frames,
        };
        export.add(self.cut, &blocks, &targets, self.cut.n_groups());
        self.running.push(export);
    }

    /// Queues the blocks of `owner` up to the prompt index `until`: the first `n_complete` of its table are complete,
    /// the others become ready layer by layer in the coming step. Takes the blocks into use.
    pub(crate) fn queue(
        &mut self,
        owner: SequenceId,
        table: &[BlockId],
        n_complete: usize,
        until: usize,
        pool: &mut BlockPool,
    ) {
        let cut = self.cut;
        let Some(export) = self.running.iter_mut().find(|export| export.owner == Some(owner)) else { return };
        let until = until.min(export.first_block + export.targets.len());
        for (from, to, n_ready) in [
            (export.cursor, until.min(n_complete), cut.n_groups()),
            (export.cursor.max(n_complete), until, 0),
        ] {
            if from < to {
                table[from..to].iter().for_each(|&id| pool.retain(id));
                let targets = export.targets[from - export.first_block..to - export.first_block].to_vec();
                export.add(cut, &table[from..to], &targets, n_ready);
                export.cursor = to;
            }
        }
    }

    /// The layer `layer_idx` of all queued blocks has been written.
    pub(crate) fn layer_written(&mut self, layer_idx: usize, arena: &KvArena) {
        let n_ready = self.cut.groups_after(layer_idx);
        for export in &mut self.running {
            for parcel in &mut export.parcels {
                parcel.n_ready = parcel.n_ready.max(n_ready);
            }
        }
        for export in &mut self.running {
            export.send_ready(self.cut, arena);
        }
    }

    /// Sends what has room; gives back the blocks of what is done. True if any were given back.
    pub(crate) fn pump(&mut self, arena: &KvArena, pool: &mut BlockPool) -> bool {
        let cut = self.cut;
        let mut released = false;
        self.running.retain_mut(|export| {
            export.send_ready(cut, arena);
            let closed = export.frames.is_closed();
            while export.parcels.front().is_some_and(|parcel| closed || parcel.n_sent == cut.n_groups()) {
                if let Some(parcel) = export.parcels.pop_front() {
                    released = true;
                    parcel.blocks.into_iter().for_each(|id| pool.release(id));
                }
            }
            !(export.parcels.is_empty() && (closed || export.owner.is_none()))
        });
        released
    }

    /// The sequence adds no more blocks; what is complete is still sent, what is not is dropped.
    pub(crate) fn end(&mut self, owner: SequenceId, pool: &mut BlockPool) {
        let n_groups = self.cut.n_groups();
        for export in self.running.iter_mut().filter(|export| export.owner == Some(owner)) {
            export.owner = None;
            export.parcels.retain_mut(|parcel| {
                let complete = parcel.n_ready == n_groups;
                if !complete {
                    parcel.blocks.drain(..).for_each(|id| pool.release(id));
                }
                complete
            });
        }
    }
}

impl Export {
    fn add(&mut self, cut: Cut, blocks: &[BlockId], targets: &[BlockId], n_ready: usize) {
        for (blocks, targets) in blocks.chunks(cut.blocks_per_frame).zip(targets.chunks(cut.blocks_per_frame))
        {
            let parcel = Parcel { blocks: blocks.to_vec(), targets: targets.to_vec(), n_ready, n_sent: 0 };
            self.parcels.push_back(parcel);
        }
    }

    fn send_ready(&mut self, cut: Cut, arena: &KvArena) {
        for parcel in &mut self.parcels {
            while parcel.n_sent < parcel.n_ready {
                let layers = cut.layers(parcel.n_sent);
                match self.frames.send_with(|| frame(parcel, layers, arena)) {
                    Ok(()) => parcel.n_sent += 1,
                    Err(NotNow::Full | NotNow::Closed) => return,
                }
            }
        }
    }
}

fn frame(parcel: &Parcel, layers: Range<usize>, arena: &KvArena) -> Frame {
    let mut payload = Vec::with_capacity(parcel.blocks.len() * layers.len() * arena.bytes_per_block_layer());
    for &block in &parcel.blocks {
        arena.export(block, layers.clone(), &mut payload);
    }
    let narrow = |n: usize| u32::try_from(n).expect("a model has few layers");
    Frame {
        first_layer: narrow(layers.start),
        n_layers: narrow(layers.len()),
        blocks: parcel.targets.clone(),
        payload: payload.into(),
    }
}

#[cfg(test)]
mod tests;
