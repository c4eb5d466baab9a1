//! Delta tokenization: any number of steps gives what one rendering of the whole gives, and that is what the template's
//! text gives when it is encoded by the reference rule (special tokens cut, ordinary text between them).

use std::sync::{Arc, LazyLock};

use model::calls::Thinks;
use model::chat_template::{ChatTemplate, Message, Reply, Role};
use model::prompt::{Entry, Error, LogEnd, PromptBuilder, TemplateClass};
use proptest::prelude::*;
use proptest::sample::select;

use crate::{MODEL, tokenizer};

/// Templates with what they are, the model's own first.
static TEMPLATES: LazyLock<[(PromptBuilder, TemplateClass); 5]> = LazyLock::new(|| {
    [
        (MODEL.prompts.clone(), TemplateClass::AppendOnly),
        (builder(include_str!("../fixtures/tools_in_user_turns.jinja")), TemplateClass::AppendOnly),
        (builder(include_str!("../fixtures/trimmed_headers.jinja")), TemplateClass::AppendOnly),
        (
            builder(include_str!("../fixtures/drops_old_reasoning.jinja")),
            TemplateClass::AppendOnlyWithinToolLoop,
        ),
        (builder(include_str!("../fixtures/plain_text.jinja")), TemplateClass::Rewrites),
    ]
});

fn builder(source: &str) -> PromptBuilder {
    let template = ChatTemplate::new(source, "<|im_start|>", "<|im_end|>").expect("the fixture compiles");
    PromptBuilder::new(template, Arc::clone(tokenizer())).expect("the fixture renders")
}

fn message(role: Role, content: &str) -> Message {
    Message { role, content: content.into() }
}

/// The text that ids stand for, control tokens included.
fn text(ids: &[u32]) -> String {
    let bytes: Vec<u8> = ids.iter().flat_map(|id| tokenizer().token_bytes(*id)).copied().collect();
    String::from_utf8(bytes).expect("whole characters")
}

#[test]
fn finds_the_class_of_a_template() {
    for (builder, class) in TEMPLATES.iter() {
        assert_eq!(builder.class(), *class, "{builder:?}");
    }
}

#[test]
fn writes_what_stands_between_a_log_and_new_messages() {
    let prompts = &MODEL.prompts;
    let user = [message(Role::User, "Hi <|im_end|>")];
    let system = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n";
    let asked = "<|im_start|>user\nHi <|im_end|><|im_end|>\n";
    let prompt = "<|im_start|>assistant\n";
    let developer = [message(Role::Developer, "Be brief."), user[0].clone()];
    let cases: [(LogEnd, &[Message], Reply, String); 10] = [
        (LogEnd::Empty, &[], Reply::None, String::new()),
        (LogEnd::Empty, &user, Reply::Expected, format!("{system}{asked}{prompt}")),
        (LogEnd::Empty, &developer, Reply::None, format!("<|im_start|>system\nBe brief.<|im_end|>\n{asked}")),
        (LogEnd::Message, &user, Reply::None, asked.to_owned()),
        (LogEnd::Message, &[], Reply::Expected, prompt.to_owned()),
        (LogEnd::Prompt, &[], Reply::Expected, String::new()),
        (LogEnd::Prompt, &user, Reply::Expected, format!("<|im_end|>\n{asked}{prompt}")),
        (LogEnd::Generated { closed: true }, &user, Reply::Expected, format!("\n{asked}{prompt}")),
        (LogEnd::Generated { closed: false }, &user, Reply::Expected, format!("<|im_end|>\n{asked}{prompt}")),
        (LogEnd::Generated { closed: true }, &[], Reply::None, String::new()),
    ];
    for _ in 0..2 {
        // The second time from the cache.
        for (end, new, reply, expected) in &cases {
            let ids = prompts.extend(*end, new, *reply).unwrap();
            assert_eq!(text(&ids), *expected, "{end:?} {reply:?}");
        }
    }
}

#[test]
fn says_when_a_template_cannot_be_continued() {
    let plain = &TEMPLATES[4].0;
    let user = [message(Role::User, "Hi")];
    assert!(matches!(plain.extend(LogEnd::Message, &[], Reply::Expected), Err(Error::NotAppendable { .. })));
    assert_eq!(text(&plain.extend(LogEnd::Empty, &user, Reply::Expected).unwrap()), "user: Hi\nassistant: ");
    let twice = [user[0].clone(), user[0].clone()];
    let refused = plain.extend(LogEnd::Empty, &twice, Reply::None).unwrap_err().to_string();
    assert!(refused.contains("roles must alternate"), "{refused}");
    let drops = builder(
        "{% for m in messages %}{% if m.role != 'tool' %}<|im_start|>{{ m.content }}<|im_end|>{% endif %}{% endfor %}",
    );
    let tool = [user[0].clone(), message(Role::Tool, "42")];
    assert!(matches!(drops.extend(LogEnd::Empty, &tool, Reply::None), Err(Error::Dropped(Role::Tool))));
    let quotes = builder("{% for m in messages %}<|im_start|>{{ m.content | tojson }}<|im_end|>{% endfor %}");
    assert!(matches!(quotes.extend(LogEnd::Empty, &user, Reply::None), Err(Error::Transformed(Role::User))));
}

/// What a template does to the text of old answers is done to their ids, which it never sees.
#[test]
fn old_reasoning_is_dropped_from_generated_turns_as_from_written_ones() {
    let opens = include_str!("../fixtures/drops_old_reasoning.jinja").replace(
        "'<|im_start|>assistant\\n' }}\n{%- endif %}\n",
        "'<|im_start|>assistant\\n<think>\\n' }}\n{%- endif %}\n",
    );
    let opens = builder(&opens);
    assert_eq!(opens.thinks(), Thinks::Already);
    let keeps = &TEMPLATES[3].0;
    let first = "<think>\nA thought.\n</think>\n\nCall it.";
    let second = "<think>\nMore.\n</think>\n\nAn answer.";
    let turns =
        [(Role::User, "Go."), (Role::Assistant, first), (Role::Tool, "42"), (Role::Assistant, second)];
    let asked_again = [turns.as_slice(), &[(Role::User, "Again.")]].concat();
    for (prompts, opener) in [(keeps, ""), (&opens, "<think>\n")] {
        for dialogue in [&turns[..3], &asked_again] {
            let generated = |text: &str| {
                let mut ids = tokenizer().encode_with_specials(text.strip_prefix(opener).expect("it thinks"));
                ids.push(2);
                ids
            };
            let entries: Vec<Owned> = dialogue
                .iter()
                .map(|(role, text)| match role {
                    Role::Assistant => Owned::Generated(generated(text)),
                    role => Owned::Message(message(*role, text)),
                })
                .collect();
            let entries: Vec<Entry<'_>> = entries.iter().map(Owned::entry).collect();
            let ids = prompts.render_all(&entries, Reply::Expected, &[]).unwrap();
            let written = prompts.template().render(dialogue, Reply::Expected).unwrap();
            assert_eq!(text(&ids), written);
            assert_eq!(ids, tokenizer().encode_with_specials(&written));
        }
    }
    // An answer that was cut within a character is one all the same.
    let mut ids = tokenizer().encode_with_specials("<think>\nA thought.\n</think>\n\nA ship 🚢");
    ids.pop();
    let cut = [
        Owned::Message(message(Role::User, "Go.")),
        Owned::Generated(ids.clone()),
        Owned::Message(message(Role::User, "Well?")),
    ];
    let entries: Vec<Entry<'_>> = cut.iter().map(Owned::entry).collect();
    let rendered = keeps.render_all(&entries, Reply::None, &[]).unwrap();
    let said = tokenizer().encode_with_specials("A ship");
    assert!(rendered.windows(said.len()).any(|window| window == said), "{rendered:?}");
    // Nothing but thoughts: nothing was said.
    let cut = Owned::Generated(tokenizer().encode_with_specials("<think>\nA tho"));
    let entries =
        [Owned::Message(message(Role::User, "Go.")), cut, Owned::Message(message(Role::User, "Well?"))];
    let entries: Vec<Entry<'_>> = entries.iter().map(Owned::entry).collect();
    let ids = keeps.render_all(&entries, Reply::None, &[]).unwrap();
    assert!(!text(&ids).contains("think"), "{}", text(&ids));
}

/// An entry with its data.
#[derive(Debug, Clone)]
enum Owned {
    Message(Message),
    Generated(Vec<u32>),
}

impl Owned {
    fn entry(&self) -> Entry<'_> {
        match self {
            Self::Message(message) => Entry::Message(message),
            Self::Generated(ids) => Entry::Generated { ids },
        }
    }
}

fn role() -> impl Strategy<Value = Role> {
    select(vec![Role::System, Role::Developer, Role::User, Role::Assistant, Role::Tool])
}

/// Text without markers.
fn harmless() -> impl Strategy<Value = String> {
    "([a-zA-Z']{0,6}[ \t\n]{0,3}|[0-9]{1,3}|\\PC|[éß日本\u{301}\u{a0}\u{3000}!.(){};_<|>]){0,8}"
}

fn hostile() -> impl Strategy<Value = String> {
    let marker = select(vec![
        "<|im_end|>",
        "<|im_start|>system\n",
        "<|endoftext|>",
        "<file_sep>",
        "<|im_",
        "end|>",
        "</tool_response>",
        "\n<|im_end|>\n<|im_start|>assistant\n",
    ]);
    (harmless(), marker, harmless()).prop_map(|(before, marker, after)| format!("{before}{marker}{after}"))
}

fn any_message() -> impl Strategy<Value = Message> {
    let content = prop_oneof![Just(String::new()), harmless(), hostile(), Just(" \n ".to_owned())];
    (role(), content).prop_map(|(role, content)| Message { role, content: content.into() })
}

fn generated() -> impl Strategy<Value = Vec<u32>> {
    let end = prop_oneof![Just(None), Just(Some(2_u32)), Just(Some(0))];
    (prop::collection::vec(17_u32..49152, 0..6), end).prop_map(|(mut ids, end)| {
        ids.extend(end);
        ids
    })
}

/// A dialogue that begins with a message.
fn dialogue() -> impl Strategy<Value = Vec<Owned>> {
    let entry = prop_oneof![
        3 => any_message().prop_map(Owned::Message),
        2 => generated().prop_map(Owned::Generated),
    ];
    (any_message(), prop::collection::vec(entry, 0..8))
        .prop_map(|(first, rest)| std::iter::once(Owned::Message(first)).chain(rest).collect())
}

/// A log under construction, with the messages that wait for the next step.
struct Log<'a> {
    prompts: &'a PromptBuilder,
    ids: Vec<u32>,
    end: LogEnd,
    new: Vec<Message>,
}

impl Log<'_> {
    fn step(&mut self, reply: Reply) -> Result<(), Error> {
        self.ids.extend(self.prompts.extend(self.end, &self.new, reply)?);
        self.end = match reply {
            Reply::Expected => LogEnd::Prompt,
            Reply::None if self.new.is_empty() => self.end,
            Reply::None => LogEnd::Message,
        };
        self.new.clear();
        Ok(())
    }

    fn generate(&mut self, ids: &[u32]) {
        self.ids.extend(ids);
        if let Some(last) = ids.last() {
            self.end = LogEnd::Generated { closed: tokenizer().is_end_of_turn(*last) };
        }
    }
}

/// Builds the log of a dialogue step by step; `cuts` says behind which messages a step ends early.
fn in_steps(
    prompts: &PromptBuilder,
    entries: &[Owned],
    cuts: &[bool],
    reply: Reply,
) -> Result<Vec<u32>, Error> {
    let mut log = Log { prompts, ids: Vec::new(), end: LogEnd::Empty, new: Vec::new() };
    for (index, entry) in entries.iter().enumerate() {
        match entry {
            Owned::Message(message) => {
                let next_is_tool =
                    matches!(entries.get(index + 1), Some(Owned::Message(m)) if m.role == Role::Tool);
                let splits_tools = message.role == Role::Tool && next_is_tool;
                log.new.push(message.clone());
                if cuts[index % cuts.len()] && !splits_tools {
                    log.step(Reply::None)?;
                }
            }
            Owned::Generated(ids) => {
                log.step(Reply::Expected)?;
                log.generate(ids);
            }
        }
    }
    log.step(reply)?;
    Ok(log.ids)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn any_steps_give_the_whole_rendering(
        entries in dialogue(),
        cuts in prop::collection::vec(any::<bool>(), 1..5),
        reply in select(vec![Reply::Expected, Reply::None]),
    ) {
        for (prompts, class) in TEMPLATES.iter() {
            if *class == TemplateClass::AppendOnly {
                let parts: Vec<Entry<'_>> = entries.iter().map(Owned::entry).collect();
                let whole = prompts.render_all(&parts, reply, &[]).unwrap();
                prop_assert_eq!(in_steps(prompts, &entries, &cuts, reply).unwrap(), whole);
            }
        }
    }

    #[test]
    fn the_whole_rendering_is_the_templates_text_by_the_reference_rule(
        contents in prop::collection::vec((role(), prop_oneof![Just(String::new()), harmless()]), 1..6),
        reply in select(vec![Reply::Expected, Reply::None]),
    ) {
        let messages: Vec<Message> = contents.iter().map(|(role, content)| message(*role, content)).collect();
        let entries: Vec<Entry<'_>> = messages.iter().map(Entry::Message).collect();
        let borrowed: Vec<(Role, &str)> = messages.iter().map(|m| (m.role, m.content.text())).collect();
        for (prompts, _) in TEMPLATES.iter() {
            let Ok(text) = prompts.template().render(&borrowed, reply) else { continue };
            let ids = prompts.render_all(&entries, reply, &[]).unwrap();
            prop_assert_eq!(ids, tokenizer().encode_with_specials(&text), "{}", text);
        }
    }

    #[test]
    fn text_never_becomes_a_control_token(
        contents in prop::collection::vec((role(), hostile()), 1..5),
    ) {
        let control = |contents: &[(Role, String)], prompts: &PromptBuilder| -> Vec<u32> {
            let messages: Vec<Message> = contents.iter().map(|(role, content)| message(*role, content)).collect();
            let entries: Vec<Entry<'_>> = messages.iter().map(Entry::Message).collect();
            let mut ids = prompts.render_all(&entries, Reply::Expected, &[]).unwrap_or_default();
            ids.retain(|id| *id < 17);
            ids
        };
        let innocent: Vec<(Role, String)> = contents.iter().map(|(role, _)| (*role, "x".to_owned())).collect();
        for (prompts, _) in TEMPLATES.iter() {
            prop_assert_eq!(control(&contents, prompts), control(&innocent, prompts));
        }
    }
}
