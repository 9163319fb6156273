//! Finds the functions that loaded objects export, by the objects' own tables. The dynamic linker's
//! `dlsym` is avoided: other libraries replace it, it takes a lock, and its answer depends on its
//! caller.
#![allow(unsafe_code)] // the tables of loaded objects

use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr;

/// An entry of an object's dynamic section.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Dynamic {
    tag: i64,
    value: usize,
}

const DT_NULL: i64 = 0;
const DT_STRTAB: i64 = 5;
const DT_SYMTAB: i64 = 6;
const DT_GNU_HASH: i64 = 0x6fff_fef5;
const DT_VERSYM: i64 = 0x6fff_fff0;

#[repr(C)]
struct Symbol {
    name: u32,
    info: u8,
    other: u8,
    section: u16,
    value: usize,
    size: usize,
}

/// The symbols that an object exports.
#[derive(Debug, Clone, Copy)]
pub struct Exports {
    base: usize,
    symbols: *const Symbol,
    names: *const c_char,
    /// The table of hashes that GNU's linker makes.
    hashes: *const u32,
    /// Null if the symbols have no versions.
    versions: *const u16,
}

// SAFETY: the tables of an object are only read.
unsafe impl Send for Exports {}
// SAFETY: the tables of an object are only read.
unsafe impl Sync for Exports {}

impl Exports {
    /// Returns the exports of the object at `base`; `None` if it has no table of hashes.
    ///
    /// # Safety
    /// The object is loaded, and `dynamic` is its dynamic section.
    pub unsafe fn new(base: usize, dynamic: *const Dynamic) -> Option<Self> {
        let table = |wanted| {
            // SAFETY: the caller guarantees that the object is loaded and has this dynamic section.
            let value = unsafe { value_of(dynamic, wanted) }?;
            // The dynamic linker has relocated most of these values, but none of the vdso's.
            Some(if value < base { base + value } else { value })
        };
        Some(Self {
            base,
            symbols: ptr::with_exposed_provenance(table(DT_SYMTAB)?),
            names: ptr::with_exposed_provenance(table(DT_STRTAB)?),
            hashes: ptr::with_exposed_provenance(table(DT_GNU_HASH)?),
            versions: table(DT_VERSYM).map_or(ptr::null(), ptr::with_exposed_provenance),
        })
    }

    /// Returns the address of the function of this name, in its default version.
    ///
    /// # Safety
    /// The object is still loaded.
    pub unsafe fn function(&self, name: &CStr) -> Option<*mut c_void> {
        const FUNCTION: u8 = 2;
        // SAFETY: the caller guarantees that the object is loaded.
        let symbol = unsafe { self.find(name) }?;
        let is_function = symbol.info & 0xf == FUNCTION;
        is_function.then(|| ptr::with_exposed_provenance_mut(self.base + symbol.value))
    }

    /// Returns whether the object exports a symbol of this name.
    ///
    /// # Safety
    /// The object is still loaded.
    pub unsafe fn has(&self, name: &CStr) -> bool {
        // SAFETY: the caller guarantees that the object is loaded.
        unsafe { self.find(name) }.is_some()
    }

    /// Finds the exported symbol of this name.
    ///
    /// # Safety
    /// The object is still loaded.
    unsafe fn find(&self, name: &CStr) -> Option<&Symbol> {
        let hash = gnu_hash(name.to_bytes());
        // SAFETY: the table begins with four numbers.
        let [buckets, first, filter_words, _] = unsafe { self.hashes.cast::<[u32; 4]>().read() };
        if buckets == 0 {
            return None;
        }
        // The filter of 64-bit words follows, and then the buckets.
        let buckets_at = self.hashes.wrapping_add(4 + 2 * filter_words as usize);
        // SAFETY: the table has `buckets` buckets, and the remainder is less.
        let mut number = unsafe { *buckets_at.wrapping_add((hash % buckets) as usize) };
        // The chains follow the buckets.
        let chains_at = buckets_at.wrapping_add(buckets as usize);
        while number >= first {
            // SAFETY: `number` is in a chain that has not ended.
            let entry = unsafe { *chains_at.wrapping_add((number - first) as usize) };
            // SAFETY: `number` is in a chain, so the object has a symbol of this number.
            if entry | 1 == hash | 1 && unsafe { self.is(number, name) } {
                // SAFETY: `number` is in a chain, so the object has a symbol of this number.
                return Some(unsafe { &*self.symbols.wrapping_add(number as usize) });
            }
            if entry & 1 != 0 {
                return None;
            }
            number += 1;
        }
        None
    }

    /// Returns whether the symbol is defined, has this name, and has the default version.
    ///
    /// # Safety
    /// The object is still loaded, and has a symbol `number`.
    unsafe fn is(&self, number: u32, name: &CStr) -> bool {
        const IS_OLD: u16 = 0x8000;
        // SAFETY: the caller guarantees that the object has this symbol.
        let symbol = unsafe { &*self.symbols.wrapping_add(number as usize) };
        // SAFETY: the table of versions, if there is one, has an entry for each symbol.
        let is_old = !self.versions.is_null()
            && unsafe { *self.versions.wrapping_add(number as usize) } & IS_OLD != 0;
        // SAFETY: names are terminated.
        symbol.section != 0
            && !is_old
            && unsafe { CStr::from_ptr(self.names.wrapping_add(symbol.name as usize)) } == name
    }
}

/// Returns the value of the first entry with the tag `wanted`.
///
/// # Safety
/// `dynamic` is the dynamic section of a loaded object.
unsafe fn value_of(dynamic: *const Dynamic, wanted: i64) -> Option<usize> {
    let mut at = dynamic;
    loop {
        // SAFETY: the section ends with `DT_NULL`, which was not read yet.
        let entry = unsafe { *at };
        match entry.tag {
            DT_NULL => return None,
            tag if tag == wanted => return Some(entry.value),
            _ => at = at.wrapping_add(1),
        }
    }
}

fn gnu_hash(name: &[u8]) -> u32 {
    name.iter().fold(5381, |hash: u32, byte| hash.wrapping_mul(33).wrapping_add(u32::from(*byte)))
}

/// A loaded object, as the dynamic linker describes it to debuggers.
#[repr(C)]
#[derive(Debug)]
pub struct Loaded {
    base: usize,
    path: *const c_char,
    dynamic: *const Dynamic,
    next: *const Self,
}

#[repr(C)]
struct Debugged {
    version: c_int,
    first: *const Loaded,
}

impl Loaded {
    /// Returns all objects, in load order.
    ///
    /// # Safety
    /// No thread calls `dlopen` or `dlclose` while the iterator is used.
    pub unsafe fn all() -> impl Iterator<Item = &'static Self> {
        unsafe extern "C" {
            static _r_debug: Debugged;
        }
        // SAFETY: the dynamic linker sets the pointer before any code runs.
        let first = unsafe { _r_debug.first.as_ref() };
        // SAFETY: null, or an object of the list, which no `dlopen` or `dlclose` changes meanwhile.
        std::iter::successors(first, |object| unsafe { object.next.as_ref() })
    }

    /// Returns the path that the object was loaded from; empty for the program.
    pub fn path(&self) -> &'static CStr {
        // SAFETY: the path is terminated, and belongs to the dynamic linker.
        if self.path.is_null() { c"" } else { unsafe { CStr::from_ptr(self.path) } }
    }

    /// Returns the object's dynamic section.
    pub fn dynamic(&self) -> *const Dynamic {
        self.dynamic
    }

    /// Returns the object's exports.
    ///
    /// # Safety
    /// The object stays loaded as long as the result is used.
    pub unsafe fn exports(&self) -> Option<Exports> {
        // SAFETY: the object is loaded, and this is its dynamic section.
        unsafe { Exports::new(self.base, self.dynamic) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of_c_library(name: &CStr) -> Option<*mut c_void> {
        // SAFETY: this test loads nothing.
        let mut objects = unsafe { Loaded::all() };
        let library = objects.find(|object| object.path().to_bytes().ends_with(b"/libc.so.6"));
        // SAFETY: the C library is never unloaded.
        let exports = unsafe { library.expect("it is loaded").exports() }.expect("its hashes");
        // SAFETY: the C library is never unloaded.
        unsafe { exports.function(name) }
    }

    #[test]
    fn functions_are_found_where_the_linker_finds_them() {
        for name in [c"write", c"dlsym", c"posix_spawn", c"fopen64", c"dl_iterate_phdr"] {
            // SAFETY: a terminated name.
            let expected = unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) };
            assert_eq!(of_c_library(name), Some(expected), "{name:?}");
        }
    }

    #[test]
    fn what_is_no_function_is_not_found() {
        for name in [c"environ", c"tidegate_no_such_function", c""] {
            assert_eq!(of_c_library(name), None, "{name:?}");
        }
    }
}
