//! Tries a template on synthetic dialogues: does a rendering with more messages start with the rendering of fewer?

use crate::chat_template::{ChatTemplate, Reply, Role};
use crate::tokenizer::Tokenizer;

use super::{Error, TemplateClass, shape};

/// Inputs between two replies, turn by turn; after each comes a reply.
const DIALOGUES: [&[&[Role]]; 4] = [
    &[&[Role::User], &[Role::User], &[Role::User]],
    &[&[Role::System, Role::User], &[Role::User], &[Role::User]],
    &[&[Role::User], &[Role::Tool], &[Role::Tool, Role::Tool], &[Role::User], &[Role::Tool]],
    &[&[Role::System, Role::User], &[Role::Tool], &[Role::Tool], &[Role::User]],
];
const ANSWER: &str = "An answer.";
const REASONED_ANSWER: &str = "<think>\nA thought.\n</think>\n\nAn answer.";

/// The class that the worst dialogue shows. Dialogues that the template refuses (no tool role, say) do not count.
pub(super) fn classify(template: &ChatTemplate, tokenizer: &Tokenizer) -> Result<TemplateClass, Error> {
    let answer = if template.knows_reasoning() { REASONED_ANSWER } else { ANSWER };
    let mut worst = None;
    let mut refusal = None;
    for dialogue in DIALOGUES {
        match try_dialogue(template, tokenizer, dialogue, answer) {
            Ok(class) => worst = worst.max(Some(rank(class))),
            Err(error) => refusal = refusal.or(Some(error)),
        }
    }
    match (worst, refusal) {
        (Some(0), _) => Ok(TemplateClass::AppendOnly),
        (Some(1), _) => Ok(TemplateClass::AppendOnlyWithinToolLoop),
        (Some(_), _) => Ok(TemplateClass::Rewrites),
        (None, refusal) => Err(refusal.expect("there are dialogues, and none was rendered")),
    }
}

fn rank(class: TemplateClass) -> u8 {
    match class {
        TemplateClass::AppendOnly => 0,
        TemplateClass::AppendOnlyWithinToolLoop => 1,
        TemplateClass::Rewrites => 2,
    }
}

fn try_dialogue(
    template: &ChatTemplate,
    tokenizer: &Tokenizer,
    turns: &[&[Role]],
    answer: &str,
) -> Result<TemplateClass, Error> {
    let mut class = TemplateClass::AppendOnly;
    let mut messages: Vec<(Role, &str)> = Vec::new();
    let mut answered = String::new();
    for inputs in turns {
        messages.extend(inputs.iter().map(|role| (*role, "Some text.")));
        let asked = template.render(&messages, Reply::None)?;
        let prompted = template.render(&messages, Reply::Expected)?;
        messages.push((Role::Assistant, answer));
        let next_answered = template.render(&messages, Reply::None)?;
        let grows = |from: &str, to: &str| {
            to.strip_prefix(from).is_some_and(|delta| shape::is_clean_cut(from, delta, tokenizer))
        };
        if !grows(&asked, &prompted) || !next_answered.starts_with(&prompted) {
            return Ok(TemplateClass::Rewrites);
        }
        if !answered.is_empty() && !grows(&answered, &asked) {
            if inputs[0] != Role::User {
                return Ok(TemplateClass::Rewrites);
            }
            class = TemplateClass::AppendOnlyWithinToolLoop;
        }
        answered = next_answered;
    }
    Ok(class)
}
