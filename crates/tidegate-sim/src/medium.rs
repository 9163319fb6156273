//! The possible states of the medium after a crash.
//!
//! The model, stricter than x86 and as strict as the persistency of 8-byte words allows:
//!
//! 1. The medium is made of aligned 8-byte words; a word is never torn.
//! 2. Each word holds one *durable* value and, in the order of the stores, *pending* ones. A crash
//!    may keep any of these values: a cache line may be evicted, and a streaming store may drain,
//!    at any moment.
//! 3. Words keep their values independently of each other, also within a cache line
//!    ([`StoreOrder::Line`] models that x86 keeps the order of cached stores within a line).
//! 4. A fence makes durable only the words that its *own* thread streamed or wrote back before.
//!    This detects a line that is written back on one CPU and fenced on another.
//! 5. A streaming store that its thread has not fenced may reach the medium after a later store of
//!    another thread.
//!
//! As sets only shrink at fences, the crash states just before each fence and at the end are all
//! the crash states.
//!
//! Entry points: [`Medium::apply`] replays a trace; [`Medium::crash`] returns the [`CrashSet`] of
//! that moment, whose [`CrashSet::exhaustive`] and [`CrashSet::sample`] choose states, and
//! [`CrashSet::build`] makes an image.

use std::collections::BTreeSet;

use crate::random::{Random, mix};
use crate::trace::{Action, Event, Trace};

const WORD_BYTES: usize = 8;
const LINE_WORDS: u32 = 8;
/// Stores longer than this many words are bulk data, which [`Granule::Chunk`] may keep together.
const BULK_WORDS: usize = 8;

/// The units of bulk stores on their way to the medium.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Granule {
    /// Every 8-byte word by itself: for sampling.
    Word,
    /// The words of one store within an aligned chunk of this many bytes go together: for
    /// enumeration.
    Chunk(u32),
}

/// The order of the stores to one cache line on their way to the medium.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StoreOrder {
    /// In any order: engines that pass need no ordering that the CPU does not promise everywhere.
    Word,
    /// Cached stores in program order, as on x86.
    Line,
}

/// The behavior of the medium.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MediumModel {
    /// Units of bulk stores.
    pub granule: Granule,
    /// Order within a line.
    pub order: StoreOrder,
}

#[derive(Debug, Clone, Copy)]
struct Pending {
    store: u32,
    value: u64,
    thread: u8,
    streaming: bool,
    bulk: bool,
    /// A bit for each thread that wrote this value back.
    written_back: u8,
}

impl Pending {
    fn ordered_by_fence_of(&self, thread: usize) -> bool {
        self.written_back & (1 << thread) != 0
            || (self.streaming && usize::from(self.thread) == thread)
    }
}

/// The medium under one region, as far as its events so far determine it.
#[derive(Debug, Clone)]
pub struct Medium {
    durable: Vec<u8>,
    durable_hash: u64,
    pending: Vec<Vec<Pending>>,
    dirty: BTreeSet<u32>,
    stores: u32,
    model: MediumModel,
}

impl Medium {
    /// Makes a medium that holds `image` durably.
    ///
    /// # Panics
    /// If the length of `image` is not a multiple of 64 bytes.
    pub fn new(image: &[u8], model: MediumModel) -> Self {
        assert!(image.len().is_multiple_of(64), "a region is made of whole cache lines");
        Self {
            durable: image.to_vec(),
            durable_hash: 0,
            pending: vec![Vec::new(); image.len() / WORD_BYTES],
            dirty: BTreeSet::new(),
            stores: 0,
            model,
        }
    }

    /// Replays one event of `trace`.
    pub fn apply(&mut self, trace: &Trace, event: &Event) {
        match &event.action {
            Action::Store { offset, data, streaming } => {
                self.store(event.thread, *offset, trace.data(data), *streaming);
            }
            Action::WriteBack { offset, len } => self.write_back(event.thread, *offset, *len),
            Action::Fence => self.fence(event.thread),
            Action::Begin | Action::End => {}
        }
    }

    fn store(&mut self, thread: usize, offset: u64, data: &[u8], streaming: bool) {
        self.stores += 1;
        let mut at = usize::try_from(offset).expect("inside the region");
        let bulk = data.len() > BULK_WORDS * WORD_BYTES;
        let mut rest = data;
        while !rest.is_empty() {
            let (word, skip) = (at / WORD_BYTES, at % WORD_BYTES);
            let (part, tail) = rest.split_at(rest.len().min(WORD_BYTES - skip));
            let mut value = self.visible(word).to_le_bytes();
            value[skip..skip + part.len()].copy_from_slice(part);
            self.pending[word].push(Pending {
                store: self.stores,
                value: u64::from_le_bytes(value),
                thread: u8::try_from(thread).expect("few threads"),
                streaming,
                bulk,
                written_back: 0,
            });
            self.dirty.insert(u32::try_from(word).expect("small regions"));
            at += part.len();
            rest = tail;
        }
    }

    fn write_back(&mut self, thread: usize, offset: u64, len: u64) {
        if len == 0 {
            return;
        }
        let line = |at: u64| u32::try_from(at / 64).expect("small regions");
        let words = line(offset) * LINE_WORDS..(line(offset + len - 1) + 1) * LINE_WORDS;
        for &word in self.dirty.range(words) {
            let last = self.pending[word as usize].last_mut().expect("dirty words have one");
            last.written_back |= 1 << thread;
        }
    }

    fn fence(&mut self, thread: usize) {
        let dirty = std::mem::take(&mut self.dirty);
        self.dirty = dirty.into_iter().filter(|&word| self.fence_word(word, thread)).collect();
    }

    /// Makes the stores to `word` durable that `thread` ordered; returns if others are pending.
    fn fence_word(&mut self, word: u32, thread: usize) -> bool {
        let index = word as usize;
        let pending = &mut self.pending[index];
        let ordered = pending.iter().rposition(|entry| entry.ordered_by_fence_of(thread));
        if let Some(newest) = ordered {
            let value = pending[newest].value;
            let mut at = 0;
            pending.retain(|entry| {
                at += 1;
                at > newest + 1 || (entry.streaming && usize::from(entry.thread) != thread)
            });
            let empty = pending.is_empty();
            self.make_durable(word, value);
            return !empty;
        }
        true
    }

    fn make_durable(&mut self, word: u32, value: u64) {
        let old = self.durable_word(word as usize);
        self.durable_hash ^= word_hash(word, old) ^ word_hash(word, value);
        let at = word as usize * WORD_BYTES;
        self.durable[at..at + WORD_BYTES].copy_from_slice(&value.to_le_bytes());
    }

    fn durable_word(&self, word: usize) -> u64 {
        let bytes = &self.durable[word * WORD_BYTES..(word + 1) * WORD_BYTES];
        u64::from_le_bytes(bytes.try_into().expect("eight bytes"))
    }

    /// Returns the value that a load sees: the newest one.
    fn visible(&self, word: usize) -> u64 {
        self.pending[word].last().map_or_else(|| self.durable_word(word), |entry| entry.value)
    }

    /// Returns the value of `word` if its pending stores up to number `newest` reached the medium.
    fn value_after(&self, word: u32, newest: u32) -> u64 {
        let entries = self.pending[word as usize].iter();
        let kept = entries.rev().find(|entry| entry.store <= newest);
        kept.map_or_else(|| self.durable_word(word as usize), |entry| entry.value)
    }

    /// Returns the possible states of the medium after a crash at this moment.
    pub fn crash(&self) -> CrashSet<'_> {
        let mut groups: Vec<Group> = Vec::new();
        for &word in &self.dirty {
            let group = self.group(word);
            match groups.last_mut() {
                Some(last) if last.joins(&group) => last.absorb(group),
                _ => groups.push(group),
            }
        }
        let units = groups.into_iter().map(|group| self.unit(group));
        CrashSet { medium: self, units: units.filter(Unit::matters).collect() }
    }

    fn group(&self, word: u32) -> Group {
        let entries = &self.pending[word as usize];
        let cell = if self.model.order == StoreOrder::Line && entries.iter().all(|e| !e.streaming) {
            Cell::Line(word / LINE_WORDS)
        } else {
            match self.model.granule {
                Granule::Chunk(bytes) if entries.iter().all(|e| e.bulk) => {
                    Cell::Chunk(word / (bytes / 8))
                }
                _ => Cell::Word(word),
            }
        };
        Group { cell, words: vec![word], stores: entries.iter().map(|e| e.store).collect() }
    }

    fn unit(&self, group: Group) -> Unit {
        let hash = |newest: u32| {
            group.words.iter().fold(0, |hash, &word| {
                let durable = self.durable_word(word as usize);
                hash ^ word_hash(word, durable) ^ word_hash(word, self.value_after(word, newest))
            })
        };
        let hashes = std::iter::once(0).chain(group.stores.iter().copied().map(hash)).collect();
        Unit { hashes, words: group.words, stores: group.stores.into_iter().collect() }
    }
}

fn word_hash(word: u32, value: u64) -> u64 {
    mix(mix(u64::from(word)) ^ value)
}

#[derive(Debug, PartialEq, Eq)]
enum Cell {
    Word(u32),
    Chunk(u32),
    Line(u32),
}

#[derive(Debug)]
struct Group {
    cell: Cell,
    words: Vec<u32>,
    stores: BTreeSet<u32>,
}

impl Group {
    fn joins(&self, next: &Group) -> bool {
        self.cell == next.cell && (matches!(self.cell, Cell::Line(_)) || self.stores == next.stores)
    }

    fn absorb(&mut self, next: Group) {
        self.words.extend(next.words);
        self.stores.extend(next.stores);
    }
}

/// Words that keep or lose their stores together.
#[derive(Debug)]
struct Unit {
    words: Vec<u32>,
    stores: Vec<u32>,
    /// The change of the image's hash by each choice; choice 0 keeps the durable value.
    hashes: Vec<u64>,
}

impl Unit {
    fn choices(&self) -> usize {
        self.hashes.len()
    }

    fn matters(&self) -> bool {
        self.hashes.iter().any(|&hash| hash != 0)
    }
}

/// For each unit of a [`CrashSet`], how many of its pending stores reached the medium.
pub type Choice = Vec<u8>;

/// The possible states of the medium after one crash.
pub struct CrashSet<'a> {
    medium: &'a Medium,
    units: Vec<Unit>,
}

impl CrashSet<'_> {
    /// Returns the number of states, or `None` if it exceeds `usize`.
    pub fn count(&self) -> Option<usize> {
        self.units.iter().try_fold(1_usize, |count, unit| count.checked_mul(unit.choices()))
    }

    /// Calls `visit` with every state.
    ///
    /// # Errors
    /// The first error of `visit`, which ends the enumeration.
    pub fn exhaustive<E>(&self, visit: impl FnMut(&Choice) -> Result<(), E>) -> Result<(), E> {
        self.exhaustive_up_to(usize::MAX, visit)
    }

    /// Calls `visit` with up to `limit` states.
    ///
    /// # Errors
    /// The first error of `visit`, which ends the enumeration.
    pub fn exhaustive_up_to<E>(
        &self,
        limit: usize,
        mut visit: impl FnMut(&Choice) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut choice = self.none();
        for _ in 0..limit {
            visit(&choice)?;
            if !self.advance(&mut choice) {
                break;
            }
        }
        Ok(())
    }

    /// Moves to the next choice in the order of an odometer. Returns false after the last one.
    fn advance(&self, choice: &mut Choice) -> bool {
        for (digit, unit) in choice.iter_mut().zip(&self.units) {
            if usize::from(*digit) + 1 < unit.choices().min(256) {
                *digit += 1;
                return true;
            }
            *digit = 0;
        }
        false
    }

    /// Returns a random state. A third of the states each: every unit by itself, nearly everything
    /// lost, nearly everything kept.
    pub fn sample(&self, random: &mut Random) -> Choice {
        let style = random.below(3);
        self.units.iter().map(|unit| sample_unit(unit, style, random)).collect()
    }

    /// Returns the choice where no pending store reached the medium.
    pub fn none(&self) -> Choice {
        vec![0; self.units.len()]
    }

    /// Returns the choice where every pending store reached the medium.
    pub fn all(&self) -> Choice {
        self.units.iter().map(last_choice).collect()
    }

    /// Returns a hash of the image, comparable between all media that started from the same image.
    pub fn hash(&self, choice: &Choice) -> u64 {
        let units = self.units.iter().zip(choice);
        units.fold(self.medium.durable_hash, |hash, (unit, &kept)| {
            hash ^ unit.hashes[usize::from(kept)]
        })
    }

    /// Writes the image into `image`, replacing its content.
    pub fn build(&self, choice: &Choice, image: &mut Vec<u8>) {
        image.clear();
        image.extend_from_slice(&self.medium.durable);
        for (unit, &kept) in self.units.iter().zip(choice).filter(|(_, kept)| **kept > 0) {
            let newest = unit.stores[usize::from(kept) - 1];
            for &word in &unit.words {
                let at = word as usize * WORD_BYTES;
                let value = self.medium.value_after(word, newest);
                image[at..at + WORD_BYTES].copy_from_slice(&value.to_le_bytes());
            }
        }
    }

    /// Describes the pending stores that the choice keeps and loses, for a report.
    pub fn describe(&self, choice: &Choice) -> String {
        let part = |(unit, &kept): (&Unit, &u8)| {
            let (first, words) = (u64::from(unit.words[0]) * 8, unit.words.len());
            format!("{first:#x}+{}: {kept} of {} stores", words * 8, unit.choices() - 1)
        };
        self.units.iter().zip(choice).map(part).collect::<Vec<_>>().join(", ")
    }
}

fn last_choice(unit: &Unit) -> u8 {
    u8::try_from(unit.choices() - 1).unwrap_or(u8::MAX)
}

fn sample_unit(unit: &Unit, style: usize, random: &mut Random) -> u8 {
    let any = u8::try_from(random.below(unit.choices().min(256))).expect("below 256");
    match style {
        1 if !random.one_in(6) => 0,
        2 if !random.one_in(6) => last_choice(unit),
        _ => any,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STRICT: MediumModel = MediumModel { granule: Granule::Word, order: StoreOrder::Word };

    fn medium(model: MediumModel) -> Medium {
        Medium::new(&[0; 1024], model)
    }

    fn images(medium: &Medium) -> BTreeSet<Vec<u8>> {
        let mut images = BTreeSet::new();
        let set = medium.crash();
        let visited: Result<(), ()> = set.exhaustive(|choice| {
            let mut image = Vec::new();
            set.build(choice, &mut image);
            images.insert(image);
            Ok(())
        });
        visited.expect("the visitor never fails");
        assert_eq!(set.count(), Some(images.len()), "each state is visited once");
        images
    }

    fn word(image: &[u8], index: usize) -> u8 {
        image[index * 8]
    }

    fn words(medium: &Medium, of: &[usize]) -> BTreeSet<Vec<u8>> {
        images(medium).iter().map(|image| of.iter().map(|&w| word(image, w)).collect()).collect()
    }

    #[test]
    fn a_store_may_or_may_not_reach_the_medium() {
        let mut medium = medium(STRICT);
        medium.store(0, 8, &[1; 8], false);
        assert_eq!(words(&medium, &[1]), BTreeSet::from([vec![0], vec![1]]));
    }

    #[test]
    fn a_word_keeps_any_later_value_and_words_are_independent() {
        let mut medium = medium(STRICT);
        medium.store(0, 0, &[1; 8], false);
        medium.store(0, 0, &[2; 8], false);
        medium.store(0, 8, &[3; 8], false);
        assert_eq!(words(&medium, &[0, 1]).len(), 6);
    }

    #[test]
    fn a_fence_alone_orders_no_cached_store() {
        let mut medium = medium(STRICT);
        medium.store(0, 0, &[1; 8], false);
        medium.fence(0);
        assert_eq!(images(&medium).len(), 2);
        medium.write_back(0, 4, 1);
        assert_eq!(images(&medium).len(), 2, "a write-back alone neither");
        medium.fence(0);
        assert_eq!(words(&medium, &[0]), BTreeSet::from([vec![1]]));
    }

    #[test]
    fn a_write_back_covers_what_was_stored_before_it() {
        let mut medium = medium(STRICT);
        medium.store(0, 0, &[1; 8], false);
        medium.write_back(0, 0, 64);
        medium.store(0, 0, &[2; 8], false);
        medium.fence(0);
        assert_eq!(words(&medium, &[0]), BTreeSet::from([vec![1], vec![2]]));
    }

    #[test]
    fn a_fence_orders_only_its_own_threads_work() {
        let mut medium = medium(STRICT);
        medium.store(0, 0, &[1; 8], true);
        medium.store(0, 64, &[1; 8], false);
        medium.write_back(0, 64, 8);
        medium.fence(1);
        assert_eq!(images(&medium).len(), 4);
        medium.write_back(1, 64, 8);
        medium.fence(1);
        assert_eq!(words(&medium, &[0, 8]), BTreeSet::from([vec![0, 1], vec![1, 1]]));
    }

    #[test]
    fn an_unfenced_streaming_store_may_land_after_a_later_one() {
        let mut medium = medium(STRICT);
        medium.store(0, 0, &[1; 8], true);
        medium.store(1, 0, &[2; 8], true);
        medium.fence(1);
        assert_eq!(words(&medium, &[0]), BTreeSet::from([vec![1], vec![2]]));
        medium.fence(0);
        assert_eq!(images(&medium).len(), 1);
    }

    #[test]
    fn four_byte_stores_of_one_word_keep_their_order() {
        let mut medium = medium(STRICT);
        medium.store(0, 0, &[1; 4], false);
        medium.store(0, 4, &[1; 4], false);
        assert_eq!(images(&medium).len(), 3, "the second half never without the first");
    }

    #[test]
    fn chunks_keep_bulk_stores_together() {
        let model = MediumModel { granule: Granule::Chunk(256), ..STRICT };
        let mut medium = medium(model);
        medium.store(0, 0, &[1; 512], true);
        medium.store(0, 512, &[2; 16], false);
        assert_eq!(images(&medium).len(), 4 * 4);
    }

    #[test]
    fn line_order_keeps_prefixes_of_a_line() {
        let model = MediumModel { order: StoreOrder::Line, ..STRICT };
        let mut medium = medium(model);
        for index in 0..3 {
            medium.store(0, index * 8, &[1; 8], false);
        }
        medium.store(0, 64, &[1; 8], false);
        assert_eq!(images(&medium).len(), 4 * 2);
    }

    #[test]
    fn hashes_tell_images_apart_and_agree_across_histories() {
        let mut direct = medium(STRICT);
        direct.store(0, 0, &[7; 8], true);
        let mut detour = medium(STRICT);
        detour.store(0, 0, &[9; 8], true);
        detour.fence(0);
        detour.store(1, 0, &[7; 8], true);
        detour.fence(1);
        let kept = direct.crash();
        assert_eq!(kept.hash(&kept.all()), detour.crash().hash(&Choice::new()));
        assert_ne!(kept.hash(&kept.all()), kept.hash(&kept.none()));
    }
}
