//! Sections of the POSIX transcript (programs/posix): what each call returns, and the files left,
//! are the same under `run`. Among them is each defect that was seen in `NVCache`'s own code.

use std::path::PathBuf;

use crate::bed::{Bed, Runner, replay, transcript};
use crate::crash::Workers;
use crate::programs::compiled;

fn program() -> PathBuf {
    // The compiler sees that some calls are wrong; that is what they are for.
    compiled("posix", &["-Wno-nonnull", "-Wno-stringop-overread"])
}

fn same(section: &str) {
    // Most files stay plain; all that can be covered are, from their first write on.
    for every_write in ["0", "1"] {
        let printed = Bed::new().same(|runner, dir| {
            let mut command = runner.command(program(), dir);
            transcript(command.arg(section).env("TIDEGATE_EVERY_WRITE", every_write))
        });
        let end = format!("end of {section}\nexit status: 0\n");
        assert!(printed.ends_with(&end), "the section fails without Tidegate too:\n{printed}");
    }
}

macro_rules! sections {
    ($($(#[$note:meta])* $test:ident: $section:literal;)*) => {
        $($(#[$note])* #[test] fn $test() { same($section); })*
    };
}

sections! {
    append_mode: "append_mode";
    duplicates_share_an_offset: "duplicates";
    vectors: "vectors";
    truncation: "truncation";
    allocation: "allocation";
    sparse_files: "sparse";
    sizes_right_after_writes: "sizes";
    /// `NVCache` wrote 8 bytes over into the next entry of its log.
    writes_of_every_size_keep_their_neighbours: "every_size";
    synchronous_flags_are_kept: "synchronous_flags";
    reused_descriptors: "reused_descriptors";
    /// `NVCache` crashed in most runs with two threads.
    threads: "threads";
    threads_share_an_offset: "shared_offset";
    /// `NVCache` lost what a child wrote, or hung.
    fork_and_both_write: "fork_both_write";
    processes_append_to_one_file: "fork_concurrent_appends";
    forks_that_run_no_handlers: "other_forks";
    exec_keeps_descriptors: "exec_keeps_descriptors";
    /// The library once opened and closed the locked file, in the program that was executed.
    locks_are_kept_over_exec: "locks_over_exec";
    vfork_and_exec: "vfork_exec";
    spawned_programs: "spawned_programs";
    signals_in_the_middle_of_writes: "signals_in_writes";
    handlers_that_jump_out_of_writes: "jumps_out_of_writes";
    /// One did once while what is made at the first sync was made: the next sync waited for ever.
    handlers_that_jump_out_of_first_syncs: "jumps_out_of_first_syncs";
    cancelled_threads: "cancellation";
    processes_killed_in_a_write: "killed_in_a_write";
    passed_descriptors: "passed_descriptors";
    proc_self_fd: "proc_self_fd";
    ten_thousand_open_files: "ten_thousand_files";
    file_size_limit: "file_size_limit";
    ends_of_processes: "ends_of_processes";
    removed_while_open: "removed_while_open";
    unnamed_files: "unnamed_files";
    renames: "renames";
    links: "links";
    directories: "directories";
    modes_and_owners: "modes_and_owners";
    times_of_files: "times";
    locks: "locks";
    files_that_are_found_again: "found_again";
    files_that_are_found_as_others: "found_as_others";
    new_root: "new_root";
    shared_mappings: "shared_mapping";
    mappings_made_writable: "mapping_made_writable";
    copies_by_the_kernel: "copies_by_the_kernel";
    posix_aio: "posix_aio";
    reads_of_posix_aio: "posix_aio_reads";
    kernel_aio: "kernel_aio";
    raw_system_calls: "raw_system_calls";
    more_raw_system_calls: "more_raw_system_calls";
    direct_io: "direct";
    /// `NVCache`'s `write()` returned 0 for any descriptor that it had not opened.
    descriptors_that_are_no_files: "other_descriptors";
    /// `NVCache` saw four calls of stdio and went stale with the others.
    streams: "streams";
    modes_of_streams: "modes_of_streams";
    buffers_of_streams: "buffers_of_streams";
    descriptors_of_streams: "descriptors_of_streams";
    formatted_output: "formatted_output";
    redirected_output: "redirected_output";
    streams_at_exit: "streams_at_exit";
    wrong_arguments: "wrong_arguments";
    places_far_away: "places_far_away";
    wrong_names: "wrong_names";
    buffers_in_a_file_that_is_cut: "truncated_mapping";
    buffers_that_are_half_readable: "half_readable_buffer";
    names_that_are_not_readable: "unreadable_names";
}

/// Runs a Python script until it has said `written`, kills it with its tree, and replays the log.
fn killed_and_replayed(bed: &Bed, script: &str) {
    let mut command = Runner::Run(&bed.pool()).command("/usr/bin/python3", bed.disk());
    let waiting = format!("{script}\nos.write(1, b'written\\n')\nimport signal; signal.pause()");
    command.args(["-c", &waiting]);
    let mut workers = Workers::spawn(command, &bed.pool());
    workers.wait_for_line("written");
    workers.tree.kill();
    drop(workers.collect(bed.pool_dir()));
    replay(&bed.pool(), None);
}

/// Where a write went is asked after it, when another thread may have moved the position.
#[test]
fn a_position_that_another_thread_moves() {
    let bed = Bed::new();
    killed_and_replayed(
        &bed,
        "import os, threading\n\
         fd = os.open('log', os.O_RDWR | os.O_CREAT | os.O_APPEND)\n\
         done = False\n\
         def move():\n    \
             while not done: os.lseek(fd, 0, os.SEEK_SET)\n\
         mover = threading.Thread(target=move)\n\
         mover.start()\n\
         os.fsync(fd)\n\
         for n in range(3000): os.write(fd, b'record %08d\\n' % n)\n\
         done = True\n\
         mover.join()\n\
         os.fsync(fd)",
    );
    let found = std::fs::read_to_string(bed.disk().join("log")).unwrap();
    let record = |n| format!("record {n:08}\n");
    let expected: String = (0..3000).map(record).collect();
    assert!(found == expected, "{} bytes, {:?} ...", found.len(), &found[..64]);
}

/// A program that makes a stream append has each copy of the stream's descriptor append.
#[test]
fn copies_of_descriptors_of_streams() {
    let bed = Bed::new();
    killed_and_replayed(
        &bed,
        "import ctypes, os\n\
         library = ctypes.CDLL(None)\n\
         library.fdopen.restype = ctypes.c_void_p\n\
         library.fclose.argtypes = [ctypes.c_void_p]\n\
         fd = os.open('file', os.O_RDWR | os.O_CREAT)\n\
         os.write(fd, b'0123456789')\n\
         library.fclose(library.fdopen(os.dup(fd), b'a'))\n\
         os.fsync(fd)\n\
         os.pwrite(fd, b'end', 0)\n\
         os.fsync(fd)",
    );
    assert_eq!(std::fs::read_to_string(bed.disk().join("file")).unwrap(), "0123456789end");
}

/// A thread that has left the table of descriptors gives a number to another file.
#[test]
fn threads_with_descriptors_of_their_own() {
    let leave = ["unshare(0x400)", "close_range(1000, 1001, 2)", "syscall(272, 0x400)"];
    let leave = if cfg!(target_arch = "x86_64") { &leave[..] } else { &leave[..2] };
    for leave in leave {
        let bed = Bed::new();
        let script = format!(
            "import ctypes, os, threading\n\
             library = ctypes.CDLL(None)\n\
             fd = os.open('one', os.O_RDWR | os.O_CREAT)\n\
             os.write(fd, b'0123456789')\n\
             def use_number():\n    \
                 assert library.{leave} == 0\n    \
                 os.close(fd)\n    \
                 assert os.open('two', os.O_RDWR | os.O_CREAT) == fd\n    \
                 os.write(fd, b'abcdefghij')\n    \
                 os.fsync(fd)\n\
             thread = threading.Thread(target=use_number)\n\
             thread.start()\n\
             thread.join()\n\
             os.pwrite(fd, b'last', 0)\n\
             os.fsync(fd)"
        );
        killed_and_replayed(&bed, &script);
        let read = |name| std::fs::read_to_string(bed.disk().join(name)).unwrap();
        assert_eq!((&*read("one"), &*read("two")), ("last456789", "abcdefghij"), "{leave}");
    }
}

/// What is done to a file that has records in the log, by functions that write or empty it
/// themselves.
fn change_by_the_library(change: &str) -> Vec<u8> {
    let bed = Bed::new();
    let script = format!(
        "import ctypes, os, socket, struct\n\
         library = ctypes.CDLL(None)\n\
         library.popen.restype = ctypes.c_void_p\n\
         library.fileno.argtypes = library.pclose.argtypes = [ctypes.c_void_p]\n\
         fd = os.open('file', os.O_RDWR | os.O_CREAT)\n\
         os.fsync(fd)\n\
         os.pwrite(fd, b'0123456789', 0)\n\
         {change}\n\
         os.fsync(fd)"
    );
    killed_and_replayed(&bed, &script);
    std::fs::read(bed.disk().join("file")).unwrap()
}

#[test]
fn a_file_that_is_emptied_for_a_spawned_program() {
    let found = change_by_the_library(
        "action = (os.POSIX_SPAWN_OPEN, 9, 'file', os.O_WRONLY | os.O_TRUNC, 0)\n\
         os.waitpid(os.posix_spawn('/bin/true', ['true'], os.environ, file_actions=[action]), 0)",
    );
    assert_eq!(found, b"");
}

#[test]
fn a_file_that_is_emptied_by_its_handle() {
    let found = change_by_the_library(
        "handle = ctypes.create_string_buffer(struct.pack('i', 128), 136)\n\
         mount = ctypes.c_int()\n\
         assert library.name_to_handle_at(-100, b'file', handle, ctypes.byref(mount), 0) == 0\n\
         directory = os.open('.', os.O_RDONLY)\n\
         assert library.open_by_handle_at(directory, handle, os.O_RDWR | os.O_TRUNC) >= 0",
    );
    assert_eq!(found, b"");
}

#[test]
fn a_trace_that_the_library_writes() {
    let found = change_by_the_library(
        "frames = (ctypes.c_void_p * 9)()\n\
         library.backtrace_symbols_fd(frames, library.backtrace(frames, 9), fd)",
    );
    assert!(!found.starts_with(b"0123456789") && found.len() > 10, "{}", found.escape_ascii());
}

/// No hook is told of a descriptor that comes in a message.
#[test]
fn a_number_that_was_a_pipes() {
    let found = change_by_the_library(
        "one, other = socket.socketpair()\n\
         socket.send_fds(one, [b'!'], [fd, fd])\n\
         pipe = library.popen(b'true', b'w')\n\
         number = library.fileno(pipe)\n\
         assert library.write(number, b'', 0) == 0\n\
         library.pclose(pipe)\n\
         assert number in socket.recv_fds(other, 1, 2)[1]\n\
         os.pwrite(number, b'new', 0)",
    );
    assert_eq!(found, b"new3456789");
}
