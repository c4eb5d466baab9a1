//! Every architecture from GGUF and from safetensors: the step against the plain reference, and both forms against
//! each other.

use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::sync::Arc;

use engine::arena::KvArena;
use engine::forward::{Forward, Logits, Slice};
use engine::reference::Reference;
use engine::weights::{Error, Weights};
use kernels::pool::ThreadPool;
use model::TextModel;
use model::chat_template::{Message, Reply, Role};
use model::checkpoint::Checkpoint;
use model::prompt::{Entry, LogEnd};

use crate::tiny::{HEAD_DIM, LLAMA3_DIVISORS, Tiny, VOCAB};

/// Of the greatest logit: the f16 of keys and values.
const TOLERANCE: f32 = 1e-3;

fn scratch(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("architectures_{name}"))
}

fn pool() -> Arc<ThreadPool> {
    Arc::new(ThreadPool::new(NonZeroUsize::new(2).expect("two")))
}

fn tokens() -> Vec<u32> {
    (0..40).map(|i| i * 7 % VOCAB as u32).collect()
}

/// The model as a GGUF file and as a folder.
fn written(tiny: &Tiny, name: &str) -> [Checkpoint; 2] {
    let file = scratch(name).with_extension("gguf");
    tiny.write_gguf(&file).expect("the target directory is writable");
    let folder = scratch(name);
    tiny.write_folder(&folder).expect("the target directory is writable");
    [file, folder].map(|path| Checkpoint::open(&path).expect("the model is well-formed"))
}

fn logits(checkpoint: &Checkpoint) -> Vec<f32> {
    let weights = Arc::new(Weights::load(checkpoint, &pool()).expect("the model is supported"));
    let mut arena = KvArena::new(weights.shape().kv_geometry(), 5);
    let slice = Slice { tokens: &tokens(), start: 0, blocks: &[4, 0, 2], logits: Logits::All };
    let rows = Forward::new(weights, pool(), 64).run(&mut arena, &[slice], &mut |_, _| ());
    let rows = rows.expect("the step is within the limits");
    (0..rows.n_rows()).flat_map(|i| rows.row(i).to_vec()).collect()
}

/// Greatest difference of any logit, relative to the greatest logit.
fn distance(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    let peak = b.iter().fold(0.0, |m: f32, x| m.max(x.abs()));
    a.iter().zip(b).fold(0.0, |m: f32, (a, b)| m.max((a - b).abs())) / peak
}

fn kinds() -> Vec<(String, Tiny)> {
    let mut kinds = Vec::new();
    for architecture in ["llama", "qwen2", "qwen3"] {
        kinds.push((format!("{architecture}_tied"), Tiny::new(architecture)));
        kinds.push((format!("{architecture}_untied"), Tiny::new(architecture).with_head()));
    }
    kinds.push(("llama3".to_owned(), Tiny { rope_divisors: Some(LLAMA3_DIVISORS), ..Tiny::new("llama") }));
    kinds
}

#[test]
fn every_kind_runs_as_the_plain_reference_and_equally_from_both_forms() {
    for (name, tiny) in kinds() {
        let forms = written(&tiny, &name);
        let found = forms.each_ref().map(logits);
        for (form, found) in forms.iter().zip(&found) {
            let want =
                Reference::new(form).and_then(|r| r.logits(&tokens())).expect("the model is supported");
            let error = distance(found, &want.concat());
            assert!(error < TOLERANCE, "{name}: {error} from the reference");
        }
        let error = distance(&found[0], &found[1]);
        assert!(error < TOLERANCE, "{name}: {error} between GGUF and safetensors");
    }
}

#[test]
fn every_part_of_an_architecture_matters() {
    let changes: [(&str, &str); 7] = [
        ("qwen2", "attn_q.bias"),
        ("qwen2", "attn_k.bias"),
        ("qwen2", "attn_v.bias"),
        ("qwen3", "attn_q_norm.weight"),
        ("qwen3", "attn_k_norm.weight"),
        ("llama", "attn_q.weight"),
        ("llama", "output.weight"),
    ];
    for (architecture, part) in changes {
        let tiny = Tiny::new(architecture).with_head();
        let mut changed = tiny.clone();
        let named = changed.tensors.iter_mut().filter(|(name, _)| name.ends_with(part));
        named.for_each(|(_, (_, data))| data.fill(0.0));
        let [before, after] =
            [&tiny, &changed].map(|tiny| logits(&written(tiny, &format!("zeroed_{part}"))[0]));
        assert!(distance(&after, &before) > 2.0 * TOLERANCE, "{architecture} without {part}");
    }
    let slow = Tiny { rope_divisors: Some([8.0; 8]), ..Tiny::new("llama") };
    let [before, after] = [&Tiny::new("llama"), &slow].map(|tiny| logits(&written(tiny, "slow")[0]));
    assert!(distance(&after, &before) > 2.0 * TOLERANCE, "without divisors of the frequencies");
}

#[test]
fn both_forms_have_the_same_text_side() {
    written(&Tiny::new("qwen2"), "text");
    for path in [scratch("text").with_extension("gguf"), scratch("text")] {
        let text = TextModel::open(&path).expect("the model is well-formed");
        let ids = text.tokenizer.encode_with_specials("<|im_start|>hello");
        assert_eq!(ids, [260, 258, u32::from(b'o')], "{}", path.display());
        // One is named by the file, the other known by its text.
        assert_eq!(text.tokenizer.end_of_turn_ids(), [259, 261]);
        assert_eq!((text.context_len, text.name.as_str()), (64, "architectures_text"));
    }
}

#[test]
fn a_dialogue_begins_with_one_bos_where_the_model_wants_it() {
    const BOS: u32 = 259;
    let plain = Tiny::new("llama").template;
    let writing = format!("{{{{ bos_token }}}}{plain}");
    for (adds_bos, template, expected) in [(false, &plain, 0), (true, &plain, 1), (true, &writing, 1)] {
        written(&Tiny { adds_bos, template: template.clone(), ..Tiny::new("llama") }, "bos");
        for path in [scratch("bos").with_extension("gguf"), scratch("bos")] {
            let prompts = TextModel::open(&path).expect("the model is well-formed").prompts;
            let message = Message { role: Role::User, content: "hello".into() };
            let ids = prompts.render_all(&[Entry::Message(&message)], Reply::Expected, &[]);
            let ids = ids.expect("the template takes it");
            assert_eq!(ids.iter().filter(|id| **id == BOS).count(), expected, "{adds_bos} {template}");
            assert_eq!(ids[0] == BOS, expected == 1);
            let extended = prompts.extend(LogEnd::Empty, &[message], Reply::Expected);
            assert_eq!(extended.expect("the template takes it"), ids);
        }
    }
}

#[test]
fn a_missing_or_foreign_tensor_is_refused_by_name() {
    let load = |tiny: &Tiny, form: usize| {
        let error =
            Weights::load(&written(tiny, "refused")[form], &pool()).expect_err("the model is refused");
        let is_unknown = matches!(error, Error::UnknownTensor { .. });
        (error.to_string(), is_unknown)
    };
    for form in 0..2 {
        for architecture in ["qwen2", "qwen3"] {
            let mut tiny = Tiny::new(architecture);
            let part = if architecture == "qwen2" { "blk.1.attn_k.bias" } else { "blk.1.attn_k_norm.weight" };
            tiny.tensors.remove(part).expect("the part is there");
            let (message, _) = load(&tiny, form);
            assert!(message.contains(part), "{message}");
        }
        let mut tiny = Tiny::new("llama");
        tiny.tensors.insert("blk.0.attn_q_norm.weight".to_owned(), (vec![HEAD_DIM], vec![1.0; HEAD_DIM]));
        let (message, is_unknown) = load(&tiny, form);
        assert!(
            is_unknown && message.contains("blk.0.attn_q_norm.weight") && message.contains("llama"),
            "{message}"
        );
    }
}
