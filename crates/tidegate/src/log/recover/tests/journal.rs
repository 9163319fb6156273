//! A log in memory.

use std::collections::HashMap;
use std::io;

use zerocopy::IntoBytes;

use crate::log::recover::{LogData, NewIdentity, Plan, Planner};
use crate::log::{Definition, Header, RecordKind, RenamePaths};

/// What a planted bug makes of the records before they are planned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Bug {
    None,
    NamesOutOfOrder,
    VoidIgnored,
    RetireIgnored,
}

#[derive(Debug, Clone, Default)]
pub(super) struct Journal {
    pub(super) records: Vec<(Header, Vec<u8>)>,
    head: u64,
    /// The ids that the files have in the log, which are the positions of their first definitions.
    ids: HashMap<u64, u64>,
}

impl Journal {
    pub(super) fn append(
        &mut self,
        kind: RecordKind,
        file: u64,
        [offset, len, aux]: [u64; 3],
        payload: Vec<u8>,
    ) -> u64 {
        let position = self.next();
        // What comes before any definition has lost the first one.
        let id = if kind == RecordKind::Define { position } else { file };
        self.ids.entry(file).or_insert(id);
        self.append_as(kind, self.id(file), [offset, len, aux], payload)
    }

    /// The id of a file in the log.
    pub(super) fn id(&self, file: u64) -> u64 {
        *self.ids.get(&file).unwrap_or(&file)
    }

    /// Where the next record will be: a hole lies before each.
    pub(super) fn next(&self) -> u64 {
        self.head + 64
    }

    fn append_as(
        &mut self,
        kind: RecordKind,
        file: u64,
        [offset, len, aux]: [u64; 3],
        payload: Vec<u8>,
    ) -> u64 {
        let position = self.next();
        let payload_bytes = u32::try_from(payload.len()).expect("payloads in tests are short");
        let header = Header {
            position,
            kind,
            file,
            offset,
            len,
            aux,
            payload_bytes,
            payload_checksum: 0,
            absorbed: false,
        };
        self.head = position + header.record_bytes();
        self.records.push((header, payload));
        position
    }

    pub(super) fn define(&mut self, file: u64, identity: u64, born: bool, path: &str) -> u64 {
        let payload = definition(identity, born, path);
        self.append(RecordKind::Define, file, [0; 3], payload)
    }

    pub(super) fn note(&mut self, new: &NewIdentity<'_>) {
        let path = std::str::from_utf8(new.path).expect("paths in tests are text");
        self.append_as(RecordKind::Define, new.file, [0; 3], definition(new.identity, true, path));
    }

    pub(super) fn write(&mut self, file: u64, offset: u64, data: &[u8]) -> u64 {
        self.append(RecordKind::Write, file, [offset, 0, 0], data.to_vec())
    }

    pub(super) fn zero(&mut self, file: u64, offset: u64, len: u64) -> u64 {
        self.append(RecordKind::Zero, file, [offset, len, 0], Vec::new())
    }

    pub(super) fn set_size(&mut self, file: u64, size: u64) -> u64 {
        self.append(RecordKind::SetSize, file, [size, 0, 0], Vec::new())
    }

    pub(super) fn link(&mut self, file: u64, path: &str) -> u64 {
        self.append(RecordKind::Link, file, [0; 3], path.into())
    }

    pub(super) fn unlink(&mut self, file: u64, path: &str) -> u64 {
        self.append(RecordKind::Unlink, file, [0; 3], path.into())
    }

    /// Of a file that has no definition.
    pub(super) fn unlink_unknown(&mut self, identity: u64, path: &str) -> u64 {
        self.append(RecordKind::Unlink, 0, [0, 0, identity], path.into())
    }

    pub(super) fn rename(&mut self, file: u64, from: &str, to: &str, replaced: u64) -> u64 {
        let paths = RenamePaths { from: from.as_bytes(), to: to.as_bytes() };
        let mut payload = paths.encode().as_bytes().to_vec();
        payload.extend_from_slice(paths.from);
        payload.extend_from_slice(paths.to);
        self.append(RecordKind::Rename, file, [0, 0, replaced], payload)
    }

    pub(super) fn retire(&mut self, file: u64) -> u64 {
        self.append(RecordKind::Retire, file, [0; 3], Vec::new())
    }

    pub(super) fn void(&mut self, file: u64, position: u64) -> u64 {
        self.append(RecordKind::Void, file, [0, 0, position], Vec::new())
    }

    pub(super) fn plan(&self) -> Plan {
        self.plan_with(Bug::None)
    }

    pub(super) fn plan_with(&self, bug: Bug) -> Plan {
        let ignored = match bug {
            Bug::VoidIgnored => Some(RecordKind::Void),
            Bug::RetireIgnored => Some(RecordKind::Retire),
            Bug::None | Bug::NamesOutOfOrder => None,
        };
        let is_name = |header: &Header| {
            use RecordKind::{Link, Rename, Unlink};
            bug == Bug::NamesOutOfOrder && matches!(header.kind, Link | Rename | Unlink)
        };
        let named = self.records.iter().map(|(header, _)| header).filter(|header| is_name(header));
        let mut backwards: Vec<_> = named.map(|header| header.position).collect();
        let mut planner = Planner::new();
        for (header, payload) in &self.records {
            let mut header = *header;
            if is_name(&header) {
                header.position = backwards.pop().expect("one for each");
            }
            if ignored != Some(header.kind) {
                planner.add(&header, payload);
            }
        }
        planner.finish()
    }
}

impl LogData for Journal {
    fn read(&self, position: u64, buf: &mut [u8]) -> io::Result<()> {
        let at = self.records.partition_point(|(header, _)| header.position <= position);
        let (header, payload) = &self.records[at - 1];
        let skip = usize::try_from(position - header.position - 64).expect("short");
        buf.copy_from_slice(&payload[skip..][..buf.len()]);
        Ok(())
    }
}

fn definition(identity: u64, born: bool, path: &str) -> Vec<u8> {
    let definition = Definition {
        identity,
        device: 0,
        inode: 0,
        mode: 0o100_640,
        uid: rustix::process::geteuid().as_raw(),
        gid: rustix::process::getegid().as_raw(),
        born,
        path: path.as_bytes(),
    };
    let mut payload = definition.encode().as_bytes().to_vec();
    payload.extend_from_slice(definition.path);
    payload
}
