//! Who is where: what the plan's paths and the temporary names lead to.

use std::collections::{BTreeSet, HashMap};
use std::io;
use std::path::PathBuf;

use super::{Context, Fate, FilePlan, FileSystem, Found, FoundKind};
use crate::log::recover::parallel;

/// What is at a path of the plan.
#[derive(Debug)]
pub(super) enum Occupant {
    /// Nothing.
    Nothing,
    /// The plan's file with this index.
    File(usize),
    /// A file that the plan has nothing of, or a thing that is neither file nor directory.
    Stranger(u64),
    /// A directory.
    Directory,
    /// It could not be told.
    Unknown(io::Error),
}

/// Where a file is.
#[derive(Debug, Default)]
pub(super) struct Place {
    /// Its identity, where it was found.
    pub(super) identity: Option<u64>,
    /// The plan's paths that lead to it.
    pub(super) at: Vec<usize>,
    /// The temporary names that lead to it.
    pub(super) temps: Vec<PathBuf>,
    /// Names that lead to it and that the plan does not have.
    pub(super) strays: Vec<PathBuf>,
    /// A temporary name could not be looked at.
    pub(super) trouble: Option<io::Error>,
}

impl Place {
    /// The file was found.
    pub(super) fn is_found(&self) -> bool {
        self.identity.is_some()
    }
}

/// All of it.
pub(super) struct Survey {
    pub(super) occupants: Vec<Occupant>,
    pub(super) places: Vec<Place>,
}

type Looked = io::Result<Option<Found>>;

impl Survey {
    /// Looks at all paths; removes temporary files that no definition in the log is about.
    pub(super) fn take<F: FileSystem>(context: &Context<'_, F>) -> Self {
        let plan = context.plan;
        let workers = context.options.workers;
        let paths: Vec<_> = (0..plan.paths.len()).collect();
        let looked = parallel::map(workers, &paths, |&path| context.files.look(context.path(path)));
        let files: Vec<_> = (0..plan.files.len()).collect();
        let looked_at = parallel::map(workers, &files, |&file| temps_of(context, file));
        let mut this = Self {
            occupants: looked.into_iter().map(occupant).collect(),
            places: plan.files.iter().map(|_| Place::default()).collect(),
        };
        let mut temps = Vec::with_capacity(looked_at.len());
        for (file, looked) in looked_at.into_iter().enumerate() {
            temps.push(looked.unwrap_or_else(|error| {
                this.places[file].trouble = Some(error);
                Vec::new()
            }));
        }
        this.identify(&plan.files, &temps);
        for (file, temps) in temps.into_iter().enumerate() {
            this.sort_temps(context, file, temps);
        }
        this.search(context);
        this
    }

    /// Looks for lost files in the directories that they were known in: a crash may have undone a change of names that the log does
    /// not have. What can be made again is not looked for.
    fn search<F: FileSystem>(&mut self, context: &Context<'_, F>) {
        let mut wanted = HashMap::new();
        let mut directories = BTreeSet::new();
        for (index, file) in context.plan.files.iter().enumerate() {
            if self.places[index].is_found() || !is_lost(file) {
                continue;
            }
            wanted.extend(file.identities.iter().map(|identity| (*identity, index)));
            directories.extend(file.known_paths.iter().map(|path| context.parent(*path)));
        }
        let directories: Vec<_> = directories.into_iter().collect();
        let found = parallel::map(context.options.workers, &directories, |directory| {
            // What cannot be read has nothing that is found: the file is reported as missing.
            let paths = context.files.list(directory).unwrap_or_default();
            let looked = paths.into_iter().filter_map(|path| {
                let found = context.files.look(&path).ok().flatten()?;
                (found.kind == FoundKind::File).then_some((path, found.identity))
            });
            looked.filter(|(_, identity)| wanted.contains_key(identity)).collect::<Vec<_>>()
        });
        for (path, identity) in found.into_iter().flatten() {
            let place = &mut self.places[wanted[&identity]];
            place.identity = Some(identity);
            place.strays.push(path);
        }
    }

    /// Says whose each identity is.
    fn identify(&mut self, files: &[FilePlan], temps: &[Vec<(PathBuf, Found)>]) {
        let identities = |occupant: &Occupant| match occupant {
            Occupant::Stranger(identity) => Some(*identity),
            _ => None,
        };
        let mut seen: BTreeSet<_> = self.occupants.iter().filter_map(identities).collect();
        seen.extend(temps.iter().flatten().map(|(_, found)| found.identity));
        let mut owners = HashMap::new();
        for (index, file) in files.iter().enumerate() {
            // Of several, the newest is the one that holds what recovery did last.
            let newest = file.identities.iter().find(|identity| seen.contains(identity));
            self.places[index].identity = newest.copied();
            owners.extend(newest.map(|identity| (*identity, index)));
        }
        for (path, occupant) in self.occupants.iter_mut().enumerate() {
            if let Some(&file) = identities(occupant).and_then(|identity| owners.get(&identity)) {
                *occupant = Occupant::File(file);
                self.places[file].at.push(path);
            }
        }
    }

    fn sort_temps<F: FileSystem>(
        &mut self,
        context: &Context<'_, F>,
        file: usize,
        temps: Vec<(PathBuf, Found)>,
    ) {
        for (temp, found) in temps {
            if self.places[file].identity == Some(found.identity) {
                self.places[file].temps.push(temp);
            } else if found.kind != FoundKind::Directory {
                // A former run was interrupted before the log knew of it. Where it stays, making the file says why.
                let _ = context.files.unlink(&temp);
            }
        }
    }

    /// A file was made under a temporary name.
    pub(super) fn note_created(&mut self, file: usize, identity: u64, temp: PathBuf) {
        let place = &mut self.places[file];
        place.identity = Some(identity);
        place.temps.push(temp);
    }
}

/// The log has not all of the file, and something that belongs into it.
fn is_lost(file: &FilePlan) -> bool {
    let has_use = file.has_data() || file.has_made_names();
    let can_be_made = file.born && file.has_made_names();
    file.records > 0 && file.fate == Fate::Named && has_use && !can_be_made
}

fn occupant(looked: Looked) -> Occupant {
    match looked {
        Ok(None) => Occupant::Nothing,
        Ok(Some(found)) if found.kind == FoundKind::Directory => Occupant::Directory,
        Ok(Some(found)) => Occupant::Stranger(found.identity),
        Err(error) => Occupant::Unknown(error),
    }
}

/// What is at the temporary names that a file may have: in the directories of the names that it shall get.
fn temps_of<F: FileSystem>(
    context: &Context<'_, F>,
    file: usize,
) -> io::Result<Vec<(PathBuf, Found)>> {
    let names = context.plan.files[file].names.iter().filter(|name| name.made);
    let temps: BTreeSet<_> = names.map(|name| context.temp(file, name.path)).collect();
    let found = |temp: PathBuf| match context.files.look(&temp) {
        Ok(found) => found.map(|found| Ok((temp, found))),
        Err(error) => Some(Err(error)),
    };
    temps.into_iter().filter_map(found).collect()
}

/// The same error once more.
pub(super) fn copy_of(error: &io::Error) -> io::Error {
    match error.raw_os_error() {
        Some(code) => io::Error::from_raw_os_error(code),
        None => io::Error::new(error.kind(), error.to_string()),
    }
}
