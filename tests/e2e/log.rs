//! What the roles log. A warning that a test does not expect fails it, and so does any panic in a role.
//!
//! All clusters share the process, so a log line is told apart by the name of its thread, which carries the cluster's tag.

use std::fmt::{Debug, Write as _};
use std::panic;
use std::sync::{LazyLock, Mutex, PoisonError};
use std::thread;

use tracing::field::{Field, Visit};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::Layer;
use tracing_subscriber::layer::{Context, SubscriberExt};
use tracing_subscriber::util::SubscriberInitExt;

/// Warnings and errors with the names of their threads.
static SEEN: Mutex<Vec<(String, String)>> = Mutex::new(Vec::new());

static STARTED: LazyLock<()> = LazyLock::new(|| {
    let report = panic::take_hook();
    panic::set_hook(Box::new(move |info| {
        record(format!("{PANIC} {info}"));
        report(info);
    }));
    tracing_subscriber::registry().with(Warnings).try_init().expect("nobody else logs in this process");
});

/// Begins to listen, once.
pub(crate) fn start() {
    LazyLock::force(&STARTED);
}

/// What lines about panics begin with.
const PANIC: &str = "PANIC";

fn record(text: String) {
    let thread = thread::current().name().unwrap_or_default().to_owned();
    SEEN.lock().unwrap_or_else(PoisonError::into_inner).push((thread, text));
}

/// Panics of threads whose names contain `tag`.
pub(crate) fn panics_of(tag: &str) -> Vec<String> {
    warnings_of(tag).into_iter().filter(|line| line.contains(PANIC)).collect()
}

/// Warnings and errors of threads whose names contain `tag`.
pub(crate) fn warnings_of(tag: &str) -> Vec<String> {
    let seen = SEEN.lock().unwrap_or_else(PoisonError::into_inner);
    let of_tag = seen.iter().filter(|(thread, _)| thread.contains(tag));
    of_tag.map(|(thread, text)| format!("{thread}: {text}")).collect()
}

struct Warnings;

impl<S: Subscriber> Layer<S> for Warnings {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        if *event.metadata().level() > Level::WARN {
            return;
        }
        let mut text = Text(format!("{} {}:", event.metadata().level(), event.metadata().target()));
        event.record(&mut text);
        record(text.0);
    }
}

struct Text(String);

impl Visit for Text {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        let _ = write!(self.0, " {field}={value:?}");
    }
}
