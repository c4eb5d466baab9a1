//! The incremental decoder against decoding all bytes at once.

use std::sync::Arc;

use proptest::prelude::*;

use super::{ByteTable, Detokenizer};

/// Tokens 0..256 are the bytes, then pieces with broken characters, and one control token at the end.
fn table() -> Arc<ByteTable> {
    let pieces: [&[u8]; 7] =
        [b"hello", "é".as_bytes(), b"\xf0\x9f", b"\x98\x80", b"a\xf0\x9f\x98", b"\xe2\x82", b"\xac\xffz"];
    let bytes = (0..=255_u8).map(|byte| vec![byte]).chain(pieces.iter().map(|piece| piece.to_vec()));
    Arc::new(ByteTable::new(bytes.map(|bytes| (bytes, false)).chain([(b"<|end|>".to_vec(), true)])))
}

fn decode(table: &Arc<ByteTable>, ids: &[u32]) -> Vec<String> {
    let mut detokenizer = Detokenizer::new(Arc::clone(table));
    let mut pieces: Vec<String> = ids.iter().map(|id| detokenizer.push(*id).to_owned()).collect();
    pieces.push(detokenizer.finish());
    pieces
}

#[test]
fn holds_a_character_back_until_it_is_complete() {
    let cases: [(&[u32], &[&str]); 5] = [
        (&[256, 257], &["hello", "é", ""]),
        (&[258, 259], &["", "😀", ""]),
        (&[258, 256], &["", "\u{FFFD}hello", ""]),
        (&[260], &["a", "\u{FFFD}"]),
        (&[261, 263, 262, 9999], &["", "", "€\u{FFFD}z", "", ""]),
    ];
    for (ids, pieces) in cases {
        assert_eq!(decode(&table(), ids), pieces, "{ids:?}");
    }
}

proptest! {
    #[test]
    fn pieces_join_to_the_lossy_text_of_all_bytes(ids in prop::collection::vec(0_u32..270, 0..60)) {
        let table = table();
        let bytes: Vec<u8> = ids.iter().flat_map(|id| table.visible_bytes(*id)).copied().collect();
        prop_assert_eq!(decode(&table, &ids).concat(), String::from_utf8_lossy(&bytes));
    }
}
