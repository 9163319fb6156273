//! A file's bytes and size; a missing file is made again.

use std::io;
use std::path::PathBuf;

use parking_lot::Mutex;

use super::survey::{Occupant, Place, Survey, copy_of};
use super::{Context, Failure, Fate, FilePlan, FileSystem, FoundKind, last_path};
use crate::log::recover::extents::{Content, Extent};
use crate::log::recover::{gather, parallel};

/// Data of a file that one thread copies at a time.
const PART_BYTES: u64 = 8 << 20;

/// What was done for a file.
pub(super) enum Restored {
    /// Nothing was to be done.
    Untouched,
    /// The file was found and written.
    Written,
    /// It was not found, and something outside Tidegate took its name.
    Vanished,
    /// It was made again.
    Created(Created),
}

/// A file under its temporary name.
pub(super) struct Created {
    pub(super) identity: u64,
    /// The name that it shall get.
    pub(super) path: usize,
    pub(super) temp: PathBuf,
    pub(super) owner_set: bool,
}

/// Sets bytes and size of a file.
pub(super) fn restore<F: FileSystem>(
    context: &Context<'_, F>,
    survey: &Survey,
    index: usize,
) -> Result<Restored, Failure> {
    let (file, place) = (&context.plan.files[index], &survey.places[index]);
    if file.records == 0 {
        return Ok(Restored::Untouched);
    }
    if let Some(error) = &place.trouble {
        return Err(context.failed(last_path(file), "look for a temporary file", copy_of(error)));
    }
    if place.is_found() {
        return write_found(context, file, place);
    }
    let wanted = file.has_data() || file.has_made_names();
    match file.fate {
        _ if !wanted => Ok(Restored::Untouched),
        Fate::Dead => Ok(Restored::Untouched),
        Fate::Displaced => Ok(Restored::Vanished),
        Fate::Named => {
            check_absent(context, survey, file)?;
            match file.names.iter().find(|name| name.made) {
                Some(name) if file.born => create(context, index, name.path).map(Restored::Created),
                _ => {
                    let path = context.text(last_path(file));
                    Err(Failure::Missing { file: file.id, path })
                }
            }
        }
    }
}

/// A file that was not found is missing only if all places where it may be could be looked at.
fn check_absent<F: FileSystem>(
    context: &Context<'_, F>,
    survey: &Survey,
    file: &FilePlan,
) -> Result<(), Failure> {
    for &path in &file.known_paths {
        if let Occupant::Unknown(error) = &survey.occupants[path] {
            return Err(context.failed(path, "look at the file", copy_of(error)));
        }
    }
    Ok(())
}

fn write_found<F: FileSystem>(
    context: &Context<'_, F>,
    file: &FilePlan,
    place: &Place,
) -> Result<Restored, Failure> {
    if !file.has_data() {
        return Ok(Restored::Untouched);
    }
    let shown = place.at.first().copied().unwrap_or(last_path(file));
    let Some(path) = context.way_to(place) else { return Ok(Restored::Untouched) };
    let fail = |doing| move |error| context.failed(shown, doing, error);
    let found = context.files.look(&path).map_err(fail("look at the file"))?;
    let names_found = (place.at.len() + place.temps.len()) as u64;
    // A name that the log does not know may keep a dead file alive.
    if file.fate == Fate::Dead && found.is_none_or(|found| found.links <= names_found) {
        return Ok(Restored::Untouched);
    }
    let opened = context.files.open(&path).map_err(fail("open the file"))?;
    let found = context.files.examine(&opened).map_err(fail("look at the file"))?;
    if Some(found.identity) != place.identity || found.kind != FoundKind::File {
        return Err(Failure::Occupied { file: file.id, path: context.text(shown) });
    }
    write_durably(context, file, &opened).map_err(|(doing, error)| fail(doing)(error))?;
    Ok(Restored::Written)
}

fn write_durably<F: FileSystem>(
    context: &Context<'_, F>,
    file: &FilePlan,
    opened: &F::File,
) -> Step {
    let write = || {
        let found = context.files.examine(opened).map_err(|error| ("look at the file", error))?;
        fill(context, file, opened, found.size_bytes)
    };
    write()?;
    // A sync that fails may tell of what went wrong before, and leaves clean what the disk did not take.
    sync(context, opened).or_else(|_| write().and_then(|()| sync(context, opened)))
}

fn create<F: FileSystem>(
    context: &Context<'_, F>,
    index: usize,
    path: usize,
) -> Result<Created, Failure> {
    let file = &context.plan.files[index];
    let temp = context.temp(index, path);
    let fail = |doing| move |error| context.failed(path, doing, error);
    context.make_parents(path, file).map_err(fail("make the directory"))?;
    let opened = context.files.create(&temp).map_err(fail("make the file again"))?;
    let filled = (|| {
        let found = context.files.examine(&opened).map_err(|error| ("look at the file", error))?;
        fill(context, file, &opened, 0)?;
        // After the data: writing takes set-user-id away.
        let owner_set = context.files.set_owner(&opened, file.mode, file.uid, file.gid).is_ok();
        sync(context, &opened)?;
        Ok(Created { identity: found.identity, path, temp: temp.clone(), owner_set })
    })();
    filled.map_err(|(doing, error)| {
        // What is half made only takes room that others may need.
        let _ = context.files.unlink(&temp);
        fail(doing)(error)
    })
}

type Step = Result<(), (&'static str, io::Error)>;

/// Sizes, bytes, zeroes.
fn fill<F: FileSystem>(
    context: &Context<'_, F>,
    file: &FilePlan,
    opened: &F::File,
    size_bytes: u64,
) -> Step {
    let files = context.files;
    let sized = |error| ("set the size", error);
    let mut size = size_bytes;
    // First down, so that all that is behind the cut and not written again is zero.
    if let Some(cut) = file.cut.filter(|cut| *cut < size) {
        files.set_size(opened, cut).map_err(sized)?;
        size = cut;
    }
    let end = file.size.unwrap_or(size.max(file.size_min));
    if end != size {
        files.set_size(opened, end).map_err(sized)?;
    }
    copy(context, &file.extents, opened)?;
    // Zeroes do not make a file longer; where they did, a record of the size says so.
    for extent in file.extents.iter().filter(|extent| extent.content == Content::Zero) {
        let until = extent.end.min(end);
        if extent.start < until {
            let zeroed = files.zero(opened, extent.start, until - extent.start);
            zeroed.map_err(|error| ("zero a range", error))?;
        }
    }
    Ok(())
}

fn sync<F: FileSystem>(context: &Context<'_, F>, opened: &F::File) -> Step {
    context.files.sync(opened).map_err(|error| ("sync the file", error))
}

/// Copies all data, joined to large writes where it is adjacent; of a large file several parts at a time: while the kernel has one,
/// the others are read from the log or are on their way to the disk.
fn copy<F: FileSystem>(context: &Context<'_, F>, extents: &[Extent], opened: &F::File) -> Step {
    let parts = parts(extents);
    // The kernel lets one write to a file at a time, and who waits there may use up a CPU.
    let turn = Mutex::new(());
    let copied = parallel::map(context.options.workers, &parts, |part| {
        copy_part(context, part, opened, &turn)?;
        if let (Some(first), Some(last), true) = (part.first(), part.last(), parts.len() > 1) {
            context.files.start_sync(opened, first.start, last.end - first.start);
        }
        Ok(())
    });
    copied.into_iter().collect()
}

/// The extents in parts of [`PART_BYTES`] or more.
fn parts(extents: &[Extent]) -> Vec<&[Extent]> {
    let (mut parts, mut from, mut bytes) = (Vec::new(), 0, 0);
    for (index, extent) in extents.iter().enumerate() {
        bytes += if extent.content == Content::Zero { 0 } else { extent.bytes() };
        if bytes >= PART_BYTES || index + 1 == extents.len() {
            parts.push(&extents[from..=index]);
            (from, bytes) = (index + 1, 0);
        }
    }
    parts
}

fn copy_part<F: FileSystem>(
    context: &Context<'_, F>,
    extents: &[Extent],
    opened: &F::File,
    turn: &Mutex<()>,
) -> Step {
    gather(extents.iter().copied(), read(context), |batch| {
        let turn = turn.lock();
        for (offset, bytes) in batch.runs() {
            let written = context.files.write(opened, offset, bytes);
            written.map_err(|error| ("write to the file", error))?;
        }
        drop(turn);
        context.meter.add(batch.used() as u64);
        Ok(())
    })
}

fn read<F: FileSystem>(context: &Context<'_, F>) -> impl Fn(u64, &mut [u8]) -> Step {
    |position, buf| {
        let read = context.data.read(position, buf);
        read.map_err(|error| ("read its data from the log", error))
    }
}
