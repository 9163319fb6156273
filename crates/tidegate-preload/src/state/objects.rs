//! The objects that are loaded into this process: the program and its libraries.
//!
//! Invariants:
//! 1. The dynamic linker is asked by the C library's own functions, in front of which nothing
//!    stands.
//! 2. Nothing that may wait is done while the dynamic linker shows its list: it is locked then.
//!
//! Entry points: [`OfLibraries`] for functions behind hooks, [`hook`] for the hook itself;
//! [`each`], [`all`], [`is_hooked`].
#![allow(unsafe_code)] // the dynamic linker's answers

use std::ffi::{CStr, CString, c_int, c_void};
use std::ptr;
use std::sync::OnceLock;

use libc::{dl_phdr_info, size_t};
use tidegate_interpose::symbols::{Dynamic, Exports, Loaded};
use tidegate_interpose::{Next, Source};

/// What the dynamic linker shows an object to.
type Shown = unsafe extern "C" fn(*mut dl_phdr_info, size_t, *mut c_void) -> c_int;
type Iterate = unsafe extern "C-unwind" fn(Shown, *mut c_void) -> c_int;
// SAFETY: the type is that of the C library's manual.
static ITERATE: Next<Iterate, OfLibraries> = unsafe { Next::new(c"dl_iterate_phdr") };

/// An object that stays.
struct Library {
    path: &'static CStr,
    exports: Exports,
}

/// The C library, and this one.
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

/// One of both. Looked for when this library is loaded: the dynamic linker runs constructors one at
/// a time, and its own is the first one.
fn find(is_it: impl Fn(&Loaded) -> bool) -> Option<Library> {
    // SAFETY: as above.
    let object = unsafe { Loaded::all() }.find(|object| is_it(object))?;
    // SAFETY: neither of both is ever unloaded.
    Some(Library { path: object.path(), exports: unsafe { object.exports() }? })
}

fn is_own(object: &Loaded) -> bool {
    unsafe extern "C" {
        static _DYNAMIC: Dynamic;
    }
    ptr::eq(object.dynamic(), &raw const _DYNAMIC)
}

/// The path by which this library was loaded.
pub(crate) fn own_path() -> Option<&'static CStr> {
    own().map(|library| library.path)
}

/// The hook of this name.
pub(crate) fn hook(name: &CStr) -> Option<*mut c_void> {
    // SAFETY: it stays.
    own().and_then(|library| unsafe { library.exports.function(name) })
}

/// The functions behind hooks: the C library's, or where it has none of a name, that of the first
/// other library.
#[derive(Debug)]
pub(crate) struct OfLibraries;

impl Source for OfLibraries {
    fn find(name: &CStr) -> *mut c_void {
        // SAFETY: it stays.
        let of_c = c_library().and_then(|library| unsafe { library.exports.function(name) });
        of_c.or_else(|| of_others(name)).unwrap_or(ptr::null_mut())
    }
}

fn of_others(name: &CStr) -> Option<*mut c_void> {
    let mut found = None;
    each(|object| {
        if found.is_none() && !object.is_own() {
            // SAFETY: it is not unloaded while the list is shown.
            found = object.exports().and_then(|exports| unsafe { exports.function(name) });
        }
    });
    found
}

/// A loaded object, while the dynamic linker shows its list.
pub(crate) struct Object<'a>(&'a dl_phdr_info);

impl Object<'_> {
    /// Where it is loaded: no two have the same place at one time.
    pub(crate) fn base(&self) -> u64 {
        self.0.dlpi_addr
    }

    /// The path by which it was loaded; empty for the program.
    pub(crate) fn path(&self) -> &CStr {
        // SAFETY: terminated, and the dynamic linker's own.
        if self.0.dlpi_name.is_null() { c"" } else { unsafe { CStr::from_ptr(self.0.dlpi_name) } }
    }

    fn headers(&self) -> &[libc::Elf64_Phdr] {
        // SAFETY: so many headers of a loaded object.
        unsafe { std::slice::from_raw_parts(self.0.dlpi_phdr, self.0.dlpi_phnum.into()) }
    }

    fn headers_of(&self, kind: u32) -> impl Iterator<Item = &libc::Elf64_Phdr> {
        self.headers().iter().filter(move |header| header.p_type == kind)
    }

    /// Whether `address` lies in it.
    pub(crate) fn has(&self, address: usize) -> bool {
        let offset = (address as u64).wrapping_sub(self.base());
        self.headers_of(libc::PT_LOAD)
            .any(|header| offset.wrapping_sub(header.p_vaddr) < header.p_memsz)
    }

    pub(crate) fn is_own(&self) -> bool {
        self.has((&raw const HOOKED).addr())
    }

    /// What it exports.
    pub(crate) fn exports(&self) -> Option<Exports> {
        let dynamic = self.headers_of(libc::PT_DYNAMIC).next()?;
        let (base, offset) = (usize::try_from(self.base()), usize::try_from(dynamic.p_vaddr));
        let base = base.ok()?;
        let at = ptr::with_exposed_provenance(base.wrapping_add(offset.ok()?));
        // SAFETY: loaded, with its own dynamic section.
        unsafe { Exports::new(base, at) }
    }
}

/// Calls `visit` for each loaded object, in the order in which they were loaded.
pub(crate) fn each<V: FnMut(&Object<'_>)>(mut visit: V) {
    unsafe extern "C" fn shown<V: FnMut(&Object<'_>)>(
        info: *mut dl_phdr_info,
        _bytes: size_t,
        visit: *mut c_void,
    ) -> c_int {
        // SAFETY: what `each` has passed, for the length of its call.
        let visit = unsafe { &mut *visit.cast::<V>() };
        // SAFETY: the dynamic linker's own, for the length of this call.
        if let Some(info) = unsafe { info.as_ref() } {
            visit(&Object(info));
        }
        0
    }
    if let Some(iterate) = ITERATE.get() {
        // SAFETY: a function of the type that it takes, with what that expects.
        unsafe { iterate(shown::<V>, (&raw mut visit).cast()) };
    }
}

/// A loaded object, for longer than the dynamic linker shows its list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Named {
    pub(crate) base: u64,
    pub(crate) path: CString,
}

/// All objects that come from files, but for the program itself.
pub(crate) fn all() -> Vec<Named> {
    let mut all = Vec::new();
    each(|object| {
        let path = object.path();
        // The kernel's own has a name only.
        if path.to_bytes().contains(&b'/') {
            all.push(Named { base: object.base(), path: path.into() });
        }
    });
    all
}

/// The parts of the C library that have system call instructions, and libraries whose entry points
/// have hooks: without a ring or a context these make no call that counts.
static HOOKED: [&[u8]; 6] =
    [b"ld-linux", b"libpthread.so", b"librt.so", b"libdl.so", b"libaio.so", b"liburing.so"];

/// Whether hooks stand in front of what is in the library at this path.
pub(crate) fn is_hooked(path: &CStr) -> bool {
    let is_known = |library: &Library| library.path == path;
    c_library().is_some_and(is_known)
        || own().is_some_and(is_known)
        || HOOKED.iter().any(|name| name_of(path.to_bytes()).starts_with(name))
}

/// Whether the library at this path is a part of the C library, or what the kernel has of it.
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

/// The last component of a path.
pub(crate) fn name_of(path: &[u8]) -> &[u8] {
    path.rsplit(|byte| *byte == b'/').next().unwrap_or_default()
}

/// Whether `address` lies in a library whose functions have hooks in front of them.
pub(crate) fn is_of_hooked(address: usize) -> bool {
    let mut is_hooked = false;
    each(|object| is_hooked |= object.has(address) && self::is_hooked(object.path()));
    is_hooked
}

/// Whether `address` lies in an object behind this library in the order of search.
pub(crate) fn is_behind(address: usize) -> bool {
    let (mut is_past, mut is_behind) = (false, false);
    each(|object| {
        is_behind |= is_past && object.has(address);
        is_past |= object.is_own();
    });
    is_behind
}

/// How many of these, which the program does not unload meanwhile, define a symbol.
pub(crate) fn definitions(exports: &[Exports], name: &CStr) -> usize {
    // SAFETY: as promised.
    exports.iter().filter(|exports| unsafe { exports.has(name) }).count()
}
