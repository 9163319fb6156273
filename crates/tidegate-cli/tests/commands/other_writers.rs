//! A backing that another program used while no server had it: noticed, and dirty data is not put
//! over it; and a backing that has only moved: found, and taken.

use std::fs::{File, FileTimes};
use std::os::unix::fs::{FileExt, symlink};
use std::time::Duration;

use rustix::process::Signal;

use crate::behind::{Scene, kill, read, write};
use crate::cache_device::Disk;
use crate::support::{ok, run, scratch};

/// What another program does to the file of a backing, and its name.
type Deed = (&'static str, fn(&File));

const DEEDS: [Deed; 4] = [
    ("write one block that the pool does not have", |file| {
        file.write_all_at(&[9; 4096], 3000 * 4096).unwrap();
    }),
    ("restore an older state, with its time", |file| {
        file.write_all_at(&[9; 4096], 3000 * 4096).unwrap();
        let before = file.metadata().unwrap().modified().unwrap() - Duration::from_secs(3600);
        file.set_times(FileTimes::new().set_modified(before)).unwrap();
    }),
    ("grow it", |file| file.set_len(24 << 20).unwrap()),
    ("cut it short", |file| file.set_len(12 << 20).unwrap()),
];

/// The names of the backings in a scene: a file, and a loop device over it.
const NAMES: [&str; 2] = ["disk", "loop"];

/// Attaches the loop device of `scene` if `name` is its name.
fn attach(scene: &Scene, name: &str) -> Option<Disk> {
    if name != "loop" {
        return None;
    }
    let disk = Disk::of(&scene.path("disk"));
    symlink(&disk.0, scene.path("loop")).unwrap();
    Some(disk)
}

fn disk(scene: &Scene) -> File {
    File::options().read(true).write(true).open(scene.path("disk")).unwrap()
}

#[test]
fn dirty_data_is_not_put_over_what_another_program_wrote() {
    for (engine, name) in ["cache", "log"].into_iter().flat_map(|it| NAMES.map(|name| (it, name))) {
        // A loop device over a file that was cut short cannot be read.
        let deeds = DEEDS.into_iter().filter(|it| name == "disk" || it.0 != "cut it short");
        for (deed, act) in deeds {
            let case = format!("{engine}, {name}, {deed}");
            let scene = Scene::new(engine);
            let _disk = attach(&scene, name);
            let server = scene.serve(name, &[]);
            (0..20).for_each(|lba| write(&mut scene.client(), lba, 7));
            kill(server);
            act(&disk(&scene));
            let refusal = scene.refusal(&[&scene.backing(name)]);
            let is_told = refusal.contains("the backing was changed since");
            assert!(is_told && refusal.contains("--force"), "{case}: {refusal}");
            let recovered = run(["recover".as_ref(), scene.pool().as_os_str()]);
            assert!(!recovered.status.success(), "{case}");
            assert_eq!(scene.in_file("disk", 3), 0, "{case}");
            let server = scene.serve(name, &["--force"]);
            assert_eq!(read(&mut scene.client(), 3), 7);
            assert!(server.stop(Signal::TERM).0.success());
            assert_eq!(scene.in_file("disk", 3), 7, "{case}");
        }
    }
}

#[test]
fn a_backing_that_is_too_short_for_dirty_data_is_to_be_made_long_again() {
    for engine in ["cache", "log"] {
        let scene = Scene::new(engine);
        let server = scene.serve("disk", &[]);
        write(&mut scene.client(), 3000, 7);
        kill(server);
        disk(&scene).set_len(8 << 20).unwrap();
        for force in [None, Some("--force")] {
            let backing = scene.backing("disk");
            let more: Vec<_> = [Some(backing.as_str()), force].into_iter().flatten().collect();
            let refusal = scene.refusal(&more);
            let is_told = refusal.contains("cut short") && refusal.contains("make it as");
            assert!(is_told && !refusal.contains("--force"), "{engine}: {refusal}");
        }
        disk(&scene).set_len(16 << 20).unwrap();
        let server = scene.serve("disk", &["--force"]);
        assert!(server.stop(Signal::TERM).0.success());
        assert_eq!(scene.in_file("disk", 3000), 7, "{engine}");
    }
}

#[test]
fn clean_pages_are_given_up_where_another_program_wrote() {
    for name in NAMES {
        let scene = Scene::new("cache");
        let _disk = attach(&scene, name);
        let server = scene.serve(name, &[]);
        (0..20).for_each(|lba| write(&mut scene.client(), lba, 7));
        assert!(server.stop(Signal::TERM).0.success());
        let server = scene.serve(name, &[]);
        let banner = server.banner.join("\n");
        assert!(banner.contains("20 pages") && !banner.contains("gave up"), "{banner}");
        assert!(server.stop(Signal::TERM).0.success());
        // No sample shows it.
        disk(&scene).write_all_at(&[9; 4096], 3000 * 4096).unwrap();
        let server = scene.serve(name, &[]);
        let banner = server.banner.join("\n");
        let expected = "gave up 20 clean pages, the backing was changed since";
        assert!(banner.contains(expected), "{name}: {banner}");
        assert!(server.stop(Signal::TERM).0.success());
    }
}

/// Killed at any moment, while it cleans too, a server leaves a backing that the next one takes.
#[test]
fn a_killed_server_is_not_taken_for_another_program() {
    let modes = [("cache", "--mode=wb"), ("cache", "--mode=wt"), ("log", "")];
    for ((engine, mode), name) in modes.into_iter().flat_map(|it| NAMES.map(|name| (it, name))) {
        let scene = Scene::new(engine);
        let _disk = attach(&scene, name);
        let more: &[&str] = if mode.is_empty() { &[] } else { &[mode] };
        for round in 1..=6 {
            let server = scene.serve(name, more);
            let mut client = scene.client();
            (0..50).for_each(|lba| write(&mut client, lba, round));
            if round % 2 == 0 && engine == "cache" {
                ok(["flush".as_ref(), scene.pool().as_os_str()]);
            }
            (50..60).for_each(|lba| write(&mut client, lba, round));
            kill(server);
        }
        let server = scene.serve(name, &[]);
        (0..60).for_each(|lba| assert_eq!(read(&mut scene.client(), lba), 6));
        assert!(server.stop(Signal::TERM).0.success());
    }
}

/// The bytes of an image are a backing only once, whatever its name is, and if it has none.
#[test]
fn another_loop_device_over_the_bytes_of_a_disk_is_refused() {
    for engine in ["cache", "log"] {
        let (scene, image) = (Scene::new(engine), scratch());
        let image = image.path().join("image");
        File::create_new(&image).unwrap().set_len(16 << 20).unwrap();
        let first = Disk::of(&image);
        let server = scene.serve(&first.0, &[]);
        let second = Disk::of(&image);
        let other = Scene::new(engine);
        for _ in 0..2 {
            let refusal = other.refusal(&[&format!("--backing={}", second.0)]);
            let told = [first.0.as_str(), "has its bytes too", "losetup -d"];
            assert!(told.iter().all(|it| refusal.contains(it)), "{refusal}");
            let _ = std::fs::remove_file(&image);
        }
        kill(server);
    }
}

#[test]
fn a_disk_that_has_moved_is_found_by_the_link_that_was_given() {
    for engine in ["cache", "log"] {
        let scene = Scene::new(engine);
        symlink("disk", scene.path("by-id")).unwrap();
        let server = scene.serve("by-id", &[]);
        write(&mut scene.client(), 3, 7);
        kill(server);
        std::fs::rename(scene.path("disk"), scene.path("moved")).unwrap();
        std::fs::remove_file(scene.path("by-id")).unwrap();
        symlink("moved", scene.path("by-id")).unwrap();
        ok(["recover".as_ref(), scene.pool().as_os_str()]);
        assert_eq!(scene.in_file("moved", 3), 7, "{engine}");
    }
}

/// The pool knows the disk whatever it is called, and remembers its new name.
#[test]
fn a_disk_under_another_name_is_the_same_disk() {
    for engine in ["cache", "log"] {
        let scene = Scene::new(engine);
        let server = scene.serve("disk", &[]);
        write(&mut scene.client(), 3, 7);
        kill(server);
        std::fs::rename(scene.path("disk"), scene.path("sdb")).unwrap();
        let server = scene.serve("sdb", &[]);
        assert_eq!(read(&mut scene.client(), 3), 7, "{engine}");
        write(&mut scene.client(), 4, 8);
        kill(server);
        ok(["recover".as_ref(), scene.pool().as_os_str()]);
        assert_eq!((scene.in_file("sdb", 3), scene.in_file("sdb", 4)), (7, 8), "{engine}");
    }
}

#[test]
fn an_image_is_served_to_its_last_byte_or_refused() {
    let odd = (16 << 20) + 33 * 512;
    for (engine, size, is_served) in
        [("log", odd, true), ("log", odd + 100, false), ("cache", odd, false)]
    {
        let scene = Scene::new(engine);
        disk(&scene).set_len(size).unwrap();
        if !is_served {
            let refusal = scene.refusal(&[&scene.backing("disk")]);
            assert!(refusal.contains("truncate -s"), "{engine}, {size}: {refusal}");
            continue;
        }
        let server = scene.serve("disk", &[]);
        let last = scene.client().read(size - 512, 512).unwrap();
        assert_eq!(last, [0; 512]);
        assert!(server.stop(Signal::TERM).0.success());
    }
}
