//! The reader on small files built in memory, sound and broken, and on sets of shards.

use std::fs;
use std::path::PathBuf;

use proptest::prelude::*;

use super::{Problem, Safetensors, parse};

const SOUND: &str = r#"{"__metadata__":{"format":"pt"},"b":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},
    "a":{"dtype":"BF16","shape":[4],"data_offsets":[24,32]}}"#;

fn file(header: &str, n_data: usize) -> Vec<u8> {
    [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &vec![7; n_data]].concat()
}

fn entry(entry: &str) -> String {
    format!(r#"{{"t":{entry}}}"#)
}

#[test]
fn reads_tensors_in_the_order_of_their_bytes() {
    let bytes = file(SOUND, 32);
    let (header_bytes, tensors) = parse::header(&bytes).unwrap();
    assert_eq!(header_bytes, bytes.len() - 32);
    let names: Vec<_> = tensors.iter().map(|t| (t.name.as_str(), t.shape.clone(), t.n_bytes())).collect();
    assert_eq!(names, [("b", vec![3, 2], 24), ("a", vec![4], 8)]);
}

#[test]
fn names_the_tensor_that_is_wrong() {
    let max = u64::MAX;
    let cases: Vec<(&str, Vec<u8>)> = vec![
        ("inside the header's length", vec![1, 2, 3]),
        ("at most 100000000", [&u64::MAX.to_le_bytes()[..], b"{}"].concat()),
        ("ends inside the header", [&200_u64.to_le_bytes()[..], b"{}"].concat()),
        ("the header", [&1_u64.to_le_bytes()[..], b"{}"].concat()),
        ("an object of tensors", file("[]", 0)),
        ("tensor `t`: missing field `dtype`", file(&entry(r#"{"shape":[1],"data_offsets":[0,4]}"#), 4)),
        ("type I64", file(&entry(r#"{"dtype":"I64","shape":[1],"data_offsets":[0,8]}"#), 8)),
        ("type F8_E4M3", file(&entry(r#"{"dtype":"F8_E4M3","shape":[1],"data_offsets":[0,1]}"#), 1)),
        ("tensor `t`: shape [2]", file(&entry(r#"{"dtype":"F32","shape":[2],"data_offsets":[0,4]}"#), 4)),
        ("tensor `t`: shape", file(&entry(r#"{"dtype":"F32","shape":[1],"data_offsets":[4,0]}"#), 4)),
        (
            "tensor `t`: shape",
            file(&entry(&format!(r#"{{"dtype":"F32","shape":[{max},{max}],"data_offsets":[0,4]}}"#)), 4),
        ),
        ("may be 0", file(&entry(r#"{"dtype":"F32","shape":[0],"data_offsets":[0,0]}"#), 0)),
        (
            "9 dimensions",
            file(&entry(r#"{"dtype":"F32","shape":[1,1,1,1,1,1,1,1,1],"data_offsets":[0,4]}"#), 4),
        ),
        ("tensor `t`", file(&entry(r#"{"dtype":"F32","shape":[1],"data_offsets":[0,4,8]}"#), 4)),
        ("data of tensor `t`", file(&entry(r#"{"dtype":"F32","shape":[2],"data_offsets":[0,8]}"#), 4)),
        (
            "data of tensor `t`",
            file(&entry(&format!(r#"{{"dtype":"F32","shape":[1],"data_offsets":[{},{max}]}}"#, max - 4)), 4),
        ),
        ("a gap after `the header`", file(&entry(r#"{"dtype":"F32","shape":[1],"data_offsets":[4,8]}"#), 8)),
        (
            "4 bytes belong to no tensor",
            file(&entry(r#"{"dtype":"F32","shape":[1],"data_offsets":[0,4]}"#), 8),
        ),
        ("tensor `a`: it overlaps `b`", file(&SOUND.replace("24,32", "16,24"), 24)),
    ];
    for (expected, bytes) in cases {
        let message = parse::header(&bytes).expect_err("the file is broken").to_string();
        assert!(message.contains(expected), "{message:?} does not say {expected:?}");
    }
}

#[test]
fn refuses_every_truncation() {
    let bytes = file(SOUND, 32);
    for len in 0..bytes.len() {
        let error = parse::header(&bytes[..len]).expect_err("a truncated file");
        assert!(matches!(error, Problem::Truncated { .. }), "{len}: {error}");
    }
}

/// A folder of this test with these files.
fn folder(name: &str, files: &[(&str, Vec<u8>)]) -> PathBuf {
    let path = std::env::temp_dir().join(format!("baton-safetensors-{}-{name}", std::process::id()));
    fs::create_dir_all(&path).unwrap();
    files.iter().for_each(|(file, bytes)| fs::write(path.join(file), bytes).unwrap());
    path
}

#[test]
fn reads_shards_and_refuses_sets_that_do_not_fit_together() {
    let one = entry(r#"{"dtype":"F32","shape":[1],"data_offsets":[0,4]}"#);
    let shard = |name: &str| file(&one.replace("\"t\"", &format!("\"{name}\"")), 4);
    let index = |map: &str| format!(r#"{{"weight_map":{map}}}"#).into_bytes();
    let open = |name: &str, map: &str, second: Vec<u8>| {
        let index = ("model.safetensors.index.json", index(map));
        let path = folder(name, &[index, ("1.safetensors", shard("a")), ("2.safetensors", second)]);
        let opened = Safetensors::open(&path, |name| Some(name.to_owned()));
        fs::remove_dir_all(path).unwrap();
        opened.map_err(|error| error.to_string())
    };
    let both = r#"{"a":"1.safetensors","b":"2.safetensors"}"#;
    let opened = open("sound", both, shard("b")).unwrap();
    assert_eq!(opened.tensors().count(), 2);
    assert_eq!(opened.tensor("b").unwrap().data, [7; 4]);
    for (name, map, second, expected) in [
        ("absent", both, shard("c"), "2.safetensors: the file is corrupt at its list of tensors"),
        ("twice", r#"{"a":"1.safetensors","x":"2.safetensors"}"#, shard("a"), "`x` here"),
        ("doubled", r#"{"a":"1.safetensors","a ":"2.safetensors"}"#, shard("a"), "`a ` here"),
        ("outside", r#"{"a":"../1.safetensors"}"#, shard("b"), "no file of the model"),
        ("lost", r#"{"a":"3.safetensors"}"#, shard("b"), "3.safetensors: cannot be read"),
        ("empty", "{}", shard("b"), "names 0 files"),
        ("list", "[]", shard("b"), "the index"),
    ] {
        let message = open(name, map, second).expect_err("the set is broken");
        assert!(message.contains(expected), "{name}: {message}");
    }
}

proptest! {
    #[test]
    fn mutated_bytes_never_panic(
        edits in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..12),
        keep in any::<prop::sample::Index>(),
        truncate in any::<bool>(),
    ) {
        let mut bytes = file(SOUND, 32);
        for (index, byte) in edits {
            let at = index.index(bytes.len());
            bytes[at] = byte;
        }
        if truncate {
            bytes.truncate(keep.index(bytes.len()));
        }
        if let Ok((_, tensors)) = parse::header(&bytes) {
            for tensor in &tensors {
                prop_assert!(bytes.get(tensor.bytes.clone()).is_some());
            }
        }
    }
}
