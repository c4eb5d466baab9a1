//! Trace context across gRPC calls, in the W3C `traceparent` header: one turn is one trace through all roles.

use opentelemetry::propagation::{Extractor, Injector, TextMapPropagator};
use tonic::metadata::{KeyRef, MetadataKey, MetadataMap, MetadataValue};
use tracing::Span;
use tracing_opentelemetry::OpenTelemetrySpanExt;

use opentelemetry_sdk::propagation::TraceContextPropagator;

/// `message` as a request that carries the current span's trace context.
pub fn request<T>(message: T) -> tonic::Request<T> {
    let mut request = tonic::Request::new(message);
    let context = Span::current().context();
    TraceContextPropagator::new().inject_context(&context, &mut Outgoing(request.metadata_mut()));
    request
}

/// Makes `span` a child of the caller's span, if `metadata` names one.
pub fn adopt(span: &Span, metadata: &MetadataMap) {
    let parent = TraceContextPropagator::new().extract(&Incoming(metadata));
    // Without a configured exporter there is no trace to join, and that is fine.
    let _ = span.set_parent(parent);
}

struct Outgoing<'a>(&'a mut MetadataMap);

impl Injector for Outgoing<'_> {
    fn set(&mut self, key: &str, value: String) {
        if let (Ok(key), Ok(value)) =
            (MetadataKey::from_bytes(key.as_bytes()), MetadataValue::try_from(value))
        {
            self.0.insert(key, value);
        }
    }
}

struct Incoming<'a>(&'a MetadataMap);

impl Extractor for Incoming<'_> {
    fn get(&self, key: &str) -> Option<&str> {
        self.0.get(key)?.to_str().ok()
    }

    fn keys(&self) -> Vec<&str> {
        self.0
            .keys()
            .filter_map(|key| match key {
                KeyRef::Ascii(key) => Some(key.as_str()),
                KeyRef::Binary(_) => None,
            })
            .collect()
    }
}
