//! `tidegate stat --reset`: what a server has counted begins with 0 again, for every engine.

use std::path::{Path, PathBuf};

use rustix::process::Signal;
use serde_json::Value;
use tempfile::TempDir;

use crate::metrics::page_of;
use crate::nbd::Client;
use crate::support::{Server, ok, run, scratch};

struct Scene {
    dir: TempDir,
    server: Server,
}

impl Scene {
    fn new(engine: &str, args: &[&str]) -> Self {
        let dir = scratch();
        let pool = dir.path().join("pool");
        ok(["create", pool.to_str().unwrap(), &format!("--engine={engine}"), "--size=32M"]);
        let args = [&["--metrics=tcp:127.0.0.1:0"], args].concat();
        let server = Server::start(&pool, &dir.path().join("socket"), &args);
        Self { dir, server }
    }

    fn pool(&self) -> PathBuf {
        self.dir.path().join("pool")
    }

    /// Writes blocks, and reads each.
    fn work(&self, blocks: u64) {
        let mut client = Client::connect(&self.dir.path().join("socket")).unwrap();
        for block in 0..blocks {
            client.send_write(0, block * 4096, &[7; 4096]).unwrap();
            assert_eq!(client.receive().unwrap(), (0, 0));
            assert_eq!(client.read(block * 4096, 4096).unwrap(), [7; 4096]);
        }
    }

    /// The metrics that `stat` with `more` prints.
    fn metrics(&self, more: &[&str]) -> Vec<Value> {
        let pool = self.pool();
        let stat = ok([&["stat", pool.to_str().unwrap(), "--json"], more].concat());
        let stat: Value = serde_json::from_str(&stat).unwrap();
        stat["metrics"].as_array().unwrap().clone()
    }

    /// The samples of the page of metrics called `name`, without their labels.
    fn samples(&self, name: &str) -> Vec<f64> {
        let page = page_of(&self.server);
        let of_it = page.lines().filter(|line| line.split(['{', ' ']).next() == Some(name));
        of_it.map(|line| line.rsplit(' ').next().unwrap().parse().unwrap()).collect()
    }

    fn stop(self) {
        assert!(self.server.stop(Signal::TERM).0.success());
    }
}

/// What is counted by the metric: a number, or the number of latencies.
fn count_of(metric: &Value) -> u64 {
    let value = &metric["value"];
    value.as_u64().or_else(|| value["count"].as_u64()).unwrap()
}

fn of_level<'a>(metrics: &'a [Value], level: &str, name: &str) -> &'a Value {
    let is_it = |it: &&Value| it["name"] == name && it["labels"]["level"] == level;
    metrics.iter().find(is_it).unwrap_or_else(|| panic!("{level} {name} is missing"))
}

fn is_gauge(metric: &Value) -> bool {
    metric["kind"] == "gauge"
}

#[test]
fn counters_and_latencies_of_every_engine_begin_again_and_gauges_stay() {
    for (engine, args) in [
        ("btt", &[][..]),
        ("raw", &["--dram=lru:1M"]),
        ("btt", &["--dram=transit:1M"]),
        ("log", &["--backing=null:64M"]),
        ("cache", &["--backing=null:64M"]),
    ] {
        let scene = Scene::new(engine, args);
        scene.work(130);
        let before = scene.metrics(&[]);
        let printed = scene.metrics(&["--reset"]);
        assert_eq!(of_level(&printed, "front_end", "writes")["value"], 130, "{engine}");
        let counted = |metrics: &[Value]| {
            let counts = metrics.iter().filter(|it| !is_gauge(it) && count_of(it) > 0);
            counts.map(|it| (it["name"].clone(), it["labels"].clone())).collect::<Vec<_>>()
        };
        assert!(counted(&printed).len() >= counted(&before).len(), "{engine}: all is printed");
        let after = scene.metrics(&[]);
        assert_eq!(after.len(), before.len());
        // A DRAM tier may write back in the background.
        let is_quiet = args.iter().all(|arg| !arg.starts_with("--dram"));
        assert!(!is_quiet || counted(&after).is_empty(), "{engine}: {:?}", counted(&after));
        for name in ["writes", "written_bytes", "reads", "connections", "errors"] {
            assert_eq!(count_of(of_level(&after, "front_end", name)), 0, "{engine} {name}");
        }
        for (before, after) in before.iter().zip(&after).filter(|(it, _)| is_quiet && is_gauge(it))
        {
            let is_of_clients = before["name"] == "connections_open";
            assert!(is_of_clients || before["value"] == after["value"], "{before} {after}");
        }
        scene.work(70);
        let later = scene.metrics(&[]);
        for (name, expected) in [("writes", 70), ("reads", 70), ("connections", 1)] {
            assert_eq!(count_of(of_level(&later, "front_end", name)), expected, "{engine} {name}");
        }
        if is_quiet {
            assert_eq!(count_of(of_level(&later, "pmem", "writes")), 70, "{engine}");
            let latencies = &of_level(&later, "pmem", "write_ns")["value"];
            let count = latencies["count"].as_u64().unwrap();
            assert!((1..=2).contains(&count), "one in 64 of these: {latencies}");
        }
        // Prometheus sees counters that were reset.
        assert_eq!(scene.samples("tidegate_connections_total"), [1.0]);
        assert!(scene.samples("tidegate_writes_total").contains(&70.0), "{engine}");
        scene.metrics(&["--reset"]);
        assert_eq!(scene.samples("tidegate_connections_total"), [0.0]);
        scene.stop();
    }
}

#[test]
fn the_counters_of_io_classes_begin_again() {
    const TABLE: &str = "io-classes=IO class id,IO class name,Eviction priority,Allocation;\
                         1,lba:ge:0,1,0.50";
    let scene = Scene::new("cache", &["--backing=null:64M"]);
    ok(["set", scene.pool().to_str().unwrap(), TABLE]);
    let of_class = |metrics: &[Value], name: &str| {
        let is_it = |it: &&Value| it["name"] == name && it["labels"]["io_class"] == "1";
        count_of(metrics.iter().find(is_it).expect(name))
    };
    scene.work(10);
    let printed = scene.metrics(&["--reset"]);
    assert_eq!(of_class(&printed, "cache_write_full_misses"), 10);
    let after = scene.metrics(&[]);
    assert_eq!(of_class(&after, "cache_write_full_misses"), 0);
    assert_eq!(of_class(&after, "cache_occupancy_bytes"), 40960, "a gauge stays");
    scene.work(4);
    assert_eq!(of_class(&scene.metrics(&[]), "cache_write_hits"), 4);
    scene.stop();
}

#[test]
fn people_are_shown_what_was_counted_until_then() {
    let dir = scratch();
    let control = dir.path().join("control");
    let scene = Scene::new("btt", &[&format!("--control=unix:{}", control.display())]);
    let shown = |target: &Path, more: &[&str]| {
        let text = ok([&["stat", target.to_str().unwrap()], more].concat());
        text.lines().any(|line| line.contains("written_bytes") && line.ends_with("40K"))
    };
    for target in [&scene.pool(), &control] {
        scene.work(10);
        assert!(shown(target, &["--reset"]) && !shown(target, &[]), "{}", target.display());
    }
    scene.stop();
}

#[test]
fn a_pool_without_a_server_has_nothing_to_reset() {
    for engine in ["btt", "cache", "log"] {
        let dir = scratch();
        let pool = dir.path().join("pool");
        let pool = pool.to_str().unwrap();
        ok(["create", pool, &format!("--engine={engine}"), "--size=32M"]);
        let output = run(["stat", pool, "--reset"]);
        let error = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.code() == Some(1) && error.contains("is not served"), "{error}");
    }
}
