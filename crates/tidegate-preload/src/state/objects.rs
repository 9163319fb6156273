//! The objects that are loaded into this process: the program and its libraries.
//!
//! Invariants:
//! 1. The dynamic linker is asked by the C library's own functions, without hooks.
//! 2. Nothing that may wait is done while the dynamic linker shows its list, under its lock.
//!
//! Entry points: [`OfLibraries`] and [`BehindThis`] for functions behind hooks; [`hook`] for the
//! hook itself; [`each`], [`all`], [`is_hooked`].
#![allow(unsafe_code)] // the dynamic linker's answers

use std::ffi::{CStr, CString, c_int, c_void};
use std::ptr;
use std::sync::OnceLock;

use libc::{dl_phdr_info, size_t};
use tidegate_interpose::symbols::{Dynamic, Exports, Loaded};
use tidegate_interpose::{Next, Source};

/// The callback of `dl_iterate_phdr`.
type Shown = unsafe extern "C" fn(*mut dl_phdr_info, size_t, *mut c_void) -> c_int;
type Iterate = unsafe extern "C-unwind" fn(Shown, *mut c_void) -> c_int;
// SAFETY: `Iterate` is the type of `dl_iterate_phdr` in the C library's manual.
static ITERATE: Next<Iterate, OfLibraries> = unsafe { Next::new(c"dl_iterate_phdr") };

/// A loaded object that is never unloaded.
struct Library {
    path: &'static CStr,
    exports: Exports,
}

/// Returns the C library and this library.
fn libraries() -> &'static [Option<Library>; 2] {
    static LIBRARIES: OnceLock<[Option<Library>; 2]> = OnceLock::new();
    LIBRARIES.get_or_init(|| {
        [find(|object| name_of(object.path().to_bytes()).starts_with(b"libc.so")), find(is_own)]
    })
}

fn c_library() -> Option<&'static Library> {
    libraries()[0].as_ref()
}

fn own() -> Option<&'static Library> {
    libraries()[1].as_ref()
}

/// Finds one of these two libraries. First called by this library's constructor, when no other
/// thread runs: the dynamic linker runs constructors one at a time, and this one first.
fn find(is_it: impl Fn(&Loaded) -> bool) -> Option<Library> {
    // SAFETY: in the constructor no other thread runs that could call `dlopen` or `dlclose`.
    let object = unsafe { Loaded::all() }.find(|object| is_it(object))?;
    // SAFETY: neither the C library nor this library is ever unloaded.
    Some(Library { path: object.path(), exports: unsafe { object.exports() }? })
}

fn is_own(object: &Loaded) -> bool {
    unsafe extern "C" {
        static _DYNAMIC: Dynamic;
    }
    ptr::eq(object.dynamic(), &raw const _DYNAMIC)
}

/// Returns the path of this library.
pub(crate) fn own_path() -> Option<&'static CStr> {
    own().map(|library| library.path)
}

/// Returns the hook of this name.
pub(crate) fn hook(name: &CStr) -> Option<*mut c_void> {
    // SAFETY: this library is never unloaded.
    own().and_then(|library| unsafe { library.exports.function(name) })
}

/// The source of the functions behind hooks: the C library, or if it has no function of a name, the
/// first other library that has one.
#[derive(Debug)]
pub(crate) struct OfLibraries;

impl Source for OfLibraries {
    fn find(name: &CStr) -> *mut c_void {
        // SAFETY: the C library is never unloaded.
        let of_c = c_library().and_then(|library| unsafe { library.exports.function(name) });
        of_c.or_else(|| of_others(name)).unwrap_or(ptr::null_mut())
    }
}

/// The source of the first definition behind this library in the order of search, which may be that
/// of another preloaded library. Such a function may come back to the hook.
#[derive(Debug)]
pub(crate) struct BehindThis;

impl Source for BehindThis {
    fn find(name: &CStr) -> *mut c_void {
        let (mut is_past, mut found) = (false, None);
        each(|object| {
            if is_past && found.is_none() {
                // SAFETY: the dynamic linker unloads no object while it shows its list.
                found = object.exports().and_then(|exports| unsafe { exports.function(name) });
            }
            is_past |= object.is_own();
        });
        found.unwrap_or(ptr::null_mut())
    }
}

fn of_others(name: &CStr) -> Option<*mut c_void> {
    let mut found = None;
    each(|object| {
        if found.is_none() && !object.is_own() {
            // SAFETY: the dynamic linker unloads no object while it shows its list.
            found = object.exports().and_then(|exports| unsafe { exports.function(name) });
        }
    });
    found
}

/// A loaded object, while the dynamic linker shows its list.
pub(crate) struct Object<'a>(&'a dl_phdr_info);

impl Object<'_> {
    /// Returns the object's base address, which no other object has while it is loaded.
    pub(crate) fn base(&self) -> u64 {
        self.0.dlpi_addr
    }

    /// Returns the object's path, empty for the program.
    pub(crate) fn path(&self) -> &CStr {
        // SAFETY: a terminated string of the dynamic linker, which it keeps with the object.
        if self.0.dlpi_name.is_null() { c"" } else { unsafe { CStr::from_ptr(self.0.dlpi_name) } }
    }

    fn headers(&self) -> &[libc::Elf64_Phdr] {
        // SAFETY: the object has `dlpi_phnum` headers, which are loaded as long as the object.
        unsafe { std::slice::from_raw_parts(self.0.dlpi_phdr, self.0.dlpi_phnum.into()) }
    }

    fn headers_of(&self, kind: u32) -> impl Iterator<Item = &libc::Elf64_Phdr> {
        self.headers().iter().filter(move |header| header.p_type == kind)
    }

    /// Returns whether `address` lies in the object.
    pub(crate) fn has(&self, address: usize) -> bool {
        let offset = (address as u64).wrapping_sub(self.base());
        self.headers_of(libc::PT_LOAD)
            .any(|header| offset.wrapping_sub(header.p_vaddr) < header.p_memsz)
    }

    pub(crate) fn is_own(&self) -> bool {
        self.has((&raw const HOOKED).addr())
    }

    /// Returns the object's exports, or `None` if it has no table of exports.
    pub(crate) fn exports(&self) -> Option<Exports> {
        let dynamic = self.headers_of(libc::PT_DYNAMIC).next()?;
        let (base, offset) = (usize::try_from(self.base()), usize::try_from(dynamic.p_vaddr));
        let base = base.ok()?;
        let at = ptr::with_exposed_provenance(base.wrapping_add(offset.ok()?));
        // SAFETY: the object is loaded, and its header says where its dynamic section is.
        unsafe { Exports::new(base, at) }
    }
}

/// Calls `visit` for each loaded object, in the order of loading.
pub(crate) fn each<V: FnMut(&Object<'_>)>(mut visit: V) {
    unsafe extern "C" fn shown<V: FnMut(&Object<'_>)>(
        info: *mut dl_phdr_info,
        _bytes: size_t,
        visit: *mut c_void,
    ) -> c_int {
        // SAFETY: `each` has passed a `V`, which lives until its call returns.
        let visit = unsafe { &mut *visit.cast::<V>() };
        // SAFETY: null, or valid until this callback returns.
        if let Some(info) = unsafe { info.as_ref() } {
            visit(&Object(info));
        }
        0
    }
    if let Some(iterate) = ITERATE.get() {
        // SAFETY: `shown::<V>` has the callback's type, and gets the `V` that it expects.
        unsafe { iterate(shown::<V>, (&raw mut visit).cast()) };
    }
}

/// A loaded object's address and path, kept after the dynamic linker has shown its list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Named {
    pub(crate) base: u64,
    pub(crate) path: CString,
}

/// Returns all objects that were loaded from files, except the program itself.
pub(crate) fn all() -> Vec<Named> {
    let mut all = Vec::new();
    each(|object| {
        let path = object.path();
        // The kernel's object (vdso) has a name without a path.
        if path.to_bytes().contains(&b'/') {
            all.push(Named { base: object.base(), path: path.into() });
        }
    });
    all
}

/// The parts of the C library that have system call instructions, and libraries whose setup
/// functions have hooks: without a ring or a context their other calls do not matter.
static HOOKED: [&[u8]; 6] =
    [b"ld-linux", b"libpthread.so", b"librt.so", b"libdl.so", b"libaio.so", b"liburing.so"];

/// Returns whether hooks intercept the functions of the library at this path.
pub(crate) fn is_hooked(path: &CStr) -> bool {
    let is_known = |library: &Library| library.path == path;
    c_library().is_some_and(is_known)
        || own().is_some_and(is_known)
        || HOOKED.iter().any(|name| name_of(path.to_bytes()).starts_with(name))
}

/// Returns whether the library at this path is a part of the C library or the kernel's vdso.
pub(crate) fn is_of_c_library(path: &CStr) -> bool {
    const PARTS: [&[u8]; 7] = [
        b"libc.so",
        b"libm.so",
        b"libpthread.so",
        b"librt.so",
        b"libdl.so",
        b"ld-linux",
        b"linux-vdso",
    ];
    PARTS.iter().any(|part| name_of(path.to_bytes()).starts_with(part))
}

/// Returns the last component of a path.
pub(crate) fn name_of(path: &[u8]) -> &[u8] {
    path.rsplit(|byte| *byte == b'/').next().unwrap_or_default()
}

/// Returns whether `address` lies in a library whose functions have hooks.
pub(crate) fn is_of_hooked(address: usize) -> bool {
    let mut is_hooked = false;
    each(|object| is_hooked |= object.has(address) && self::is_hooked(object.path()));
    is_hooked
}

/// Returns whether `address` lies in an object after this library in the order of search.
pub(crate) fn is_behind(address: usize) -> bool {
    let (mut is_past, mut is_behind) = (false, false);
    each(|object| {
        is_behind |= is_past && object.has(address);
        is_past |= object.is_own();
    });
    is_behind
}

/// Returns how many of the objects, which the caller keeps from being unloaded, define a symbol.
pub(crate) fn definitions(exports: &[Exports], name: &CStr) -> usize {
    // SAFETY: the caller keeps the objects loaded.
    exports.iter().filter(|exports| unsafe { exports.has(name) }).count()
}
