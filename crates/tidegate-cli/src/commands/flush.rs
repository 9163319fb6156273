//! `tidegate flush`: destages a log pool to the files' disks, or a pool to its own backing.

use anyhow::Result;
use tidegate::size::Size;
use tidegate_run::{Asked, PoolPaths, RecoverOptions, Reply, Request, ask_at, existing_log};

use super::backed_pool;
use super::recover::{destage_device, recover, without_supervisors};
use crate::args::FlushArgs;
use crate::output::{Terminal, line};

/// Runs the command.
///
/// # Errors
/// The pool does not exist, or a write fails.
pub(crate) fn run(args: &FlushArgs) -> Result<()> {
    if args.purge {
        return backed_pool::purge(&args.pool);
    }
    if backed_pool::flush_served(&args.pool)? {
        return Ok(());
    }
    if let Some(engine) = backed_pool::engine_at(&args.pool)? {
        return backed_pool::clean(engine, &args.pool);
    }
    let pool = existing_log(&args.pool)?;
    let paths = match PoolPaths::of_pool(&pool) {
        Ok(paths) => paths,
        Err(error) => return without_supervisors(&pool, false, error),
    };
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
            if destage_device(&pool, false)?.is_none() {
                drop(lock);
                recover(&pool, &paths, RecoverOptions::default())?;
            }
        }
    }
    Ok(())
}
