//! What clients do wrong over HTTP: JSON errors everywhere.

use anyhow::{bail, ensure};
use serde_json::{Value, json};
use tokio::net::TcpStream;
use tokio_tungstenite::client_async;
use tokio_tungstenite::tungstenite::Error;

use crate::bad_input::{check_error, mistakes};
use crate::client::{create, with};
use crate::cluster::{Cluster, Spec};
use crate::http;
use crate::plain::TEXT;

#[tokio::test]
async fn mistakes_over_http_have_the_same_names() -> anyhow::Result<()> {
    let cluster = Cluster::start(Spec::aggregated(1)).await?;
    let only_here = (json!({"generate": false}), 400, "unsupported_parameter", Some("generate"));
    for (fields, status, code, param) in mistakes().into_iter().chain([only_here]) {
        let body = with(create("Hello"), fields);
        let reply = http::post(cluster.address(), &body).await?;
        assert_eq!(reply.status, status, "{reply:?}");
        check_error(&reply.json()["error"], code, param, &reply.json());
        if body["stream"].is_null() {
            let streamed = http::post(cluster.address(), &with(body, json!({"stream": true}))).await?;
            assert_eq!(
                (streamed.status, streamed.json()),
                (reply.status, reply.json()),
                "before the first event"
            );
        }
    }
    for body in ["{", "", "[]", "null", "\u{fffd}"] {
        let reply = http::request(cluster.address(), "POST", "/v1/responses", body).await?;
        assert_eq!(reply.status, 400, "{reply:?}");
        check_error(&reply.json()["error"], "invalid_json", None, &reply.json());
    }
    Ok(())
}

#[tokio::test]
async fn with_websockets_switched_off_upgrades_are_answered_with_426() -> anyhow::Result<()> {
    let api = api_gateway::Config { websockets: false, ..Default::default() };
    let cluster = Cluster::start(Spec { api, ..Spec::aggregated(1) }).await?;
    let stream = TcpStream::connect(cluster.address()).await?;
    let url = format!("ws://{}/v1/responses", cluster.address());
    let Err(Error::Http(answer)) = client_async(url, stream).await else { bail!("it was upgraded") };
    assert_eq!(answer.status(), 426);
    let body: Value = serde_json::from_slice(&answer.into_body().unwrap_or_default())?;
    assert_eq!(body["error"]["code"], "upgrade_required");
    assert_eq!(http::post(cluster.address(), &create("Hello.")).await?.status, 200);
    Ok(())
}

#[tokio::test]
async fn paths_methods_and_upgrades_are_answered_in_json() -> anyhow::Result<()> {
    let cluster = Cluster::start(Spec::aggregated(1)).await?;
    for (method, path, status, code) in [
        ("GET", "/v1/responses", 426, "upgrade_required"),
        ("GET", "/v1/nothing", 404, "unknown_path"),
        ("POST", "/responses", 404, "unknown_path"),
        ("PUT", "/v1/responses", 405, "method_not_allowed"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
        ("GET", "/v1/models/gpt-5", 404, "model_not_found"),
        ("GET", "/v1/models/%ff", 400, "invalid_path"),
        ("DELETE", "/v1/conversations/a%C3", 400, "invalid_path"),
    ] {
        let reply = http::request(cluster.address(), method, path, "").await?;
        assert_eq!(reply.status, status, "{reply:?}");
        ensure!(reply.head.contains("content-type: application/json"), "{reply:?}");
        ensure!(reply.head.contains("x-request-id: req_"), "{reply:?}");
        let param = (code == "model_not_found").then_some("model");
        check_error(&reply.json()["error"], code, param, &reply.json());
    }
    let list = http::request(cluster.address(), "GET", "/v1/models", "").await?.json();
    assert_eq!((&list["object"], &list["data"][0]["id"]), (&json!("list"), &json!(TEXT.name)));
    let one = http::request(cluster.address(), "GET", &format!("/v1/models/{}", TEXT.name), "").await?.json();
    assert_eq!(one, list["data"][0]);
    Ok(())
}

#[tokio::test]
async fn limits_of_bodies_and_connections_hold() -> anyhow::Result<()> {
    let api =
        api_gateway::Config { max_request_bytes: 4096, max_connections: 1, ..api_gateway::Config::default() };
    let cluster = Cluster::start(Spec { api, ..Spec::aggregated(1) }).await?;
    for n_bytes in [4097, 400_000] {
        let reply = http::post(cluster.address(), &create("x".repeat(n_bytes))).await?;
        assert_eq!(reply.status, 413, "{reply:?}");
        check_error(&reply.json()["error"], "request_too_large", None, &reply.json());
        let others = ["/v1/conversations", "/v1/responses/input_tokens", "/v1/responses/compact"];
        for path in others {
            let body = create("x".repeat(n_bytes)).to_string();
            let reply = http::request(cluster.address(), "POST", path, &body).await?;
            assert_eq!(reply.status, 413, "{reply:?}");
            check_error(&reply.json()["error"], "request_too_large", None, &reply.json());
        }
    }
    let mut first = crate::client::Socket::open(cluster.address()).await?;
    ensure!(crate::client::Socket::open(cluster.address()).await.is_err(), "the only place is taken");
    first.turn(&create("Hello")).await?.expect_answer();
    Ok(())
}
