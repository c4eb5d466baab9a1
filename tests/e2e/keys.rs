//! Who is let in, and what they see of each other.

use anyhow::bail;
use serde_json::json;
use tokio::net::TcpStream;
use tokio_tungstenite::client_async;
use tokio_tungstenite::tungstenite::Error;
use tokio_tungstenite::tungstenite::client::IntoClientRequest;
use tokio_tungstenite::tungstenite::http::HeaderValue;

use crate::client::{create, with};
use crate::cluster::{Cluster, Spec};
use crate::http::{request, request_as};

const ADA: &str = "sk-ada-0123456789abcdef";
const BOB: &str = "sk-bob-0123456789abcdef";

async fn cluster() -> anyhow::Result<Cluster> {
    let mut spec = Spec::aggregated(1);
    spec.api.api_keys = api_gateway::ApiKeys::parse(&format!("{ADA}\n{BOB}"))?;
    Cluster::start(spec).await
}

#[tokio::test]
async fn without_a_known_key_everything_is_refused_as_json() -> anyhow::Result<()> {
    let cluster = cluster().await?;
    let body = create("Hello").to_string();
    for (method, path, body) in [
        ("POST", "/v1/responses", body.as_str()),
        ("GET", "/v1/responses/resp_1", ""),
        ("DELETE", "/v1/responses/resp_1", ""),
        ("POST", "/v1/responses/resp_1/cancel", ""),
        ("GET", "/v1/responses/resp_1/input_items", ""),
        ("POST", "/v1/responses/compact", body.as_str()),
        ("POST", "/v1/responses/input_tokens", body.as_str()),
        ("POST", "/v1/conversations", "{}"),
        ("GET", "/v1/conversations/conv_1", ""),
        ("GET", "/v1/models", ""),
        ("GET", "/v1/responses", ""),
    ] {
        let reply = request(cluster.address(), method, path, body).await?;
        assert_eq!(reply.status, 401, "{method} {path}: {reply:?}");
        assert_eq!(reply.json()["error"]["code"], "missing_api_key", "{method} {path}");
        let reply = request_as("sk-eve-0123456789abcdef", cluster.address(), method, path, body).await?;
        assert_eq!(
            (reply.status, &reply.json()["error"]["code"]),
            (401, &json!("invalid_api_key")),
            "{method} {path}"
        );
        assert_eq!(reply.json()["error"]["type"], "authentication_error");
    }
    Ok(())
}

#[tokio::test]
async fn an_upgrade_without_a_known_key_is_refused_as_json() -> anyhow::Result<()> {
    let cluster = cluster().await?;
    let upgrade = async |key: Option<&str>| {
        let stream = TcpStream::connect(cluster.address()).await?;
        let mut request = format!("ws://{}/v1/responses", cluster.address()).into_client_request()?;
        if let Some(key) = key {
            request.headers_mut().insert("authorization", HeaderValue::from_str(&format!("Bearer {key}"))?);
        }
        Ok::<_, anyhow::Error>(client_async(request, stream).await.map(|_| ()))
    };
    for (key, code) in [(None, "missing_api_key"), (Some("sk-eve-0123456789abcdef"), "invalid_api_key")] {
        let Err(Error::Http(answer)) = upgrade(key).await? else { bail!("{key:?} was let in") };
        assert_eq!(answer.status(), 401);
        let body = answer.into_body().unwrap_or_default();
        let body: serde_json::Value = serde_json::from_slice(&body)?;
        assert_eq!(body["error"]["code"], code);
    }
    assert!(upgrade(Some(ADA)).await?.is_ok());
    Ok(())
}

#[tokio::test]
async fn those_with_different_keys_see_nothing_of_each_other() -> anyhow::Result<()> {
    let cluster = cluster().await?;
    let address = cluster.address();
    let post = async |key: &str, body: &serde_json::Value| {
        request_as(key, address, "POST", "/v1/responses", &body.to_string()).await
    };
    let response = post(ADA, &create("My name is Ada.")).await?;
    assert_eq!(response.status, 200, "{response:?}");
    let response = response.json();
    let id = response["id"].as_str().unwrap_or_default();
    let path = format!("/v1/responses/{id}");
    for method in ["GET", "DELETE"] {
        let reply = request_as(BOB, address, method, &path, "").await?;
        assert_eq!((reply.status, &reply.json()["error"]["code"]), (404, &json!("response_not_found")));
    }
    let next = with(create("What is my name?"), json!({"previous_response_id": id}));
    assert_eq!(post(BOB, &next).await?.json()["error"]["code"], "previous_response_not_found");
    let reference = create(json!([{"type": "item_reference", "id": response["output"][0]["id"]}]));
    assert_eq!(post(BOB, &reference).await?.json()["error"]["code"], "item_not_found");
    assert_eq!(post(ADA, &next).await?.status, 200);
    assert_eq!(request_as(ADA, address, "DELETE", &path, "").await?.status, 200);
    Ok(())
}
