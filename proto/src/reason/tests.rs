use super::*;

#[test]
fn every_reason_survives_the_wire() {
    for reason in Reason::ALL {
        assert_eq!(Reason::of(&reason.status("why")), Some(reason));
    }
    assert_eq!(Reason::of(&Status::internal("plain")), None);
}

#[test]
fn a_connection_error_is_retryable_and_a_bad_prompt_is_not() {
    assert!(is_retryable(&Status::unavailable("connection refused")));
    assert!(is_retryable(&Reason::Draining.status("bye")));
    assert!(!is_retryable(&Reason::PromptTooLong.status("too long")));
    assert!(!is_retryable(&Status::invalid_argument("bad")));
}
