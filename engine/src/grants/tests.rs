use super::*;
use kernels::attention::KvDtype;

use crate::arena::KvGeometry;

const GEOMETRY: KvGeometry = KvGeometry { n_layers: 4, n_kv_heads: 1, head_dim: 2, dtype: KvDtype::F16 };

fn frame(first_layer: u32, n_layers: u32, blocks: &[BlockId], fill: u8) -> Frame {
    let n_bytes = blocks.len() * n_layers as usize * GEOMETRY.bytes_per_block_layer();
    Frame { first_layer, n_layers, blocks: blocks.to_vec(), payload: vec![fill; n_bytes].into() }
}

#[test]
fn a_grant_is_complete_when_all_layers_of_its_blocks_have_arrived() {
    let mut arena = KvArena::new(GEOMETRY, 8);
    let mut grants = Grants::new(4, GEOMETRY.bytes_per_block_layer());
    grants.open(SequenceId(1), &[5, 2]);
    for (first, n, blocks) in [(0, 2, &[5, 2][..]), (2, 2, &[5])] {
        grants.import(1, &frame(first, n, blocks, 7), &mut arena).expect("granted");
    }
    assert_eq!(grants.close(SequenceId(1), &[5, 2]), 1);
    let mut bytes = Vec::new();
    arena.export(5, 0..4, &mut bytes);
    assert!(bytes.iter().all(|byte| *byte == 7));
    assert_eq!(grants.import(1, &frame(0, 1, &[5], 9), &mut arena), Err(ImportError::Revoked(1)));
}

#[test]
fn what_does_not_fit_the_grant_is_refused_and_writes_nothing() {
    let mut arena = KvArena::new(GEOMETRY, 8);
    let mut grants = Grants::new(4, GEOMETRY.bytes_per_block_layer());
    grants.open(SequenceId(1), &[5]);
    let short = Frame { payload: vec![9; 3].into(), ..frame(0, 1, &[5], 9) };
    for bad in [
        frame(0, 1, &[5, 6], 9),
        frame(3, 2, &[5], 9),
        frame(0, 0, &[5], 9),
        frame(u32::MAX, 2, &[5], 9),
        short,
    ] {
        assert!(matches!(grants.import(1, &bad, &mut arena), Err(ImportError::Misfit(_))), "{bad:?}");
    }
    assert_eq!(grants.import(2, &frame(0, 1, &[5], 9), &mut arena), Err(ImportError::Revoked(2)));
    let mut bytes = Vec::new();
    arena.export(5, 0..4, &mut bytes);
    assert!(bytes.iter().all(|byte| *byte == 0));
}
