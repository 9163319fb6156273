//! Builds the environment of a program that is about to start: the caller's, with the variables
//! that load the library there too.
//!
//! Pure: works in the memory that it is given. Unchanged strings of the caller are shared.
//!
//! Entry points: [`Additions::needed_bytes`] returns how much memory [`Additions::build`] needs, or
//! `None` if the caller's environment will do as it is.

#![allow(unsafe_code)] // strings and arrays of C

use std::ffi::{CStr, c_char};

const PRELOAD: &[u8] = b"LD_PRELOAD";

/// The library and the variables that the environment must contain.
#[derive(Debug, Clone, Copy)]
pub struct Additions<'a> {
    /// Path of the library, as it stands in `LD_PRELOAD`.
    pub library: &'a [u8],
    /// Whether the library must be loaded; if not, it must not be.
    pub preload: bool,
    /// `NAME=value` of the session. A value that the program has set itself stays.
    pub variables: &'a [&'a CStr],
}

/// A NULL-terminated array of strings, without the NULL.
pub type Strings<'a> = &'a [*const c_char];

impl Additions<'_> {
    /// Returns how many bytes [`Self::build`] needs, or `None` if nothing has to change.
    pub fn needed_bytes(&self, theirs: Strings<'_>) -> Option<usize> {
        let missing = self
            .variables
            .iter()
            .filter(|variable| find(theirs, name_of(variable.to_bytes())).is_none());
        let preload = find(theirs, PRELOAD).unwrap_or_default();
        if missing.count() == 0 && self.preload == contains(preload, self.library) {
            return None;
        }
        let pointers = theirs.len() + self.variables.len() + 2;
        let preload_bytes = PRELOAD.len() + preload.len() + self.library.len() + 3;
        Some(pointers * size_of::<*const c_char>() + preload_bytes)
    }

    /// Builds the new environment in `memory`, with its NULL, or returns `None` if it does not fit.
    pub fn build<'m>(&self, theirs: Strings<'_>, memory: &'m mut [usize]) -> Option<Strings<'m>> {
        let pointers = theirs.len() + self.variables.len() + 2;
        let (array, text) = memory.split_at_mut_checked(pointers)?;
        let mut text = Text::new(text);
        let mut array = Array { words: array, len: 0 };
        for &entry in theirs {
            if name_of(bytes_of(entry)) != PRELOAD {
                array.push(entry)?;
            }
        }
        for variable in self.variables {
            if find(theirs, name_of(variable.to_bytes())).is_none() {
                array.push(variable.as_ptr())?;
            }
        }
        self.push_preload(find(theirs, PRELOAD), &mut array, &mut text)?;
        array.push(std::ptr::null())?;
        Some(array.finish())
    }

    /// Pushes `LD_PRELOAD`. The caller's libraries stay in front: some insist on being first.
    fn push_preload(
        &self,
        theirs: Option<&[u8]>,
        array: &mut Array<'_>,
        text: &mut Text<'_>,
    ) -> Option<()> {
        let value = theirs.unwrap_or_default();
        let present = contains(value, self.library);
        let entry = match (self.preload, present) {
            (true, true) | (false, false) => {
                if theirs.is_none() {
                    return Some(());
                }
                text.string(&[PRELOAD, b"=", value])?
            }
            (true, false) if value.is_empty() => text.string(&[PRELOAD, b"=", self.library])?,
            (true, false) => text.string(&[PRELOAD, b"=", value, b":", self.library])?,
            (false, true) => text.list_without(value, self.library)?,
        };
        array.push(entry)
    }
}

/// Returns the strings of a NULL-terminated array without the NULL; none if `array` is null.
///
/// # Safety
/// The array and its strings are terminated, and stay until the caller has done.
pub unsafe fn strings<'a>(array: *const *const c_char) -> Strings<'a> {
    if array.is_null() {
        return &[];
    }
    let mut len = 0;
    loop {
        // SAFETY: the array ends with a NULL, and none of its first `len` entries is NULL.
        let place = unsafe { array.add(len) };
        // SAFETY: `place` is in the array or at its NULL.
        if unsafe { *place }.is_null() {
            break;
        }
        len += 1;
    }
    // SAFETY: the loop has read `len` pointers there, which stay for the length of the call.
    unsafe { std::slice::from_raw_parts(array, len) }
}

/// Returns the value of the first `name=value`.
pub fn find<'a>(strings: Strings<'a>, name: &[u8]) -> Option<&'a [u8]> {
    strings.iter().find_map(|&entry| bytes_of(entry).strip_prefix(name)?.strip_prefix(b"="))
}

/// Returns the first result of `look` for the directories of `PATH`, in the order in which the C
/// library searches for a program.
pub fn search<R>(environment: Strings<'_>, mut look: impl FnMut(&[u8]) -> Option<R>) -> Option<R> {
    let list = find(environment, b"PATH").unwrap_or(b"/bin:/usr/bin");
    let mut directories = list.split(|&byte| byte == b':');
    directories.find_map(|directory| look(if directory.is_empty() { b"." } else { directory }))
}

/// Returns whether the dynamic linker only lists the libraries that it would load, as for `ldd`. It
/// then runs nothing of the program, and the library would appear in the list.
pub fn only_lists(environment: Strings<'_>) -> bool {
    find(environment, b"LD_TRACE_LOADED_OBJECTS").is_some()
}

/// Returns whether `library` is in a list of libraries as `ld.so` reads it.
fn contains(list: &[u8], library: &[u8]) -> bool {
    list.split(|&byte| is_separator(byte)).any(|item| item == library)
}

fn is_separator(byte: u8) -> bool {
    matches!(byte, b':' | b' ')
}

fn name_of(entry: &[u8]) -> &[u8] {
    entry.split(|&byte| byte == b'=').next().unwrap_or_default()
}

fn bytes_of<'a>(entry: *const c_char) -> &'a [u8] {
    // SAFETY: the entries of a `Strings` are NUL-terminated and outlive the call that is about to
    // start a program.
    unsafe { CStr::from_ptr(entry) }.to_bytes()
}

/// An array of pointers, in the first part of the memory.
struct Array<'m> {
    words: &'m mut [usize],
    len: usize,
}

impl<'m> Array<'m> {
    fn push(&mut self, entry: *const c_char) -> Option<()> {
        *self.words.get_mut(self.len)? = entry.expose_provenance();
        self.len += 1;
        Some(())
    }

    fn finish(self) -> Strings<'m> {
        let words = self.words;
        let len = self.len.min(words.len());
        // SAFETY: a pointer has the size and alignment of a `usize`, and `push` has stored a
        // pointer in each of the first `len` words.
        unsafe { std::slice::from_raw_parts(words.as_ptr().cast(), len) }
    }
}

/// Strings, in the second part of the memory.
struct Text<'m> {
    free: &'m mut [u8],
}

impl<'m> Text<'m> {
    fn new(words: &'m mut [usize]) -> Self {
        let len_bytes = size_of_val(words);
        let start = words.as_mut_ptr().cast();
        // SAFETY: the words are initialized memory, and the bytes borrow them for as long.
        let free = unsafe { std::slice::from_raw_parts_mut(start, len_bytes) };
        Self { free }
    }

    fn string(&mut self, parts: &[&[u8]]) -> Option<*const c_char> {
        let len_bytes = parts.iter().map(|part| part.len()).sum::<usize>();
        let (space, free) = std::mem::take(&mut self.free).split_at_mut_checked(len_bytes + 1)?;
        self.free = free;
        let mut at = 0;
        for part in parts {
            space[at..at + part.len()].copy_from_slice(part);
            at += part.len();
        }
        space[at] = 0;
        Some(space.as_ptr().cast())
    }

    fn list_without(&mut self, list: &[u8], library: &[u8]) -> Option<*const c_char> {
        let start = std::mem::take(&mut self.free);
        let mut len_bytes = 0;
        let mut put = |bytes: &[u8]| {
            start.get_mut(len_bytes..len_bytes + bytes.len())?.copy_from_slice(bytes);
            len_bytes += bytes.len();
            Some(())
        };
        put(PRELOAD)?;
        put(b"=")?;
        for item in list
            .split(|&byte| is_separator(byte))
            .filter(|item| !item.is_empty() && *item != library)
        {
            put(item)?;
            put(b":")?;
        }
        put(b"\0")?;
        let (space, free) = start.split_at_mut_checked(len_bytes)?;
        self.free = free;
        Some(space.as_ptr().cast())
    }
}

#[cfg(test)]
mod tests {
    use std::ffi::CString;

    use super::*;

    const LIBRARY: &[u8] = b"/usr/lib/libtidegate_preload.so";
    const VARIABLES: &[&CStr] = &[c"TIDEGATE_POOL=/p", c"TIDEGATE_CONTROL=/dev/shm/c"];

    /// Returns the environment that a program would get, or `None` if that is the one passed in.
    fn changed(additions: Additions<'_>, theirs: &[&str]) -> Option<Vec<String>> {
        let theirs: Vec<CString> =
            theirs.iter().map(|&entry| CString::new(entry).unwrap()).collect();
        let theirs: Vec<*const c_char> = theirs.iter().map(|entry| entry.as_ptr()).collect();
        let mut memory =
            vec![usize::MAX; additions.needed_bytes(&theirs)?.div_ceil(size_of::<usize>())];
        let built = additions.build(&theirs, &mut memory).expect("it asked for enough");
        let (end, entries) = built.split_last().unwrap();
        assert!(end.is_null());
        Some(
            entries
                .iter()
                .map(|&entry| String::from_utf8(bytes_of(entry).to_vec()).unwrap())
                .collect(),
        )
    }

    fn additions() -> Additions<'static> {
        Additions { library: LIBRARY, preload: true, variables: VARIABLES }
    }

    const COMPLETE: [&str; 4] = [
        "A=1",
        "LD_PRELOAD=/usr/lib/libtidegate_preload.so",
        "TIDEGATE_POOL=/p",
        "TIDEGATE_CONTROL=/dev/shm/c",
    ];

    #[test]
    fn a_complete_environment_stays() {
        assert_eq!(changed(additions(), &COMPLETE), None);
        let others = [
            "LD_PRELOAD=liba.so /usr/lib/libtidegate_preload.so:libb.so",
            COMPLETE[2],
            COMPLETE[3],
        ];
        assert_eq!(changed(additions(), &others), None);
    }

    #[test]
    fn an_empty_environment_gets_everything() {
        let built = changed(additions(), &[]).unwrap();
        assert_eq!(built, ["TIDEGATE_POOL=/p", "TIDEGATE_CONTROL=/dev/shm/c", COMPLETE[1]]);
    }

    #[test]
    fn libraries_and_values_of_the_program_stay() {
        let built =
            changed(additions(), &["LD_PRELOAD=libasan.so", "TIDEGATE_POOL=/other", "B"]).unwrap();
        let preload = "LD_PRELOAD=libasan.so:/usr/lib/libtidegate_preload.so";
        assert_eq!(built, ["TIDEGATE_POOL=/other", "B", "TIDEGATE_CONTROL=/dev/shm/c", preload]);
        assert_eq!(changed(additions(), &["LD_PRELOAD="]).unwrap().last().unwrap(), COMPLETE[1]);
    }

    #[test]
    fn a_library_that_cannot_be_loaded_is_taken_out() {
        let foreign = Additions { preload: false, ..additions() };
        let built = changed(
            foreign,
            &["LD_PRELOAD=a.so:/usr/lib/libtidegate_preload.so b.so", COMPLETE[2]],
        )
        .unwrap();
        assert_eq!(built, [COMPLETE[2], COMPLETE[3], "LD_PRELOAD=a.so:b.so:"]);
        let built = changed(foreign, &COMPLETE).unwrap();
        assert_eq!(built, ["A=1", COMPLETE[2], COMPLETE[3], "LD_PRELOAD="]);
        assert_eq!(changed(foreign, &["LD_PRELOAD=a.so", COMPLETE[2], COMPLETE[3]]), None);
    }

    #[test]
    fn too_little_memory_is_noticed() {
        let theirs: Vec<*const c_char> = vec![c"LD_PRELOAD=x:y".as_ptr(), c"A=1".as_ptr()];
        for preload in [true, false] {
            let additions = Additions { preload, ..additions() };
            let needed_bytes = additions.needed_bytes(&theirs).unwrap();
            for words in 0..needed_bytes / size_of::<usize>() {
                let _ = additions.build(&theirs, &mut vec![0; words]);
            }
            let mut enough = vec![0; needed_bytes.div_ceil(size_of::<usize>())];
            assert!(additions.build(&theirs, &mut enough).is_some());
        }
    }
}
