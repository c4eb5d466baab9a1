//! What a step costs on this machine now: measured, and corrected with every step.

use std::time::Duration;

/// Widths that are measured at the start and corrected later; between them the cost is linear.
const WIDTHS: [usize; 12] = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128];

/// A step that took this many times longer than expected was disturbed; the excess says nothing.
const MAX_SURPRISE: f64 = 2.0;

/// Weight of a new measurement for the level of all costs (the machine is busier, histories are longer).
const LEVEL_GAIN: f64 = 0.1;

/// Weight of a new measurement for the cost of one width against the others.
const SHAPE_GAIN: f64 = 0.03;

/// How fast a width that is not used drifts back to its measured ratio to the one that is.
const DRIFT: f64 = 0.005;

/// Seconds of a step by its number of tokens. Starts with a guess; [`set`](Self::set) puts measurements in its place.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct StepCosts {
    seconds: [f64; WIDTHS.len()],
    /// What was measured at the start. A width that is not used drifts back to its ratio here, so that a disturbance
    /// which made it look dear does not keep it from being used for ever.
    measured: [f64; WIDTHS.len()],
}

impl Default for StepCosts {
    fn default() -> Self {
        // A step that reads all weights for a few tokens, and computes for more.
        let seconds = WIDTHS.map(|n_tokens| 0.005 * (1.0 + n_tokens as f64 / 16.0));
        Self { seconds, measured: seconds }
    }
}

impl StepCosts {
    /// Steps of any width cost the same.
    pub(crate) const FLAT: Self = Self { seconds: [1.0; WIDTHS.len()], measured: [1.0; WIDTHS.len()] };

    /// The widths worth measuring, narrow ones first.
    pub(crate) fn widths() -> impl Iterator<Item = usize> {
        WIDTHS.into_iter()
    }

    /// Takes the measurements of the narrowest widths, in the order of [`widths`](Self::widths); wider ones are
    /// extrapolated. With none, nothing changes.
    pub(crate) fn set(&mut self, measured: &[Duration]) {
        for (seconds, measured) in self.seconds.iter_mut().zip(measured) {
            *seconds = measured.as_secs_f64();
        }
        let n = measured.len().min(WIDTHS.len());
        if n == 0 {
            return;
        }
        let slope = if n == 1 {
            self.seconds[0] / 16.0
        } else {
            let run = (WIDTHS[n - 1] - WIDTHS[n - 2]) as f64;
            ((self.seconds[n - 1] - self.seconds[n - 2]) / run).max(0.0)
        };
        let (known, beyond) = self.seconds.split_at_mut(n);
        for (seconds, width) in beyond.iter_mut().zip(&WIDTHS[n..]) {
            *seconds = known[n - 1] + slope * (width - WIDTHS[n - 1]) as f64;
        }
        // A wider step is never cheaper; what looks so is noise.
        for i in (0..WIDTHS.len() - 1).rev() {
            self.seconds[i] = self.seconds[i].min(self.seconds[i + 1]);
        }
        self.measured = self.seconds;
    }

    /// Expected seconds of a step of `n_tokens`; linear between the measured widths and beyond the widest.
    pub(crate) fn of(&self, n_tokens: usize) -> f64 {
        let above = WIDTHS.partition_point(|&width| width < n_tokens).clamp(1, WIDTHS.len() - 1);
        let (low, high) = (above - 1, above);
        let part = (n_tokens as f64 - WIDTHS[low] as f64) / (WIDTHS[high] - WIDTHS[low]) as f64;
        self.seconds[low] + part * (self.seconds[high] - self.seconds[low])
    }

    /// Learns from a step.
    pub(crate) fn observe(&mut self, n_tokens: usize, took: Duration) {
        let expected = self.of(n_tokens);
        if n_tokens == 0 || expected <= 0.0 {
            return;
        }
        let surprise = (took.as_secs_f64() / expected).clamp(1.0 / MAX_SURPRISE, MAX_SURPRISE);
        let used = WIDTHS.partition_point(|&width| width < n_tokens).min(WIDTHS.len() - 1);
        self.seconds.iter_mut().for_each(|seconds| *seconds *= surprise.powf(LEVEL_GAIN));
        self.seconds[used] *= surprise.powf(SHAPE_GAIN);
        let level = self.seconds[used] / self.measured[used];
        for (i, (seconds, measured)) in self.seconds.iter_mut().zip(self.measured).enumerate() {
            if i != used {
                *seconds += DRIFT * (measured * level - *seconds);
            }
        }
    }

    /// The most tokens, up to `limit`, that can join a step of `n_tokens` without making it last longer than
    /// `times` such steps.
    pub(crate) fn room_within(&self, n_tokens: usize, times: f64, limit: usize) -> usize {
        // The margin is for rounding.
        let allowed = times * self.of(n_tokens) * (1.0 + 1e-9);
        let (mut fits, mut too_many) = (0, limit + 1);
        while fits + 1 < too_many {
            let middle = usize::midpoint(fits, too_many);
            if self.of(n_tokens + middle) <= allowed {
                fits = middle;
            } else {
                too_many = middle;
            }
        }
        fits
    }
}

#[cfg(test)]
mod tests;
