//! What real clients sent, played against a cluster; every answer is validated.

use anyhow::ensure;

use crate::cluster::{Cluster, Spec};
use crate::conformance::recording::Recording;
use crate::conformance::replay::{Played, play};

/// Enough for the default configuration of Codex, which fills a context of 8192 tokens.
fn spec() -> Spec {
    Spec { n_blocks: 1100, ..Spec::split(1, 1) }
}

/// Plays a small recording; all of it must be answered.
async fn small(name: &str) -> anyhow::Result<()> {
    let cluster = Cluster::start(spec()).await?;
    let played = play(&cluster, &Recording::small(name)?).await?;
    ensure!(played.refused.is_none() && played.n_answers > 0, "{name}: {played:?}");
    Ok(())
}

macro_rules! recordings {
    ($($(#[$mark:meta])* $name:ident)*) => {
        $(
            $(#[$mark])*
            #[tokio::test]
            async fn $name() -> anyhow::Result<()> {
                small(stringify!($name)).await
            }
        )*
    };
}

recordings! {
    openai_python_http_plain
    openai_python_http_stream
    openai_python_ws_text
    openai_python_ws_error
    openai_node_ws_text
    openai_python_ws_stream_id
    openai_node_ws_stream_id
    openai_python_http_parse_schema
    openai_python_http_stream_helper_tool
    openai_python_ws_generate_false
    openai_python_ws_tool
    openai_node_http
    openai_node_ws_tool
    agents_js_http
    agents_js_ws
    agents_python_http
    agents_python_ws
    codex_http_sse_reasoning_replay
    codex_http_sse_text
    codex_http_sse_tool
    codex_ws_bad_arguments
    codex_ws_builtin_provider_openai_base_url
    codex_ws_connection_limit_reached
    codex_ws_custom_tool_apply_patch
    codex_ws_local_compaction
    codex_ws_multi_turn_and_interrupt
    codex_ws_output_schema
    codex_ws_parallel_calls
    codex_ws_previous_response_not_found
    codex_ws_remote_compaction_v2
    codex_ws_responses_lite_additional_tools
    codex_ws_text_default_config
    codex_ws_text_small_config
    codex_ws_tool_default_config
    codex_ws_tool_minimal_server_events
    codex_ws_tool_small_config
    codex_ws_unknown_tool
    codex_ws_upgrade_404_fallback
    codex_ws_upgrade_426_fallback
}

/// The originals, at their full size. Codex's default configuration may not fit the model; then exactly that is said.
#[tokio::test]
async fn the_originals_in_full() -> anyhow::Result<()> {
    let mut cluster = Cluster::start(spec()).await?;
    // On a busy machine a prompt of 8000 tokens may take the prefill worker longer than its deadline.
    cluster.forgive_warnings();
    for recording in Recording::originals()? {
        if recording.name == "openai_python_http_other_endpoints" {
            continue;
        }
        let Played { n_answers, refused } = play(&cluster, &recording).await?;
        let too_long = refused.as_deref() == Some("context_length_exceeded");
        ensure!(too_long || refused.is_none() && n_answers > 0, "{}: {refused:?}", recording.name);
    }
    Ok(())
}
