//! Records of created files and of their names, on the medium.
//!
//! Decoding any bytes yields a valid record or `None`.

use std::io::IoSlice;
use std::time::Duration;

use zerocopy::little_endian::{I32, I64, U16, U32};
use zerocopy::{FromBytes, IntoBytes};

use crate::log::pool::LogPool;
use crate::log::pool::layout::{
    EXTENDED_BYTES_MAX, HANDLE_BYTES_MAX, MakeBytes, NAME_BYTES_MAX, NameBytes,
};
use crate::log::pool::record::{FileHandle, Header};
use crate::pmem::PmemError;

/// The longest payload of a record of names, without content.
pub(in crate::log) const HEAD_BYTES_MAX: usize =
    size_of::<MakeBytes>() + HANDLE_BYTES_MAX + NAME_BYTES_MAX + EXTENDED_BYTES_MAX;
const _: () = {
    let name = size_of::<NameBytes>() + 3 * HANDLE_BYTES_MAX + 2 * NAME_BYTES_MAX;
    assert!(name <= HEAD_BYTES_MAX);
};

/// A timestamp of a file.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Timestamp {
    /// Seconds since 1970.
    pub s: i64,
    /// Nanoseconds, below 10^9.
    pub ns: u32,
}

impl Timestamp {
    fn of(s: I64, ns: U32) -> Option<Self> {
        let this = Self { s: s.get(), ns: ns.get() };
        (this.ns < 1_000_000_000).then_some(this)
    }

    /// Converts nanoseconds since 1970.
    pub(in crate::log) fn of_ns(ns: u64) -> Self {
        let since = Duration::from_nanos(ns);
        Self { s: since.as_secs().cast_signed(), ns: since.subsec_nanos() }
    }
}

/// A name in a directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NameAt<'a> {
    /// The directory's handle, on the file system of the file.
    pub parent: FileHandle,
    /// The name in the directory: 1 to 255 bytes, without a slash or a NUL, not `.` or `..`.
    pub name: &'a [u8],
}

impl<'a> NameAt<'a> {
    fn checked(parent: Option<FileHandle>, name: &'a [u8]) -> Option<Self> {
        let parent = parent.filter(|parent| !parent.bytes().is_empty())?;
        let is_fine = (1..=NAME_BYTES_MAX).contains(&name.len())
            && !name.iter().any(|byte| matches!(byte, 0 | b'/'))
            && !matches!(name, b"." | b"..");
        is_fine.then_some(Self { parent, name })
    }

    fn parts(&self) -> [&[u8]; 2] {
        [self.parent.bytes(), self.name]
    }
}

/// Attributes of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Attributes<'a> {
    /// Permission bits, with set-user-ID, set-group-ID and the sticky bit.
    pub mode: u32,
    /// User.
    pub owner: u32,
    /// Group.
    pub group: u32,
    /// The last access.
    pub accessed: Timestamp,
    /// The last modification.
    pub modified: Timestamp,
    /// Extended attributes, ACLs among them, as [`put_extended`] encodes them one behind the other;
    /// at most 8192 bytes.
    pub extended: &'a [u8],
}

/// Everything that creates a file again, except its content.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Make<'a> {
    /// The only name that the file has, under which it was created.
    pub at: NameAt<'a>,
    /// The parent's last change (`st_ctime`), read after the file was created. While the parent on
    /// the disk is not newer, no commit had the file.
    pub parent_changed: Timestamp,
    /// Its attributes.
    pub attributes: Attributes<'a>,
}

fn narrow<T: TryFrom<usize> + Default>(len: usize) -> T {
    T::try_from(len).unwrap_or_default()
}

impl<'a> Make<'a> {
    /// Returns whether the record is valid: it decodes to the values that were encoded.
    pub(in crate::log) fn is_sound(&self) -> bool {
        NameAt::checked(Some(self.at.parent), self.at.name).is_some()
            && self.attributes.extended.len() <= EXTENDED_BYTES_MAX
            && Extended(self.attributes.extended).all(|attribute| attribute.is_some())
    }

    /// Encodes the fixed part of the payload.
    pub(in crate::log) fn encode(&self) -> MakeBytes {
        let Attributes { mode, owner, group, accessed, modified, extended } = self.attributes;
        MakeBytes {
            parent_changed_s: I64::new(self.parent_changed.s),
            accessed_s: I64::new(accessed.s),
            modified_s: I64::new(modified.s),
            parent_changed_ns: U32::new(self.parent_changed.ns),
            accessed_ns: U32::new(accessed.ns),
            modified_ns: U32::new(modified.ns),
            mode: U32::new(mode),
            owner: U32::new(owner),
            group: U32::new(group),
            parent_type: I32::new(self.at.parent.kind()),
            extended_bytes: U32::new(narrow(extended.len())),
            parent_bytes: U16::new(narrow(self.at.parent.bytes().len())),
            name_bytes: U16::new(narrow(self.at.name.len())),
            reserved: U32::ZERO,
        }
    }

    /// Returns the payload in parts, the first one `fixed`.
    pub(in crate::log) fn parts<'b>(
        &'b self,
        fixed: &'b MakeBytes,
        content: &'b [u8],
    ) -> [IoSlice<'b>; 5] {
        let [parent, name] = self.at.parts();
        [fixed.as_bytes(), parent, name, self.attributes.extended, content].map(IoSlice::new)
    }

    /// Decodes the start of a payload. Also returns the content's offset in the payload. Returns
    /// `None` if the payload is invalid.
    pub fn decode(payload: &'a [u8]) -> Option<(Self, u64)> {
        let (fixed, rest) = MakeBytes::read_from_prefix(payload).ok()?;
        let (parent, rest) = rest.split_at_checked(usize::from(fixed.parent_bytes.get()))?;
        let (name, rest) = rest.split_at_checked(usize::from(fixed.name_bytes.get()))?;
        let extended_bytes = usize::try_from(fixed.extended_bytes.get()).ok()?;
        let (extended, rest) = rest.split_at_checked(extended_bytes)?;
        let attributes = Attributes {
            mode: fixed.mode.get(),
            owner: fixed.owner.get(),
            group: fixed.group.get(),
            accessed: Timestamp::of(fixed.accessed_s, fixed.accessed_ns)?,
            modified: Timestamp::of(fixed.modified_s, fixed.modified_ns)?,
            extended,
        };
        let parent_changed = Timestamp::of(fixed.parent_changed_s, fixed.parent_changed_ns)?;
        let at = NameAt::checked(FileHandle::new(fixed.parent_type.get(), parent), name)?;
        let this = Self { at, parent_changed, attributes };
        let content_at = (payload.len() - rest.len()) as u64;
        (this.is_sound() && attributes.mode & !0o7777 == 0).then_some((this, content_at))
    }
}

impl LogPool {
    /// Returns the log position and the length of the content in a
    /// [`RecordKind::Make`](crate::log::RecordKind::Make). Returns `None` if the record is invalid.
    ///
    /// # Errors
    /// [`PmemError`].
    pub fn content_of(&self, header: &Header) -> Result<Option<(u64, u64)>, PmemError> {
        let payload_bytes = u64::from(header.payload_bytes);
        let mut head = [0; HEAD_BYTES_MAX];
        let len = usize::try_from(payload_bytes).unwrap_or(usize::MAX).min(HEAD_BYTES_MAX);
        self.read_payload(header, 0, &mut head[..len])?;
        let content_at = Make::decode(&head[..len]).map(|(_, content_at)| content_at);
        Ok(content_at.map(|at| (header.data_position() + at, payload_bytes - at)))
    }
}

/// Encodes an extended attribute into `buf`. Returns its length, or `None` if it does not fit.
pub fn put_extended(name: &[u8], value: &[u8], buf: &mut [u8]) -> Option<usize> {
    let name_bytes = u16::try_from(name.len()).ok().filter(|bytes| *bytes > 0)?;
    let value_bytes = u16::try_from(value.len()).ok()?;
    let mut at = 0;
    for part in [&name_bytes.to_le_bytes()[..], &value_bytes.to_le_bytes(), name, value] {
        buf.get_mut(at..at + part.len())?.copy_from_slice(part);
        at += part.len();
    }
    Some(at)
}

/// An iterator over name and value of encoded extended attributes. Invalid bytes yield `None` and
/// end the iteration.
#[derive(Debug, Clone)]
pub struct Extended<'a>(pub &'a [u8]);

impl<'a> Extended<'a> {
    fn take(&mut self) -> Option<(&'a [u8], &'a [u8])> {
        let (&[n0, n1, v0, v1], rest) = self.0.split_first_chunk()?;
        let (name, rest) = rest.split_at_checked(u16::from_le_bytes([n0, n1]).into())?;
        let (value, rest) = rest.split_at_checked(u16::from_le_bytes([v0, v1]).into())?;
        self.0 = rest;
        (!name.is_empty() && !name.contains(&0)).then_some((name, value))
    }
}

impl<'a> Iterator for Extended<'a> {
    type Item = Option<(&'a [u8], &'a [u8])>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.0.is_empty() {
            return None;
        }
        let taken = self.take();
        if taken.is_none() {
            self.0 = &[];
        }
        Some(taken)
    }
}

/// A change of the names of a file.
#[expect(clippy::large_enum_variant, reason = "one at a time, where no memory is to be allocated")]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NameChange<'a> {
    /// The file gets one more name.
    Link {
        /// The new name, which no file had.
        to: NameAt<'a>,
    },
    /// The file loses a name.
    Unlink {
        /// The former name.
        from: NameAt<'a>,
    },
    /// The file gets one name in exchange for another.
    Rename {
        /// The former name.
        from: NameAt<'a>,
        /// The new name.
        to: NameAt<'a>,
        /// The handle of the file that had the new name, as its only name.
        replaced: Option<FileHandle>,
    },
}

/// The payload of a [`RecordKind::Name`](crate::log::RecordKind::Name).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NameRecord<'a> {
    /// The change.
    pub change: NameChange<'a>,
    /// Number of names that the file has after the change.
    pub links: u32,
}

const LINK: u16 = 1;
const UNLINK: u16 = 2;
const RENAME: u16 = 3;

impl<'a> NameRecord<'a> {
    /// Returns code, former name, new name and replaced file.
    fn fields(&self) -> (u16, Option<NameAt<'a>>, Option<NameAt<'a>>, Option<FileHandle>) {
        match self.change {
            NameChange::Link { to } => (LINK, None, Some(to), None),
            NameChange::Unlink { from } => (UNLINK, Some(from), None, None),
            NameChange::Rename { from, to, replaced } => (RENAME, Some(from), Some(to), replaced),
        }
    }

    /// Returns whether the record is valid: it decodes to the values that were encoded.
    pub(in crate::log) fn is_sound(&self) -> bool {
        let (_, from, to, replaced) = self.fields();
        let is_fine = |at: NameAt<'_>| NameAt::checked(Some(at.parent), at.name).is_some();
        from.is_none_or(is_fine)
            && to.is_none_or(is_fine)
            && replaced.is_none_or(|handle| !handle.bytes().is_empty())
    }

    /// Calls `use_it` with the payload in parts.
    pub(in crate::log) fn with_parts<R>(&self, use_it: impl FnOnce(&[IoSlice<'_>]) -> R) -> R {
        const NOTHING: NameAt<'static> = NameAt { parent: FileHandle::NONE, name: b"" };
        let (change, from, to, replaced) = self.fields();
        let (from, to) = (from.unwrap_or(NOTHING), to.unwrap_or(NOTHING));
        let replaced = replaced.unwrap_or(FileHandle::NONE);
        let fixed = NameBytes {
            change: U16::new(change),
            reserved: U16::ZERO,
            links: U32::new(self.links),
            from_type: I32::new(from.parent.kind()),
            to_type: I32::new(to.parent.kind()),
            replaced_type: I32::new(replaced.kind()),
            from_bytes: U16::new(narrow(from.parent.bytes().len())),
            from_name_bytes: U16::new(narrow(from.name.len())),
            to_bytes: U16::new(narrow(to.parent.bytes().len())),
            to_name_bytes: U16::new(narrow(to.name.len())),
            replaced_bytes: U16::new(narrow(replaced.bytes().len())),
            reserved_too: U16::ZERO,
        };
        let ([from, from_name], [to, to_name]) = (from.parts(), to.parts());
        let parts = [fixed.as_bytes(), from, from_name, to, to_name, replaced.bytes()];
        use_it(&parts.map(IoSlice::new))
    }

    /// Decodes a payload. Returns `None` if it is invalid.
    pub fn decode(payload: &'a [u8]) -> Option<Self> {
        let (fixed, mut rest) = NameBytes::read_from_prefix(payload).ok()?;
        let mut take = |bytes: U16| {
            let (part, behind) = rest.split_at_checked(usize::from(bytes.get()))?;
            rest = behind;
            Some(part)
        };
        let handle = |kind: I32, bytes| FileHandle::new(kind.get(), bytes);
        let parent = take(fixed.from_bytes)?;
        let from = NameAt::checked(handle(fixed.from_type, parent), take(fixed.from_name_bytes)?);
        let parent = take(fixed.to_bytes)?;
        let to = NameAt::checked(handle(fixed.to_type, parent), take(fixed.to_name_bytes)?);
        let replaced = take(fixed.replaced_bytes)?;
        let replaced = match replaced.len() {
            0 => None,
            _ => Some(handle(fixed.replaced_type, replaced)?),
        };
        let change = match fixed.change.get() {
            LINK => NameChange::Link { to: to? },
            UNLINK => NameChange::Unlink { from: from? },
            RENAME => NameChange::Rename { from: from?, to: to?, replaced },
            _ => return None,
        };
        Some(Self { change, links: fixed.links.get() })
    }
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;
    use proptest::sample::Index;

    use super::*;

    fn handle(byte: u8) -> FileHandle {
        FileHandle::new(1, &[byte; 8]).unwrap()
    }

    fn at(byte: u8, name: &[u8]) -> NameAt<'_> {
        NameAt { parent: handle(byte), name }
    }

    fn made(extended: &[u8]) -> Make<'_> {
        let time = |s| Timestamp { s, ns: 999_999_999 };
        let (accessed, modified) = (time(-1), time(1 << 33));
        let (mode, owner, group) = (0o4755, 1000, u32::MAX - 1);
        let attributes = Attributes { mode, owner, group, accessed, modified, extended };
        Make { at: at(7, b"name"), parent_changed: time(5), attributes }
    }

    fn payload(make: &Make<'_>, content: &[u8]) -> Vec<u8> {
        make.parts(&make.encode(), content).iter().flat_map(|part| part.to_vec()).collect()
    }

    fn changes() -> [NameChange<'static>; 4] {
        let (from, to) = (at(1, b"from"), at(2, b"to"));
        [
            NameChange::Link { to },
            NameChange::Unlink { from },
            NameChange::Rename { from, to, replaced: None },
            NameChange::Rename { from, to, replaced: Some(handle(3)) },
        ]
    }

    fn named(record: &NameRecord<'_>) -> Vec<u8> {
        record.with_parts(|parts| parts.iter().flat_map(|part| part.to_vec()).collect())
    }

    #[test]
    fn what_was_made_comes_back_with_its_attributes() {
        let mut extended = [0; 64];
        let mut used = put_extended(b"user.a", b"value", &mut extended).unwrap();
        used += put_extended(b"security.b", b"", &mut extended[used..]).unwrap();
        let make = made(&extended[..used]);
        let payload = payload(&make, b"content");
        let (found, content_at) = Make::decode(&payload).unwrap();
        assert_eq!(found, make);
        assert_eq!(&payload[usize::try_from(content_at).unwrap()..], b"content");
        let attributes: Vec<_> = Extended(found.attributes.extended).flatten().collect();
        assert_eq!(attributes, [(&b"user.a"[..], &b"value"[..]), (b"security.b", b"")]);
        assert_eq!(put_extended(b"user.a", b"value", &mut [0; 14]), None);
    }

    #[test]
    fn changes_of_names_come_back() {
        for change in changes() {
            let record = NameRecord { change, links: 3 };
            assert_eq!(NameRecord::decode(&named(&record)), Some(record));
        }
    }

    #[test]
    fn what_is_cut_off_is_no_record() {
        let make = payload(&made(b""), b"");
        assert!((0..make.len()).all(|len| Make::decode(&make[..len]).is_none()));
        for change in changes() {
            let name = named(&NameRecord { change, links: 1 });
            assert!((0..name.len()).all(|len| NameRecord::decode(&name[..len]).is_none()));
        }
    }

    #[test]
    fn names_that_no_directory_has_are_refused() {
        let long = [b'x'; 256];
        for name in [&b""[..], b".", b"..", b"a/b", b"a\0b", &long] {
            let make = Make { at: at(1, name), ..made(b"") };
            assert!(!make.is_sound() && Make::decode(&payload(&make, b"")).is_none());
            let record = NameRecord { change: NameChange::Link { to: at(1, name) }, links: 1 };
            assert!(!record.is_sound() && NameRecord::decode(&named(&record)).is_none());
        }
        let nowhere = NameAt { parent: FileHandle::NONE, name: b"a" };
        let record = NameRecord { change: NameChange::Link { to: nowhere }, links: 1 };
        assert!(!record.is_sound() && NameRecord::decode(&named(&record)).is_none());
    }

    #[test]
    fn numbers_that_make_no_sense_are_refused() {
        let make = made(b"");
        let with = |edit: fn(&mut MakeBytes)| {
            let mut fixed = make.encode();
            edit(&mut fixed);
            make.parts(&fixed, b"").iter().flat_map(|part| part.to_vec()).collect::<Vec<u8>>()
        };
        let edits: [fn(&mut MakeBytes); 5] = [
            |fixed| fixed.modified_ns = U32::new(1_000_000_000),
            |fixed| fixed.mode = U32::new(0o10_0644),
            |fixed| fixed.parent_bytes = U16::new(129),
            |fixed| fixed.extended_bytes = U32::MAX_VALUE,
            |fixed| fixed.name_bytes = U16::new(0),
        ];
        assert!(edits.into_iter().all(|edit| Make::decode(&with(edit)).is_none()));
        assert!(!made(&[1, 0, 0, 0]).is_sound(), "a name that is not there");
        let mut code = named(&NameRecord { change: changes()[0], links: 1 });
        code[0] = 4;
        assert_eq!(NameRecord::decode(&code), None);
    }

    proptest! {
        #[test]
        fn any_bytes_give_a_record_that_makes_sense_or_none(
            is_make in any::<bool>(),
            edits in vec((any::<Index>(), any::<u8>()), 0..8),
            end in any::<Index>(),
        ) {
            let mut bytes = if is_make {
                payload(&made(&[1, 0, 1, 0, b'a', b'b']), b"content")
            } else {
                named(&NameRecord { change: changes()[3], links: 1 })
            };
            let len = bytes.len();
            for (at, byte) in edits {
                bytes[at.index(len)] = byte;
            }
            bytes.truncate(end.index(len + 1));
            if let Some((make, content_at)) = Make::decode(&bytes) {
                prop_assert!(make.is_sound() && content_at <= bytes.len() as u64);
            }
            if let Some(record) = NameRecord::decode(&bytes) {
                prop_assert!(record.is_sound());
                let again = named(&record);
                prop_assert_eq!(NameRecord::decode(&again), Some(record));
            }
        }
    }
}
