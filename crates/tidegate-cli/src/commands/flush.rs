//! `tidegate flush`: everything that a log pool holds goes to the files' disks, and the dirty pages
//! of a cache pool to its backing.

use std::fs::File;
use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context, Result};
use tidegate::cache::{self, CacheHeader};
use tidegate::pmem::{Region, RegionOptions};
use tidegate::pool::{Glance, glance};
use tidegate::size::Size;
use tidegate_run::{Asked, PoolPaths, RecoverOptions, Reply, Request, ask_at, existing_log};

use super::recover::{destage, recover};
use crate::args::FlushArgs;
use crate::control::{Answer, set_at, stat_of};
use crate::output::{Terminal, line};

/// Runs the command.
///
/// # Errors
/// There is no such pool, or something cannot be written.
pub(crate) fn run(args: &FlushArgs) -> Result<ExitCode> {
    if is_cache(&args.pool) {
        flush_cache(&args.pool)?;
        return Ok(ExitCode::SUCCESS);
    }
    let pool = existing_log(&args.pool)?;
    let paths = PoolPaths::of_pool(&pool)?;
    let shown = args.pool.display();
    match ask_at(&paths, &Request::Flush, &Terminal::new(false))? {
        Asked::Reply(Reply::Flushed { retired_bytes: 0 }) => {
            line(format_args!("{shown}: the log was empty"))?;
        }
        Asked::Reply(Reply::Flushed { retired_bytes }) => {
            let size = Size { bytes: retired_bytes };
            line(format_args!("{shown}: {size} of the log are in the files and free again"))?;
        }
        Asked::Reply(_) => anyhow::bail!("{shown}: the supervisor gave an answer of another kind"),
        Asked::Unsupervised(lock) => {
            drop(lock);
            recover(&pool, &paths, RecoverOptions::default())?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// A cache pool is at `path`, also where a server has it open.
fn is_cache(path: &Path) -> bool {
    let found = File::open(path).and_then(|file| glance(&file));
    found.is_ok_and(|found| found == Glance::Tidegate(Some(cache::CODE)))
}

/// Has the server of the cache pool at `pool` clean it, or does so where there is none.
fn flush_cache(pool: &Path) -> Result<()> {
    let shown = pool.display();
    if let Answer::Of(stat) = stat_of(pool)? {
        let mode = stat.settings.iter().find(|setting| setting.key == "mode");
        let mode = &mode.with_context(|| format!("{shown}: its server has no mode"))?.value;
        set_at(pool, vec![("mode".into(), format!("{mode}+flush"))])?;
        return Ok(line(format_args!("{shown}: the backing has all pages"))?);
    }
    let binding = {
        let region = Region::open(pool, &RegionOptions::default())?;
        CacheHeader::read(&region)?.binding
    };
    let Some(binding) = binding else {
        return Ok(line(format_args!("{shown}: the cache was never used"))?);
    };
    destage(pool, &binding.name)?;
    Ok(line(format_args!("{shown}: the backing {} has all pages", binding.name))?)
}
