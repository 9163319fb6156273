//! Decides how recovery changes names, from the log's records and the names on the disk. The code
//! is pure, and generic over names and files: `tidegate-sim` runs a million histories on it.
//!
//! The rules (numbers as in docs/decisions/run-logs-what-was-synced.md, stage B):
//! - B6: a name gets its last file if the disk has no file there, or one that the name had in the
//!   log. Any other name stays. A file with more or fewer names on the disk than the log explains
//!   was moved from outside: it gets no names, and a name that a rename took from it stays.
//! - B7: a missing file is created again only if it has a name at the end of the log, the log has
//!   the whole file, and no commit can have included it.
//! - A file that has a name at the end of the log is never left without one. If it would lose all
//!   its names because its last name is taken, it keeps them.

use std::collections::{BTreeMap, BTreeSet};

/// A change of names in a record: `S` is a name in a directory, `F` a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NameFact<S, F> {
    /// The log has the whole file, which has only this name.
    Made(S),
    /// The file got a name.
    Linked(S),
    /// The file lost a name.
    Unlinked(S),
    /// The file got the name `to` in exchange for `from`.
    Renamed {
        /// The former name.
        from: S,
        /// The new name.
        to: S,
        /// The file that had the new name, as its only one.
        replaced: Option<F>,
    },
}

/// The names and files on the disk.
pub trait DiskNames<S, F> {
    /// Returns the file at a name.
    fn at(&self, name: &S) -> Option<F>;

    /// Returns the number of a file's names.
    fn links(&self, file: &F) -> u64;

    /// Returns whether no commit can have included the file, because its directory is not newer.
    /// The log has the whole file.
    fn is_unseen(&self, file: &F) -> bool;
}

/// The source of a file that gets names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Source {
    /// The disk has the file.
    Disk,
    /// The file is created again.
    Log,
}

/// The changes that recovery makes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Decisions<S, F> {
    /// The new file of each name to change, or `None` to remove the name.
    pub names: BTreeMap<S, Option<F>>,
    /// The files that get names.
    pub files: BTreeMap<F, Source>,
}

/// The log's facts about a name.
#[derive(Debug)]
struct Name<F> {
    /// The files that had the name at some time in the log.
    files: BTreeSet<F>,
    last: Option<F>,
    /// The last file that was renamed away from the name.
    renamed: Option<F>,
}

/// The log's facts about names, in the order of its records.
#[derive(Debug, Default)]
pub struct NameStories<S, F> {
    names: BTreeMap<S, Name<F>>,
    /// Number of each file's names at the end of the log.
    links: BTreeMap<F, u64>,
    /// The files that the log can create again, and the name of each when it was created.
    made: BTreeMap<F, S>,
}

impl<S: Ord + Clone, F: Ord + Clone> NameStories<S, F> {
    /// Adds the next record. It changes names of `file`, which then has `links` names.
    pub fn add(&mut self, file: &F, fact: NameFact<S, F>, links: u64) {
        self.links.insert(file.clone(), links);
        match fact {
            NameFact::Made(at) => {
                self.made.insert(file.clone(), at.clone());
                self.set(at, file, true);
            }
            NameFact::Linked(to) => _ = self.set(to, file, true),
            NameFact::Unlinked(from) => _ = self.set(from, file, false),
            NameFact::Renamed { from, to, replaced } => {
                self.set(from, file, false).renamed = Some(file.clone());
                let name = self.set(to, file, true);
                name.files.extend(replaced.clone());
                if let Some(links) = replaced.and_then(|file| self.links.get_mut(&file)) {
                    *links = links.saturating_sub(1);
                }
            }
        }
    }

    fn set(&mut self, at: S, file: &F, has_it: bool) -> &mut Name<F> {
        let unknown = || Name { files: BTreeSet::new(), last: None, renamed: None };
        let name = self.names.entry(at).or_insert_with(unknown);
        name.files.insert(file.clone());
        name.last = has_it.then(|| file.clone());
        name.renamed = None;
        name
    }

    /// Returns all names that the log knows.
    pub fn names(&self) -> impl Iterator<Item = &S> {
        self.names.keys()
    }

    /// Returns all files that the log knows at some name.
    pub fn files(&self) -> BTreeSet<&F> {
        self.names.values().flat_map(|name| &name.files).collect()
    }

    /// Returns the files that had the name at some time in the log.
    pub fn files_at(&self, at: &S) -> impl Iterator<Item = &F> {
        self.names.get(at).into_iter().flat_map(|name| &name.files)
    }

    /// Returns whether the file had the name at some time in the log.
    pub fn knows(&self, at: &S, file: &F) -> bool {
        self.names.get(at).is_some_and(|name| name.files.contains(file))
    }

    /// Returns the file that has the name at the end of the log.
    pub fn last_of(&self, at: &S) -> Option<&F> {
        self.names.get(at)?.last.as_ref()
    }

    /// Returns the name that the file was created with, if the log can create it again.
    pub fn made_at(&self, file: &F) -> Option<&S> {
        self.made.get(file)
    }

    /// Returns the known names that a file has at the end of the log.
    pub fn last_names<'a>(&'a self, file: &'a F) -> impl Iterator<Item = &'a S> {
        let names = self.names.iter().filter(move |(_, name)| name.last.as_ref() == Some(file));
        names.map(|(at, _)| at)
    }

    /// Returns whether a process outside has changed the file's names: the number of its names that
    /// the log does not know has changed.
    fn was_moved(&self, disk: &impl DiskNames<S, F>, file: &F) -> bool {
        let names = || self.names.iter().filter(|(_, name)| name.files.contains(file));
        let last = names().filter(|(_, name)| name.last.as_ref() == Some(file)).count() as u64;
        let found = names().filter(|(at, _)| disk.at(at).as_ref() == Some(file)).count() as u64;
        let others = self.links.get(file).map(|links| links.saturating_sub(last));
        others.is_some_and(|others| disk.links(file) != others + found)
    }

    /// Decides the changes.
    pub fn decide(&self, disk: &impl DiskNames<S, F>) -> Decisions<S, F> {
        let mut names = BTreeMap::new();
        for (at, name) in &self.names {
            let found = disk.at(at);
            let is_known = found.as_ref().is_none_or(|file| name.files.contains(file));
            let stays = name.renamed.as_ref().is_some_and(|file| self.was_moved(disk, file));
            if !is_known || stays || found == name.last {
                continue;
            }
            if name.last.as_ref().is_none_or(|file| self.source(disk, file).is_some()) {
                names.insert(at.clone(), name.last.clone());
            }
        }
        self.keep_names(disk, &mut names);
        let files = names.values().flatten();
        let files = files.filter_map(|file| Some((file.clone(), self.source(disk, file)?)));
        Decisions { files: files.collect(), names }
    }

    /// Returns the source of the file, or `None` if recovery must not give it names.
    fn source(&self, disk: &impl DiskNames<S, F>, file: &F) -> Option<Source> {
        if disk.links(file) > 0 {
            return (!self.was_moved(disk, file)).then_some(Source::Disk);
        }
        (self.made.contains_key(file) && disk.is_unseen(file)).then_some(Source::Log)
    }

    /// Drops changes that would take a file's last name, if the log leaves the file a name.
    fn keep_names(&self, disk: &impl DiskNames<S, F>, names: &mut BTreeMap<S, Option<F>>) {
        let lasting: BTreeSet<&F> =
            self.names.values().filter_map(|name| name.last.as_ref()).collect();
        loop {
            let mut lost: BTreeMap<F, u64> = BTreeMap::new();
            for at in names.keys() {
                if let Some(file) = disk.at(at) {
                    *lost.entry(file).or_default() += 1;
                }
            }
            let gets_one = |file: &F| names.values().flatten().any(|gets| gets == file);
            lost.retain(|file, lost| {
                lasting.contains(file) && disk.links(file) <= *lost && !gets_one(file)
            });
            if lost.is_empty() {
                return;
            }
            names.retain(|at, _| disk.at(at).is_none_or(|file| !lost.contains_key(&file)));
        }
    }

    /// Returns the number of bits that encode decisions.
    pub fn bits(&self) -> usize {
        self.names.len() + self.made.len()
    }

    /// Encodes decisions as bits: for each name, in order, whether it changes, then for each file
    /// that the log can create, whether it is created.
    pub fn to_bits(&self, decisions: &Decisions<S, F>) -> Vec<bool> {
        let names = self.names.keys().map(|at| decisions.names.contains_key(at));
        let made = self.made.keys();
        let made = made.map(|file| decisions.files.get(file) == Some(&Source::Log));
        names.chain(made).collect()
    }

    /// Decodes the bits of [`to_bits`](Self::to_bits). Returns `None` if the log's names differ.
    pub fn from_bits(&self, bits: &[bool]) -> Option<Decisions<S, F>> {
        let (of_names, of_made) = bits.split_at_checked(self.names.len())?;
        if of_made.len() != self.made.len() {
            return None;
        }
        let changed = self.names.iter().zip(of_names).filter(|(_, is_changed)| **is_changed);
        let names: BTreeMap<S, Option<F>> =
            changed.map(|((at, name), _)| (at.clone(), name.last.clone())).collect();
        let made = self.made.keys().zip(of_made).filter(|(_, is_made)| **is_made);
        let made: BTreeSet<&F> = made.map(|(file, _)| file).collect();
        let source = |file| if made.contains(file) { Source::Log } else { Source::Disk };
        let files = names.values().flatten().map(|file| (file.clone(), source(file)));
        Some(Decisions { files: files.collect(), names })
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    type Stories = NameStories<&'static str, u64>;

    #[derive(Default)]
    struct Disk {
        names: Vec<(&'static str, u64)>,
        /// Files of names that the log does not know.
        others: Vec<u64>,
        is_seen: bool,
    }

    impl DiskNames<&'static str, u64> for Disk {
        fn at(&self, name: &&'static str) -> Option<u64> {
            self.names.iter().find(|(at, _)| at == name).map(|(_, file)| *file)
        }

        fn links(&self, file: &u64) -> u64 {
            let known = self.names.iter().map(|(_, other)| other);
            known.chain(&self.others).filter(|other| *other == file).count() as u64
        }

        fn is_unseen(&self, _: &u64) -> bool {
            !self.is_seen
        }
    }

    /// Makes file 1 at `tmp` and renames it to `new`, over file 2.
    fn replaced() -> Stories {
        let mut stories = Stories::default();
        stories.add(&1, NameFact::Made("tmp"), 1);
        let renamed = NameFact::Renamed { from: "tmp", to: "new", replaced: Some(2) };
        stories.add(&1, renamed, 1);
        stories
    }

    type Found = (Vec<(&'static str, Option<u64>)>, Vec<(u64, Source)>);

    fn decided(stories: &Stories, disk: &Disk) -> Found {
        let decisions = stories.decide(disk);
        assert_eq!(stories.from_bits(&stories.to_bits(&decisions)), Some(decisions.clone()));
        (decisions.names.into_iter().collect(), decisions.files.into_iter().collect())
    }

    fn on(names: &[(&'static str, u64)]) -> Disk {
        Disk { names: names.to_vec(), ..Disk::default() }
    }

    #[test]
    fn a_file_at_a_name_that_the_log_knows_gets_its_last_names() {
        let expected = (vec![("new", Some(1)), ("tmp", None)], vec![(1, Source::Disk)]);
        assert_eq!(decided(&replaced(), &on(&[("tmp", 1), ("new", 2)])), expected);
        assert_eq!(decided(&replaced(), &on(&[("new", 1)])), (vec![], vec![]));
    }

    #[test]
    fn a_file_that_is_not_there_is_made_again_unless_its_directory_is_newer() {
        let expected = (vec![("new", Some(1))], vec![(1, Source::Log)]);
        assert_eq!(decided(&replaced(), &on(&[("new", 2)])), expected);
        assert_eq!(decided(&replaced(), &on(&[])), expected);
        let seen = Disk { is_seen: true, ..on(&[("new", 2)]) };
        assert_eq!(decided(&replaced(), &seen), (vec![], vec![]));
    }

    #[test]
    fn a_file_with_names_that_the_log_does_not_explain_is_left_alone() {
        let moved = Disk { others: vec![1], ..on(&[("new", 2)]) };
        assert_eq!(decided(&replaced(), &moved), (vec![], vec![]));
        let linked = Disk { others: vec![1], ..on(&[("tmp", 1), ("new", 2)]) };
        assert_eq!(decided(&replaced(), &linked), (vec![], vec![]));
    }

    #[test]
    fn a_recorded_unlink_is_done_even_so() {
        let mut stories = Stories::default();
        stories.add(&1, NameFact::Linked("cur"), 2);
        stories.add(&1, NameFact::Unlinked("tmp"), 1);
        let disk = Disk { others: vec![1], ..on(&[("tmp", 1), ("cur", 1)]) };
        assert_eq!(decided(&stories, &disk), (vec![("tmp", None)], vec![]));
    }

    #[test]
    fn a_file_that_the_log_ends_without_is_not_made() {
        let mut stories = replaced();
        stories.add(&1, NameFact::Unlinked("new"), 0);
        assert_eq!(decided(&stories, &on(&[])), (vec![], vec![]));
        assert_eq!(decided(&stories, &on(&[("new", 1)])), (vec![("new", None)], vec![]));
        assert_eq!(decided(&stories, &on(&[("tmp", 1)])), (vec![("tmp", None)], vec![]));
    }

    #[test]
    fn what_the_log_does_not_know_at_a_name_stays_and_so_does_the_file() {
        let taken = on(&[("tmp", 1), ("new", 9)]);
        assert_eq!(decided(&replaced(), &taken), (vec![], vec![]));
        assert_eq!(decided(&replaced(), &on(&[("new", 9)])), (vec![], vec![]));
    }

    #[test]
    fn a_file_keeps_its_name_where_a_kept_one_would_take_it() {
        let mut stories = replaced();
        let renamed = NameFact::Renamed { from: "third", to: "tmp", replaced: None };
        stories.add(&3, renamed, 1);
        let taken = on(&[("tmp", 1), ("new", 9), ("third", 3)]);
        assert_eq!(decided(&stories, &taken), (vec![], vec![]));
    }

    #[test]
    fn names_that_were_retired_are_counted() {
        let mut stories = Stories::default();
        stories.add(&1, NameFact::Linked("two"), 2);
        let disk = Disk { others: vec![1], ..on(&[]) };
        let expected = (vec![("two", Some(1))], vec![(1, Source::Disk)]);
        assert_eq!(decided(&stories, &disk), expected);
    }

    #[test]
    fn bits_of_another_log_are_refused() {
        let stories = replaced();
        assert_eq!(stories.from_bits(&[true; 2]), None);
        assert_eq!(stories.from_bits(&[true; 4]), None);
    }
}
