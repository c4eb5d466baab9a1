//! A turn's events in their order: numbers them, repeats the heartbeat, and waits for slow readers only so long.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use serde_json::value::RawValue;
use tokio::sync::mpsc;

use crate::error::ApiError;
use crate::prepare::Prepared;
use crate::state::Gateway;
use crate::turn::Finish;
use crate::wire::{BatonTurn, Create, Event, ResponseView, Status, Usage, terminal_kind};

/// Where events go.
#[derive(Debug)]
pub(crate) enum EventSink {
    Stream(mpsc::Sender<Event>),
    /// The client wants the final object only.
    Discard,
}

/// Emits one response.
#[derive(Debug)]
pub(crate) struct Emitter<'a> {
    create: &'a Create,
    prepared: &'a Prepared,
    model: &'a str,
    heartbeat: Duration,
    patience: Duration,
    sink: EventSink,
    id: String,
    item_id: String,
    created_at: u64,
    sequence_number: u64,
    begun: bool,
    text: String,
    first_text: Option<Instant>,
}

/// The parts of a response object that change while it is made.
struct Phase<'a> {
    status: Status,
    usage: Option<Usage>,
    error: Option<&'a ApiError>,
    incomplete_reason: Option<&'static str>,
    message: Option<Status>,
    baton: Option<&'a BatonTurn>,
}

const IN_PROGRESS: Phase<'static> = Phase {
    status: Status::InProgress,
    usage: None,
    error: None,
    incomplete_reason: None,
    message: None,
    baton: None,
};

impl<'a> Emitter<'a> {
    pub(crate) fn new(
        gateway: &'a Gateway,
        create: &'a Create,
        prepared: &'a Prepared,
        sink: EventSink,
    ) -> Self {
        let config = gateway.config();
        Self {
            create,
            prepared,
            model: &gateway.text().name,
            heartbeat: config.heartbeat,
            patience: config.slow_reader,
            sink,
            id: prepared.response_id.clone(),
            item_id: new_id("msg"),
            created_at: unix_now(),
            sequence_number: 0,
            begun: false,
            text: String::new(),
            first_text: None,
        }
    }

    pub(crate) fn id(&self) -> &str {
        &self.id
    }

    /// True once the client has seen an event; failures from then on are events too.
    pub(crate) fn has_begun(&self) -> bool {
        self.begun && matches!(self.sink, EventSink::Stream(_))
    }

    pub(crate) fn first_text(&self) -> Option<Instant> {
        self.first_text
    }

    /// Announces the response, once.
    pub(crate) async fn begin(&mut self) -> Result<(), ApiError> {
        if self.begun {
            return Ok(());
        }
        self.begun = true;
        self.response_event("response.created", &IN_PROGRESS).await?;
        self.response_event("response.in_progress", &IN_PROGRESS).await
    }

    /// Waits for `work`, repeating `response.in_progress` so that nobody takes the silence for death.
    pub(crate) async fn waiting<T>(&mut self, work: impl Future<Output = T>) -> Result<T, ApiError> {
        let mut work = std::pin::pin!(work);
        loop {
            match tokio::time::timeout(self.heartbeat, &mut work).await {
                Ok(done) => return Ok(done),
                Err(_) => self.response_event("response.in_progress", &IN_PROGRESS).await?,
            }
        }
    }

    /// Sends a piece of text; the first one opens the message.
    pub(crate) async fn text(&mut self, delta: &str) -> Result<(), ApiError> {
        if delta.is_empty() {
            return Ok(());
        }
        if self.first_text.is_none() {
            self.open_message().await?;
        }
        self.text.push_str(delta);
        let number = self.next_number();
        self.send(|this| Event::text_delta(number, &this.item_id, delta)).await
    }

    async fn open_message(&mut self) -> Result<(), ApiError> {
        self.first_text = Some(Instant::now());
        let number = self.next_number();
        self.send(|this| Event::item_added(number, &this.item_id)).await?;
        let number = self.next_number();
        self.send(|this| Event::part_added(number, &this.item_id)).await
    }

    async fn close_message(&mut self, status: Status) -> Result<(), ApiError> {
        let number = self.next_number();
        self.send(|this| Event::text_done(number, &this.item_id, &this.text)).await?;
        let number = self.next_number();
        self.send(|this| Event::part_done(number, &this.item_id, &this.text)).await?;
        let number = self.next_number();
        self.send(|this| Event::item_done(number, &this.item_id, status, &this.text)).await
    }

    /// Ends the response; returns its final object.
    pub(crate) async fn finish(
        mut self,
        finish: Finish,
        generated: bool,
        usage: Usage,
        account: BatonTurn,
    ) -> Result<String, ApiError> {
        let reason = finish.incomplete_reason();
        let status = if reason.is_some() { Status::Incomplete } else { Status::Completed };
        if generated {
            if self.first_text.is_none() {
                // An empty answer is a message all the same.
                self.open_message().await?;
            }
            self.close_message(status).await?;
        }
        let phase = Phase {
            status,
            usage: Some(usage),
            error: None,
            incomplete_reason: reason,
            message: generated.then_some(status),
            baton: self.create.include_baton.then_some(&account),
        };
        self.end(&phase).await
    }

    /// Ends the response with an error, closing what was open.
    pub(crate) async fn fail(mut self, error: &ApiError, account: BatonTurn) -> Result<String, ApiError> {
        if self.first_text.is_some() {
            self.close_message(Status::Incomplete).await?;
        }
        let message = self.first_text.map(|_| Status::Incomplete);
        let baton = self.create.include_baton.then_some(&account);
        let phase = Phase { status: Status::Failed, error: Some(error), message, baton, ..IN_PROGRESS };
        self.end(&phase).await
    }

    async fn end(mut self, phase: &Phase<'_>) -> Result<String, ApiError> {
        let response = serde_json::to_string(&self.view(phase)).expect("our own types serialize");
        self.response_event(terminal_kind(phase.status), phase).await?;
        Ok(response)
    }

    async fn response_event(&mut self, kind: &'static str, phase: &Phase<'_>) -> Result<(), ApiError> {
        // Counted once it is sent: a heartbeat may be dropped while it waits.
        let number = self.sequence_number;
        self.send(|this| Event::response(kind, number, &this.view(phase))).await?;
        self.sequence_number += 1;
        Ok(())
    }

    fn next_number(&mut self) -> u64 {
        let number = self.sequence_number;
        self.sequence_number += 1;
        number
    }

    /// Builds and sends one event, unless nobody wants it.
    async fn send(&self, make: impl FnOnce(&Self) -> Event) -> Result<(), ApiError> {
        let EventSink::Stream(sender) = &self.sink else { return Ok(()) };
        match sender.send_timeout(make(self), self.patience).await {
            Ok(()) => Ok(()),
            Err(mpsc::error::SendTimeoutError::Timeout(_)) => {
                Err(ApiError::client_gone("the client reads too slowly: the turn was cancelled"))
            }
            Err(mpsc::error::SendTimeoutError::Closed(_)) => {
                Err(ApiError::client_gone("the client closed the connection"))
            }
        }
    }

    fn view<'s>(&'s self, phase: &'s Phase<'_>) -> ResponseView<'s> {
        let create = self.create;
        ResponseView {
            id: &self.id,
            created_at: self.created_at,
            completed_at: (phase.status == Status::Completed).then(unix_now),
            status: phase.status,
            error: phase.error,
            incomplete_reason: phase.incomplete_reason,
            instructions: self.prepared.instructions.as_deref(),
            model: self.model,
            message: phase.message.map(|status| (self.item_id.as_str(), status, self.text.as_str())),
            previous_response_id: create.previous_response_id.as_deref(),
            tools: &self.prepared.tools_echo,
            tool_choice: create.tool_choice.as_deref(),
            reasoning: create.reasoning.as_deref(),
            parallel_tool_calls: create.parallel_tool_calls,
            temperature: self.prepared.sampling.temperature,
            top_p: self.prepared.sampling.top_p,
            usage: phase.usage,
            max_output_tokens: create.max_output_tokens,
            store: create.store,
            metadata: create.metadata.as_deref(),
            safety_identifier: create.safety_identifier.as_deref(),
            prompt_cache_key: create.prompt_cache_key.as_deref(),
            baton: phase.baton,
        }
    }
}

/// A fresh id with the prefix that OpenAI's clients expect: `resp_` or `msg_` and 32 hex digits.
pub(crate) fn new_id(prefix: &str) -> String {
    format!("{prefix}_{:032x}", rand::random::<u128>())
}

fn unix_now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// The tools to echo: only function tools may stand there, and none is offered yet.
pub(crate) fn no_tools() -> Box<RawValue> {
    RawValue::from_string("[]".to_owned()).expect("an empty list is JSON")
}
