//! Logs, metrics and traces of the process.

use std::io::IsTerminal;

use anyhow::Context;
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusHandle};
use opentelemetry::trace::TracerProvider;
use opentelemetry_otlp::WithExportConfig;
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::trace::SdkTracerProvider;
use tracing::level_filters::LevelFilter;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, Layer};

use crate::cli::TelemetryArgs;
use crate::roles::BadConfig;

/// Seconds; from a cache hit to a long prompt on a small machine.
const BUCKETS: [f64; 16] =
    [0.0001, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0];

/// The process's metrics and what has to be flushed at its end.
#[derive(Debug, Clone)]
pub struct Telemetry {
    metrics: PrometheusHandle,
    traces: Option<SdkTracerProvider>,
}

/// Starts logging to stderr, the metrics registry, and traces if an endpoint is configured.
///
/// # Errors
/// When the filter or the endpoint is malformed, or telemetry runs already.
pub fn start(args: &TelemetryArgs, service: bool) -> anyhow::Result<Telemetry> {
    let filter = args.log.as_deref().unwrap_or(if service { "info" } else { "warn" });
    let filter = EnvFilter::try_new(filter)
        .map_err(|error| BadConfig(format!("--log {filter} is no filter: {error}")))?;
    let traces = args.otlp_endpoint.as_deref().map(exporter).transpose()?;
    let log = tracing_subscriber::fmt::layer()
        .with_writer(std::io::stderr)
        .with_target(false)
        .with_ansi(std::io::stderr().is_terminal());
    let log = if args.log_json { log.json().boxed() } else { log.compact().boxed() };
    // What is logged does not decide what is traced.
    let trace = traces.as_ref().map(|traces| {
        let layer = tracing_opentelemetry::layer().with_tracer(traces.tracer("baton"));
        layer.with_filter(LevelFilter::INFO)
    });
    let registry = tracing_subscriber::registry().with(log.with_filter(filter)).with(trace);
    registry.try_init().context("logging runs already")?;
    let metrics = PrometheusBuilder::new()
        .set_buckets_for_metric(Matcher::Suffix("_seconds".to_owned()), &BUCKETS)?
        .install_recorder()
        .context("the metrics registry runs already")?;
    Ok(Telemetry { metrics, traces })
}

fn exporter(endpoint: &str) -> anyhow::Result<SdkTracerProvider> {
    if !endpoint.starts_with("http://") {
        return Err(BadConfig(format!("--otlp-endpoint {endpoint} is no http://HOST:PORT")).into());
    }
    let exporter = opentelemetry_otlp::SpanExporter::builder()
        .with_tonic()
        .with_endpoint(endpoint)
        .build()
        .with_context(|| format!("--otlp-endpoint {endpoint} cannot be used"))?;
    let resource = Resource::builder().with_service_name("baton").build();
    Ok(SdkTracerProvider::builder().with_batch_exporter(exporter).with_resource(resource).build())
}

impl Telemetry {
    /// All metrics in Prometheus' text format.
    #[must_use]
    pub fn render(&self) -> String {
        self.metrics.run_upkeep();
        self.metrics.render()
    }

    /// Sends what is buffered.
    pub async fn stop(self) {
        let Some(traces) = self.traces else { return };
        // It waits for the network, so not on a thread of the runtime.
        let stopped = tokio::task::spawn_blocking(move || traces.shutdown()).await;
        if let Ok(Err(error)) = stopped {
            tracing::warn!(%error, "some traces were not sent");
        }
    }
}
