use super::{Worker, Workers, parse, parse_rss};

#[test]
fn the_names_are_the_engines() {
    use engine::metrics as names;
    let ours = [
        super::FREE_BLOCKS,
        super::RUNNING_TURNS,
        super::PREEMPTIONS,
        super::DRAFTS,
        super::DRAFT_TOKENS,
        super::DRAFT_ACCEPTED,
    ];
    let theirs = [
        names::FREE_BLOCKS,
        names::RUNNING_TURNS,
        names::PREEMPTIONS,
        names::DRAFTS,
        names::DRAFT_TOKENS,
        names::DRAFT_ACCEPTED,
    ];
    assert_eq!(ours, theirs);
}

#[test]
fn reads_workers_and_adds_up_sources_of_drafts() {
    let page = r#"# TYPE baton_engine_free_blocks gauge
baton_engine_free_blocks{worker="decode-0"} 136
baton_engine_free_blocks{worker="prefill-0"} 1.2e1 1700000000000

# TYPE baton_engine_preemptions_total counter
baton_engine_preemptions_total{worker="decode-0"} 7
baton_engine_drafts_total{source="lookup",worker="decode-0"} 3
baton_engine_drafts_total{worker="decode-0",source="head"} 4
baton_engine_step_seconds_bucket{worker="decode-0",le="+Inf"} 15
baton_gateway_turns_total{outcome="completed"} 2
process_threads 9
"#;
    let decode = Worker { free_blocks: 136.0, preemptions: 7.0, drafts: 7.0, ..Worker::default() };
    let prefill = Worker { free_blocks: 12.0, ..Worker::default() };
    let expected = [("decode-0".to_owned(), decode), ("prefill-0".to_owned(), prefill)];
    assert_eq!(parse(page), Workers::from(expected));
}

#[test]
fn labels_may_hold_quotes_braces_and_commas() {
    let workers = parse(r#"baton_engine_running_turns{note="a,}\"=",worker="w\\0"} 2"#);
    assert_eq!(workers[r"w\0"].running_turns, 2.0);
}

#[test]
fn skips_what_is_no_measurement() {
    for line in [
        "",
        "3c",
        "baton_engine_free_blocks 3",
        r#"baton_engine_free_blocks{worker="w"}"#,
        r#"baton_engine_free_blocks{worker="w"} many"#,
        r#"baton_engine_free_blocks{worker="w" 3"#,
        r#"baton_engine_free_blocks{worker="w"#,
        r#"baton_engine_free_blocks{other="w"} 3"#,
        "baton_engine_free_blocks{",
    ] {
        assert_eq!(parse(line), Workers::new(), "{line}");
    }
}

#[test]
fn reads_the_memory_of_a_process() {
    let status = "Name:\tbaton\nVmHWM:\t  300 kB\nVmRSS:\t  204800 kB\nThreads:\t9\n";
    assert_eq!(parse_rss(status), Some(204_800));
    assert_eq!(parse_rss("Name:\tbaton\n"), None);
}
