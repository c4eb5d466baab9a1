use std::time::Duration;

use clap::Parser;

use super::{Cut, Plan, Session};
use crate::options::Options;

fn sessions(arguments: &str) -> Vec<Session> {
    let command = ["replay", "--soak-s", "1"].into_iter().chain(arguments.split_whitespace());
    let plan = Plan::new(&Options::parse_from(command));
    (0..400).map(|number| plan.session(number)).collect()
}

#[test]
fn the_same_seed_gives_the_same_plan() {
    assert_eq!(sessions("--seed 3"), sessions("--seed 3"));
    assert_ne!(sessions("--seed 3"), sessions("--seed 4"));
}

#[test]
fn what_is_drawn_stays_in_its_range_and_fills_it() {
    let sessions =
        sessions("--delta-tokens 50 --output-tokens 20 --max-output-tokens 70 --turns 4 --tool-ms 30");
    let lengths: Vec<_> = sessions.iter().map(|session| session.turns.len()).collect();
    assert_eq!((lengths.iter().min(), lengths.iter().max()), (Some(&1), Some(&8)));
    let turns: Vec<_> = sessions.iter().flat_map(|session| &session.turns).collect();
    let range = |of: &dyn Fn(usize) -> u64| {
        let values = (0..turns.len()).map(of);
        (values.clone().min().unwrap(), values.max().unwrap())
    };
    let (shortest, longest) = range(&|n| turns[n].text.estimated_tokens() as u64);
    assert!((50..55).contains(&shortest) && (190..=200).contains(&longest), "{shortest} to {longest}");
    assert_eq!(range(&|n| u64::from(turns[n].output_tokens)), (20, 70));
    assert!(turns.iter().all(|turn| turn.pause <= Duration::from_millis(60)));
    for turn in &turns {
        match turn.cut {
            Some(Cut::AfterDeltas(n)) => assert!((1..=u64::from(turn.output_tokens)).contains(&n)),
            Some(Cut::AfterSending(patience)) => assert!(patience <= Duration::from_millis(1024)),
            None => {}
        }
    }
}

/// Shares of turns that are cut and that fork.
fn shares(arguments: &str) -> (f64, f64) {
    let sessions = sessions(arguments);
    let turns: Vec<_> = sessions.iter().flat_map(|session| &session.turns).collect();
    let share = |n: usize| n as f64 / turns.len() as f64;
    let n_cut = turns.iter().filter(|turn| turn.cut.is_some()).count();
    (share(n_cut), share(turns.iter().filter(|turn| turn.older.is_some()).count()))
}

#[test]
fn turns_are_cut_and_fork_as_often_as_asked() {
    let (cut, forked) = shares("");
    assert!((0.08..0.12).contains(&cut) && (0.08..0.12).contains(&forked), "{cut} {forked}");
    assert_eq!(shares("--cancel 0 --fork 1"), (0.0, 1.0));
}

#[test]
fn a_fork_continues_an_older_response_where_there_is_one() {
    let session = sessions("--fork 1").swap_remove(0);
    let forking = &session.turns[0];
    assert_eq!((forking.parent(0), forking.parent(1), forking.parent(2)), (None, Some(0), Some(0)));
    assert!((3..50).all(|n| forking.parent(n).unwrap() < n - 1));
    let following = super::Turn { older: None, ..forking.clone() };
    assert_eq!((following.parent(0), following.parent(3)), (None, Some(2)));
}

#[test]
fn some_sessions_begin_as_an_earlier_one() {
    let sessions = sessions("");
    let twins: Vec<_> = sessions.iter().filter(|session| session.opening != session.number).collect();
    assert!((25..80).contains(&twins.len()), "{} of 400", twins.len());
    for twin in twins {
        let earlier = &sessions[usize::try_from(twin.opening).unwrap()];
        assert!(earlier.number < twin.number && earlier.opening == earlier.number);
        assert_eq!(twin.turns[0].text, earlier.turns[0].text);
        if let (Some(own), Some(other)) = (twin.turns.get(1), earlier.turns.get(1)) {
            assert_ne!(own.text, other.text);
        }
    }
}
