use super::*;
use kernels::attention::KvDtype;

use crate::arena::KvGeometry;
use crate::job::ExportTo;

const GEOMETRY: KvGeometry = KvGeometry { n_layers: 8, n_kv_heads: 1, head_dim: 2, dtype: KvDtype::F16 };

struct Rig {
    exports: Exports,
    pool: BlockPool,
    arena: KvArena,
}

fn rig() -> Rig {
    let layer_bytes = GEOMETRY.bytes_per_block_layer();
    // Two layers per group, two blocks per frame.
    let exports = Exports::new(Cut::new(8, layer_bytes, layer_bytes * 4));
    Rig { exports, pool: BlockPool::new(8), arena: KvArena::new(GEOMETRY, 8) }
}

fn drain(frames: &mut tokio::sync::mpsc::Receiver<Frame>) -> Vec<(u32, Vec<BlockId>)> {
    std::iter::from_fn(|| frames.try_recv().ok()).map(|frame| (frame.first_layer, frame.blocks)).collect()
}

#[test]
fn layer_groups_leave_as_soon_as_they_are_written_and_cached_blocks_at_once() {
    let Rig { mut exports, mut pool, arena } = rig();
    let table = pool.allocate(3).expect("room");
    let (frames, mut received) = FrameSender::new(64);
    exports.begin(SequenceId(1), ExportTo { first_block: 0, targets: vec![70, 71, 72], frames });
    exports.queue(SequenceId(1), &table, 1, 3, &mut pool);
    exports.pump(&arena, &mut pool);
    assert_eq!(drain(&mut received), [0, 2, 4, 6].map(|layer| (layer, vec![70])));
    exports.layer_written(0, &arena);
    assert_eq!(drain(&mut received), []);
    exports.layer_written(1, &arena);
    assert_eq!(drain(&mut received), [(0, vec![71, 72])]);
    (2..8).for_each(|layer_idx| exports.layer_written(layer_idx, &arena));
    assert_eq!(drain(&mut received), [2, 4, 6].map(|layer| (layer, vec![71, 72])));
    exports.end(SequenceId(1), &mut pool);
    exports.pump(&arena, &mut pool);
    assert!(exports.is_empty() && received.is_closed());
    table.into_iter().for_each(|id| pool.release(id));
    assert_eq!(pool.available(), 8);
}

#[test]
fn a_slow_reader_keeps_blocks_in_use_and_a_lost_one_frees_them() {
    let Rig { mut exports, mut pool, arena } = rig();
    let table = pool.allocate(2).expect("room");
    let (frames, mut received) = FrameSender::new(1);
    exports.send_cached(table, frames);
    exports.pump(&arena, &mut pool);
    assert!(exports.has_backlog());
    assert_eq!(drain(&mut received).len(), 1);
    drop(received);
    exports.pump(&arena, &mut pool);
    assert!(exports.is_empty());
    assert_eq!(pool.available(), 8);
}

#[test]
fn blocks_of_a_cancelled_prompt_that_were_never_written_are_not_sent() {
    let Rig { mut exports, mut pool, arena } = rig();
    let table = pool.allocate(2).expect("room");
    let (frames, mut received) = FrameSender::new(64);
    exports.begin(SequenceId(1), ExportTo { first_block: 0, targets: vec![70, 71], frames });
    exports.queue(SequenceId(1), &table, 0, 2, &mut pool);
    exports.end(SequenceId(1), &mut pool);
    exports.pump(&arena, &mut pool);
    assert_eq!(drain(&mut received), []);
    assert!(received.is_closed());
    table.into_iter().for_each(|id| pool.release(id));
    assert_eq!(pool.available(), 8);
}
