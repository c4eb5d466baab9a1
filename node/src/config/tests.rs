use super::*;
use crate::cli::Command;

fn parse_with(name: &str, file: &str, args: &[&str]) -> Result<Cli, Error> {
    let path = std::env::temp_dir().join(format!("baton-config-test-{}-{name}.toml", std::process::id()));
    std::fs::write(&path, file).expect("a temporary file");
    let config = format!("--config={}", path.display());
    let args = ["baton", &config].into_iter().chain(args.iter().copied());
    let result = parse(args.map(OsString::from));
    let _ = std::fs::remove_file(&path);
    result
}

#[test]
fn a_flag_wins_over_the_file_and_the_file_over_the_default() {
    let file =
        "log = \"debug\"\n[up]\nprefill = 3\ndecode = 4\nlisten = \"127.0.0.1:9\"\nskip_self_check = true\n";
    let cli = parse_with("wins", file, &["up", "--decode", "2"]).expect("a configuration");
    assert_eq!(cli.telemetry.log.as_deref(), Some("debug"));
    let Command::Up(up) = cli.command else { panic!("up") };
    assert_eq!((up.prefill, up.decode, up.listen.port(), up.skip_self_check), (3, 2, 9, true));
}

#[test]
fn lists_and_required_options_may_come_from_the_file() {
    let file = "[router]\nworkers = [\"http://a:1\", \"http://b:2\"]\n";
    let Command::Router(router) = parse_with("list", file, &["router"]).expect("a configuration").command
    else {
        panic!("router")
    };
    assert_eq!(router.workers, ["http://a:1", "http://b:2"]);
}

#[test]
fn mistakes_in_the_file_are_named() {
    for (name, file, expected) in [
        ("key", "[up]\nprefil = 3\n", "up.prefil"),
        ("table", "[uup]\nprefill = 3\n", "uup"),
        ("toml", "[up\n", "toml"),
    ] {
        let error = parse_with(name, file, &["up"]).expect_err(file);
        assert!(error.to_string().contains(expected), "{error}");
    }
    assert!(matches!(parse_with("value", "[up]\nprefill = \"many\"\n", &["up"]), Err(Error::Usage(_))));
}
