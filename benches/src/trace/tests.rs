use std::io::Write;
use std::path::{Path, PathBuf};

use clap::Parser;

use super::{Error, read};
use crate::options::Options;
use crate::workload::{Chain, Workload};

const MOONCAKE: &str = r#"{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]}
{"timestamp": 1500, "input_length": 1100, "output_length": 7, "hash_ids": [0, 2, 3]}
"#;

const SESSIONS: &str = r#"{"session_id":"a","turn":0,"timestamp":0.0,"keep_chars":0,"append_text":"Grüße","output_text":"hi"}
{"session_id":"b","turn":0,"timestamp":0.0,"keep_chars":0,"append_text":"other","output_text":""}
{"session_id":"a","turn":1,"timestamp":250.0,"keep_chars":5,"append_text":" and more","output_text":""}
{"session_id":"a","turn":2,"timestamp":300.0,"keep_chars":3,"append_text":"n","output_text":""}
{"session_id":"a","turn":3,"timestamp":400.0,"keep_chars":4,"append_text":"","output_text":""}
"#;

/// A file that is removed at the end of the test.
struct Temporary(PathBuf);

impl Temporary {
    fn new(name: &str, content: &[u8]) -> Self {
        let path = std::env::temp_dir().join(format!("replay-{}-{name}", std::process::id()));
        std::fs::File::create(&path).unwrap().write_all(content).unwrap();
        Self(path)
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

fn options(arguments: &str) -> Options {
    Options::parse_from(std::iter::once("replay").chain(arguments.split_whitespace()))
}

fn parse(name: &str, content: &str, arguments: &str) -> Result<Workload, Error> {
    read(&Temporary::new(name, content.as_bytes()).0, &options(arguments))
}

#[test]
fn equal_hash_ids_give_equal_text() {
    let workload = parse("mooncake", MOONCAKE, "").unwrap();
    let text = |idx: usize| workload.sessions[idx].turns[0].text.render();
    let shared = text(0).bytes().zip(text(1).bytes()).take_while(|(a, b)| a == b).count();
    let block = crate::text::Text::words(crate::text::mix(1, 0), 512).render();
    assert!(text(0).starts_with(&block) && text(1).starts_with(&block));
    assert!(shared < block.len() + 20, "the second blocks differ");
    assert_eq!(workload.sessions[1].start.unwrap().as_millis(), 1500);
}

#[test]
fn long_prompts_are_cut_and_counted() {
    let workload = parse("cut", MOONCAKE, "--max-input-tokens 1000").unwrap();
    assert_eq!(workload.sessions[1].turns[0].text.estimated_tokens(), 1000);
    assert!(workload.notes.iter().any(|note| note.starts_with("1 of 2 prompts")), "{:?}", workload.notes);
}

#[test]
fn a_turn_continues_only_when_it_keeps_the_whole_previous_prompt() {
    let workload = parse("sessions", SESSIONS, "").unwrap();
    let [a, b] = workload.sessions.as_slice() else { panic!("two sessions") };
    assert_eq!((a.id.as_str(), b.turns.len()), ("a", 1));
    let got: Vec<_> = a.turns.iter().map(|turn| (turn.chain, turn.text.render())).collect();
    let expected = [
        (Chain::Opens, "Grüße"),
        (Chain::Continues, " and more"),
        (Chain::Opens, "Grün"),
        // The same prompt again.
        (Chain::Opens, "Grün"),
    ];
    assert_eq!(got, expected.map(|(chain, text)| (chain, text.to_owned())));
    assert_eq!(a.turns[1].delay.as_millis(), 250);
    assert_eq!(a.turns[0].output_tokens, 1);
}

#[test]
fn errors_name_file_and_line() {
    let check = |content: &str, part: &str| {
        let error = parse("wrong", content, "").unwrap_err().to_string();
        assert!(error.contains(part), "{error}");
    };
    check(&format!("{MOONCAKE}{{\"timestamp\": 1}}\n"), "line 3: missing field");
    check(&format!("{MOONCAKE}nonsense\n"), "line 3: expected");
    check(&MOONCAKE.replace("1100", "5000"), "line 2: 3 hash_ids");
    check(&SESSIONS.replace("\"keep_chars\":3", "\"keep_chars\":99"), "line 4: keep_chars is 99");
    check(&SESSIONS.replace("\"turn\":3", "\"turn\":5"), "line 5: turn 5");
    check("session_id,arrival\n", "no trace that the replayer knows");
    check("", "no trace that the replayer knows");
    let missing = read(Path::new("/no/such/trace"), &options("")).unwrap_err().to_string();
    assert!(missing.starts_with("cannot read /no/such/trace"), "{missing}");
}

#[test]
fn several_zstd_frames_are_one_trace() {
    use ruzstd::encoding::{CompressionLevel, compress_to_vec};
    let frames: Vec<u8> = MOONCAKE
        .split_inclusive('\n')
        .flat_map(|line| compress_to_vec(line.as_bytes(), CompressionLevel::Uncompressed))
        .collect();
    let file = Temporary::new("frames.zst", &frames);
    let plain = parse("plain", MOONCAKE, "").unwrap();
    assert_eq!(read(&file.0, &options("")).unwrap(), plain);
}
