//! What the log is told of a file itself: which one it is, that it is new, that it is empty now.

use tidegate::log::{AppendError, Definition, FileGuard, Ticket};

use super::{Open, PATIENCE, Refused, TRIES};
use crate::files::{self, Seen};
use crate::names;
use crate::path::PathBuffer;

impl Open {
    /// Tells the log which file the descriptor is, so that records can name it. Under the lock of names: no name changes
    /// between its being read and its being recorded. False: the name that the descriptor was opened by is gone. True may mean that
    /// the locks are busy: whoever needs the definition looks, and asks again.
    #[cold]
    pub(crate) fn define(&self) -> bool {
        let Some(_names) = names::lock(self.log) else { return true };
        let Some(guard) = self.lock_as_it_is() else { return true };
        let defined = match guard.begin() {
            Ok(mut ticket) => self.define_by(&guard, &mut ticket),
            Err(error) => Err(error.into()),
        };
        let refused = defined.err().map(|refused| self.undefined(&guard, refused));
        !matches!(refused, Some(Refused::Undefinable))
    }

    /// What becomes of a file that could not be defined.
    pub(super) fn undefined(&self, guard: &FileGuard<'_>, refused: Refused) -> Refused {
        if files::has_lost_its_name(self.fd) {
            return Refused::Undefinable;
        }
        guard.mark_unlogged(true);
        refused
    }

    pub(super) fn define_by(
        &self,
        guard: &FileGuard<'_>,
        ticket: &mut Ticket<'_>,
    ) -> Result<(), Refused> {
        if !ticket.needs_define() {
            return Ok(());
        }
        let seen = Seen::of(self.fd).map_err(|_| Refused::Changed)?;
        if seen.stat.st_nlink == 0 {
            guard.mark_nameless();
            return Ok(());
        }
        let mut path = PathBuffer::new();
        files::path_of(self.fd, &seen.stat, &mut path).map_err(|_| Refused::Never)?;
        guard.note_mount(seen.mount);
        let key = self.log.key_of(guard.file());
        self.define_as(ticket, &seen.definition(key, guard.is_born(), &path))
    }

    fn define_as(
        &self,
        ticket: &mut Ticket<'_>,
        definition: &Definition<'_>,
    ) -> Result<(), Refused> {
        for _ in 0..TRIES {
            let room = self.log.room();
            match ticket.define(definition) {
                Err(AppendError::Full) if self.log.supervisor_alive() => {
                    self.log.wait_for_room(room, PATIENCE);
                }
                result => return Ok(result?),
            }
        }
        Err(Refused::Full)
    }

    /// The file was made by this process just now: all of it is in the log from the start.
    pub(crate) fn born(&self) {
        if let Some(guard) = self.lock_as_it_is() {
            guard.mark_born();
        }
        self.define();
        let Some(guard) = self.lock_as_it_is() else { return };
        if guard.begin().map_or(true, |ticket| ticket.needs_define()) {
            // Its name is not in the log: a sync has to bring it to the disk.
            guard.mark_unlogged(false);
        }
    }

    /// Empties the file, as `O_TRUNC` does. A file of which the log has nothing is emptied past the log: most such
    /// files are rewritten without any sync.
    pub(crate) fn empty(&self, kernel: impl Fn() -> isize) -> isize {
        let Ok(Some(guard)) = self.lock() else { return self.unseen(kernel) };
        if !guard.has_live_changes() {
            guard.mark_unlogged(false);
            return kernel();
        }
        let recorded = guard.begin().map_err(Refused::from).and_then(|mut ticket| {
            if ticket.needs_define() {
                return Err(Refused::Undefined);
            }
            let position = ticket.set_size(0)?;
            let result = kernel();
            if result < 0 && ticket.void(position).is_err() {
                guard.mark_unlogged(false);
            }
            Ok(result)
        });
        recorded.unwrap_or_else(|_| {
            self.retire(&guard);
            guard.mark_unlogged(false);
            kernel()
        })
    }
}
