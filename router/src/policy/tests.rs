use super::*;

fn worker(idx: u64, held: usize) -> Candidate {
    Candidate {
        idx: WorkerIdx(idx),
        held,
        queued_tokens: 0,
        turns: 0,
        free_blocks: 1000,
        us_per_token: 1000.0,
        us_per_output: 4000.0,
    }
}

fn demand(prompt_tokens: u32) -> Demand {
    Demand { prompt_tokens, last_decode: None }
}

fn picked(demand: Demand, decode: &[Candidate], prefill: &[Candidate]) -> (usize, Option<usize>) {
    let choice = choose(&Costs::default(), demand, decode, prefill).expect("a plan");
    (choice.decode, choice.prefill)
}

#[test]
fn each_case_goes_where_its_first_token_comes_soonest() {
    let busy = |candidate: Candidate, queued_tokens, turns| Candidate { queued_tokens, turns, ..candidate };
    let full = |candidate: Candidate| Candidate { free_blocks: 0, ..candidate };
    let cases = [
        (
            "a long prompt goes to a prefill worker",
            demand(800),
            vec![worker(0, 0)],
            vec![worker(1, 0)],
            (0, Some(0)),
        ),
        (
            "a short delta stays where its prefix is",
            demand(820),
            vec![worker(0, 50), worker(1, 0)],
            vec![worker(2, 40)],
            (0, None),
        ),
        (
            "without prefill workers everything is computed by the decode worker",
            demand(800),
            vec![worker(0, 0)],
            vec![],
            (0, None),
        ),
        (
            "the prefill worker with the prefix wins",
            demand(1600),
            vec![worker(0, 0)],
            vec![worker(1, 0), worker(2, 60)],
            (0, Some(1)),
        ),
        (
            "but not when its queue is longer than the prefix is worth",
            demand(1600),
            vec![worker(0, 0)],
            vec![worker(1, 0), busy(worker(2, 60), 5000, 4)],
            (0, Some(0)),
        ),
        (
            "a full decode worker is avoided",
            demand(800),
            vec![full(worker(0, 0)), worker(1, 0)],
            vec![worker(2, 0)],
            (1, Some(0)),
        ),
        (
            "a busy decode worker is avoided",
            demand(800),
            vec![busy(worker(0, 0), 0, 9), worker(1, 0)],
            vec![worker(2, 0)],
            (1, Some(0)),
        ),
    ];
    for (name, demand, decode, prefill, expected) in cases {
        assert_eq!(picked(demand, &decode, &prefill), expected, "{name}");
    }
}

#[test]
fn a_tie_goes_to_the_last_worker_of_the_conversation() {
    let demand = Demand { prompt_tokens: 50, last_decode: Some(WorkerIdx(1)) };
    assert_eq!(picked(demand, &[worker(0, 0), worker(1, 0)], &[]), (1, None));
    assert!(choose(&Costs::default(), demand, &[], &[worker(2, 0)]).is_none());
}
