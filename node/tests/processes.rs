//! The real binary: it proves itself when it starts, and killed as a kernel kills it loses nothing that a client was told
//! is stored.

use std::io::{BufRead, BufReader};
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, ensure};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

const BATON: &str = env!("CARGO_BIN_EXE_baton");
const N_ROUNDS: usize = 4;
const N_CLIENTS: usize = 6;
const PATIENCE: Duration = Duration::from_secs(30);

/// A role in a process of its own; it is killed when it is dropped.
struct Role {
    child: Child,
    address: SocketAddr,
}

impl Role {
    /// Starts `command` with `args` on a free port and waits until it serves.
    async fn start(mut command: Command, args: &[&str]) -> anyhow::Result<Self> {
        let address = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?;
        command
            .args(args)
            .arg("--listen")
            .arg(address.to_string())
            .stdout(Stdio::null())
            .env("BATON_LOG", "error");
        let role = Self { child: command.spawn()?, address };
        let ready = async {
            while !request(address, "GET", "/readyz", "").await.is_ok_and(|(status, _)| status == 200) {
                sleep(Duration::from_millis(10)).await;
            }
        };
        timeout(PATIENCE, ready).await.with_context(|| format!("{args:?} is not ready"))?;
        Ok(role)
    }

    fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// SIGKILL: nothing of it runs any more.
    fn kill(&mut self) -> anyhow::Result<()> {
        self.child.kill()?;
        self.child.wait()?;
        Ok(())
    }
}

impl Drop for Role {
    fn drop(&mut self) {
        let _ = self.kill();
    }
}

/// What gateways need besides themselves, and their data folder.
struct Cluster {
    router: Role,
    _decode: Role,
    folder: PathBuf,
}

impl Cluster {
    async fn start(name: &str) -> anyhow::Result<Self> {
        let folder = std::env::temp_dir().join(format!("baton-kill-{}-{name}", std::process::id()));
        let _ = std::fs::remove_dir_all(&folder);
        let model = model();
        let mut args = vec!["decode", "--kv-memory-mb", "256"];
        args.extend(model.iter().map(String::as_str));
        let decode = Role::start(Command::new(BATON), &args).await?;
        let router = Role::start(Command::new(BATON), &["router", "--workers", &decode.url()]).await?;
        Ok(Self { router, _decode: decode, folder })
    }

    /// A gateway in `command`, which may be a shell that prepares it.
    async fn gateway(&self, command: Command) -> anyhow::Result<Role> {
        let (model, url) = (model(), self.router.url());
        let mut args = vec!["gateway", "--routers", &url, "--data-dir", path(&self.folder)];
        args.extend(model.iter().map(String::as_str));
        Role::start(command, &args).await
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

fn path(path: &Path) -> &str {
    path.to_str().expect("temporary folders are UTF-8")
}

/// The model file, if one is named; else the default one is fetched.
fn model() -> Vec<String> {
    let file = std::env::var_os("BATON_TEST_MODEL");
    file.map_or_else(Vec::new, |file| vec!["--model".to_owned(), file.to_string_lossy().into_owned()])
}

/// A whole answer: status and body.
async fn request(address: SocketAddr, method: &str, path: &str, body: &str) -> anyhow::Result<(u16, String)> {
    let mut stream = TcpStream::connect(address).await?;
    let length = body.len();
    let head = format!(
        "{method} {path} HTTP/1.0\r\nHost: {address}\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n\r\n"
    );
    stream.write_all(head.as_bytes()).await?;
    stream.write_all(body.as_bytes()).await?;
    let mut answer = String::new();
    timeout(PATIENCE, stream.read_to_string(&mut answer)).await??;
    let (head, body) = answer.split_once("\r\n\r\n").context("no end of the head")?;
    Ok((head.split(' ').nth(1).context("no status")?.parse()?, body.to_owned()))
}

async fn model_name(gateway: SocketAddr) -> anyhow::Result<String> {
    let (_, body) = request(gateway, "GET", "/v1/models", "").await?;
    let models: Value = serde_json::from_str(&body)?;
    Ok(models["data"][0]["id"].as_str().context("a model")?.to_owned())
}

/// The final response object of a streamed turn, as soon as its event is there.
async fn turn(gateway: SocketAddr, create: &Value) -> anyhow::Result<Value> {
    let body = create.to_string();
    let mut stream = TcpStream::connect(gateway).await?;
    let head = format!(
        "POST /v1/responses HTTP/1.0\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n",
        body.len()
    );
    stream.write_all(head.as_bytes()).await?;
    stream.write_all(body.as_bytes()).await?;
    let mut answer = String::new();
    let mut buffer = vec![0; 64 << 10];
    loop {
        let n_read = timeout(PATIENCE, stream.read(&mut buffer)).await??;
        ensure!(n_read > 0, "the stream ended early: {answer}");
        answer.push_str(std::str::from_utf8(&buffer[..n_read])?);
        for event in answer.split_terminator("\n\n") {
            let Some(data) = event.rsplit_once("\ndata: ").map(|(_, data)| data) else { continue };
            let Ok(mut event) = serde_json::from_str::<Value>(data) else { continue };
            let kind = event["type"].as_str().unwrap_or_default();
            if matches!(kind, "response.completed" | "response.incomplete" | "response.failed") {
                return Ok(event["response"].take());
            }
        }
    }
}

/// Goes on with a conversation until the gateway dies; returns what it was told is done.
async fn client(gateway: SocketAddr, model: String, number: usize) -> Vec<Value> {
    let mut done: Vec<Value> = Vec::new();
    loop {
        let previous = done.last().map_or(Value::Null, |response: &Value| response["id"].clone());
        let create = json!({
            "model": model, "input": format!("Client {number} counts: {}.", done.len()), "stream": true,
            "previous_response_id": previous, "max_output_tokens": 3, "metadata": {"number": number.to_string()},
        });
        match turn(gateway, &create).await {
            Ok(response) => done.push(response),
            Err(_) => return done,
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn no_response_that_was_told_complete_is_lost_by_kill_9() -> anyhow::Result<()> {
    let cluster = Cluster::start("rounds").await?;
    let mut done: Vec<Value> = Vec::new();
    for round in 0..=N_ROUNDS {
        let mut gateway = cluster.gateway(Command::new(BATON)).await?;
        let model = model_name(gateway.address).await?;
        for response in &done {
            let id = response["id"].as_str().unwrap_or_default();
            let (status, body) = request(gateway.address, "GET", &format!("/v1/responses/{id}"), "").await?;
            ensure!(status == 200, "round {round}: {id} is lost: {body}");
            ensure!(serde_json::from_str::<Value>(&body)? == *response, "round {round}: {id} has changed");
        }
        for response in done.iter().rev().take(3) {
            let create = json!({
                "model": model, "input": "Go on.", "stream": true, "previous_response_id": response["id"],
                "max_output_tokens": 2, "store": false,
            });
            let next = turn(gateway.address, &create).await?;
            let tokens = |response: &Value| response["usage"]["input_tokens"].as_u64();
            ensure!(tokens(&next) > tokens(response), "round {round}: it is continued");
        }
        if round == N_ROUNDS {
            break;
        }
        let mut clients = JoinSet::new();
        for number in 0..N_CLIENTS {
            clients.spawn(client(gateway.address, model.clone(), number));
        }
        sleep(Duration::from_millis(500 + u64::from(rand::random::<u8>()) * 4)).await;
        gateway.kill()?;
        while let Some(more) = clients.join_next().await {
            done.extend(more?);
        }
    }
    ensure!(done.len() > N_ROUNDS * N_CLIENTS, "only {} turns were done", done.len());
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_disk_fails_turns_that_are_to_be_stored_and_no_others() -> anyhow::Result<()> {
    let cluster = Cluster::start("full").await?;
    // No file may become larger than 2 MiB: a write beyond it fails as on a full disk.
    let mut shell = Command::new("sh");
    shell.args(["-c", r#"trap "" XFSZ; ulimit -f 4096; exec "$0" "$@""#, BATON]);
    let gateway = cluster.gateway(shell).await?;
    let model = model_name(gateway.address).await?;
    let create = |store: bool| {
        let noise: String = (0..200_000).map(|_| char::from(rand::random_range(b'!'..=b'['))).collect();
        json!({
            "model": model, "stream": true, "store": store, "max_output_tokens": 2,
            "input": [
                {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": noise},
                {"role": "user", "content": "Hello"},
            ],
        })
    };
    let mut done = Vec::new();
    let failed = loop {
        let response = turn(gateway.address, &create(true)).await?;
        if response["status"] == "failed" {
            break response;
        }
        done.push(response);
        ensure!(done.len() < 50, "the disk does not become full");
    };
    assert_eq!(failed["error"]["code"], "storage_error", "{failed}");
    ensure!(!done.is_empty(), "something found room");
    let unstored = turn(gateway.address, &create(false)).await?;
    ensure!(unstored["status"] != "failed", "{unstored}");
    for response in &done {
        let id = response["id"].as_str().unwrap_or_default();
        let (status, _) = request(gateway.address, "GET", &format!("/v1/responses/{id}"), "").await?;
        assert_eq!(status, 200, "what was stored before is still there");
    }
    let (status, _) = request(gateway.address, "GET", "/readyz", "").await?;
    assert_eq!(status, 200);
    Ok(())
}

#[test]
fn a_damaged_store_stops_the_start_with_advice_and_is_left_alone() -> anyhow::Result<()> {
    let folder = std::env::temp_dir().join(format!("baton-kill-{}-damaged", std::process::id()));
    std::fs::create_dir_all(&folder)?;
    let file = folder.join("responses.redb");
    std::fs::write(&file, "not a database, and somebody's only copy of something")?;
    let model = model();
    let output = Command::new(BATON)
        .args([
            "gateway",
            "--listen",
            "127.0.0.1:0",
            "--routers",
            "http://127.0.0.1:1",
            "--data-dir",
            path(&folder),
        ])
        .args(&model)
        .stdin(Stdio::null())
        .output()?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(!output.status.success(), "it starts");
    for part in [path(&file), "damaged", "mv "] {
        ensure!(said.contains(part), "{part} is missing in: {said}");
    }
    ensure!(std::fs::read(&file)?.starts_with(b"not a database"), "it was changed");
    std::fs::remove_dir_all(&folder)?;
    Ok(())
}

#[tokio::test]
async fn up_proves_itself_with_a_conversation() -> anyhow::Result<()> {
    let mut command = Command::new(BATON);
    command.args(["up", "--listen", "127.0.0.1:0", "--kv-memory-mb", "128"]).args(model());
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn()?;
    let banner = BufReader::new(child.stdout.take().context("it has an output")?).lines();
    let _killed = Role { child, address: (Ipv4Addr::LOCALHOST, 0).into() };
    // When the conversation fails the process ends, and its output with it.
    let read = tokio::task::spawn_blocking(move || {
        let lines = banner.map_while(Result::ok);
        let lines: Vec<String> = lines.take_while(|line| !line.starts_with("Ctrl-C stops it")).collect();
        lines
    });
    let lines = timeout(PATIENCE, read).await.context("the conversation takes too long")??;
    ensure!(lines.iter().any(|line| line.starts_with("Ready after")), "{lines:#?}");
    ensure!(lines.iter().any(|line| line.contains("turn 2")), "{lines:#?}");
    Ok(())
}
