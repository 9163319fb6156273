//! `tidegate flush`, `recover` and `set` for a pool that remembers its backing, such as a cache:
//! its data is destaged to the backing.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use tidegate::pmem::{Region, RegionOptions};
use tidegate::pool::glance;
use tidegate::size::Size;
use tidegate::stack::REGISTRY;
use tidegate::tier::{Engine, State};
use tidegate_run::open_pool_file;

use super::destage;
use crate::args::RecoverArgs;
use crate::control::{Answer, Flushed, borrowed, flush_of, purge_of, stat_of};
use crate::output::{line, progress};

/// Time between two questions to a server about its progress.
const ASK_EVERY: Duration = Duration::from_millis(100);

/// Returns the engine of the pool at `path`, also while a server has the pool open. Returns `None`
/// if the engine's pools do not remember their backings, or if no call reads the device.
///
/// # Errors
/// The path does not exist, cannot be a pool, or cannot be opened.
pub(super) fn engine_at(path: &Path) -> Result<Option<&'static dyn Engine>> {
    let found = glance(&open_pool_file(path)?).ok();
    let engine = found.and_then(|found| REGISTRY.of_glance(found));
    Ok(engine.filter(|engine| engine.traits().remembers_backing))
}

/// Asks the server of `pool` to destage everything it holds. Returns false if there is no server.
///
/// # Errors
/// The server does not answer, or the backing or the memory failed.
pub(super) fn flush_served(pool: &Path) -> Result<bool> {
    let Answer::Of(flushed) = flush_of(pool)? else { return Ok(false) };
    let Flushed { left_bytes, uncommitted_bytes, has_no_backing } = flushed;
    let shown = pool.display();
    let size = |bytes| Size { bytes };
    let newer_bytes = left_bytes.saturating_sub(uncommitted_bytes);
    let newer = (newer_bytes > 0).then(|| format!("{} written since", size(newer_bytes)));
    let uncommitted = (uncommitted_bytes > 0).then(|| {
        let bytes = size(uncommitted_bytes);
        format!("{bytes} that no client has flushed, which --atomic-flush keeps back")
    });
    let left: Vec<_> = newer.into_iter().chain(uncommitted).collect();
    if left.is_empty() && has_no_backing {
        line(format_args!("{shown}: all is in the pool, which has no backing"))?;
    } else if left.is_empty() {
        line(format_args!("{shown}: all is written that its server held for the backing"))?;
    } else {
        let left = left.join(", and ");
        line(format_args!("{shown}: all is written that its server held, but for {left}"))?;
    }
    Ok(true)
}

/// Cleans the pool at `pool` and removes all its pages: through its server, or here if it has none.
///
/// # Errors
/// The engine has no clean pages; the backing cannot be opened, or fails.
pub(super) fn purge(pool: &Path) -> Result<()> {
    let shown = pool.display();
    let Some(engine) = engine_at(pool)?.filter(|engine| engine.traits().has_clean_pages) else {
        let found =
            glance(&open_pool_file(pool)?).with_context(|| format!("cannot read {shown}"))?;
        bail!(
            "{shown} holds {}, which keeps no pages of a backing: --purge needs a cache pool, \
             leave it out",
            REGISTRY.words(found)
        );
    };
    let purged = match purge_of(pool)? {
        Answer::Of(purged) => purged,
        Answer::Nobody | Answer::Supervisor => {
            let Some(backing) = backing_of(pool)? else { return tell_unused(engine, pool) };
            destage::purge(pool, &backing)?
        }
    };
    let freed = Size { bytes: purged.freed_bytes };
    if purged.left_bytes == 0 {
        return Ok(line(format_args!(
            "{shown}: the backing has all pages, and the cache is empty: {freed} were given up"
        ))?);
    }
    let left = Size { bytes: purged.left_bytes };
    Ok(line(format_args!(
        "{shown}: {freed} were given up, and {left} are left: written or read since, or with \
         --atomic-flush and flushed by no client"
    ))?)
}

/// Cleans a pool whose server was killed.
///
/// # Errors
/// The pool has a server; an option is for logs only; the backing cannot be opened, or fails.
pub(super) fn recover(engine: &dyn Engine, args: &RecoverArgs) -> Result<()> {
    let (pool, shown) = (&args.pool, args.pool.display());
    let options =
        [("--discard", args.discard), ("--replay", args.replay), ("--salvage", args.salvage)];
    if let Some((option, _)) = options.into_iter().find(|(_, is_given)| *is_given) {
        bail!(
            "{shown} holds a {engine} pool, and {option} is for logs; `tidegate create --force` \
             throws its dirty pages away"
        );
    }
    if matches!(stat_of(pool)?, Answer::Of(_)) {
        bail!(
            "{shown} is being served, and needs no recovery; `tidegate flush` writes its dirty \
             pages to the backing"
        );
    }
    clean(engine, pool)
}

/// Changes `settings` of the pool at `pool`, which no server has open. Its data stays in the pool,
/// except pages that leave with their slots.
///
/// # Errors
/// The pool was never used, its backing cannot be opened, or a setting cannot be changed.
pub(super) fn set(engine: &dyn Engine, pool: &Path, settings: &[(String, String)]) -> Result<()> {
    let shown = pool.display();
    let Some(backing) = backing_of(pool)? else {
        bail!("{shown}: the {engine} was never used: serve it with --backing first");
    };
    let stack = destage::open(pool, &backing, false)?;
    stack.set(&borrowed(settings)).with_context(|| shown.to_string())?;
    follow_resize(pool, settings, || Ok(stack.stat(|_| ()).tiers))
}

/// Shows the progress of a change of the size of `pool`, if `settings` have one, until it is done.
/// A pool becomes smaller in the background, and `tiers` returns its progress.
///
/// # Errors
/// The change fails.
pub(super) fn follow_resize(
    pool: &Path,
    settings: &[(String, String)],
    tiers: impl Fn() -> Result<Vec<State>>,
) -> Result<()> {
    if settings.iter().all(|(key, _)| key != "size") {
        return Ok(());
    }
    let bar = progress("moving pages to the backing");
    loop {
        let tiers = tiers()?;
        let resize = tiers.iter().map(|tier| &tier.details["resize"]).find(|it| it.is_object());
        let Some(resize) = resize else {
            bar.finish_and_clear();
            return Ok(());
        };
        if let Some(error) = resize["error"].as_str() {
            bail!("{}: the change of the size failed: {error}", pool.display());
        }
        let count = |key: &str| resize[key].as_u64().unwrap_or_default();
        bar.set_length(count("slots"));
        bar.set_position(count("slots").saturating_sub(count("slots_left")));
        std::thread::sleep(ASK_EVERY);
    }
}

/// Returns the backing of the pool at `pool`, or `None` if the pool was never used.
///
/// # Errors
/// The pool cannot be opened, or is damaged.
pub(super) fn backing_of(pool: &Path) -> Result<Option<String>> {
    let options = RegionOptions { read_only: true, ..RegionOptions::default() };
    let region = Arc::new(Region::open(pool, &options)?);
    let engine = REGISTRY.identify(&region)?;
    engine.backing_of(&region).with_context(|| format!("pool {}", pool.display()))
}

/// Cleans the pool at `pool`, which no server has open.
///
/// # Errors
/// The backing cannot be opened, or fails.
pub(super) fn clean(engine: &dyn Engine, pool: &Path) -> Result<()> {
    let shown = pool.display();
    let Some(backing) = backing_of(pool)? else { return tell_unused(engine, pool) };
    destage::destage(pool, &backing, false)?;
    Ok(line(format_args!("{shown}: the backing {backing} has all pages"))?)
}

fn tell_unused(engine: &dyn Engine, pool: &Path) -> Result<()> {
    Ok(line(format_args!("{}: the {engine} was never used", pool.display()))?)
}
