//! Constraints and log-probabilities over the wire, also where a prefill worker samples the first token.

use anyhow::Context;
use proto::reason::Reason;
use proto::v1;
use proto::v1::decode_client::DecodeClient;
use proto::v1::generate_event::Event;
use tonic::{Code, Status};

use crate::cluster::{Cluster, Spec};
use crate::plain::{Plain, TEXT};

const QUESTION: &str = "Tell me in a few words what a lighthouse is for, who keeps it, and since when there are any of them. \
    Begin with the most important thing and leave out what everybody knows anyway, please.";

fn request(constraint: Option<v1::Constraint>) -> v1::GenerateRequest {
    v1::GenerateRequest {
        turn: 5,
        prompt: Some(v1::Prompt {
            model_fingerprint: TEXT.fingerprint.to_vec().into(),
            ids: Plain::new().prompt(QUESTION),
            ..Default::default()
        }),
        sampling: Some(v1::Sampling {
            temperature: 0.8,
            top_p: 1.0,
            seed: 11,
            logprobs: true,
            top_logprobs: 2,
            top_k: 0,
        }),
        max_output_tokens: 40,
        stop_ids: TEXT.tokenizer.end_of_turn_ids().to_vec(),
        constraint,
        ..Default::default()
    }
}

fn lines() -> v1::Constraint {
    let grammar = "start: line{2}\nline: \"- \" /[a-z ]{5,30}/ \"\\n\"".to_owned();
    v1::Constraint { grammar, ..Default::default() }
}

/// Ids and log-probabilities of a turn, and what it told of its start.
async fn generate(
    address: &str,
    request: v1::GenerateRequest,
) -> Result<(Vec<u32>, Vec<v1::Logprobs>, v1::Started), Status> {
    let channel = proto::net::channel(address).map_err(|error| Status::internal(error.to_string()))?;
    let mut events = DecodeClient::new(channel).generate(request).await?.into_inner();
    let (mut ids, mut logprobs, mut started) = (Vec::new(), Vec::new(), v1::Started::default());
    while let Some(event) = events.message().await? {
        match event.event {
            Some(Event::Started(event)) => started = event,
            Some(Event::Tokens(tokens)) => {
                ids.extend(tokens.ids);
                logprobs.extend(tokens.logprobs);
            }
            _ => {}
        }
    }
    Ok((ids, logprobs, started))
}

#[tokio::test]
async fn a_handover_changes_nothing_about_a_constrained_output() -> anyhow::Result<()> {
    let cluster = Cluster::start(Spec::split(1, 2)).await?;
    let [alone, helped] = [0, 1].map(|idx| cluster.decode[idx].info.address.clone());
    let wanted = generate(&alone, request(Some(lines()))).await?;
    let split = v1::GenerateRequest { prefill: Some(cluster.prefill[0].as_ref()), ..request(Some(lines())) };
    let found = generate(&helped, split).await?;
    assert_eq!(found.2.prefill_worker, cluster.prefill[0].info.id, "{:?}", found.2);
    assert_eq!((&found.0, &found.1), (&wanted.0, &wanted.1));
    assert_eq!(wanted.0.len(), wanted.1.len());
    assert!(wanted.1.iter().all(|found| found.top_ids.len() == 2 && found.logprob <= 0.0));
    let (stop, ids) = wanted.0.split_last().context("it has an end")?;
    assert!(TEXT.tokenizer.is_end_of_turn(*stop));
    let bytes: Vec<u8> = ids.iter().flat_map(|id| TEXT.tokenizer.token_bytes(*id)).copied().collect();
    let text = String::from_utf8(bytes)?;
    assert!(text.lines().count() == 2 && text.lines().all(|line| line.starts_with("- ")), "{text}");
    Ok(())
}

#[tokio::test]
async fn a_defective_constraint_is_the_callers_mistake() -> anyhow::Result<()> {
    let cluster = Cluster::start(Spec::aggregated(1)).await?;
    let address = &cluster.decode[0].info.address;
    let grammar = "start: foo".to_owned();
    let status = generate(address, request(Some(v1::Constraint { grammar, ..Default::default() })))
        .await
        .expect_err("there is no foo");
    assert_eq!((status.code(), Reason::of(&status)), (Code::InvalidArgument, Some(Reason::BadConstraint)));
    assert!(status.message().contains("line 1"), "{status:?}");
    assert!(generate(address, request(None)).await.is_ok(), "the worker goes on");
    Ok(())
}

#[tokio::test]
async fn a_grammar_travels_once_to_each_worker() -> anyhow::Result<()> {
    let cluster = Cluster::start(Spec::split(1, 2)).await?;
    let [alone, helped] = [0, 1].map(|idx| cluster.decode[idx].info.address.clone());
    let wanted = generate(&alone, request(Some(lines()))).await?;
    let hash = blake3::hash(lines().grammar.as_bytes()).as_bytes().to_vec();
    let short = || Some(v1::Constraint { grammar_hash: hash.clone().into(), ..Default::default() });
    let status = generate(&helped, request(short())).await.err().context("it was never told")?;
    assert_eq!(Reason::of(&status), Some(Reason::GrammarUnknown));
    let other = v1::Prompt { ids: Plain::new().prompt("Hello."), ..request(None).prompt.unwrap_or_default() };
    generate(&helped, v1::GenerateRequest { prompt: Some(other), ..request(Some(lines())) }).await?;
    // The prefill worker, which samples the first token, is told by the one that it works for.
    let split = v1::GenerateRequest { prefill: Some(cluster.prefill[0].as_ref()), ..request(short()) };
    let found = generate(&helped, split).await?;
    assert_eq!(found.2.prefill_worker, cluster.prefill[0].info.id, "{:?}", found.2);
    assert_eq!((found.0, found.1), (wanted.0, wanted.1));
    Ok(())
}
