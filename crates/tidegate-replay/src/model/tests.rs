//! Cases that were computed by hand, and properties of all cases.

use clap::Parser;
use tidegate::pmem::MediaModel;
use tidegate_bench::measure::ROW_KEYS;
use tidegate_bench::policy::Policy;

use super::args::ModelArgs;
use super::case::{Case, Length, Outcome};
use super::costs::Costs;
use super::machine::{self, Session};

/// Returns round costs: a copy of a block takes 400 ns, or 1000 ns to persistent memory.
fn costs() -> Costs {
    Costs {
        name: "by hand".into(),
        request_ns: 100,
        btt_ns: 0,
        clock_ns: 0,
        lock_ns: 10,
        handover_ns: 50,
        section_ns: 20,
        wake_ns: 0,
        wake_latency_ns: 0,
        switch_ns: 0,
        slice_ns: 100_000,
        dram_copy_bytes_per_s: 10_240_000_000,
        stream_bytes_per_s: 4_096_000_000,
        word_load_ns: 0,
        word_store_ns: 0,
        write_back_ns: 0,
        fence_ns: 10,
        media: "dram".into(),
        ssd: "nvme".into(),
    }
}

#[test]
fn a_replay_has_the_slower_of_what_was_measured_and_of_the_media() {
    let media = |text: &str| Costs { media: text.into(), ..costs() }.whole_media().unwrap();
    let measured = media("dram");
    assert_eq!(measured.thread_write_bytes_per_s, Some(4_096_000_000));
    assert_eq!(measured.write_latency_ns, 10);
    let modelled = media("optane");
    assert_eq!(modelled.thread_write_bytes_per_s, Some(3_000_000_000));
    assert_eq!((modelled.write_latency_ns, modelled.read_latency_ns), (76, 305));
}

fn case(policy: &str, cores: u32, jobs: u32, requests: u64) -> Case {
    Case {
        policy: policy.parse().unwrap(),
        cores,
        jobs,
        depths: vec![1, 2],
        cache_bytes: 4 << 20,
        block_bytes: 4096,
        device_bytes: 1 << 40,
        warm_up: 1,
        length: Length::Requests(requests),
        flush_every: 0,
        reads: false,
        seed: 7,
    }
}

fn run(case: &Case, costs: &Costs) -> Outcome {
    case.run(costs, &costs.media().unwrap()).unwrap()
}

/// Two jobs write blocks to the bare memory: each request takes 100 ns of software, 1000 ns of
/// copying and 10 ns for the fence. Both jobs get answers at 1110, 2220 and 3330 ns. Time counts
/// from the first answer, and the requests of a job from its next one on.
#[test]
fn two_cores_and_three_requests_to_the_memory() {
    let outcome = run(&case("raw", 2, 2, 3), &costs());
    assert_eq!((outcome.requests, outcome.elapsed_ns), (3, 2220));
    assert_eq!(outcome.latencies[0].min(), outcome.latencies[0].max());
    assert_eq!(outcome.latencies[0].max(), 1110);
    assert!((outcome.service_ns(2) - 1480.0).abs() < 1e-9, "2 jobs for 2220 ns over 3 requests");
}

/// Two jobs, A and B, write to free slots of a cache with one lock. The lock's last holder is
/// always the other core: 50 ns for the handover, and 20 ns of work under the lock.
///
/// - At 100 both request the lock. A holds it until 170, B from 170 to 240.
/// - A copies until 570 and holds the lock until 640: answer. B copies until 640 and holds the lock
///   until 710: answer.
/// - A requests the lock at 740, holds it until 810 and, after the copy, from 1210 to 1280: answer.
///   B requests it at 810, holds it until 880, and from 1280 to 1350: answer. Repeats every 640 ns.
///
/// Time counts from the first answer at 640. The third counted request is answered at 1990.
fn locked(costs: &Costs) -> (u64, u64) {
    let outcome = run(&case("lru", 2, 2, 3), costs);
    (outcome.elapsed_ns, outcome.latencies[0].max())
}

#[test]
fn two_cores_and_three_requests_through_one_lock() {
    assert_eq!(locked(&costs()), (1350, 640));
}

/// The results computed by hand detect a machine that omits or doubles a cost.
#[test]
fn a_cost_that_is_planted_shows() {
    let base = costs();
    let changes = [
        (Costs { request_ns: 110, ..base.clone() }, (1370, 650)),
        (Costs { handover_ns: 60, ..base.clone() }, (1400, 660)),
        (Costs { section_ns: 30, ..base.clone() }, (1400, 660)),
        // The cores alternate, so that the last holder is never the same core.
        (Costs { lock_ns: 90, ..base.clone() }, (1350, 640)),
        // 500 ns per copy.
        (Costs { dram_copy_bytes_per_s: 8_192_000_000, ..base }, (1550, 740)),
    ];
    for (costs, expected) in changes {
        assert_eq!(locked(&costs), expected, "{costs:?}");
    }
}

#[test]
fn one_job_has_its_lock_with_itself() {
    let base = costs();
    // 100 ns of software, twice 30 ns under the lock, 400 ns of copying.
    assert_eq!(run(&case("lru", 2, 1, 5), &base).latencies[0].max(), 560);
    assert_eq!(run(&case("lru", 2, 1, 5), &base).latencies[1].max(), 1120, "two back to back");
}

/// Four jobs on two cores alternate: their total rate is that of two jobs with a core each.
#[test]
fn cores_are_never_idle_while_a_job_is_ready() {
    let two = run(&case("raw", 2, 2, 4000), &costs());
    let four = run(&case("raw", 2, 4, 4000), &costs());
    assert!((four.ops_per_s() / two.ops_per_s() - 1.0).abs() < 0.01, "{two:?} {four:?}");
    let longest_ns = four.latencies[0].max();
    assert!(longest_ns > costs().slice_ns, "a job waits for the slices of others: {longest_ns}");
}

#[test]
fn more_cores_are_never_less_for_a_block_translation_table() {
    let costs = Costs { media: "optane".into(), ..costs() };
    let rate = |cores| run(&case("btt", cores, cores, 2000), &costs).ops_per_s();
    let rates = [1, 2, 4, 8, 16].map(rate);
    assert!(rates.is_sorted(), "{rates:?}");
    assert!(rates[4] < 13.8e9 / 4096.0 * 1.02, "no more than the medium takes: {rates:?}");
}

#[test]
fn a_run_is_a_function_of_its_inputs() {
    for policy in ["transit", "pmbd70", "coactive"] {
        let case = Case { warm_up: 1500, ..case(policy, 6, 4, 3000) };
        let costs = Costs { media: "optane".into(), ..Costs::optane() };
        let [one, other] = [run(&case, &costs), run(&case, &costs)];
        assert_eq!(one.elapsed_ns, other.elapsed_ns, "{policy}");
        assert_eq!(one.latencies, other.latencies, "{policy}");
        let seeded = run(&Case { seed: 8, ..case }, &costs);
        assert_ne!(one.latencies, seeded.latencies, "{policy}");
    }
}

/// On many cores a transit cache takes a block in the time of a copy, while evictors write back.
#[test]
fn evictors_on_idle_cores_keep_slots_free() {
    let costs = Costs { media: "optane,thread_write_bytes_per_s=1000000000".into(), ..costs() };
    let with_warm_up = |policy, cores| {
        let case = Case { warm_up: 3000, ..case(policy, cores, 1, 5000) };
        run(&case, &costs).service_ns(1)
    };
    let (btt, transit) = (with_warm_up("btt", 8), with_warm_up("transit", 8));
    assert!(btt > 4000.0 && transit < btt / 3.0, "{btt} {transit}");
    let no_eager = with_warm_up("transit-no-eager", 8);
    assert!(no_eager > btt * 0.95, "a full cache is bypassed: {no_eager}");
}

/// The machine detects a thread that waits for an event that never occurs.
#[test]
fn a_lost_wake_up_is_a_deadlock() {
    let run = |main: fn()| machine::run(&costs(), MediaModel::dram(), 2, main);
    assert_eq!(run(|| machine::spawn(|| machine::spend(1)).join()), Ok(()));
    assert!(run(machine::wait_for_ever).is_err());
    let forgotten = || {
        machine::spawn(machine::wait_for_ever);
    };
    assert!(run(forgotten).is_err(), "nobody joins it");
    let joined = || {
        machine::spawn(machine::wait_for_ever).join();
        panic!("a thread that has not ended is joined");
    };
    assert!(run(joined).is_err());
}

#[test]
fn what_cannot_be_modelled_is_refused() {
    let case = Case { policy: Policy::Copy, ..case("btt", 1, 1, 1) };
    assert!(case.run(&costs(), &MediaModel::dram()).is_err());
}

#[test]
fn costs_are_read_as_they_were_written() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("costs.json");
    costs().write(&path).unwrap();
    assert_eq!(Costs::load(path.to_str().unwrap()).unwrap(), costs());
    std::fs::write(&path, "{\"name\":1}").unwrap();
    let error = Costs::load(path.to_str().unwrap()).unwrap_err();
    assert!(error.is_usage(), "{error}");
    for name in Costs::PRESETS {
        assert_eq!(Costs::load(name).unwrap().name, name);
    }
}

#[derive(Debug, Parser)]
struct Cli {
    #[command(flatten)]
    args: ModelArgs,
}

fn command(line: &str) -> Result<(), crate::error::Error> {
    Cli::try_parse_from(line.split(' ')).unwrap().args.run()
}

#[test]
fn rows_have_the_keys_of_the_bench_and_the_machine() {
    let dir = tempfile::tempdir().unwrap();
    let json = dir.path().join("model.json");
    let line = format!(
        "model --cores 2,4 --jobs 1,2 --iodepth 1,8 --policies btt,transit --cache 1M,2M --size 64M \
         --costs optane --seconds 0.002 --json {}",
        json.display()
    );
    command(&line).unwrap();
    let results: serde_json::Value =
        serde_json::from_str(&std::fs::read_to_string(json).unwrap()).unwrap();
    let rows = results["rows"].as_array().unwrap();
    // Two machines, two numbers of jobs and two depths: btt once, transit with each cache.
    assert_eq!(rows.len(), 2 * 2 * 2 * 3);
    let keys: Vec<_> = rows[0].as_object().unwrap().keys().map(String::as_str).collect();
    // The columns of the bench, except those about stores: a model stores nothing.
    let of_bench = ROW_KEYS.iter().filter(|key| !key.starts_with("pmem_") && **key != "fences");
    for key in of_bench.copied().chain(["cores", "cache_bytes"]) {
        assert!(keys.contains(&key), "{key} is not in {keys:?}");
    }
    assert!(rows.iter().all(|row| row["ops_per_s"].as_f64().unwrap() > 1e5));
    assert_eq!(results["costs"]["name"], "optane");
    assert!(results["phases"].as_array().unwrap().iter().all(|row| row["policy"] == "transit"));
}

#[test]
fn arguments_that_make_no_sense_are_refused() {
    for line in [
        "model --cores 0",
        "model --jobs 2000",
        "model --iodepth 0",
        "model --policies copy",
        "model --block-bytes 8192",
        "model --cache 1K",
        "model --seconds -1",
        "model --costs nothing-of-that-name",
    ] {
        // The parser rejects a negative number.
        let refused = Cli::try_parse_from(line.split(' ')).map(|cli| cli.args.run());
        assert!(refused.is_err() || refused.is_ok_and(|result| result.is_err()), "{line}");
    }
}

#[test]
fn the_time_of_a_session_stands_still_between_requests() {
    let mut session = Session::new(&costs(), MediaModel::dram(), 2);
    assert_eq!(session.call(|| machine::spend(500)), Ok(((), 500)));
    // A background thread works while requests run.
    let (background, _) = session.call(|| machine::spawn(|| machine::spend(2_000))).unwrap();
    let spend = || {
        machine::spend(100);
        machine::now_ns()
    };
    assert_eq!(session.call(spend), Ok((600, 100)));
    assert_eq!(session.call(move || background.join()), Ok(((), 1_900)));
}

#[test]
fn a_session_whose_threads_wait_for_each_other_says_so() {
    let mut session = Session::new(&costs(), MediaModel::dram(), 2);
    assert!(session.call(machine::wait_for_ever).is_err());
}
