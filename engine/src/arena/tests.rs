use super::*;

const GEOMETRY: KvGeometry = KvGeometry { n_layers: 3, n_kv_heads: 2, head_dim: 16, dtype: KvDtype::F16 };

/// An arena in which no two numbers are equal.
fn numbered(geometry: KvGeometry, n_blocks: usize) -> KvArena {
    let mut arena = KvArena::new(geometry, n_blocks);
    arena.words.iter_mut().enumerate().for_each(|(i, word)| *word = i as u16);
    arena
}

fn exported(arena: &KvArena, block: u32, layers: Range<usize>) -> Vec<u8> {
    let mut bytes = Vec::new();
    arena.export(block, layers, &mut bytes);
    bytes
}

#[test]
fn what_is_exported_layer_by_layer_can_be_imported_whole() {
    for geometry in [GEOMETRY, GEOMETRY.with_dtype(KvDtype::I8)] {
        let source = numbered(geometry, 4);
        let mut target = KvArena::new(geometry, 2);
        let mut bytes = Vec::new();
        for layer in 0..3 {
            source.export(3, layer..layer + 1, &mut bytes);
        }
        assert_eq!(bytes.len(), geometry.bytes_per_block());
        target.import(1, 0..3, &bytes).unwrap();
        assert_eq!(exported(&target, 1, 0..3), exported(&source, 3, 0..3));
        assert!(exported(&target, 0, 0..3).iter().all(|&b| b == 0), "the other block is untouched");
        assert_eq!(exported(&source, 0, 0..1)[2..4], [1, 0], "little-endian");
    }
}

#[test]
fn eight_bits_take_a_byte_per_number_and_two_per_scale() {
    let i8 = GEOMETRY.with_dtype(KvDtype::I8);
    assert_eq!(GEOMETRY.bytes_per_block_layer(), 2 * 2 * 16 * 16 * 2);
    assert_eq!(i8.bytes_per_block_layer(), 2 * 2 * 16 * (16 + 2));
    assert_eq!((GEOMETRY.dtype_name(), i8.dtype_name()), ("f16", "i8+scale"));
}

#[test]
fn copies_a_block() {
    let mut arena = numbered(GEOMETRY, 3);
    arena.copy_block(2, 0);
    assert_eq!(exported(&arena, 0, 0..3), exported(&arena, 2, 0..3));
    assert_eq!(exported(&arena, 1, 0..3), exported(&numbered(GEOMETRY, 3), 1, 0..3));
}

#[test]
fn refuses_bytes_that_do_not_fit() {
    let mut arena = KvArena::new(GEOMETRY, 2);
    let expected = GEOMETRY.bytes_per_block_layer();
    let refused = |result, error| assert_eq!(result, Err(error));
    refused(arena.import(2, 0..1, &[]), Error::Block { block: 2, n_blocks: 2 });
    refused(arena.import(0, 2..4, &[]), Error::Layers { layers: 2..4, n_layers: 3 });
    refused(arena.import(0, 1..2, &[0; 3]), Error::Length { layers: 1..2, expected, found: 3 });
}
