//! Compares the model with this machine: the same policies, threads and media.

#![allow(clippy::cast_precision_loss, reason = "rates for people")]

use std::sync::Arc;
use std::time::Duration;

use tidegate::device::{BlockDevice, DeviceError};
use tidegate::dram::{self, DramTier};
use tidegate::pmem::{MediaModel, RegionOptions};
use tidegate_bench::policy::Policy;
use tidegate_bench::table::Table;
use tidegate_bench::workload::Stop;

use super::calibrate;
use super::case::{Case, Length};
use super::plan;
use crate::error::{Error, Result};
use crate::stdout::print;

const POLICIES: &str = "btt,transit,transit-no-eager,transit-no-bypass,pmbd,pmbd70,lru,coactive";
const THREADS: [u32; 2] = [1, 2];
const CACHE_BYTES: u64 = 16 << 20;
const DEVICE_BYTES: u64 = 256 << 20;
const RUN: Duration = Duration::from_millis(100);
const REPETITIONS: u64 = 5;
/// Maximum relative difference of an accurate model.
const TOLERANCE_PCT: f64 = 20.0;

/// Measures this machine, models it, and prints both.
///
/// # Errors
/// The memory for the measurements cannot be allocated.
pub(super) fn run(seed: u64) -> Result<()> {
    let costs = calibrate::measure(None)?;
    print(&(costs.lines() + "\n\n"))?;
    let cases = cases(seed);
    let modelled = plan::run(&cases, &costs)?;
    let headers = ["policy", "threads", "measured /s", "from", "to", "modelled /s", "off by %", ""];
    let title = "Writes a second: this machine and the model of it";
    let mut table = Table::new("model-validation", title, &headers);
    let mut within = 0;
    for ran in &modelled {
        let case = &ran.case;
        let failed = |error: DeviceError| Error::Usage(format!("{}: {error}", case.policy.name()));
        let mut measured = measure(case, &costs.media()?).map_err(failed)?;
        measured.sort_by(f64::total_cmp);
        let (least, median) = (measured[0], measured[measured.len() / 2]);
        let most = measured[measured.len() - 1];
        let off_pct = (ran.outcome.ops_per_s() / median - 1.0) * 100.0;
        let is_within = off_pct.abs() <= TOLERANCE_PCT;
        within += usize::from(is_within);
        let rate = |rate: f64| format!("{rate:.0}");
        table.push(vec![
            case.policy.name().to_owned(),
            case.jobs.to_string(),
            rate(median),
            rate(least),
            rate(most),
            rate(ran.outcome.ops_per_s()),
            format!("{off_pct:+.1}"),
            if is_within { "within" } else { "outside" }.to_owned(),
        ]);
    }
    let of = modelled.len();
    print(&format!("{table}\n{within} of {of} within {TOLERANCE_PCT} %\n"))
}

fn cases(seed: u64) -> Vec<Case> {
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let cores = u32::try_from(cores).unwrap_or(u32::MAX);
    let policies = || POLICIES.split(',').map(|name| name.parse().expect("a known policy"));
    let case = |policy, jobs| Case {
        cores,
        jobs,
        cache_bytes: CACHE_BYTES,
        warm_up: CACHE_BYTES / 4096 * 9 / 8,
        length: Length::seconds(RUN.as_secs_f64()),
        seed,
        ..Case::new(policy, DEVICE_BYTES)
    };
    THREADS.iter().flat_map(|&jobs| policies().map(move |policy| case(policy, jobs))).collect()
}

/// Returns the writes per second of several runs on this machine.
fn measure(case: &Case, media: &MediaModel) -> Result<Vec<f64>, DeviceError> {
    let options = RegionOptions { media: media.clone(), ..RegionOptions::default() };
    let btt = Arc::new(calibrate::open_btt(DEVICE_BYTES + DEVICE_BYTES / 64, &options)?);
    let writes = |stop, seed| calibrate::writes(case.jobs, DEVICE_BYTES, stop, seed);
    writes(Stop::Requests(1), case.seed).fill(&*btt)?;
    let tier: Option<Arc<dyn DramTier>> = match case.policy {
        Policy::Tier(policy) => Some(dram::open(policy, case.cache_bytes, Arc::clone(&btt) as _)?),
        _ => None,
    };
    let device: &dyn BlockDevice = tier.as_deref().map_or(&*btt, |tier| tier);
    writes(Stop::Requests(case.warm_up / u64::from(case.jobs)), case.seed).run(device)?;
    (0..REPETITIONS)
        .map(|repetition| {
            let outcome = writes(Stop::After(RUN), case.seed + 1 + repetition).run(device)?;
            Ok(outcome.write.len() as f64 / outcome.elapsed.as_secs_f64())
        })
        .collect()
}
