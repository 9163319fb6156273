//! The page that Prometheus reads: by a parser of others, and with all that the alert rules and the
//! dashboard name.

use std::collections::BTreeSet;
use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::Signal;
use tempfile::TempDir;

use crate::nbd::Client;
use crate::support::{Server, ok, run, scratch, tidegate, tool};

/// Requests of each kind of a client at work.
const REQUESTS: u64 = 256;

/// Prints what the reference implementation in Python finds in a page: name, type, samples.
const PARSER: &str = "import sys
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse
for family in parse(sys.stdin.read()):
    assert family.documentation, family.name
    for sample in family.samples:
        print(sample.name, family.type, family.unit or '-', float(sample.value))";

/// Where the page of `server` is, as it says.
fn address_of(server: &Server) -> &str {
    let line = server.banner.iter().find(|line| line.starts_with("metrics")).unwrap();
    line.split_once("tcp:").unwrap().1
}

/// The page of metrics of `server`.
pub(crate) fn page_of(server: &Server) -> String {
    let mut client = TcpStream::connect(address_of(server)).unwrap();
    client.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    client.write_all(b"GET /metrics HTTP/1.1\r\nHost: test\r\n\r\n").unwrap();
    let mut response = String::new();
    client.read_to_string(&mut response).unwrap();
    assert!(response.starts_with("HTTP/1.1 200 OK\r\n"), "{response}");
    response.split_once("\r\n\r\n").unwrap().1.to_owned()
}

struct Scene {
    dir: TempDir,
    server: Server,
}

impl Scene {
    fn serving(engine: &str, args: &[&str]) -> Self {
        let dir = scratch();
        let pool = dir.path().join("pool");
        let disk = dir.path().join("disk");
        std::fs::File::create(&disk).unwrap().set_len(64 << 20).unwrap();
        let engine = format!("--engine={engine}");
        ok(["create", pool.to_str().unwrap(), &engine, "--size=32M"]);
        let backing = format!("--backing=file:{}", disk.display());
        let has_backing = !engine.ends_with("btt");
        let mut all = vec!["--metrics=tcp:127.0.0.1:0"];
        all.extend(has_backing.then_some(backing.as_str()));
        all.extend(args);
        let server = Server::start(&pool, &dir.path().join("socket"), &all);
        Self { dir, server }
    }

    /// One server with a device of each of `engines`, described in a file.
    fn of_many(engines: &[&str]) -> Self {
        let dir = scratch();
        let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
        let mut lines = vec![
            format!("nbd = [\"unix:{}\"]", path("socket")),
            "metrics = \"tcp:127.0.0.1:0\"".to_owned(),
        ];
        for (number, engine) in engines.iter().enumerate() {
            let (pool, disk) = (path(&format!("pool{number}")), path(&format!("disk{number}")));
            ok(["create", &pool, &format!("--engine={engine}"), "--size=32M"]);
            lines.push(format!("[[device]]\npool = \"{pool}\"\nexport = \"{number}\""));
            if *engine != "btt" {
                std::fs::File::create(&disk).unwrap().set_len(64 << 20).unwrap();
                lines.push(format!("backing = \"file:{disk}\""));
            }
        }
        std::fs::write(path("config.toml"), lines.join("\n")).unwrap();
        let config = path("config.toml");
        let server = Server::spawn(tidegate().args(["serve", "--config", &config]));
        Self { dir, server }
    }

    fn address(&self) -> &str {
        address_of(&self.server)
    }

    /// Has a client write and read, so often that latencies are measured: one in 64.
    fn work(&self) {
        let mut client = Client::connect(&self.dir.path().join("socket")).unwrap();
        for n in 0..REQUESTS {
            client.send_write(n, n % 16 * 4096, &[3; 4096]).unwrap();
            assert_eq!(client.receive().unwrap(), (n, 0));
            assert_eq!(client.read(n % 16 * 4096, 4096).unwrap(), [3; 4096]);
        }
    }

    fn page(&self) -> String {
        page_of(&self.server)
    }

    fn stop(self) {
        let (status, _) = self.server.stop(Signal::TERM);
        assert!(status.success());
        drop(self.dir);
    }
}

/// The samples of `page`, as another parser reads them.
fn parsed(page: &str) -> String {
    // Debian's own, which has the package.
    let mut python = Command::new("/usr/bin/python3");
    python.args(["-c", PARSER]).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut python = python.spawn().unwrap();
    python.stdin.take().unwrap().write_all(page.as_bytes()).unwrap();
    let output = python.wait_with_output().unwrap();
    assert!(output.status.success(), "python3-prometheus-client refuses it: {page}");
    String::from_utf8(output.stdout).unwrap()
}

/// The values of the samples that `parsed` prints as `name`.
fn values(samples: &str, name: &str) -> Vec<f64> {
    let of_it = samples.lines().filter_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    of_it.map(|rest| rest.rsplit(' ').next().unwrap().parse().unwrap()).collect()
}

#[test]
fn another_parser_reads_the_page() {
    let scene = Scene::serving("cache", &["--dram=transit:4M"]);
    let samples = parsed(&scene.page());
    for line in [
        "tidegate_connections_open gauge - 0.0",
        "tidegate_read_bytes_total counter bytes 0.0",
        "tidegate_write_seconds_count histogram seconds 0.0",
        "tidegate_pending_bytes gauge bytes 0.0",
    ] {
        assert!(samples.lines().any(|it| it == line), "{line}: {samples}");
    }
    scene.stop();
}

/// One that holds a connection open keeps the page from others for five seconds, no longer, and the
/// export from nobody.
#[test]
fn a_client_that_says_nothing_keeps_nobody_out() {
    let scene = Scene::serving("btt", &[]);
    let mut silent = TcpStream::connect(scene.address()).unwrap();
    silent.write_all(b"GET").unwrap();
    let asked = Instant::now();
    scene.work();
    assert!(scene.page().contains("tidegate_connections_open"));
    let waited = asked.elapsed();
    assert!(waited < Duration::from_secs(30), "the page took {waited:?}");
    silent.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let ended = silent.read(&mut [0; 100]);
    assert!(!matches!(&ended, Err(error) if error.kind() == ErrorKind::WouldBlock), "{ended:?}");
    scene.stop();
}

/// Of every engine, and of a server of several devices, each after work: histograms have samples,
/// and families come once, whatever has them.
#[test]
fn another_parser_reads_the_pages_of_all_engines_and_of_many_devices() {
    let assert_worked = |samples: &str| {
        for direction in ["read", "write"] {
            let counts = values(samples, &format!("tidegate_{direction}_seconds_count"));
            assert!(counts.iter().any(|count| *count > 0.0), "{direction}: {samples}");
            let buckets = values(samples, &format!("tidegate_{direction}_seconds_bucket"));
            assert!(buckets.len() > counts.len(), "{direction}: {samples}");
        }
        let written = values(samples, "tidegate_written_bytes_total");
        #[expect(clippy::cast_precision_loss, reason = "the page has such numbers")]
        let expected = (REQUESTS * 4096) as f64;
        assert!(written.contains(&expected), "{samples}");
    };
    for engine in ["btt", "log", "cache"] {
        let scene = Scene::serving(engine, &[]);
        scene.work();
        assert_worked(&parsed(&scene.page()));
        scene.stop();
    }
    let scene = Scene::of_many(&["btt", "log", "cache", "log"]);
    let samples = parsed(&scene.page());
    assert!(values(&samples, "tidegate_written_bytes_total").len() >= 4, "{samples}");
    scene.work();
    assert_worked(&parsed(&scene.page()));
    scene.stop();
}

/// The metrics that `text` names, as samples.
fn named_in(text: &str) -> BTreeSet<String> {
    let is_of_name = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let words = text.split(|c: char| !is_of_name(c));
    words.filter(|word| word.starts_with("tidegate_")).map(str::to_owned).collect()
}

#[test]
fn alert_rules_and_dashboard_name_metrics_that_there_are() {
    let mut shown = BTreeSet::new();
    for (engine, args) in [("cache", ["--dram=transit:4M"]), ("log", ["--dram=none"])] {
        let scene = Scene::serving(engine, &args);
        shown.extend(named_in(&scene.page()));
        scene.stop();
    }
    let monitoring = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../contrib/monitoring");
    for name in ["alerts.yml", "grafana-dashboard.json"] {
        let text = std::fs::read_to_string(monitoring.join(name)).unwrap();
        let named = named_in(&text);
        assert!(named.len() >= 7, "{name}: {named:?}");
        let missing: Vec<_> = named.difference(&shown).collect();
        assert!(missing.is_empty(), "{name} names {missing:?}, which no page has");
    }
    let dashboard = std::fs::read(monitoring.join("grafana-dashboard.json")).unwrap();
    serde_json::from_slice::<serde_json::Value>(&dashboard).unwrap();
}

/// Prints name, severity, summary and action of each rule, as Prometheus reads them: they are keys
/// of the rule, each with one line of text.
const RULES: &str = "import json, sys, yaml
rules = [rule for group in yaml.safe_load(sys.stdin)['groups'] for rule in group['rules']]
print(json.dumps([[rule['alert'], rule['expr'], rule['labels']['severity'],
    rule['annotations']['summary'], rule['annotations']['action']] for rule in rules]))";

#[test]
fn each_alert_has_a_severity_a_summary_and_an_action() {
    let alerts = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../contrib/monitoring/alerts.yml");
    let mut python = tool("/usr/bin/python3", "python3-yaml");
    python.args(["-c", RULES]).stdin(std::fs::File::open(alerts).unwrap());
    let output = python.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let rules: Vec<[String; 5]> = serde_json::from_slice(&output.stdout).unwrap();
    assert!(rules.len() >= 6, "{rules:?}");
    for rule in &rules {
        let [alert, expression, severity, summary, action] = rule;
        assert!(["critical", "warning"].contains(&severity.as_str()), "{alert}: {severity}");
        for text in [expression, summary, action] {
            assert!(text.trim().len() > 10 && !text.contains('\n'), "{alert}: {text:?}");
        }
    }
    let names: BTreeSet<_> = rules.iter().map(|[alert, ..]| alert).collect();
    assert_eq!(names.len(), rules.len(), "each has a name of its own");
}

/// The settings that actions name can be set as they say.
#[test]
fn what_the_action_for_a_cache_that_is_off_says_can_be_done() {
    let scene = Scene::serving("cache", &[]);
    let pool = scene.dir.path().join("pool");
    ok(["flush", pool.to_str().unwrap()]);
    ok(["set", pool.to_str().unwrap(), "pt-error-threshold=5"]);
    scene.stop();
}

#[test]
fn an_address_that_is_taken_is_refused_before_clients_are_served() {
    let scene = Scene::serving("btt", &[]);
    let taken = format!("--metrics=tcp:{}", scene.address());
    let other = scene.dir.path().join("other");
    ok(["create", other.to_str().unwrap(), "--engine=btt", "--size=32M"]);
    let socket = format!("--nbd=unix:{}", scene.dir.path().join("second").display());
    let output = run(["serve", other.to_str().unwrap(), &socket, &taken]);
    let error = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{error}");
    assert!(error.contains("tcp:127.0.0.1") && error.contains("in use"), "{error}");
    scene.stop();
}
