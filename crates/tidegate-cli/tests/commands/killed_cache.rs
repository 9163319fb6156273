//! A cache whose server was killed, to be damaged.

use std::fs::File;
use std::os::unix::fs::FileExt;

use crate::behind::{Scene, kill, write};

const PAGE_BYTES: usize = 4096;

/// Page 1 of 0x5A, written last and over 0xC3, and pages 2 to 9 of 0xC3, all dirty.
pub(crate) fn killed_cache() -> Scene {
    let scene = Scene::new("cache");
    let server = scene.serve("disk", &[]);
    let mut client = scene.client();
    (1..=9).for_each(|lba| write(&mut client, lba, 0xC3));
    write(&mut client, 1, 0x5A);
    kill(server);
    scene
}

/// Overwrites a part, from byte `at` on, of that page of the pool which is the `number`th one full
/// of `byte`.
pub(crate) fn damage(scene: &Scene, (byte, number): (u8, usize), at: usize, damage: &[u8]) {
    let pool = std::fs::read(scene.pool()).unwrap();
    let pages = pool.chunks_exact(PAGE_BYTES).enumerate();
    let is_full = |(_, page): &(usize, &[u8])| page.iter().all(|other| *other == byte);
    let (page, _) = pages.filter(is_full).nth(number).expect("there are so many");
    let file = File::options().write(true).open(scene.pool()).unwrap();
    file.write_all_at(damage, (page * PAGE_BYTES + at) as u64).unwrap();
}
