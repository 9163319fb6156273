//! Extended attributes of a file, including ACLs, in the form of records.
//!
//! Entry point: [`Extended::read`].

use std::ffi::{CStr, c_int};

use tidegate::log::put_extended;

use crate::sys::page::Page;
use crate::sys::query;

/// The extended attribute that has a file's capability.
pub(crate) const CAPABILITY: &CStr = c"security.capability";

/// All extended attributes of a file.
pub(crate) struct Extended {
    /// The attributes in the form of records.
    page: Page,
    len_bytes: usize,
    /// The names, each with a NUL.
    names: Page,
    names_bytes: usize,
}

impl Extended {
    /// Reads the attributes of an open file. Returns `None` if that fails or they exceed a page.
    pub(crate) fn read(fd: c_int) -> Option<Self> {
        let mut names = Page::take();
        let names_bytes = match query::flistxattr(fd, names.bytes_mut()) {
            Err(libc::EOPNOTSUPP) => 0,
            len => len.ok()?,
        };
        let mut found = Self { page: Page::take(), len_bytes: 0, names, names_bytes };
        for name in names_in(found.names.bytes().get(..names_bytes)?) {
            let (page, at) = (&mut found.page, found.len_bytes);
            found.len_bytes += put(fd, name, page.bytes_mut().get_mut(at..)?)?;
        }
        Some(found)
    }

    /// Returns whether the file has the attribute `name`.
    pub(crate) fn has(&self, name: &CStr) -> bool {
        let names = self.names.bytes().get(..self.names_bytes).unwrap_or_default();
        names_in(names).any(|found| found == name)
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        self.page.bytes().get(..self.len_bytes).unwrap_or_default()
    }
}

/// Returns the names in a list of names, each with a NUL.
fn names_in(list: &[u8]) -> impl Iterator<Item = &CStr> {
    list.split_inclusive(|byte| *byte == 0).map_while(|name| CStr::from_bytes_with_nul(name).ok())
}

/// Puts the attribute `name` of a file into `space`. Returns its length there.
fn put(fd: c_int, name: &CStr, space: &mut [u8]) -> Option<usize> {
    let mut value = Page::take();
    let len = query::fgetxattr(fd, name, value.bytes_mut()).ok()?;
    put_extended(name.to_bytes(), value.bytes().get(..len)?, space)
}
