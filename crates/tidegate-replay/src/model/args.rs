//! The options of `tidegate model`.

use std::path::{Path, PathBuf};

use clap::{ArgGroup, Args};
use tidegate::size::parse_bytes;
use tidegate_bench::policy::Policy;

use super::case::{Case, Length};
use super::costs::Costs;
use super::{calibrate, disk, output, page, paper, plan, validate};
use crate::error::{Error, Result};
use crate::report;
use crate::stdout::print;

/// Maximum of cores and jobs, as in the largest machines that exist.
const MOST_CORES: u32 = 1024;
/// Minimum of counted requests if `--seconds` is not given.
const LEAST_REQUESTS: u64 = 100_000;

/// Options of a modelled machine and its cases, which other modes would ignore.
const OF_CASES: [&str; 12] = [
    "cores",
    "jobs",
    "iodepth",
    "policies",
    "seconds",
    "cache",
    "block_bytes",
    "size",
    "costs",
    "flush_every",
    "json",
    "report",
];

/// Arguments of `tidegate model`.
#[derive(Debug, Clone, Args)]
#[command(group = ArgGroup::new("instead").conflicts_with_all(OF_CASES))]
pub struct ModelArgs {
    /// Cores of the machine, one case for each number
    #[arg(long, value_name = "N,..", value_delimiter = ',', default_value = "36")]
    pub cores: Vec<u32>,
    /// Threads that write, one case for each number
    #[arg(long, value_name = "N,..", value_delimiter = ',', default_value = "1,2,4,8,16,32")]
    pub jobs: Vec<u32>,
    /// Requests of each job issued as a batch, from the first of which latencies count
    #[arg(long, value_name = "N,..", value_delimiter = ',', default_value = "1,32,128,1024")]
    pub iodepth: Vec<u32>,
    /// Policies: raw, btt, and DRAM tiers over btt: transit, transit-no-eager, transit-no-bypass,
    /// pmbd, pmbd70, lru, coactive
    #[arg(
        long,
        value_name = "A,B,..",
        value_delimiter = ',',
        default_value = "raw,btt,transit,transit-no-eager,transit-no-bypass,pmbd,pmbd70,lru,coactive"
    )]
    pub policies: Vec<Policy>,
    /// Virtual seconds of each run [default: a request for each slot, at least 100,000]
    #[arg(long, value_name = "S")]
    pub seconds: Option<f64>,
    /// Sizes of the DRAM tiers, one case for each
    #[arg(
        long,
        value_name = "SIZE,..",
        value_delimiter = ',',
        value_parser = parse_bytes,
        default_value = "512M"
    )]
    pub cache: Vec<u64>,
    /// Size of a request and of a block: 512, 1024, 2048 or 4096
    #[arg(long, value_name = "BYTES", default_value_t = 4096)]
    pub block_bytes: u32,
    /// Size of the device, all of which is written
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes, default_value = "64G")]
    pub size: u64,
    /// What things cost: caiti (the machine of the paper), caiti-own (the same with Tidegate's
    /// block translation table), optane, or a file of --calibrate
    #[arg(long, value_name = "NAME|FILE", default_value = "caiti")]
    pub costs: String,
    /// Requests of a job between two flushes; 0: it does not flush
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub flush_every: u64,
    /// Seed of everything random
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub seed: u64,
    /// Write the results to FILE as one JSON object; - for standard output
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// Write a page with plots to DIR/index.html
    #[arg(long, value_name = "DIR")]
    pub report: Option<PathBuf>,
    /// Measure this machine for some 10 seconds and write its costs to FILE
    #[arg(long, value_name = "FILE", group = "instead")]
    pub calibrate: Option<PathBuf>,
    /// With --calibrate: measure the disk that this directory is on, too, for `tidegate replay`
    #[arg(long, value_name = "DIR", requires = "calibrate")]
    pub disk: Option<PathBuf>,
    /// With --calibrate: measure the persistent memory in this directory [default: the model
    /// optane]
    #[arg(long, value_name = "DIR", requires = "calibrate")]
    pub pmem: Option<PathBuf>,
    /// Measure this machine, run the policies on it and in the model, and compare
    #[arg(long, group = "instead")]
    pub validate: bool,
    /// Make the figures of the Caiti paper, and put them between the markers of FILE
    #[arg(long, value_name = "FILE", group = "instead")]
    pub papers: Option<PathBuf>,
}

impl ModelArgs {
    /// Runs the mode that the options select.
    ///
    /// # Errors
    /// [`Error::Usage`] for invalid arguments; [`Error::Io`] if a file cannot be read or written.
    pub fn run(&self) -> Result<()> {
        if let Some(path) = &self.calibrate {
            return self.calibrate(path);
        }
        if self.validate {
            return validate::run(self.seed);
        }
        if let Some(path) = &self.papers {
            return paper::update(path, self.seed);
        }
        self.check()?;
        let costs = Costs::load(&self.costs)?;
        let results = plan::run(&self.cases(), &costs)?;
        if let Some(dir) = &self.report {
            report::write(dir, &page::page(&results, &costs))?;
        }
        output::publish(&results, &costs, self.json.as_deref())
    }

    /// Measures this machine, and writes its costs to `path`.
    fn calibrate(&self, path: &Path) -> Result<()> {
        let mut costs = calibrate::measure(self.pmem.as_deref())?;
        if let Some(dir) = &self.disk {
            costs.ssd = disk::measure(dir)?.name;
        }
        costs.write(path)?;
        print(&(costs.lines() + "\n"))
    }

    fn check(&self) -> Result<()> {
        let usage = |message: String| Err(Error::Usage(message));
        let in_range = |number: &u32| (1..=MOST_CORES).contains(number);
        if !self.cores.iter().chain(&self.jobs).all(in_range) {
            return usage(format!("--cores and --jobs: expected 1 to {MOST_CORES}"));
        }
        if self.iodepth.contains(&0) {
            return usage("--iodepth: expected at least 1".to_owned());
        }
        let known = |policy: &Policy| !matches!(policy, Policy::Copy | Policy::Libpmemblk);
        if let Some(other) = self.policies.iter().find(|policy| !known(policy)) {
            return usage(format!(
                "policy {} cannot be modelled: expected raw, btt or a DRAM tier",
                other.name()
            ));
        }
        if ![512, 1024, 2048, 4096].contains(&self.block_bytes) {
            let found = self.block_bytes;
            return usage(format!("--block-bytes {found}: expected 512, 1024, 2048 or 4096"));
        }
        let least = u64::from(self.block_bytes) * 64;
        if self.cache.iter().any(|&bytes| bytes < least || bytes > self.size) {
            return usage(format!("--cache: expected {least} bytes up to --size"));
        }
        if self.seconds.is_some_and(|seconds| !(seconds > 0.0 && seconds <= 3600.0)) {
            return usage("--seconds: expected more than 0 and at most 3600".to_owned());
        }
        Ok(())
    }

    /// Returns the cases of all options. Policies without a cache ignore further cache sizes.
    fn cases(&self) -> Vec<Case> {
        let mut cases = Vec::new();
        for &cores in &self.cores {
            for (index, &cache_bytes) in self.cache.iter().enumerate() {
                for &jobs in &self.jobs {
                    let wanted = |policy: &&Policy| index == 0 || policy.has_tier();
                    let policies = self.policies.iter().filter(wanted);
                    cases.extend(
                        policies.map(|&policy| self.case(policy, cores, jobs, cache_bytes)),
                    );
                }
            }
        }
        cases
    }

    fn case(&self, policy: Policy, cores: u32, jobs: u32, cache_bytes: u64) -> Case {
        let case = Case {
            cores,
            jobs,
            depths: self.iodepth.clone(),
            cache_bytes,
            block_bytes: self.block_bytes,
            flush_every: self.flush_every,
            seed: self.seed,
            ..Case::new(policy, self.size)
        };
        let case = case.overrun(LEAST_REQUESTS);
        match self.seconds {
            None => case,
            Some(seconds) => Case { length: Length::seconds(seconds), ..case },
        }
    }
}
