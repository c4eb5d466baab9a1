//! A turn's events in their order: numbers them, repeats the heartbeat, and waits for slow readers only so long.

use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use model::calls::Piece;
use tokio::sync::mpsc;
use tokio::time::Sleep;

use crate::background::EventLog;
use crate::error::ApiError;
use crate::prepare::Prepared;
use crate::seal::Seal;
use crate::state::Gateway;
use crate::thought::Thought;
use crate::wire::{
    At, BatonTurn, Body, Create, Event, Lane, Logprob, OutputItem, ResponseView, Shown, Status, Usage,
    terminal_kind,
};

/// Where events go.
#[derive(Debug)]
pub(crate) enum EventSink {
    /// To the reader, on a lane of its connection.
    Stream(mpsc::Sender<Event>, Lane),
    /// Kept for whoever asks.
    Log(Arc<EventLog>),
    /// The client wants the final object only.
    Discard,
}

/// Emits one response.
#[derive(Debug)]
pub(crate) struct Emitter<'a> {
    create: &'a Create,
    prepared: &'a Prepared,
    model: &'a str,
    seal: &'a Seal,
    heartbeat: Duration,
    /// Goes off when the next heartbeat may be due.
    beat: Pin<Box<Sleep>>,
    /// When the last event went out.
    last_sent: tokio::time::Instant,
    patience: Duration,
    sink: EventSink,
    id: String,
    created_at: u64,
    sequence_number: u64,
    begun: bool,
    items: Vec<OutputItem>,
    /// The last item is still growing.
    is_open: bool,
    first_output: Option<Instant>,
}

/// The parts of a response object that change while it is made.
#[derive(Debug)]
pub(crate) struct Phase<'a> {
    pub(crate) status: Status,
    pub(crate) usage: Option<Usage>,
    pub(crate) error: Option<&'a ApiError>,
    pub(crate) incomplete_reason: Option<&'static str>,
    pub(crate) baton: Option<&'a BatonTurn>,
}

const IN_PROGRESS: Phase<'static> =
    Phase { status: Status::InProgress, usage: None, error: None, incomplete_reason: None, baton: None };

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
            seal: gateway.seal(),
            heartbeat: config.heartbeat,
            beat: Box::pin(tokio::time::sleep(config.heartbeat)),
            last_sent: tokio::time::Instant::now(),
            patience: config.slow_reader,
            sink,
            id: prepared.response_id.clone(),
            created_at: unix_now(),
            sequence_number: 0,
            begun: false,
            items: Vec::new(),
            is_open: false,
            first_output: None,
        }
    }

    pub(crate) fn id(&self) -> &str {
        &self.id
    }

    /// True once the client has seen an event; failures from then on are events too.
    pub(crate) fn has_begun(&self) -> bool {
        self.begun && !matches!(self.sink, EventSink::Discard)
    }

    /// When the first piece of output was there to be sent.
    pub(crate) fn first_output(&self) -> Option<Instant> {
        self.first_output
    }

    /// The response goes on with a prompt that was made anew.
    pub(crate) fn goes_on(&mut self, create: &'a Create, prepared: &'a Prepared) {
        (self.create, self.prepared) = (create, prepared);
    }

    /// The items so far.
    pub(crate) fn items(&self) -> &[OutputItem] {
        &self.items
    }

    /// Announces the response, once.
    pub(crate) async fn begin(&mut self) -> Result<(), ApiError> {
        if self.begun {
            return Ok(());
        }
        self.begun = true;
        if matches!(self.sink, EventSink::Discard) {
            return Ok(());
        }
        let response = self.json(&IN_PROGRESS);
        self.response_event("response.created", &response).await?;
        self.response_event("response.in_progress", &response).await
    }

    /// Waits for `work`, repeating `response.in_progress` so that nobody takes the silence for death: also when work is
    /// done all the time and brings no events.
    pub(crate) async fn waiting<T>(&mut self, work: impl Future<Output = T>) -> Result<T, ApiError> {
        let mut work = std::pin::pin!(work);
        loop {
            let silent_until = self.last_sent + self.heartbeat;
            if self.begun && tokio::time::Instant::now() >= silent_until {
                let response = self.json(&IN_PROGRESS);
                self.response_event("response.in_progress", &response).await?;
                continue;
            }
            tokio::select! {
                biased;
                done = &mut work => return Ok(done),
                // It is set anew only when it has gone off: most work is done long before.
                () = &mut self.beat => {
                    let next = if self.begun { silent_until } else { tokio::time::Instant::now() + self.heartbeat };
                    self.beat.as_mut().reset(next);
                }
            }
        }
    }

    /// Sends a piece of the output; pieces of another kind than the last one open an item of their own. `logprobs` are
    /// those of the tokens of a piece of text.
    pub(crate) async fn piece(&mut self, piece: Piece, logprobs: Vec<Logprob>) -> Result<(), ApiError> {
        match piece {
            Piece::Text(delta) => {
                if !matches!(self.open_item(), Some(Body::Message { .. })) {
                    self.open(Body::Message { text: String::new(), logprobs: Vec::new() }).await?;
                }
                self.grow(&delta, logprobs).await
            }
            Piece::Reasoning(delta) => {
                if !matches!(self.open_item(), Some(Body::Reasoning { .. })) {
                    let shown = self.shows_reasoning();
                    self.open(Body::Reasoning { text: String::new(), shown, sealed: None }).await?;
                }
                self.grow(&delta, Vec::new()).await
            }
            Piece::Call(name) => {
                let body = self.call(name);
                self.open(body).await
            }
            Piece::Arguments(delta) => self.grow(&delta, Vec::new()).await,
            Piece::End { whole } => {
                self.close(if whole { Status::Completed } else { Status::Incomplete }).await
            }
        }
    }

    /// Closes the item that is still growing, if there is one.
    pub(crate) async fn close(&mut self, status: Status) -> Result<(), ApiError> {
        if !std::mem::take(&mut self.is_open) {
            return Ok(());
        }
        let output_index = self.items.len() - 1;
        self.items[output_index].status = status;
        if let Body::Reasoning { text, sealed, .. } = &mut self.items[output_index].body
            && self.create.include.sealed_reasoning
        {
            *sealed = Some(Thought { text: text.clone() }.sealed(self.seal, &self.prepared.tenant));
        }
        let body = &self.items[output_index].body;
        let has_text =
            !matches!(body, Body::Compaction { .. } | Body::Reasoning { shown: Shown::Nothing, .. });
        let has_part = matches!(body, Body::Message { .. } | Body::Reasoning { shown: Shown::Summary, .. });
        if has_text {
            self.item_event(output_index, Event::text_done).await?;
        }
        if has_part {
            self.item_event(output_index, Event::part_done).await?;
        }
        self.item_event(output_index, Event::item_done).await
    }

    /// Takes back the item that is still growing, if there is one.
    pub(crate) fn discard(&mut self) {
        if std::mem::take(&mut self.is_open) {
            self.items.pop();
        }
    }

    /// Opens an item and closes the one before.
    pub(crate) async fn open(&mut self, body: Body) -> Result<(), ApiError> {
        self.close(Status::Completed).await?;
        self.first_output.get_or_insert_with(Instant::now);
        let has_part = matches!(body, Body::Message { .. } | Body::Reasoning { shown: Shown::Summary, .. });
        self.items.push(OutputItem { id: new_id(body.id_prefix()), status: Status::InProgress, body });
        self.is_open = true;
        let output_index = self.items.len() - 1;
        self.item_event(output_index, Event::item_added).await?;
        if has_part {
            self.item_event(output_index, Event::part_added).await?;
        }
        Ok(())
    }

    fn open_item(&self) -> Option<&Body> {
        self.items.last().filter(|_| self.is_open).map(|item| &item.body)
    }

    async fn grow(&mut self, delta: &str, logprobs: Vec<Logprob>) -> Result<(), ApiError> {
        if delta.is_empty() || !self.is_open {
            return Ok(());
        }
        let output_index = self.items.len() - 1;
        let body = &mut self.items[output_index].body;
        body.push_str(delta);
        if let Body::Message { logprobs: all, .. } = body {
            all.extend_from_slice(&logprobs);
        }
        if matches!(body, Body::Reasoning { shown: Shown::Nothing, .. }) {
            return Ok(());
        }
        self.item_event(output_index, |at, item| Event::delta(at, item, delta, &logprobs)).await
    }

    async fn item_event(
        &mut self,
        output_index: usize,
        make: impl FnOnce(At, &OutputItem) -> Event,
    ) -> Result<(), ApiError> {
        let at = At { sequence_number: self.next_number(), output_index };
        self.send(|this| make(at, &this.items[output_index])).await
    }

    fn shows_reasoning(&self) -> Shown {
        let summarized =
            self.create.reasoning.as_deref().is_some_and(|raw| !raw.get().contains("\"summary\":null"));
        match (self.create.include.raw_reasoning, summarized) {
            (true, _) => Shown::Raw,
            (false, true) => Shown::Summary,
            (false, false) => Shown::Nothing,
        }
    }

    /// An empty call of the tool that the model calls `name`.
    fn call(&self, name: String) -> Body {
        let tools = &self.prepared.tools;
        let call_id = new_id("call");
        let text = String::new();
        match tools.find(&name).map(|idx| &tools.offered[idx]) {
            Some(tool) if tool.is_custom => Body::CustomCall {
                call_id,
                name: tool.name.clone(),
                namespace: tool.namespace.clone(),
                input: text,
            },
            Some(tool) => Body::Call {
                call_id,
                name: tool.name.clone(),
                namespace: tool.namespace.clone(),
                arguments: text,
            },
            // A tool that does not exist: the client knows best what to say to that.
            None => Body::Call { call_id, name, namespace: None, arguments: text },
        }
    }

    /// The final response object, before it is sent.
    pub(crate) fn json(&self, phase: &Phase<'_>) -> String {
        serde_json::to_string(&self.view(phase)).expect("our own types serialize")
    }

    /// Ends the response with an error, closing what was open; returns its final object.
    pub(crate) async fn fail(mut self, error: &ApiError, account: BatonTurn) -> Result<String, ApiError> {
        self.close(Status::Incomplete).await?;
        let baton = self.create.include.baton.then_some(&account);
        let phase = Phase { status: Status::Failed, error: Some(error), baton, ..IN_PROGRESS };
        let response = self.json(&phase);
        self.end(phase.status, &response).await?;
        Ok(response)
    }

    /// Sends the terminal event of a response with this status and final object.
    pub(crate) async fn end(mut self, status: Status, response: &str) -> Result<(), ApiError> {
        self.response_event(terminal_kind(status), response).await
    }

    async fn response_event(&mut self, kind: &'static str, response: &str) -> Result<(), ApiError> {
        // Counted once it is sent: a heartbeat may be dropped while it waits.
        let number = self.sequence_number;
        self.send(|_| Event::of_response(kind, number, response)).await?;
        self.sequence_number += 1;
        Ok(())
    }

    fn next_number(&mut self) -> u64 {
        let number = self.sequence_number;
        self.sequence_number += 1;
        number
    }

    /// Builds and sends one event, unless nobody wants it.
    async fn send(&mut self, make: impl FnOnce(&Self) -> Event) -> Result<(), ApiError> {
        self.last_sent = tokio::time::Instant::now();
        let (sender, lane) = match &self.sink {
            EventSink::Stream(sender, lane) => (sender, lane),
            EventSink::Log(log) => return log.push(make(self)),
            EventSink::Discard => return Ok(()),
        };
        let event = match sender.try_send(make(self).on_lane(lane)) {
            Ok(()) => return Ok(()),
            Err(mpsc::error::TrySendError::Full(event) | mpsc::error::TrySendError::Closed(event)) => event,
        };
        match sender.send_timeout(event, self.patience).await {
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
            output: if phase.status == Status::InProgress { &[] } else { &self.items },
            conversation: create.conversation.as_deref(),
            background: create.background,
            previous_response_id: create.previous_response_id.as_deref(),
            tools: &self.prepared.tools.echo,
            tool_choice: create.tool_choice_echo.as_deref(),
            truncates: create.truncates,
            text: &create.text.echo,
            top_logprobs: create.top_logprobs.unwrap_or(0),
            max_tool_calls: create.max_tool_calls,
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

/// A fresh id with the prefix that OpenAI's clients expect (`resp`, `msg`, …) and 32 hex digits.
pub(crate) fn new_id(prefix: &str) -> String {
    format!("{prefix}_{:032x}", rand::random::<u128>())
}

pub(crate) fn unix_now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}
