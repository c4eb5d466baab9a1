use super::{Memory, Report, leftovers};
use crate::soak::metrics::{Sample, Worker, Workers};
use crate::soak::tally::Tally;

const IDLE: Worker = Worker {
    free_blocks: 136.0,
    running_turns: 0.0,
    preemptions: 5.0,
    drafts: 9.0,
    draft_tokens: 20.0,
    draft_accepted: 8.0,
};

fn workers(worker: Worker) -> Workers {
    Workers::from([("decode-0".to_owned(), worker)])
}

#[test]
fn nothing_may_be_left_in_a_worker() {
    let check = |end: Workers, expected: &[&str]| assert_eq!(leftovers(&workers(IDLE), &end), expected);
    check(workers(IDLE), &[]);
    check(workers(Worker { preemptions: 90.0, drafts: 70.0, ..IDLE }), &[]);
    check(
        workers(Worker { free_blocks: 130.0, running_turns: 1.0, ..IDLE }),
        &["decode-0 has 130 free blocks, and had 136 at the start", "decode-0 still runs 1 turns"],
    );
    check(
        workers(Worker { preemptions: 0.0, ..IDLE }),
        &["decode-0 has started anew: its counters went back"],
    );
    check(Workers::new(), &["decode-0 is gone"]);
}

fn sample(at_s: f64, free_blocks: f64, rss_kb: u64) -> Sample {
    Sample { at_s, workers: workers(Worker { free_blocks, ..IDLE }), rss_kb: Some(rss_kb) }
}

fn report(turns: Tally, end_blocks: f64) -> Report {
    let samples = vec![sample(0.0, 136.0, 1024), sample(10.0, 3.0, 2048), sample(20.0, end_blocks, 2048)];
    Report::new(20.0, false, turns, samples)
}

#[test]
fn a_soak_fails_for_errors_leaks_and_for_nothing_answered() {
    let mut fine = Tally::default();
    (fine.answered, fine.refused_too_long) = (3, 2);
    assert_eq!(report(fine.clone(), 136.0).failures, Vec::<String>::new());
    assert_eq!(report(fine.clone(), 135.0).failures.len(), 1);
    let mut broken = fine;
    broken.error("server_error: oh".to_owned());
    assert_eq!(report(broken, 136.0).failures, ["1 errors"]);
    assert_eq!(report(Tally::default(), 136.0).failures, ["no turn was answered"]);
}

#[test]
fn the_table_shows_what_counts() {
    let mut turns = Tally::default();
    (turns.answered, turns.output_tokens, turns.forked) = (3, 100, 1);
    turns.error("server_error: oh".to_owned());
    let mut out = Vec::new();
    report(turns, 130.0).print(&mut out, "small").unwrap();
    let text = String::from_utf8(out).unwrap();
    for part in ["3 answered", "1 of all were forks", "1 x server_error: oh", "5.0 out", "2.0 at the end"] {
        assert!(text.contains(part), "{part} is missing in\n{text}");
    }
    assert!(text.contains("FAILED: decode-0 has 130 free blocks") && !text.contains("passed"));
}

#[test]
fn growth_is_measured_over_the_second_half() {
    // Grows fast, then by 10 kB/s.
    let rss = |at: u64| if at < 50 { 1000 * at } else { 50_000 + 10 * (at - 50) };
    let samples: Vec<_> = (0..=10).map(|n| 10 * n).map(|at| sample(at as f64, 136.0, rss(at))).collect();
    let memory = Memory::of(&samples).unwrap();
    assert_eq!(memory.kb, [10_000, 50_000, 50_500]);
    assert!((memory.kb_per_hour - 36_000.0).abs() < 1.0, "{memory:?}");
    assert_eq!(Memory::of(&[Sample::default()]), None);
    assert_eq!(Memory::of(&samples[..1]).unwrap().kb_per_hour, 0.0);
}
