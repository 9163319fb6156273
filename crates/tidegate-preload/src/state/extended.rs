//! Extended attributes of a file, including ACLs, in the form of records.
//!
//! Entry point: [`Extended::read`].

use std::ffi::{CStr, c_int};

use tidegate::log::put_extended;

use crate::sys::page::Page;
use crate::sys::query;

/// All extended attributes of a file.
pub(crate) struct Extended {
    page: Page,
    len_bytes: usize,
}

impl Extended {
    pub(crate) fn new() -> Self {
        Self { page: Page::take(), len_bytes: 0 }
    }

    /// Reads the attributes of an open file. Returns `None` if that fails or they exceed a page.
    pub(crate) fn read(&mut self, fd: c_int) -> Option<()> {
        self.len_bytes = 0;
        let mut names = Page::take();
        let len = query::flistxattr(fd, names.bytes_mut());
        let len = match len {
            Err(libc::EOPNOTSUPP) => 0,
            len => len.ok()?,
        };
        let mut rest = names.bytes().get(..len)?;
        while !rest.is_empty() {
            let name = CStr::from_bytes_until_nul(rest).ok()?;
            rest = rest.get(name.to_bytes_with_nul().len()..)?;
            self.add(fd, name)?;
        }
        Some(())
    }

    fn add(&mut self, fd: c_int, name: &CStr) -> Option<()> {
        let mut value = Page::take();
        let len = query::fgetxattr(fd, name, value.bytes_mut()).ok()?;
        let space = self.page.bytes_mut().get_mut(self.len_bytes..)?;
        self.len_bytes += put_extended(name.to_bytes(), value.bytes().get(..len)?, space)?;
        Some(())
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        self.page.bytes().get(..self.len_bytes).unwrap_or_default()
    }
}
