//! How likely a draft token is to be accepted: measured per kind of evidence for the worker, corrected per conversation.

/// Where a draft comes from. Tried in this order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Source {
    /// What a constraint leaves no choice about, see [`crate::constrain`].
    Grammar,
    /// What followed the same tokens earlier, see [`super::lookup`].
    Lookup,
    /// A small network fed by the model's last hidden state, see [`super::head`].
    Head,
    /// A smaller model with the same vocabulary, see [`super::draft_model`].
    Model,
}

impl Source {
    pub(crate) const ALL: [Self; 4] = [Self::Grammar, Self::Lookup, Self::Head, Self::Model];

    /// Its name in metrics.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Grammar => "grammar",
            Self::Lookup => "lookup",
            Self::Head => "head",
            Self::Model => "model",
        }
    }
}

/// What speaks for a draft token, in classes that were found to matter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Evidence {
    source: Source,
    class: usize,
}

const N_CLASSES: usize = 8;

/// Matches of at least this many tokens form a class; the acceptance that is assumed before any was seen.
const MATCH_CLASSES: [(usize, f64); N_CLASSES] =
    [(0, 0.4), (4, 0.5), (5, 0.6), (6, 0.65), (8, 0.75), (12, 0.85), (16, 0.9), (24, 0.95)];

/// The same for the probability that the guesser itself gives.
const PROBABILITY_CLASSES: [(f64, f64); N_CLASSES] =
    [(0.0, 0.1), (0.1, 0.2), (0.2, 0.3), (0.35, 0.45), (0.5, 0.6), (0.65, 0.75), (0.8, 0.85), (0.93, 0.95)];

impl Evidence {
    /// Nothing else may come.
    pub(crate) const FORCED: Self = Self { source: Source::Grammar, class: 0 };

    /// `n_matched` tokens before the proposed one agree with an earlier place.
    pub(crate) fn of_match(n_matched: usize) -> Self {
        Self {
            source: Source::Lookup,
            class: MATCH_CLASSES.partition_point(|class| class.0 <= n_matched) - 1,
        }
    }

    /// A guesser gives its likeliest token this probability.
    pub(crate) fn of_guess(source: Source, probability: f32) -> Self {
        let at = PROBABILITY_CLASSES.partition_point(|class| class.0 <= f64::from(probability));
        Self { source, class: at.max(1) - 1 }
    }

    fn prior(self) -> f64 {
        match self.source {
            Source::Grammar => 1.0,
            Source::Lookup => MATCH_CLASSES[self.class].1,
            Source::Head | Source::Model => PROBABILITY_CLASSES[self.class].1,
        }
    }
}

/// Acceptance per kind of evidence over all conversations of a worker.
#[derive(Debug, Default)]
pub(crate) struct Rates {
    classes: [[Tally; N_CLASSES]; Source::ALL.len()],
    /// Over all classes of a source.
    sources: [Tally; Source::ALL.len()],
}

/// Draft tokens that were checked, older ones counting less.
#[derive(Debug, Clone, Copy, Default)]
struct Tally {
    checked: f64,
    accepted: f64,
}

impl Tally {
    /// Checks in which a token's weight falls to a third.
    const MEMORY: f64 = 500.0;
    /// The prior counts as this many checks.
    const PRIOR_WEIGHT: f64 = 8.0;

    /// Notes a checked token; `accepted` is 1 when it was right and 0 when not.
    fn add(&mut self, accepted: f64) {
        self.fade();
        self.checked += 1.0;
        self.accepted += accepted;
    }

    fn fade(&mut self) {
        let keep = 1.0 - 1.0 / Self::MEMORY;
        self.checked *= keep;
        self.accepted *= keep;
    }

    fn rate(self, prior: f64) -> f64 {
        (self.accepted + prior * Self::PRIOR_WEIGHT) / (self.checked + Self::PRIOR_WEIGHT)
    }
}

impl Rates {
    fn of(&self, evidence: Evidence) -> f64 {
        self.classes[evidence.source as usize][evidence.class].rate(evidence.prior())
    }

    /// A source's rate over all evidence: what to expect before it was asked.
    pub(crate) fn typical(&self, source: Source) -> f64 {
        self.sources[source as usize].rate(0.5)
    }

    fn add(&mut self, evidence: Evidence, accepted: f64) {
        self.classes[evidence.source as usize][evidence.class].add(accepted);
        self.sources[evidence.source as usize].add(accepted);
    }

    /// A step went by: what was learnt long ago and is not confirmed fades, so that a source which failed in one kind of
    /// text is tried again in another.
    pub(crate) fn fade(&mut self) {
        self.classes.iter_mut().flatten().chain(&mut self.sources).for_each(Tally::fade);
    }
}

/// How much better or worse one conversation goes than the rates say, per source.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Trust {
    expected: f64,
    accepted: f64,
}

/// No chance is held to be higher.
const SUREST: f64 = 0.98;

impl Trust {
    /// Doubt: the worker's rates count as this many tokens of the conversation's own.
    const DOUBT: f64 = 3.0;
    /// What a checked draft leaves of the memory of earlier ones.
    const KEEP: f64 = 0.93;
    /// The same for a step without a draft, so that a source which failed is tried again some day.
    const FORGIVE: f64 = 0.985;

    fn factor(self) -> f64 {
        (self.accepted + Self::DOUBT) / (self.expected + Self::DOUBT)
    }

    /// The chance of a token that would be accepted at `rate` elsewhere.
    pub(crate) fn apply(self, rate: f64) -> f64 {
        (rate * self.factor()).min(SUREST)
    }

    /// The chance of a token with this evidence, given that all before it are accepted.
    pub(crate) fn chance(self, rates: &Rates, evidence: Evidence) -> f64 {
        self.apply(rates.of(evidence))
    }

    /// Learns from a checked draft, of which the first `n_accepted` tokens were right.
    pub(crate) fn learn(&mut self, rates: &mut Rates, draft: &[Evidence], n_accepted: usize) {
        self.expected *= Self::KEEP;
        self.accepted *= Self::KEEP;
        // What comes after the first wrong token was not put to the test.
        for (i, &evidence) in draft.iter().take(n_accepted + 1).enumerate() {
            self.expected += rates.of(evidence);
            let accepted = if i < n_accepted { 1.0 } else { 0.0 };
            self.accepted += accepted;
            rates.add(evidence, accepted);
        }
    }

    /// A step went by without a draft of this source.
    pub(crate) fn forgive(&mut self) {
        self.expected *= Self::FORGIVE;
        self.accepted *= Self::FORGIVE;
    }
}

#[cfg(test)]
mod tests;
