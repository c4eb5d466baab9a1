use std::time::Duration;

use super::{End, MAX_TEXTS, News, Over, STALL, Tally};
use crate::record::Record;

const S: Duration = Duration::from_secs(1);

fn ended(record: Record, end: End) -> News {
    News::Ended(Box::new(Over { record, end, forked: false }))
}

fn failed(code: &str, message: &str) -> News {
    let record =
        Record { error: Some(code.to_owned()), message: Some(message.to_owned()), ..Record::default() };
    ended(record, End::Failed)
}

fn tally(news: impl IntoIterator<Item = News>) -> Tally {
    let mut tally = Tally::default();
    for news in news {
        if matches!(news, News::Ended(_)) {
            tally.book(News::Sent { at: Duration::ZERO });
        }
        tally.book(news);
    }
    tally
}

#[test]
fn refusals_are_no_errors_and_differ_by_more_than_numbers() {
    let tally = tally([
        failed("context_length_exceeded", "2200 tokens, 2176 fit"),
        failed("context_length_exceeded", "2201 tokens, 2176 fit"),
        failed("server_is_overloaded", "later"),
        failed("rate_limit_exceeded", "later"),
    ]);
    assert_eq!((tally.refused_too_long, tally.refused_overload, tally.n_errors()), (2, 2, 0));
    assert_eq!(tally.refusals["context_length_exceeded: N tokens, N fit"], 2);
}

#[test]
fn all_else_is_an_error_with_its_text() {
    let tally = tally([failed("server_error", "oh"), News::Unreachable("refused".to_owned())]);
    let texts: Vec<_> = tally.errors.keys().map(String::as_str).collect();
    assert_eq!(texts, ["connect: refused", "server_error: oh ( turn 0)"]);
}

#[test]
fn only_so_many_texts_are_kept() {
    let mut tally = Tally::default();
    for n in 0..2 * MAX_TEXTS {
        tally.error(format!("problem {n}"));
    }
    assert_eq!((tally.errors.len(), tally.n_errors()), (MAX_TEXTS + 1, 2 * MAX_TEXTS as u64));
}

#[test]
fn cancelled_turns_are_told_apart_by_whether_text_had_come() {
    let text = Record { first_text: Some(S), ..Record::default() };
    let tally = tally([ended(text, End::Cancelled), ended(Record::default(), End::Cancelled)]);
    assert_eq!((tally.cancelled_before_text, tally.cancelled_in_stream), (1, 1));
}

#[test]
fn a_stall_is_silence_while_turns_are_open() {
    let mut tally = Tally::default();
    assert_eq!(tally.stalls_at(), None);
    tally.book(News::Sent { at: 5 * S });
    tally.book(News::Sent { at: 7 * S });
    assert_eq!(tally.stalls_at(), Some(5 * S + STALL), "a request is no progress");
    tally.book(News::Text { at: 9 * S });
    assert_eq!(tally.stalls_at(), Some(9 * S + STALL));
    for done in [10 * S, 11 * S] {
        tally.book(ended(Record { done, ..Record::default() }, End::Cancelled));
    }
    assert_eq!(tally.stalls_at(), None);
    tally.book(News::Sent { at: 100 * S });
    assert_eq!((tally.longest_silence_s, tally.n_open()), (4.0, 1), "idle time is no silence");
}
