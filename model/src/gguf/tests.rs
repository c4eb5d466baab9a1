//! The reader on small files built in memory, sound and broken.

use proptest::prelude::*;

use super::write::{Writer, array, string};
use super::{Array, Error, Value, parse};

fn sound() -> Writer {
    Writer::new()
        .str("general.name", "tiny")
        .key("tiny.layers", 4, &7_u32.to_le_bytes())
        .key("tiny.eps", 6, &1e-5_f32.to_le_bytes())
        .key("tiny.tied", 7, &[1])
        .key("tiny.words", 9, &array(8, 2, &[string(b"a"), string("é".as_bytes())].concat()))
        .key("tiny.kinds", 9, &array(5, 2, &[3, 0, 0, 0, 255, 255, 255, 255]))
        .f32("a", &[2, 3], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
        .f32("b", &[3], &[7.0, 8.0, 9.0])
}

/// The message of the error that `bytes` give.
fn refused(bytes: &[u8]) -> String {
    parse::header(bytes).expect_err("the file is broken").to_string()
}

#[test]
fn reads_metadata_and_tensors() {
    let bytes = sound().bytes();
    let header = parse::header(&bytes).unwrap();
    assert_eq!(header.metadata["general.name"].as_str(), Some("tiny"));
    assert_eq!(header.metadata["tiny.layers"].as_u32(), Some(7));
    assert_eq!(header.metadata["tiny.eps"].as_f32(), Some(1e-5));
    assert_eq!(header.metadata["tiny.tied"].as_bool(), Some(true));
    assert_eq!(header.metadata["tiny.words"].as_strings().unwrap(), ["a", "é"]);
    assert_eq!(header.metadata["tiny.kinds"], Value::Array(Array::Ints(vec![3, -1])));
    let b = &header.tensors[header.tensor_index["b"]];
    assert_eq!((b.shape.as_slice(), b.n_bytes(), b.n_elements()), (&[3][..], 12, 3));
    assert_eq!(&bytes[b.bytes.clone()][..4], 7.0_f32.to_le_bytes());
}

#[test]
fn names_the_key_or_tensor_that_is_wrong() {
    let end = sound().bytes().len();
    let huge = u64::MAX.to_le_bytes();
    let cases: Vec<(&str, Vec<u8>)> = vec![
        ("not a GGUF file", b"PK\x03\x04 something else".to_vec()),
        ("the file ends inside the header", b"GG".to_vec()),
        ("version 2", Writer { version: 2, ..sound() }.bytes()),
        ("big-endian", Writer { version: 3_u32.swap_bytes(), ..sound() }.bytes()),
        ("inside the header", Writer { n_keys: u64::MAX, ..sound() }.bytes()),
        ("inside the header", Writer { n_tensors: 1 << 40, ..sound() }.bytes()),
        ("data of tensor `b`", sound().bytes()[..end - 1].to_vec()),
        ("data of tensor `a`", sound().bytes()[..end - 40].to_vec()),
        ("`tiny.words`", Writer::new().key("tiny.words", 9, &array(8, 1 << 21, &[])).bytes()),
        ("`tiny.words`", Writer::new().key("tiny.words", 9, &array(8, u64::MAX, &[])).bytes()),
        ("arrays of arrays", Writer::new().key("k", 9, &array(9, 1, &[])).bytes()),
        ("unknown element type 77", Writer::new().key("k", 9, &array(77, 1, &[])).bytes()),
        ("unknown value type 13", Writer::new().key("k", 13, &[0; 8]).bytes()),
        ("not a bool", Writer::new().key("k", 7, &[2]).bytes()),
        ("value of metadata key `k`", Writer::new().key("k", 8, &huge).bytes()),
        ("not UTF-8", Writer::new().key("k", 8, &string(&[0xff])).bytes()),
        ("appears twice", Writer::new().str("k", "1").str("k", "2").bytes()),
        ("`general.alignment`", Writer::new().key("general.alignment", 4, &0_u32.to_le_bytes()).bytes()),
        ("`general.alignment`", Writer::new().key("general.alignment", 4, &24_u32.to_le_bytes()).bytes()),
        ("`general.alignment`", Writer::new().str("general.alignment", "32").bytes()),
        ("tensor `q5` has ggml dtype 6", sound().entry("q5", &[32], 6, 0).bytes()),
        ("tensor `t`: 0 dimensions", sound().entry("t", &[], 0, 0).bytes()),
        ("tensor `t`: 5 dimensions", sound().entry("t", &[1; 5], 0, 0).bytes()),
        ("tensor `t`: the shape", sound().entry("t", &[4, 0], 0, 0).bytes()),
        ("tensor `t`: rows of 33", sound().entry("t", &[33], 2, 0).bytes()),
        ("tensor `t`: its offset 4", sound().entry("t", &[1], 0, 4).bytes()),
        ("tensor `t`: shape", sound().entry("t", &[1 << 40, 1 << 40], 0, 64).bytes()),
        ("tensor `t`: shape", sound().entry("t", &[1], 0, u64::MAX - 31).bytes()),
        ("data of tensor `t`", sound().entry("t", &[1 << 40], 0, 64).bytes()),
        ("it overlaps tensor `b`", sound().entry("t", &[1], 0, 32).bytes()),
        ("`a`: the name appears twice", sound().f32("a", &[1], &[0.0]).bytes()),
    ];
    for (expected, bytes) in cases {
        let message = refused(&bytes);
        assert!(message.contains(expected), "{message:?} does not say {expected:?}");
    }
}

#[test]
fn refuses_every_truncation() {
    let bytes = sound().bytes();
    for len in 0..bytes.len() {
        let error = parse::header(&bytes[..len]).expect_err("a truncated file");
        assert!(matches!(error, Error::Truncated { .. }), "{len}: {error}");
    }
}

proptest! {
    #[test]
    fn mutated_bytes_never_panic(
        edits in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..12),
        keep in any::<prop::sample::Index>(),
        truncate in any::<bool>(),
    ) {
        let mut bytes = sound().bytes();
        for (index, byte) in edits {
            let at = index.index(bytes.len());
            bytes[at] = byte;
        }
        if truncate {
            bytes.truncate(keep.index(bytes.len()));
        }
        if let Ok(header) = parse::header(&bytes) {
            for tensor in &header.tensors {
                prop_assert!(bytes.get(tensor.bytes.clone()).is_some());
            }
        }
    }
}
