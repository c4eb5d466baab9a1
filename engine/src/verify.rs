//! Which tokens a step has brought: sampled from its logits as far as its drafts were right.

use crate::constrain::{Allowed, Masks};
use crate::forward::LogitRows;
use crate::job::{Error, Output};
use crate::sample::Sampler;
use crate::sequence::Sequence;

/// What a step found out about one sequence.
pub(crate) enum Verdict {
    /// Its next tokens, at least one.
    Outputs(Vec<Output>),
    /// Nothing more may follow.
    Complete,
    Failed(Error),
}

impl Verdict {
    pub(crate) fn n_outputs(&self) -> usize {
        match self {
            Self::Outputs(outputs) => outputs.len(),
            Self::Complete | Self::Failed(_) => 0,
        }
    }
}

/// The output of one step of a sequence: the token that follows what it has, and on while its draft is right. The logits
/// begin at `first_row`; `masks` are there when the sequence has a constraint.
pub(crate) fn verify(
    sampler: &mut Sampler,
    sequence: &Sequence,
    masks: Option<&Masks>,
    rows: &LogitRows,
    first_row: usize,
) -> Verdict {
    let mut outputs = Vec::new();
    let params = &sequence.sampling;
    for drafted in sequence.speculation.draft().iter().map(Some).chain([None]) {
        let position = (sequence.tokens.len() + outputs.len()) as u64;
        let row = rows.row(first_row + outputs.len());
        let id = match masks.map_or(Ok(Allowed::Any), |masks| masks.at(outputs.len())) {
            Ok(Allowed::Any) => sampler.sample(row, params, position),
            Ok(Allowed::Some(mask)) => sampler.sample_allowed(row, mask, params, position),
            Ok(Allowed::Nothing) if outputs.is_empty() => return Verdict::Complete,
            Ok(Allowed::Nothing | Allowed::Unknown) => break,
            Err(error) => return Verdict::Failed(error.clone().into()),
        };
        let logprobs = params.logprobs.map(|n_top| Box::new(sampler.logprobs(row, id, n_top)));
        outputs.push(Output { id, logprobs });
        if drafted != Some(&id) || sequence.stop_ids.contains(&id) {
            break;
        }
    }
    Verdict::Outputs(outputs)
}
