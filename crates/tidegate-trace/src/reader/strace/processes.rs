//! Processes: their descriptors and working directories.

use std::collections::HashMap;

use crate::bad::{Bad, Result};
use crate::descriptors::Descriptors;
use crate::out::Out;

const MAX_PROCESSES: usize = 1 << 20;

/// A process or thread.
#[derive(Debug, Clone)]
pub(super) struct Process {
    /// The descriptor table, which threads share.
    pub(super) table: u32,
    /// The working directory; empty until the trace shows it.
    pub(super) folder: Box<[u8]>,
    /// Whether the parent is known.
    adopted: bool,
}

/// All processes.
#[derive(Debug, Default)]
pub(super) struct Processes {
    by_pid: HashMap<u32, Process>,
    /// Number of processes that use each table.
    users: HashMap<u32, u32>,
    next_table: u32,
}

impl Processes {
    /// Returns process `pid`, which is added with no descriptors if the trace has not shown it.
    pub(super) fn get(&mut self, pid: u32) -> Result<&mut Process> {
        if !self.by_pid.contains_key(&pid) {
            let table = self.new_table()?;
            self.insert(pid, Process { table, folder: Box::default(), adopted: false })?;
        }
        self.by_pid.get_mut(&pid).ok_or(Bad::Tables)
    }

    pub(super) fn knows(&self, pid: u32) -> bool {
        self.by_pid.contains_key(&pid)
    }

    fn new_table(&mut self) -> Result<u32> {
        self.next_table = self.next_table.checked_add(1).ok_or(Bad::Tables)?;
        Ok(self.next_table)
    }

    fn insert(&mut self, pid: u32, process: Process) -> Result<()> {
        if self.by_pid.len() >= MAX_PROCESSES {
            return Err(Bad::Tables);
        }
        *self.users.entry(process.table).or_default() += 1;
        self.by_pid.insert(pid, process);
        Ok(())
    }

    /// Adds `child` as a child of `parent`. A thread shares its parent's descriptors.
    pub(super) fn fork(
        &mut self,
        (parent, child): (u32, u32),
        is_thread: bool,
        descriptors: &mut Descriptors,
        out: &mut Out,
    ) -> Result<()> {
        let Process { table, folder, .. } = self.get(parent)?.clone();
        if let Some(known) = self.by_pid.get_mut(&child) {
            if known.adopted {
                return Ok(());
            }
            // The child was running before the parent's `fork` returned.
            (known.adopted, known.folder) = (true, folder);
            let own = known.table;
            return descriptors.inherit(table, own);
        }
        self.exit(child, descriptors, out);
        let own = if is_thread { table } else { self.new_table()? };
        if own != table {
            descriptors.inherit(table, own)?;
        }
        self.insert(child, Process { table: own, folder, adopted: true })
    }

    /// Removes process `pid`, and closes its table if no other process uses it.
    pub(super) fn exit(&mut self, pid: u32, descriptors: &mut Descriptors, out: &mut Out) {
        let Some(process) = self.by_pid.remove(&pid) else { return };
        let users = self.users.entry(process.table).or_default();
        *users = users.saturating_sub(1);
        if *users == 0 {
            self.users.remove(&process.table);
            descriptors.close_all(process.table, |_, _| true, out);
        }
    }
}
