use clap::Parser;

use super::sessions;
use crate::options::Options;
use crate::workload::Chain;

fn options(arguments: &str) -> Options {
    Options::parse_from(std::iter::once("replay").chain(arguments.split_whitespace()))
}

#[test]
fn the_same_seed_gives_the_same_sessions() {
    let arguments = "--sessions 3 --turns 2 --seed 9";
    assert_eq!(sessions(&options(arguments)), sessions(&options(arguments)));
    assert_ne!(sessions(&options(arguments)), sessions(&options("--sessions 3 --turns 2 --seed 8")));
}

#[test]
fn sessions_share_their_system_prompt_and_nothing_else() {
    let workload = sessions(&options("--sessions 2 --turns 2 --delta-tokens 30"));
    let [a, b] = workload.sessions.as_slice() else { panic!("two sessions") };
    assert_eq!(a.system, b.system);
    assert_ne!(a.turns[0].text.render(), b.turns[0].text.render());
    assert_ne!(a.turns[0].text.render(), a.turns[1].text.render());
    assert_eq!((a.turns[0].chain, a.turns[1].chain), (Chain::Opens, Chain::Continues));
}
