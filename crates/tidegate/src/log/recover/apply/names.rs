//! Names: links under temporary names, renames into place, removals.
//!
//! All files that have to move are linked before any is renamed, so that no rename takes a file's only name.

use std::io;
use std::path::Path;

use rustix::io::Errno;

use super::survey::{Occupant, Survey, copy_of};
use super::{Context, Failure, Fate, FileSystem, Finding, Outcome};
use crate::log::recover::plan::Taken;

/// A name to be given.
#[derive(Clone, Copy)]
struct Move {
    file: usize,
    path: usize,
}

/// Whether a file may get a name.
enum Verdict {
    /// It has it.
    Done,
    /// The name is free, or may be taken over.
    Free,
    /// Something else has it.
    Occupied,
    /// A file of the plan has it that would be lost.
    Blocked,
}

struct Names<'a, 'b, F> {
    context: &'a Context<'b, F>,
    survey: &'a mut Survey,
    /// By file: its bytes are as they must be.
    ready: &'a [bool],
    outcome: &'a mut Outcome,
}

/// Makes all names as the plan has them.
pub(super) fn arrange<F: FileSystem>(
    context: &Context<'_, F>,
    survey: &mut Survey,
    ready: &[bool],
    outcome: &mut Outcome,
) {
    let mut names = Names { context, survey, ready, outcome };
    let moves = names.moves();
    let anchored: Vec<_> = moves.into_iter().filter(|it| names.anchor(*it)).collect();
    for it in anchored {
        if let Err(failure) = names.place(it) {
            names.outcome.failures.push(failure);
        }
    }
    for path in 0..context.plan.paths.len() {
        names.remove(path);
    }
    for file in 0..context.plan.files.len() {
        names.drop_temps(file);
    }
}

impl<F: FileSystem> Names<'_, '_, F> {
    /// The names that are to be given and can be; the others are reported.
    fn moves(&mut self) -> Vec<Move> {
        let mut moves = Vec::new();
        for (file, plan) in self.context.plan.files.iter().enumerate() {
            if !self.ready[file] || !self.survey.places[file].is_found() {
                continue;
            }
            for name in plan.names.iter().filter(|name| name.made) {
                let it = Move { file, path: name.path };
                match self.verdict(it, false) {
                    Verdict::Done => {}
                    Verdict::Occupied => self.outcome.failures.push(self.occupied(it)),
                    Verdict::Free | Verdict::Blocked => moves.push(it),
                }
            }
        }
        moves
    }

    /// Whether a file may have a name; `careful`: without another losing its last.
    fn verdict(&self, it: Move, careful: bool) -> Verdict {
        let taken = &self.context.plan.paths[it.path].taken;
        match self.survey.occupants[it.path] {
            Occupant::File(file) if file == it.file => Verdict::Done,
            Occupant::File(other) if !taken.contains(&Taken::File(other)) => Verdict::Occupied,
            Occupant::File(other) if careful && !self.can_lose(other, it.path) => Verdict::Blocked,
            Occupant::Stranger(identity) if !taken.contains(&Taken::Identity(identity)) => {
                Verdict::Occupied
            }
            Occupant::Nothing | Occupant::File(_) | Occupant::Stranger(_) => Verdict::Free,
            Occupant::Directory | Occupant::Unknown(_) => Verdict::Occupied,
        }
    }

    /// The file is dead, or is found without its name `path`.
    fn can_lose(&self, file: usize, path: usize) -> bool {
        !self.survey.places[file].temps.is_empty() || self.can_do_without(file, path)
    }

    /// The file is dead, or has one of the names that it shall have beside `path`.
    fn can_do_without(&self, file: usize, path: usize) -> bool {
        let (plan, place) = (&self.context.plan.files[file], &self.survey.places[file]);
        let is_final = |at: &usize| *at != path && plan.names.iter().any(|name| name.path == *at);
        match plan.fate {
            Fate::Dead => self.ready[file],
            Fate::Named | Fate::Displaced => place.at.iter().any(is_final),
        }
    }

    /// Why a file does not get its name.
    fn occupied(&self, it: Move) -> Failure {
        if let Occupant::Unknown(error) = &self.survey.occupants[it.path] {
            return self.context.failed(it.path, "look at the file", copy_of(error));
        }
        let (file, path) = (self.context.plan.files[it.file].id, self.context.text(it.path));
        Failure::Occupied { file, path }
    }

    /// Gives the file a temporary name beside the one that it is to get; whether it has one.
    fn anchor(&mut self, it: Move) -> bool {
        let anchored = self.try_anchor(it);
        anchored
            .map_err(|error| self.context.failed(it.path, "link the file", error))
            .map_err(|failure| self.outcome.failures.push(failure))
            .is_ok()
    }

    fn try_anchor(&mut self, it: Move) -> io::Result<()> {
        let temp = self.context.temp(it.file, it.path);
        if self.survey.places[it.file].temps.contains(&temp) {
            return Ok(());
        }
        self.context.make_parents(it.path, &self.context.plan.files[it.file])?;
        let from = self.context.way_to(&self.survey.places[it.file]);
        let from = from.ok_or(io::ErrorKind::NotFound)?;
        match self.context.files.link(&from, &temp) {
            Err(error) if is_refusal(&error) => self.move_to_temp(it, &temp, error)?,
            linked => linked?,
        }
        self.survey.places[it.file].temps.push(temp);
        Ok(())
    }

    /// Without hard links: renames a name that the file shall not keep.
    fn move_to_temp(&mut self, it: Move, temp: &Path, error: io::Error) -> io::Result<()> {
        let plan = &self.context.plan.files[it.file];
        let place = &mut self.survey.places[it.file];
        let is_kept = |path: &usize| plan.names.iter().any(|name| name.path == *path);
        if let Some(at) = place.at.iter().position(|path| !is_kept(path)) {
            let path = place.at[at];
            self.context.files.rename(self.context.path(path), temp)?;
            place.at.swap_remove(at);
            self.survey.occupants[path] = Occupant::Nothing;
            return Ok(());
        }
        let Some(other) = place.temps.pop() else { return Err(error) };
        self.context.files.rename(&other, temp)
    }

    fn place(&mut self, it: Move) -> Result<(), Failure> {
        let (file, path) = (self.context.plan.files[it.file].id, self.context.text(it.path));
        match self.verdict(it, true) {
            Verdict::Done => return Ok(()),
            Verdict::Occupied => return Err(self.occupied(it)),
            Verdict::Blocked => return Err(Failure::Blocked { file, path }),
            Verdict::Free => {}
        }
        let fail = |error| self.context.failed(it.path, "rename the file into place", error);
        // Two names in one directory share a temporary one, which the first has taken.
        self.try_anchor(it).map_err(fail)?;
        let temp = self.context.temp(it.file, it.path);
        self.context.files.rename(&temp, self.context.path(it.path)).map_err(fail)?;
        self.survey.leave(it.path);
        self.survey.occupants[it.path] = Occupant::File(it.file);
        let place = &mut self.survey.places[it.file];
        place.temps.retain(|other| *other != temp);
        place.at.push(it.path);
        self.outcome.names_placed += 1;
        Ok(())
    }

    /// Removes the name, if the log took it and whose it is can do without it.
    fn remove(&mut self, path: usize) {
        let plan = &self.context.plan.paths[path];
        if plan.binding.is_some() {
            return;
        }
        match self.survey.occupants[path] {
            Occupant::File(file) if plan.taken.contains(&Taken::File(file)) => {
                if !self.can_do_without(file, path) {
                    self.keep(file, path);
                    return;
                }
            }
            Occupant::Stranger(identity) if plan.taken.contains(&Taken::Identity(identity)) => {}
            Occupant::Unknown(ref error) if !plan.taken.is_empty() => {
                let failure = self.context.failed(path, "look at the file", copy_of(error));
                self.outcome.failures.push(failure);
                return;
            }
            _ => return,
        }
        match self.context.files.unlink(self.context.path(path)) {
            Ok(()) => {
                self.survey.leave(path);
                self.outcome.names_removed += 1;
            }
            Err(error) => {
                self.outcome.failures.push(self.context.failed(path, "remove the name", error));
            }
        }
    }

    fn keep(&mut self, file: usize, path: usize) {
        let plan = &self.context.plan.files[file];
        // Where the file failed, that was reported, and the next recovery removes the name.
        if !self.ready[file] || plan.has_made_names() {
            return;
        }
        for &known in &plan.known_paths {
            if let Occupant::Unknown(error) = &self.survey.occupants[known] {
                let failure = self.context.failed(known, "look at the file", copy_of(error));
                self.outcome.failures.push(failure);
                return;
            }
        }
        self.outcome.findings.add(Finding::NameKept { path: self.context.text(path) });
    }

    /// Removes the temporary names of a file that has others, or is dead.
    fn drop_temps(&mut self, file: usize) {
        let place = &mut self.survey.places[file];
        let is_needed = self.context.plan.files[file].fate != Fate::Dead && place.at.is_empty();
        if is_needed {
            return;
        }
        for temp in std::mem::take(&mut place.temps) {
            if let Err(source) = self.context.files.unlink(&temp) {
                let path = temp.display().to_string();
                let doing = "remove the temporary name";
                self.outcome.failures.push(Failure::Io { path, doing, source });
            }
        }
    }
}

impl Survey {
    /// Nothing is at `path` any more.
    fn leave(&mut self, path: usize) {
        let former = std::mem::replace(&mut self.occupants[path], Occupant::Nothing);
        if let Occupant::File(file) = former {
            self.places[file].at.retain(|at| *at != path);
        }
    }
}

/// The file system has no hard links, or not for this file.
fn is_refusal(error: &io::Error) -> bool {
    let refusals = [Errno::PERM, Errno::OPNOTSUPP, Errno::NOSYS, Errno::MLINK];
    error.raw_os_error().is_some_and(|code| refusals.iter().any(|it| it.raw_os_error() == code))
}
