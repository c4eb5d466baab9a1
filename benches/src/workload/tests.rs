use std::time::Duration;

use clap::Parser;

use super::{Chain, Error, Workload};
use crate::options::Options;

fn workload(arguments: &str) -> Result<Workload, Error> {
    Workload::new(&Options::parse_from(std::iter::once("replay").chain(arguments.split_whitespace())))
}

#[test]
fn a_rate_spreads_the_starts() {
    let workload = workload("--sessions 3 --rate 4").unwrap();
    let starts: Vec<_> = workload.sessions.iter().map(|session| session.start.unwrap().as_millis()).collect();
    assert_eq!(starts, [0, 250, 500]);
}

#[test]
fn speed_shortens_delays() {
    let workload = workload("--turns 2 --tool-ms 800 --speed 4").unwrap();
    assert_eq!(workload.sessions[0].turns[1].delay, Duration::from_millis(200));
}

#[test]
fn turns_beyond_the_context_are_left_out_and_counted() {
    let workload = workload(
        "--sessions 2 --turns 9 --system-tokens 0 --delta-tokens 400 --output-tokens 52 --max-input-tokens 1452",
    );
    let workload = workload.unwrap();
    // 448 tokens with the template and 52 of output a turn: the third prompt has 1448.
    assert_eq!(workload.n_turns(), 6);
    assert!(workload.notes[0].starts_with("12 of 18 turns left out"), "{:?}", workload.notes);
}

#[test]
fn open_mode_sends_whole_prompts_at_their_own_times() {
    let workload =
        workload("--mode open --sessions 1 --turns 3 --rate 1 --tool-ms 100 --delta-tokens 20").unwrap();
    let [first, second, third] = workload.sessions.as_slice() else { panic!("three requests") };
    let prompt = |session: &super::Session| session.turns[0].text.render();
    assert!(prompt(third).starts_with(&prompt(second)) && prompt(second).starts_with(&prompt(first)));
    assert_eq!(third.start, Some(Duration::from_millis(200)));
    assert!(workload.sessions.iter().all(|session| session.turns[0].chain == Chain::Opens));
}

#[test]
fn open_mode_without_times_is_refused() {
    assert!(matches!(workload("--mode open"), Err(Error::Usage(_))));
    assert!(matches!(workload("--delta-tokens 9000"), Err(Error::Empty)));
}
