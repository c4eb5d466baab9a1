//! KV between workers, spoken by hand with a real decode worker: what fits is taken, what does not is refused by name.

use std::sync::Arc;

use anyhow::{Context, bail, ensure};
use bytes::Bytes;
use engine::job::{Admitted, Event, Fill, Job, Output, Prompt, SequenceId};
use engine::sample::SamplingParams;
use engine::{Engine, EngineConfig, Speculate};
use kernels::attention::KvDtype;
use kv::BLOCK_TOKENS;
use kv::hash::{BlockHash, HashChain, HashKey};
use kv::port::Frame;
use proto::reason::Reason;
use proto::v1;
use proto::v1::push_message::Message;
use proto::v1::transfer_client::TransferClient;
use tokio::sync::mpsc;
use tokio_stream::iter;
use tonic::transport::Channel;
use tonic::{Code, Status};

use crate::client::Chat;
use crate::cluster::{Cluster, Spec, Worker};
use crate::plain::{MODEL, Plain, TEXT, threads};

const STORY: &str = "Read this and remember it. The old lighthouse stood at the end of a long pier of grey stone. Every \
    evening its keeper climbed the two hundred steps to the lamp, trimmed the wick and wound the clockwork. What is the \
    story about?";

fn client(worker: &Worker) -> anyhow::Result<TransferClient<Channel>> {
    let client = TransferClient::new(proto::net::channel(&worker.info.address)?);
    Ok(client.max_decoding_message_size(proto::MAX_MESSAGE_BYTES))
}

/// The introduction of a peer that fits.
fn hello(worker: &Worker, grant: u64) -> v1::Hello {
    v1::Hello {
        worker: "tester".to_owned(),
        epoch: worker.info.epoch,
        model_fingerprint: worker.info.model_fingerprint.clone(),
        geometry: worker.info.geometry.clone(),
        grant,
    }
}

/// All layers of `blocks`, with a right checksum.
fn frame(worker: &Worker, number: u32, blocks: &[u32]) -> v1::KvFrame {
    let geometry = worker.engine.geometry();
    let payload = Bytes::from(vec![0; geometry.block_bytes() * blocks.len()]);
    let crc32 = crc32fast::hash(&payload);
    v1::KvFrame {
        number,
        first_layer: 0,
        n_layers: geometry.n_layers,
        blocks: blocks.to_vec(),
        payload,
        crc32,
    }
}

/// Pushes frames; returns how many were acknowledged before the end or the error.
async fn push(
    worker: &Worker,
    hello: v1::Hello,
    frames: Vec<v1::KvFrame>,
) -> anyhow::Result<(usize, Option<Status>)> {
    let messages = std::iter::once(Message::Hello(hello)).chain(frames.into_iter().map(Message::Frame));
    let messages: Vec<_> = messages.map(|message| v1::PushMessage { message: Some(message) }).collect();
    let mut acks = match client(worker)?.push(iter(messages)).await {
        Ok(acks) => acks.into_inner(),
        Err(status) => return Ok((0, Some(status))),
    };
    let mut n_acks = 0;
    loop {
        match acks.message().await {
            Ok(Some(_)) => n_acks += 1,
            Ok(None) => return Ok((n_acks, None)),
            Err(status) => return Ok((n_acks, Some(status))),
        }
    }
}

/// A sequence inside an engine, driven by hand.
struct Sequence {
    id: SequenceId,
    events: mpsc::Receiver<Event>,
}

impl Sequence {
    /// Submits a prompt and waits for its place.
    async fn submit(engine: &Engine, ids: Vec<u32>, fill: Fill) -> anyhow::Result<(Self, Admitted)> {
        let (sender, mut events) = mpsc::channel(64);
        let id = engine.submit(Job {
            turn: 1,
            prompt: Prompt { key: key(), parent: BlockHash::ROOT, ids },
            fill,
            export: None,
            sampling: SamplingParams::GREEDY,
            constraint: None,
            max_output_tokens: 1,
            stop_ids: Vec::new(),
            sink: Box::new(move |event| sender.try_send(event).is_ok()),
        })?;
        match events.recv().await {
            Some(Event::Admitted(admitted)) => Ok((Self { id, events }, admitted)),
            other => bail!("not admitted: {other:?}"),
        }
    }

    async fn event(&mut self) -> anyhow::Result<Event> {
        self.events.recv().await.context("the engine is gone")
    }
}

fn key() -> HashKey {
    HashKey::derive(&TEXT.fingerprint, b"")
}

fn hashes_of(ids: &[u32]) -> Vec<BlockHash> {
    HashChain::new(key()).extend(ids)
}

fn to_wire(hashes: &[BlockHash]) -> Bytes {
    hashes.iter().flat_map(|hash| *hash.as_bytes()).collect()
}

#[tokio::test]
async fn peers_that_do_not_fit_are_refused_by_name() -> anyhow::Result<()> {
    let cluster = Cluster::start(Spec::aggregated(1)).await?;
    let worker = &cluster.decode[0];
    let changed = |change: fn(&mut v1::KvGeometry)| {
        let mut hello = hello(worker, 1);
        hello.geometry.as_mut().map(change);
        hello
    };
    let fingerprint = v1::Hello { model_fingerprint: Bytes::from_static(&[7; 32]), ..hello(worker, 1) };
    let cases = [
        ("model fingerprint", fingerprint),
        ("dtype", changed(|geometry| geometry.dtype = "bf16".to_owned())),
        ("layout", changed(|geometry| geometry.layout = "token-major".to_owned())),
        ("n_layers", changed(|geometry| geometry.n_layers += 1)),
        ("n_kv_heads", changed(|geometry| geometry.n_kv_heads += 1)),
        ("head_dim", changed(|geometry| geometry.head_dim *= 2)),
        ("block_tokens", changed(|geometry| geometry.block_tokens *= 2)),
        ("dtype", v1::Hello { geometry: None, ..hello(worker, 1) }),
    ];
    for (field, hello) in cases {
        let (_, pushed) = push(worker, hello.clone(), vec![frame(worker, 0, &[0])]).await?;
        let request = v1::PullRequest { hello: Some(hello), hashes: Bytes::new() };
        let pulled = client(worker)?.pull(request).await.err();
        for status in [pushed, pulled] {
            let status = status.context("it was not refused")?;
            assert_eq!(Reason::of(&status), Some(Reason::Mismatch), "{status:?}");
            ensure!(status.message().contains(&format!("{field} is")), "{field} is not named: {status:?}");
        }
    }
    let old = v1::Hello { epoch: worker.info.epoch + 1, ..hello(worker, 1) };
    let (_, status) = push(worker, old, Vec::new()).await?;
    assert_eq!(status.as_ref().and_then(Reason::of), Some(Reason::GrantRevoked), "{status:?}");
    let (_, status) = push(worker, hello(worker, 4242), vec![frame(worker, 0, &[0])]).await?;
    assert_eq!(status.as_ref().and_then(Reason::of), Some(Reason::GrantRevoked), "{status:?}");
    let headless = client(worker)?.pull(v1::PullRequest::default()).await.err();
    assert_eq!(headless.map(|status| status.code()), Some(Code::InvalidArgument));
    Ok(())
}

#[tokio::test]
async fn a_grant_takes_its_own_blocks_whole_and_nothing_else() -> anyhow::Result<()> {
    let cluster = Cluster::start(Spec::aggregated(1)).await?;
    let worker = &cluster.decode[0];
    let ids: Vec<u32> = (100..140).collect();
    let (sequence, admitted) = Sequence::submit(&worker.engine, ids, Fill::Handover).await?;
    let (grant, granted) = (sequence.id.0, admitted.granted);
    assert_eq!(granted.len(), 3, "40 tokens are 3 blocks");
    let foreign = (0..).find(|block| !granted.contains(block)).context("a block that is not granted")?;
    let good = |number| frame(worker, number, &granted[..1]);
    let bad: [(&str, v1::KvFrame, Option<Reason>, Code); 6] = [
        ("a bad checksum", v1::KvFrame { crc32: 7, ..good(1) }, Some(Reason::Damaged), Code::DataLoss),
        ("a foreign block", frame(worker, 1, &[foreign]), None, Code::InvalidArgument),
        ("a block that does not exist", frame(worker, 1, &[999_999]), None, Code::InvalidArgument),
        ("a layer too many", v1::KvFrame { first_layer: 1, ..good(1) }, None, Code::InvalidArgument),
        ("no layer", v1::KvFrame { n_layers: 0, ..good(1) }, None, Code::InvalidArgument),
        (
            "a block without bytes",
            v1::KvFrame { blocks: granted[..2].to_vec(), ..good(1) },
            None,
            Code::InvalidArgument,
        ),
    ];
    for (name, bad, reason, code) in bad {
        let (n_acks, status) = push(worker, hello(worker, grant), vec![good(0), bad]).await?;
        let status = status.with_context(|| format!("{name} was taken"))?;
        assert_eq!((Reason::of(&status), status.code()), (reason, code), "{name}: {status:?}");
        assert_eq!(n_acks, 1, "{name}: the good frame before it counts");
    }
    let frames = granted.iter().zip(0..).map(|(block, number)| frame(worker, number, &[*block])).collect();
    let (n_acks, status) = push(worker, hello(worker, grant), frames).await?;
    ensure!(n_acks == 3 && status.is_none(), "{n_acks} {status:?}");

    worker.engine.cancel(sequence.id);
    let (n_acks, status) = push(worker, hello(worker, grant), vec![good(0)]).await?;
    assert_eq!((n_acks, status.as_ref().and_then(Reason::of)), (0, Some(Reason::GrantRevoked)), "it is over");
    Ok(())
}

/// Pulls `hashes` by hand into `sequence`; returns the number of blocks that came.
async fn pull_into(
    worker: &Worker,
    hashes: &[BlockHash],
    engine: &Engine,
    sequence: &Sequence,
    granted: &[u32],
) -> anyhow::Result<usize> {
    let request = v1::PullRequest { hello: Some(hello(worker, 0)), hashes: to_wire(hashes) };
    let mut frames = client(worker)?.pull(request).await?.into_inner();
    let (mut n_frames, mut last_block) = (0, 0);
    while let Some(frame) = frames.message().await? {
        assert_eq!((frame.number, frame.crc32), (n_frames, crc32fast::hash(&frame.payload)));
        n_frames += 1;
        last_block = frame.blocks.iter().copied().max().unwrap_or(0).max(last_block);
        let blocks = frame.blocks.iter().map(|index| granted[*index as usize]).collect();
        let v1::KvFrame { first_layer, n_layers, payload, .. } = frame;
        engine.port().import(sequence.id.0, Frame { first_layer, n_layers, blocks, payload }).await?;
    }
    Ok(if n_frames == 0 { 0 } else { last_block as usize + 1 })
}

#[tokio::test]
async fn pulled_blocks_continue_as_if_computed_here() -> anyhow::Result<()> {
    let cluster = Cluster::start(Spec::aggregated(1)).await?;
    let worker = &cluster.decode[0];
    let turn = Chat::open(cluster.address()).await?.say(STORY, 4).await?;
    let ids = Plain::new().prompt(STORY);
    assert_eq!(ids.len() as u64, turn.usage("/input_tokens"));
    let hashes = hashes_of(&ids[..ids.len() - 1]);

    let config = EngineConfig {
        n_blocks: 50,
        step_tokens: 64,
        max_running: 8,
        max_turns: 8,
        kv_dtype: KvDtype::F16,
        speculate: Speculate::Never,
    };
    let engine = Engine::start(MODEL.clone(), Arc::new(threads(1)), config, "puller")?;
    let (mut sequence, admitted) =
        Sequence::submit(&engine, ids.clone(), Fill::PullPrefix(hashes.len())).await?;
    assert_eq!((&admitted.hashes[..hashes.len()], admitted.granted.len()), (&hashes[..], hashes.len()));
    // A hash that nobody holds ends the answer; what comes before it is sent.
    let mut wanted = hashes.clone();
    wanted.extend(hashes_of(&[1; BLOCK_TOKENS]));
    let n_blocks = pull_into(worker, &wanted, &engine, &sequence, &admitted.granted).await?;
    assert_eq!(n_blocks, hashes.len());
    engine.filled(sequence.id, None);
    let computed_tokens = ids.len() - n_blocks * BLOCK_TOKENS;
    assert_eq!(sequence.event().await?, Event::Prefilled { computed_tokens });
    let first = Output { id: turn.output_ids()[0], logprobs: None };
    assert_eq!(sequence.event().await?, Event::Token(first));
    engine.stop();
    Ok(())
}

#[tokio::test]
async fn a_decode_worker_pulls_what_another_holds() -> anyhow::Result<()> {
    let cluster = Cluster::start(Spec::aggregated(2)).await?;
    let turn = Chat::open(cluster.address()).await?.say(STORY, 8).await?;
    let holds = |worker: &&Worker| worker.info.id == turn.worker("decode_worker");
    let holder = cluster.decode.iter().find(holds).context("the worker of the turn")?;
    let puller = cluster.decode.iter().find(|worker| !holds(worker)).context("the other worker")?;
    let ids = Plain::new().prompt(STORY);
    let (n_ids, n_blocks) = (ids.len(), (ids.len() - 1) / BLOCK_TOKENS);
    let request = |source_blocks: usize| v1::GenerateRequest {
        turn: 77,
        prompt: Some(v1::Prompt {
            model_fingerprint: puller.info.model_fingerprint.clone(),
            ids: ids.clone(),
            ..Default::default()
        }),
        sampling: Some(v1::Sampling { top_p: 1.0, ..Default::default() }),
        max_output_tokens: 8,
        stop_ids: TEXT.tokenizer.end_of_turn_ids().to_vec(),
        source: Some(holder.as_ref()),
        source_blocks: u32::try_from(source_blocks).unwrap_or(u32::MAX),
        ..Default::default()
    };
    let mut client = v1::decode_client::DecodeClient::new(proto::net::channel(&puller.info.address)?);
    let mut events = client.generate(request(n_blocks)).await?.into_inner();
    let (mut started, mut output) = (None, Vec::new());
    while let Some(event) = events.message().await? {
        match event.event {
            Some(v1::generate_event::Event::Started(event)) => started = Some(event),
            Some(v1::generate_event::Event::Tokens(tokens)) => output.extend(tokens.ids),
            _ => {}
        }
    }
    let started = started.context("it was started")?;
    assert_eq!(output, turn.output_ids());
    assert_eq!(started.moved_blocks as usize, n_blocks);
    assert_eq!(started.computed_tokens as usize, n_ids - n_blocks * BLOCK_TOKENS, "{started:?}");
    Ok(())
}
