use std::time::Duration;

use super::{Summary, Times, print};
use crate::drive::Outcome;
use crate::record::Record;

const MS: Duration = Duration::from_millis(1);

#[test]
fn percentiles_are_exact_to_three_digits() {
    let times = Times::of((1..=1000).map(|n| n * MS));
    let close = |got: u64, expected_ms: f64| (got as f64 / 1e3 / expected_ms - 1.0).abs() < 0.002;
    assert!(close(times.p50_us, 500.0) && close(times.p90_us, 900.0) && close(times.p99_us, 990.0));
    assert!(close(times.max_us, 1000.0));
    assert_eq!(times.count, 1000);
    assert_eq!(Times::of([]), Times::default());
}

fn record(scheduled_ms: u32, sent_ms: u32, done_ms: u32) -> Record {
    Record {
        scheduled: scheduled_ms * MS,
        sent: sent_ms * MS,
        first_text: Some(done_ms * MS),
        done: done_ms * MS,
        input_tokens: 100,
        cached_tokens: 25,
        output_tokens: 10,
        ..Default::default()
    }
}

fn summary(records: Vec<Record>) -> Summary {
    let outcome = Outcome { records, wall: 1000 * MS, interrupted: false };
    Summary::new(&outcome, 4, vec!["as recorded".to_owned()])
}

#[test]
fn end_to_end_counts_from_the_schedule_and_service_from_sending() {
    let summary = summary(vec![record(0, 400, 500)]);
    assert_eq!(summary.end_to_end.max_us / 1000, 500);
    assert_eq!(summary.service.max_us / 1000, 100);
    assert_eq!(summary.lateness.max_us / 1000, 400);
    assert!(summary.unfaithful);
    assert!(!self::summary(vec![record(0, 3, 500)]).unfaithful);
}

#[test]
fn failed_requests_are_counted_by_code_and_kept_out_of_latencies() {
    let failed = Record { error: Some("timeout".to_owned()), ..record(0, 0, 900) };
    let summary = summary(vec![record(0, 0, 100), failed.clone(), failed]);
    assert_eq!(summary.errors["timeout"], 2);
    assert_eq!((summary.n_errors(), summary.answered, summary.end_to_end.count), (2, 1, 1));
    let mut out = Vec::new();
    print(&mut out, &summary, "small").unwrap();
    let text = String::from_utf8(out).unwrap();
    for part in ["1 answered, 2 failed, 1 not sent", "2 x timeout", "25.0 %", "note: as recorded"] {
        assert!(text.contains(part), "{part} is missing in\n{text}");
    }
}
