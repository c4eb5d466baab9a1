//! Against the real file format: in a temporary folder, or on a disk made of memory that fails when told to.

use std::sync::Mutex;
use std::sync::atomic::AtomicBool;

use kv::hash::HashKey;
use model::chat_template::{Content, Message, Role};
use model::prompt::{Entry as LogEntry, LogEnd};
use proptest::prelude::*;
use redb::{BackendError, DatabaseError, StorageBackend};

use super::super::durable::Durable;
use super::super::{Base, Store, StoreLimits, row};
use super::file::{Check, with_backend};
use super::*;
use crate::conversation::{Item, TokenLog};
use crate::history::{ContentHash, Entry, History};
use crate::wire::{ToolSource, Tools};

mod conversations;

const TOOLS: &str =
    r#"[{"type":"function","name":"ls","parameters":{"type":"object","properties":{}},"strict":false}]"#;
const LIMITS: StoreLimits =
    StoreLimits { max_responses: 1, max_tokens: 1 << 20, ttl: Duration::from_secs(60) };
const HOUR: Duration = Duration::from_secs(3600);

fn key() -> HashKey {
    HashKey::derive(&[7; 32], b"")
}

fn form() -> Form {
    Form::new(&[7; 32], 50_000)
}

fn entry(id: String, json: String) -> Entry {
    let hash = *blake3::hash(json.as_bytes()).as_bytes();
    let call_id = json.contains("call").then(|| format!("call_{id}"));
    Entry::kept(id, json.into(), Some(hash), call_id)
}

/// A response that answers `text` after `parent`.
fn turn(parent: Option<&Stored>, id: &str, text: &str, stored: bool) -> Arc<Stored> {
    let tools = parent.map_or_else(
        || Tools::parse(TOOLS, ToolSource::Request).expect("tools"),
        |parent| Arc::clone(&parent.tools),
    );
    let instructions: Option<Arc<str>> = Some("Be \"brief\".".into());
    let start = ContentHash::start("me", instructions.as_deref(), &tools);
    let mut log = parent.map_or_else(|| TokenLog::new(key()), |parent| parent.log.clone());
    let mut content: Content = text.into();
    content.push_special(49_151);
    content.push_str(" after");
    let ids = text.bytes().map(|byte| u32::from(byte) * 100).collect();
    log.append(ids, vec![Item::Message(Message { role: Role::User, content })], LogEnd::Prompt);
    log.append((0..20).collect(), vec![Item::Generated], LogEnd::Generated { closed: true });
    let mut history = parent.map_or_else(|| History::new(start), |parent| parent.history.clone());
    history.append(vec![entry(format!("msg_in_{id}"), format!(r#"{{"role":"user","content":"{text}"}}"#))]);
    let output = format!(r#"{{"id":"msg_{id}","type":"message","text":"an answer to {text}"}}"#);
    history.append(vec![entry(format!("msg_{id}"), output.clone())]);
    let response = format!(
        r#"{{"id":"{id}","instructions":"Be \"brief\".","output":[{output}],"tools":{},"metadata":{{"a":"{text}"}}}}"#,
        tools.echo
    );
    Arc::new(Stored {
        id: id.into(),
        tenant: "me".into(),
        conversation: parent.map_or(id, |parent| &parent.conversation).into(),
        base: parent.and_then(|parent| parent.base_of(&log)),
        log,
        history,
        n_own_items: 2,
        n_output_items: 1,
        instructions,
        tools,
        decode_worker: "decode-0".into(),
        cache_key: Some("cache".into()),
        response: stored.then(|| response.into()),
    })
}

fn entries(log: &TokenLog) -> Vec<String> {
    log.with_entries(|entries| {
        entries
            .iter()
            .map(|entry| match entry {
                LogEntry::Message(message) => format!("{message:?}"),
                LogEntry::Generated { ids } => format!("{ids:?}"),
            })
            .collect()
    })
}

fn assert_same(found: &Stored, stored: &Stored) {
    assert_eq!(found.id, stored.id);
    assert_eq!(
        (&found.tenant, &found.conversation, &found.decode_worker, &found.cache_key, &found.instructions),
        (
            &stored.tenant,
            &stored.conversation,
            &stored.decode_worker,
            &stored.cache_key,
            &stored.instructions
        )
    );
    assert_eq!((&found.tools.raw, &found.response), (&stored.tools.raw, &stored.response));
    assert_eq!(found.log.ids_from(0), stored.log.ids_from(0));
    assert_eq!(found.log.hashes_from(0), stored.log.hashes_from(0));
    assert_eq!((found.log.end(), entries(&found.log)), (stored.log.end(), entries(&stored.log)));
    assert_eq!(found.history.content(), stored.history.content());
    assert_eq!((found.n_own_items, found.n_output_items), (stored.n_own_items, stored.n_output_items));
    let items = |stored: &Stored| -> Vec<_> {
        let entries = stored.history.entries().into_iter();
        entries.map(|entry| (entry.id.clone(), entry.json.to_string())).collect()
    };
    assert_eq!(items(found), items(stored));
    for entry in stored.history.entries() {
        let call_id = entry.to_keep().1;
        assert!(call_id.is_none_or(|call_id| found.history.has_call(call_id)));
    }
}

/// A folder that goes when the test ends.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let folder = std::env::temp_dir().join(format!("baton-store-{}-{name}", std::process::id()));
        let _ = std::fs::remove_dir_all(&folder);
        Self(folder)
    }

    fn file(&self) -> PathBuf {
        self.0.join("responses.redb")
    }

    fn config(&self) -> DiskConfig {
        DiskConfig { folder: self.0.clone(), ttl: HOUR, max_bytes: 1 << 30 }
    }

    fn open(&self) -> Result<Store, OpenError> {
        Ok(store(Disk::open(&self.config(), form())?))
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn store(disk: Disk) -> Store {
    Store::new(LIMITS, Durable::Disk(disk), key())
}

/// A disk in memory.
#[derive(Debug, Clone, Default)]
struct RamDisk(Arc<RamState>);

#[derive(Debug, Default)]
struct RamState {
    bytes: Mutex<Vec<u8>>,
    is_full: AtomicBool,
    n_syncs: AtomicU64,
}

impl RamState {
    fn check(&self) -> Result<(), BackendError> {
        if self.is_full.load(Ordering::Relaxed) {
            return Err(BackendError::Io(std::io::ErrorKind::StorageFull.into()));
        }
        Ok(())
    }
}

type Io<T> = Result<T, std::io::Error>;

impl StorageBackend for RamDisk {
    fn len(&self) -> Io<u64> {
        Ok(self.0.bytes.lock().expect("no panic").len() as u64)
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> Io<()> {
        let from = usize::try_from(offset).expect("small");
        let bytes = self.0.bytes.lock().expect("no panic");
        out.copy_from_slice(bytes.get(from..from + out.len()).ok_or(std::io::ErrorKind::UnexpectedEof)?);
        Ok(())
    }

    fn set_len(&self, len: u64) -> Io<()> {
        self.0.check()?;
        self.0.bytes.lock().expect("no panic").resize(usize::try_from(len).expect("small"), 0);
        Ok(())
    }

    fn sync_data(&self) -> Io<()> {
        self.0.n_syncs.fetch_add(1, Ordering::Relaxed);
        Ok(self.0.check()?)
    }

    fn write(&self, offset: u64, data: &[u8]) -> Io<()> {
        self.0.check()?;
        let from = usize::try_from(offset).expect("small");
        self.0.bytes.lock().expect("no panic")[from..from + data.len()].copy_from_slice(data);
        Ok(())
    }
}

impl RamDisk {
    fn open(&self, ttl: Duration, max_bytes: u64) -> Disk {
        let config = DiskConfig { folder: PathBuf::new(), ttl, max_bytes };
        let own = self.clone();
        let open = move |check: Check| {
            with_backend(&PathBuf::from("ram"), check, || Ok::<_, DatabaseError>(own.clone()))
        };
        Disk::start(&config, form(), PathBuf::from("ram"), Box::new(open)).expect("a fresh disk opens")
    }

    /// As the first format was: without the tables of conversations.
    fn make_first_format(&self) {
        let (database, _) =
            with_backend(&PathBuf::from("ram"), Check::Crash, || Ok::<_, DatabaseError>(self.clone()))
                .expect("opens");
        let write = database.begin_write().expect("writes");
        for name in ["conversations", "conversation_items"] {
            let table = redb::TableDefinition::<&str, &[u8]>::new(name);
            let deleted = write.delete_table(table).is_ok()
                || write
                    .delete_table(redb::TableDefinition::<(&str, u64), &[u8]>::new(name))
                    .expect("it is one of both");
            assert!(deleted, "{name}");
        }
        let about = redb::TableDefinition::<&str, u64>::new("about");
        write.open_table(about).expect("opens").insert("format", 1).expect("writes");
        write.commit().expect("writes");
    }

    /// Rows of each table.
    fn n_rows(&self) -> Vec<u64> {
        use redb::ReadableTableMetadata;
        let (database, _) =
            with_backend(&PathBuf::from("ram"), Check::Everything, || Ok::<_, DatabaseError>(self.clone()))
                .expect("opens");
        let read = database.begin_read().expect("reads");
        let tables = read.list_tables().expect("reads");
        tables.map(|table| read.open_untyped_table(table).expect("reads").len().expect("reads")).collect()
    }
}

async fn recall(store: &Store, id: &str) -> Option<Arc<Stored>> {
    store.recall(id, "me").await.expect("the disk is fine")
}

#[tokio::test]
async fn responses_outlive_the_process_and_memory() {
    let folder = Folder::new("outlive");
    let first = turn(None, "resp_1", "one", true);
    // One that is not stored lies between two that are.
    let second = turn(Some(&first), "resp_2", "two", false);
    let third = turn(Some(&second), "resp_3", "three", true);
    let fork = turn(Some(&first), "resp_4", "four", true);
    let all = [&first, &second, &third, &fork];
    let stored = [&first, &third, &fork];
    let opened = folder.open().expect("a new store");
    for response in all {
        opened.put(Arc::clone(response), 10).await.expect("kept");
    }
    for response in stored {
        assert_same(&recall(&opened, &response.id).await.expect("memory or disk has it"), response);
    }
    opened.close().await;
    drop(opened);

    let opened = folder.open().expect("the same store");
    assert!(recall(&opened, "resp_2").await.is_none(), "it was not to be stored");
    assert!(opened.recall("resp_3", "you").await.expect("fine").is_none(), "it is not theirs");
    for response in stored {
        assert_same(&recall(&opened, &response.id).await.expect("it is on disk"), response);
    }
    // What is continued after a restart is built upon what was there before.
    let third = recall(&opened, "resp_3").await.expect("it is on disk");
    let fifth = turn(Some(&third), "resp_5", "five", true);
    assert_eq!(fifth.base.as_ref().map(|base| &*base.id), Some("resp_3"));
    opened.put(Arc::clone(&fifth), 10).await.expect("kept");
    opened.close().await;
    let opened = folder.open().expect("the same store");
    assert_same(&recall(&opened, "resp_5").await.expect("it is on disk"), &fifth);
}

#[tokio::test]
async fn responses_on_disk_are_found_by_what_was_said_and_by_their_items() {
    let disk = RamDisk::default();
    let opened = store(disk.open(HOUR, 1 << 30));
    let first = turn(None, "resp_1", "one", true);
    let second = turn(Some(&first), "resp_2", "two", true);
    for response in [&first, &second] {
        opened.put(Arc::clone(response), 10).await.expect("kept");
    }
    opened.close().await;
    let opened = store(disk.open(HOUR, 1 << 30));
    let nothing = ContentHash::start("me", Some("else"), &Tools::none());
    let contents = vec![nothing, second.history.content(), first.history.content()];
    assert!(!opened.recall_after(contents.clone(), "you").await, "it is not theirs");
    assert!(opened.recall_after(contents, "me").await);
    let found = opened.after(&second.history.content()).expect("it is in memory now");
    assert_same(&found, &second);
    let me: Arc<str> = "me".into();
    opened.recall_item(&me, "msg_in_resp_1").await.expect("fine");
    assert!(opened.item(&me, "msg_in_resp_1").is_some_and(|json| json.contains("one")));
    opened.recall_item(&me, "msg_unknown").await.expect("fine");
    assert!(opened.item(&me, "msg_unknown").is_none());
}

#[tokio::test]
async fn what_was_deleted_stays_only_as_long_as_others_are_built_upon_it() {
    let disk = RamDisk::default();
    let opened = store(disk.open(HOUR, 1 << 30));
    let empty = disk.clone();
    let first = turn(None, "resp_1", "one", true);
    let second = turn(Some(&first), "resp_2", "two", true);
    for response in [&first, &second] {
        opened.put(Arc::clone(response), 10).await.expect("kept");
    }
    assert!(!opened.delete("resp_1", "you").await.expect("fine"), "it is not theirs");
    assert!(opened.delete("resp_1", "me").await.expect("fine"));
    assert!(!opened.delete("resp_1", "me").await.expect("fine"), "it is gone");
    assert!(recall(&opened, "resp_1").await.is_none());
    opened.close().await;
    let opened = store(disk.open(HOUR, 1 << 30));
    assert!(recall(&opened, "resp_1").await.is_none(), "it is gone after a restart too");
    assert_same(&recall(&opened, "resp_2").await.expect("it lives"), &second);
    assert!(opened.delete("resp_2", "me").await.expect("fine"));
    // A continuation of what has just been deleted carries everything itself.
    let third = turn(Some(&second), "resp_3", "three", true);
    opened.put(Arc::clone(&third), 10).await.expect("kept");
    opened.close().await;
    let opened = store(disk.open(HOUR, 1 << 30));
    assert_same(&recall(&opened, "resp_3").await.expect("it lives"), &third);
    assert!(opened.delete("resp_3", "me").await.expect("fine"));
    opened.close().await;
    let n_rows = empty.n_rows();
    assert_eq!(n_rows.iter().sum::<u64>(), 1, "only what the file is remains: {n_rows:?}");
}

#[tokio::test]
async fn what_has_expired_is_not_found_and_is_swept() {
    let disk = RamDisk::default();
    let opened = store(disk.open(Duration::from_millis(300), 1 << 30));
    let first = turn(None, "resp_1", "one", true);
    opened.put(Arc::clone(&first), 10).await.expect("kept");
    opened.put(turn(Some(&first), "resp_2", "two", true), 10).await.expect("kept");
    assert!(recall(&opened, "resp_1").await.is_some());
    tokio::time::sleep(Duration::from_millis(350)).await;
    assert!(recall(&opened, "resp_1").await.is_none() && recall(&opened, "resp_2").await.is_none());
    opened.sweep();
    opened.close().await;
    assert_eq!(disk.n_rows().iter().sum::<u64>(), 1);
}

#[tokio::test]
async fn beyond_its_size_the_oldest_go_first_and_the_file_does_not_grow() {
    const MAX_BYTES: u64 = 2 << 20;
    let disk = RamDisk::default();
    let opened = store(disk.open(HOUR, MAX_BYTES));
    let random =
        |len: usize| -> String { (0..len).map(|_| char::from(rand::random_range(b'a'..=b'z'))).collect() };
    let ids: Vec<String> = (0..600).map(|idx| format!("resp_{idx}")).collect();
    for id in &ids {
        let text = random(rand::random_range(1..20_000));
        opened.put(turn(None, id, &text, true), 10).await.expect("kept");
    }
    let len = disk.len().expect("memory");
    assert!(len <= 4 * MAX_BYTES, "the file has {len} bytes");
    let mut found = Vec::new();
    for id in &ids {
        found.push(recall(&opened, id).await.is_some());
    }
    let n_gone = found.iter().take_while(|found| !**found).count();
    assert!((100..595).contains(&n_gone), "{n_gone} are gone");
    assert!(found[n_gone..].iter().all(|found| *found), "no newer one goes before an older one");
}

#[tokio::test]
async fn a_full_disk_fails_what_needs_it_and_works_again_once_there_is_room() {
    let disk = RamDisk::default();
    let opened = store(disk.open(HOUR, 1 << 30));
    let first = turn(None, "resp_1", "one", true);
    opened.put(Arc::clone(&first), 10).await.expect("kept");
    disk.0.is_full.store(true, Ordering::Relaxed);
    for id in ["resp_2", "resp_3"] {
        let error = opened.put(turn(Some(&first), id, "two", true), 10).await.expect_err("it is full");
        assert_eq!((error.code, error.status), ("storage_error", 500));
        assert!(opened.get(id, "me").is_none(), "what is not durable is not found");
    }
    opened.put(turn(Some(&first), "resp_4", "four", false), 10).await.expect("it need not be stored");
    disk.0.is_full.store(false, Ordering::Relaxed);
    tokio::time::sleep(REOPEN_PAUSE).await;
    let fifth = turn(Some(&first), "resp_5", "five", true);
    opened.put(Arc::clone(&fifth), 10).await.expect("there is room");
    opened.close().await;
    let opened = store(disk.open(HOUR, 1 << 30));
    assert_same(&recall(&opened, "resp_1").await.expect("kept"), &first);
    assert_same(&recall(&opened, "resp_5").await.expect("kept"), &fifth);
}

#[tokio::test]
async fn one_sync_serves_many_who_come_together() {
    let disk = RamDisk::default();
    let opened = store(disk.open(HOUR, 1 << 30));
    let before = disk.0.n_syncs.load(Ordering::Relaxed);
    let puts = (0..200).map(|idx| opened.put(turn(None, &format!("resp_{idx}"), "one", true), 10));
    let results = futures::future::join_all(puts).await;
    assert!(results.iter().all(Result::is_ok));
    let n_syncs = disk.0.n_syncs.load(Ordering::Relaxed) - before;
    assert!(n_syncs < 100, "{n_syncs} syncs for 200 responses");
}

#[tokio::test]
async fn rows_of_another_model_are_not_found_and_wait_for_it() {
    let folder = Folder::new("model");
    let opened = folder.open().expect("a new store");
    let first = turn(None, "resp_1", "one", true);
    opened.put(Arc::clone(&first), 10).await.expect("kept");
    opened.close().await;
    drop(opened);
    let other = store(Disk::open(&folder.config(), Form::new(&[8; 32], 50_000)).expect("the same file"));
    assert!(recall(&other, "resp_1").await.is_none());
    other.close().await;
    drop(other);
    let opened = folder.open().expect("the same store");
    assert_same(&recall(&opened, "resp_1").await.expect("it is on disk"), &first);
}

#[tokio::test]
async fn a_file_that_cannot_be_used_is_named_and_left_alone() {
    let folder = Folder::new("damaged");
    let opened = folder.open().expect("a new store");
    for idx in 0..50 {
        opened.put(turn(None, &format!("resp_{idx}"), &"one".repeat(500), true), 10).await.expect("kept");
    }
    let locked = folder.open().expect_err("two cannot have it").to_string();
    assert!(locked.contains("another process") && locked.contains("responses.redb"), "{locked}");
    opened.close().await;
    drop(opened);
    let whole = std::fs::read(folder.file()).expect("it is there");
    let mut noise = whole.clone();
    noise.fill_with(rand::random);
    let mut wrong_magic = whole.clone();
    wrong_magic[..8].copy_from_slice(b"PK\x03\x04 no!");
    let mut holes = whole.clone();
    holes[8192..].chunks_mut(4096).for_each(|page| page[..2048].fill(0xa5));
    let half = whole[..whole.len() / 2].to_vec();
    let texts = b"these are not the bytes you are looking for".to_vec();
    for (name, bytes) in
        [("noise", noise), ("magic", wrong_magic), ("holes", holes), ("half", half), ("text", texts)]
    {
        std::fs::write(folder.file(), &bytes).expect("writable");
        let error = folder.open().expect_err(name).to_string();
        assert!(error.contains("responses.redb") && error.contains("mv "), "{name}: {error}");
        let left = std::fs::read(folder.file()).expect("it is still there");
        assert!(left == bytes, "{name}: it has been changed");
    }
    std::fs::write(folder.file(), &whole).expect("writable");
    assert!(folder.open().is_ok(), "a copy can be put back");

    let blocked = Folder::new("blocked");
    std::fs::write(&blocked.0, "a file").expect("writable");
    let error = blocked.open().expect_err("no folder").to_string();
    assert!(error.contains("data folder") && error.contains("writable"), "{error}");
    let _ = std::fs::remove_file(&blocked.0);
}

#[test]
fn what_a_row_repeats_costs_next_to_nothing() {
    let first = turn(None, "resp_1", &"some words ".repeat(50), true);
    let second = turn(Some(&first), "resp_2", "two", true);
    let bytes = row::encode(&second, second.base.as_ref(), &form());
    assert!(bytes.len() < 450, "{} bytes", bytes.len());
    let whole = row::encode(&second, None, &form());
    assert!(whole.len() > bytes.len());
}

proptest! {
    #[test]
    fn no_bytes_make_a_row_panic(at in any::<prop::sample::Index>(), byte in any::<u8>(), cut in any::<prop::sample::Index>()) {
        let stored = turn(None, "resp_1", "some text", true);
        let mut bytes = row::encode(&stored, None::<&Base>, &form());
        prop_assert!(row::decode(&bytes).is_ok());
        let at = at.index(bytes.len());
        let changed = bytes[at] != byte;
        bytes[at] = byte;
        prop_assert!(!changed || row::decode(&bytes).is_err(), "a change at {} goes unseen", at);
        bytes.truncate(cut.index(bytes.len()));
        prop_assert!(row::decode(&bytes).is_err());
    }
}
