//! Initialization when the library is loaded, and the last reports when the process ends.
#![allow(unsafe_code)] // the functions that the loader runs

use tidegate_record::event::{Event, Kind};

use crate::files::PathBuffer;
use crate::{close, names, open, program, session, stream, sync, transfer, unseen};

#[used]
#[unsafe(link_section = ".init_array")]
static LOADED: extern "C" fn() = loaded;

extern "C" fn loaded() {
    close::resolve();
    names::resolve();
    open::resolve();
    program::resolve();
    stream::resolve();
    sync::resolve();
    transfer::resolve();
    unseen::resolve();
    // SAFETY: takes no argument. It clears the error of a function that an older C library lacks.
    unsafe { libc::dlerror() };
    session::begin();
    session::recording(|recorder| {
        let mut buffer = PathBuffer::new();
        let path = buffer.of_link(c"/proc/self/exe");
        recorder.tell_of_process(Event::new(Kind::Started), &[path]);
    });
}

#[used]
#[unsafe(link_section = ".fini_array")]
static ENDED: extern "C" fn() = ended;

extern "C" fn ended() {
    stream::end();
    program::ending();
}
