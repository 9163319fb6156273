//! Finds the files that the dynamic linker will load for a name, as far as it can be foreseen.
//!
//! The linker takes the first file that it finds; this module takes all files that the linker may
//! find. It does not look for files that the linker prefers for one kind of processor
//! (`glibc-hwcaps`), nor for files that the C library loads for itself. The caller looks at the
//! loaded files afterwards.

use std::collections::HashSet;
use std::ffi::{CStr, CString};
use std::os::unix::ffi::OsStrExt;
use std::sync::OnceLock;

use tidegate_interpose::library::{Library, Symbols};

use crate::state::objects::{self, name_of};
use crate::sys::path::Opened;
use crate::sys::query;

/// The files found for a name.
#[derive(Debug, Default)]
pub(super) struct Found {
    /// The path to pass instead of the name, if the result of the search depends on the caller.
    pub(super) path: Option<CString>,
    /// All files that may be loaded; `None` if that cannot be told.
    pub(super) objects: Option<Vec<CString>>,
}

/// More libraries than any library needs.
const LIBRARIES_MAX: usize = 256;
#[cfg(target_arch = "x86_64")]
const MACHINE_DIRECTORY: &str = "lib/x86_64-linux-gnu";
#[cfg(target_arch = "aarch64")]
const MACHINE_DIRECTORY: &str = "lib/aarch64-linux-gnu";
const DIRECTORIES: [&str; 3] = [MACHINE_DIRECTORY, "lib64", "lib"];

/// `LD_LIBRARY_PATH` as it was when the program started.
static OF_ENVIRONMENT: OnceLock<Vec<u8>> = OnceLock::new();

/// Keeps the value of `LD_LIBRARY_PATH`, which the dynamic linker reads at the start only.
pub(crate) fn remember() {
    let value = std::env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
    OF_ENVIRONMENT.get_or_init(|| value.as_bytes().to_vec());
}

/// Finds the files that a caller at this address loads by a name.
pub(super) fn find(name: &CStr, caller: usize) -> Found {
    let loader = path_of(caller);
    let origin = directory_of(loader.to_bytes());
    let text = name.to_bytes();
    if text.contains(&b'/') {
        let path = expanded(text, origin).into_iter().find(|path| exists(path));
        let objects = path.as_ref().and_then(|path| closure(vec![path.clone()], &[]));
        return Found { path: path.filter(|_| text.contains(&b'$')), objects };
    }
    let library = library_at(&loader).unwrap_or_default();
    let first = |directories: &[Vec<u8>]| in_directories(directories, text).into_iter().next();
    let (mut early, late) = of_library(&library, origin);
    early.extend(of_program());
    if let Some(path) = first(&early) {
        return Found { objects: closure(vec![path.clone()], &early), path: Some(path) };
    }
    if let Some(path) = first(&of_environment()) {
        return Found { objects: closure(vec![path], &early), path: None };
    }
    if let Some(path) = first(&late) {
        return Found { objects: closure(vec![path.clone()], &early), path: Some(path) };
    }
    Found { objects: closure(in_system(text), &early), path: None }
}

/// Returns the files at these paths and all that may be loaded with them; `None` if unknown.
fn closure(roots: Vec<CString>, inherited: &[Vec<u8>]) -> Option<Vec<CString>> {
    if roots.is_empty() {
        return None;
    }
    let mut loaded = HashSet::new();
    objects::each(|object| {
        loaded.insert(name_of(object.path().to_bytes()).to_vec());
    });
    let (mut all, mut directories) = (roots, inherited.to_vec());
    let mut at = 0;
    while let Some(path) = all.get(at).cloned() {
        at += 1;
        let library = library_at(&path)?;
        let (early, late) = of_library(&library, directory_of(path.to_bytes()));
        directories.extend(early);
        for name in &library.needed {
            if !loaded.insert(name.clone()) {
                continue;
            }
            let found = candidates(name, &directories, &late);
            if found.is_empty() || all.len() + found.len() > LIBRARIES_MAX {
                return None;
            }
            all.extend(found.into_iter().filter(|path| library_at(path).is_some()));
        }
    }
    Some(all)
}

/// Returns all files that the dynamic linker may take for a name that a library needs.
fn candidates(name: &[u8], early: &[Vec<u8>], late: &[Vec<u8>]) -> Vec<CString> {
    if name.contains(&b'/') {
        return CString::new(name).ok().filter(|path| exists(path)).into_iter().collect();
    }
    let mut found = in_directories(early, name);
    found.extend(in_directories(&of_environment(), name));
    found.extend(in_directories(late, name));
    found.extend(in_system(name));
    found
}

/// Returns the directories that a library names, searched before and after the environment's.
fn of_library(library: &Library, origin: &[u8]) -> (Vec<Vec<u8>>, Vec<Vec<u8>>) {
    let of_list = |list: &[u8]| {
        let items = list.split(|byte| *byte == b':').filter(|item| !item.is_empty());
        items.flat_map(|item| expanded(item, origin)).map(CString::into_bytes).collect()
    };
    let runpath: Vec<_> = of_list(&library.runpath);
    (if runpath.is_empty() { of_list(&library.rpath) } else { Vec::new() }, runpath)
}

/// Returns the directories that the program names for all libraries.
fn of_program() -> Vec<Vec<u8>> {
    let library = library_at(c"/proc/self/exe").unwrap_or_default();
    let mut buffer = [0; 4096];
    let path = query::readlink(c"/proc/self/exe", &mut buffer).unwrap_or_default();
    of_library(&library, directory_of(path)).0
}

fn of_environment() -> Vec<Vec<u8>> {
    let list = OF_ENVIRONMENT.get().map_or(&b""[..], Vec::as_slice);
    let items = list.split(|byte| [b':', b';'].contains(byte)).filter(|_| !list.is_empty());
    // An empty item is the working directory.
    items.map(|item| if item.is_empty() { b".".to_vec() } else { item.to_vec() }).collect()
}

/// Expands `$ORIGIN` in a path to `origin`, and `$LIB` to each directory of libraries.
fn expanded(path: &[u8], origin: &[u8]) -> Vec<CString> {
    let text = String::from_utf8_lossy(path).into_owned();
    let origin = String::from_utf8_lossy(origin).into_owned();
    let text = text.replace("${ORIGIN}", &origin).replace("$ORIGIN", &origin);
    let of_libraries =
        |directory: &str| text.replace("${LIB}", directory).replace("$LIB", directory);
    let mut all: Vec<_> = DIRECTORIES.iter().map(|directory| of_libraries(directory)).collect();
    all.dedup();
    all.into_iter().filter_map(|text| CString::new(text).ok()).collect()
}

fn in_directories(directories: &[Vec<u8>], name: &[u8]) -> Vec<CString> {
    let joined = directories.iter().map(|directory| [directory, &b"/"[..], name].concat());
    joined.filter_map(|path| CString::new(path).ok()).filter(|path| exists(path)).collect()
}

/// Returns the files of this name in the linker's cache and in the system's directories.
fn in_system(name: &[u8]) -> Vec<CString> {
    let mut found: Vec<_> = cached(&read_cache(), name).collect();
    let roots = ["/", "/usr/"].iter();
    let directories = roots
        .flat_map(|root| DIRECTORIES.map(|directory| format!("{root}{directory}").into_bytes()));
    found.extend(in_directories(&directories.collect::<Vec<_>>(), name));
    found.retain(|path| exists(path));
    found
}

/// Reads the linker's cache. Returns no bytes if there is none.
fn read_cache() -> Vec<u8> {
    const BYTES_MAX: usize = 64 << 20;
    let Ok(opened) = Opened::open(libc::AT_FDCWD, c"/etc/ld.so.cache", libc::O_RDONLY) else {
        return Vec::new();
    };
    let len = query::fstat(opened.number()).map_or(0, |stat| stat.st_size);
    let len = usize::try_from(len).unwrap_or(0).min(BYTES_MAX);
    let mut bytes = vec![0; len];
    let read_bytes = query::pread(opened.number(), &mut bytes, 0).unwrap_or(0);
    bytes.truncate(read_bytes);
    bytes
}

/// Returns the paths that the cache has for a name, for any machine.
fn cached<'c>(cache: &'c [u8], name: &'c [u8]) -> impl Iterator<Item = CString> + 'c {
    const HEADER_BYTES: usize = 48;
    const ENTRY_BYTES: usize = 24;
    let start = memchr::memmem::find(cache, b"glibc-ld.so.cache1.1").unwrap_or(cache.len());
    let cache = &cache[start..];
    let number = |at: usize| Some(u32::from_le_bytes(*cache.get(at..)?.first_chunk()?) as usize);
    let text = move |at: usize| CStr::from_bytes_until_nul(cache.get(number(at)?..)?).ok();
    let entries = 0..number(20).unwrap_or(0);
    entries
        .map_while(move |entry| {
            let at = HEADER_BYTES + entry * ENTRY_BYTES;
            Some((text(at + 4)?, text(at + 8)?))
        })
        .filter(move |(key, _)| key.to_bytes() == name)
        .map(|(_, path)| path.to_owned())
}

fn exists(path: &CStr) -> bool {
    query::fstatat(libc::AT_FDCWD, path, 0)
        .is_ok_and(|stat| stat.st_mode & libc::S_IFMT == libc::S_IFREG)
}

fn library_at(path: &CStr) -> Option<Library> {
    reading(path, |read| Library::of(read))
}

fn reading<T>(
    path: &CStr,
    parse: impl FnOnce(&mut dyn FnMut(u64, &mut [u8]) -> usize) -> Option<T>,
) -> Option<T> {
    let opened = Opened::open(libc::AT_FDCWD, path, libc::O_RDONLY).ok()?;
    parse(&mut |at, out| query::pread(opened.number(), out, at).unwrap_or(0))
}

/// Returns the path of the object at an address, or the path of the program if there is none.
fn path_of(address: usize) -> CString {
    let mut path = CString::default();
    objects::each(|object| {
        if object.has(address) {
            path = object.path().into();
        }
    });
    if path.is_empty() { c"/proc/self/exe".into() } else { path }
}

fn directory_of(path: &[u8]) -> &[u8] {
    let end = path.iter().rposition(|byte| *byte == b'/');
    end.map_or(&b"."[..], |end| &path[..end])
}

/// Returns whether these files refer to a symbol with more than one definition beside its hook. A
/// library that binds to itself first may then bind to another definition. Also returns true if a
/// file cannot be read.
pub(super) fn may_bind_otherwise(paths: &[CString]) -> bool {
    let symbols = paths.iter().map(|path| reading(path, |read| Symbols::of(read)));
    let Some(symbols) = symbols.collect::<Option<Vec<_>>>() else { return true };
    // Definitions in several parts of the C library are equal, and count once.
    let (mut of_c, mut loaded) = (Vec::new(), Vec::new());
    objects::each(|object| {
        if objects::is_of_c_library(object.path()) {
            of_c.extend(object.exports());
        } else if !object.is_own() {
            loaded.extend(object.exports());
        }
    });
    let defined: HashSet<_> = symbols.iter().flat_map(|file| file.defined.iter()).collect();
    let referred: HashSet<_> = symbols.iter().flat_map(|file| file.referred.iter()).collect();
    referred.into_iter().any(|name| {
        let Ok(text) = CString::new(name.as_slice()) else { return true };
        let by_c = usize::from(objects::definitions(&of_c, &text) > 0);
        usize::from(defined.contains(name)) + by_c + objects::definitions(&loaded, &text) > 1
    })
}
