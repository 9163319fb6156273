//! Every form of the format, created by one side, read and written by the other.

use std::fs::File;
use std::io::Read;
use std::ops::Range;
use std::path::{Path, PathBuf};

use tidegate::btt::{Btt, BttOptions, FlogSlots, LBA_SIZES, Version};
use tidegate::device::{BlockDevice, BlockDeviceExt, ZeroFlags};

use crate::image::Image;
use crate::label::{self, LABEL_AREA_BYTES};
use crate::pool::{
    POOL_BYTES, assert_clean, assert_stamped, blank, convert_pool, create_pool, format_pool,
    open_pool, read_all, stamp, stamped, write_stamped,
};
use crate::vm::{Guest, Lab, Nvdimm};

const UUID: &str = "6d1a7f0e-52c4-4e0b-9d57-2f5b8c6e9a31";

/// The blocks that the second side writes again.
const REWRITTEN: Range<u64> = 24..1048;

/// A form of the format, and the file that holds a BTT of it.
struct Form {
    lba_bytes: u32,
    flog_slots: FlogSlots,
    path: PathBuf,
}

impl Form {
    fn new(lab: &Lab, lba_bytes: u32, flog_slots: FlogSlots) -> Self {
        Self { lba_bytes, flog_slots, path: lab.path(&format!("{lba_bytes}-{flog_slots:?}")) }
    }

    fn block_bytes(&self) -> u32 {
        if self.lba_bytes >= 4096 { 4096 } else { 512 }
    }

    /// Asserts that the disk has `data`, of which the second side wrote its blocks again or did not
    /// yet.
    fn assert(&self, data: &[u8], rewritten: bool) {
        let generation = |block| if rewritten && REWRITTEN.contains(&block) { 9 } else { 3 };
        let name = format!("{}, rewritten: {rewritten}", self.path.display());
        assert_stamped(&name, data, self.block_bytes(), generation);
    }

    /// Lets the guest format the NVDIMM in this form and write every block.
    fn format(&self, guest: &mut Guest, nvdimm: usize) {
        guest.format(nvdimm, self.lba_bytes, UUID);
        let blocks = guest.disk_bytes(nvdimm) / u64::from(self.block_bytes());
        guest.write_disk(nvdimm, 0, &stamped(0..blocks, 3, self.block_bytes()));
    }

    /// Lets the guest write its blocks again.
    fn rewrite(&self, guest: &mut Guest, nvdimm: usize) {
        let offset = REWRITTEN.start * u64::from(self.block_bytes());
        guest.write_disk(nvdimm, offset, &stamped(REWRITTEN, 9, self.block_bytes()));
    }

    /// Asserts that we find what was written, and nothing wrong.
    fn assert_ours(&self, rewritten: bool) {
        assert_clean(&self.path);
        let device = open_pool(&self.path);
        let summary = device.summary();
        assert_eq!(summary.lba_bytes, self.lba_bytes);
        assert_eq!(summary.arenas[0].flog_slots, self.flog_slots);
        self.assert(&read_all(&device), rewritten);
    }
}

fn boot(lab: &Lab, forms: &[Form]) -> Guest {
    let nvdimms: Vec<_> = forms.iter().map(|form| Nvdimm::plain(&form.path)).collect();
    Guest::boot(lab, &nvdimms)
}

#[test]
fn the_kernel_reads_and_writes_every_form_that_we_create() {
    let lab = Lab::enter();
    let mut forms: Vec<_> =
        LBA_SIZES.iter().map(|&lba| Form::new(&lab, lba, FlogSlots::ZeroOne)).collect();
    forms.extend([512, 4096].map(|lba| Form::new(&lab, lba, FlogSlots::ZeroTwo)));
    for form in &forms {
        let Form { lba_bytes, flog_slots, .. } = *form;
        let options = BttOptions { lba_bytes, flog_slots, ..BttOptions::default() };
        create_pool(&form.path, POOL_BYTES, &options);
        fill(&open_pool(&form.path));
    }
    let mut guest = boot(&lab, &forms);
    for (nvdimm, form) in (1..).zip(&forms) {
        form.assert(&guest.read_disk(nvdimm), false);
        form.rewrite(&mut guest, nvdimm);
        form.assert(&guest.read_disk(nvdimm), true);
    }
    guest.power_off();
    for form in &forms {
        form.assert_ours(true);
    }
}

/// Writes every block, many of them several times, so that all of the flog has a history.
fn fill(device: &dyn BlockDevice) {
    write_stamped(device, 0..2048, 1);
    write_stamped(device, 100..900, 2);
    write_stamped(device, 0..device.geometry().blocks, 3);
}

#[test]
fn we_read_and_write_every_form_that_the_kernel_creates() {
    let lab = Lab::enter();
    let forms = LBA_SIZES.map(|lba| Form::new(&lab, lba, FlogSlots::ZeroOne));
    for form in &forms {
        blank(&form.path, POOL_BYTES);
    }
    let mut guest = boot(&lab, &forms);
    for (nvdimm, form) in (1..).zip(&forms) {
        guest.detach(nvdimm);
        form.format(&mut guest, nvdimm);
        guest.detach(nvdimm);
        form.assert_ours(false);
        let device = open_pool(&form.path);
        assert_eq!(device.summary().uuid.to_string(), UUID);
        assert_eq!(device.summary().version, Version::V1_1);
        write_stamped(&device, REWRITTEN, 9);
        drop(device);
        guest.attach(nvdimm);
        form.assert(&guest.read_disk(nvdimm), true);
    }
    guest.power_off();
}

/// UUID and size in bytes of the labelled namespace.
const NAMESPACE: &str = "0b2f7a44-90a1-4c8e-8f6d-6c5d1be7f3c0";
const NAMESPACE_BYTES: u64 = 16 << 20;

/// The kernel knows version 2.0 only in a namespace whose label says so, and writes the namespace's
/// UUID into its info blocks.
#[test]
fn version_2_0_goes_both_ways_in_a_labelled_namespace() {
    let lab = Lab::enter();
    let nvdimm = lab.path("nvdimm");
    // The kernel keeps a namespace's ends on 2 MiB: the labels cost that much.
    blank(&nvdimm, NAMESPACE_BYTES + (2 << 20));
    label::initialise(&nvdimm).expect("the labels can be written");
    let labelled = Nvdimm { path: nvdimm.clone(), label_bytes: LABEL_AREA_BYTES };
    let mut guest = Guest::boot(&lab, &[labelled]);
    guest.label(1, NAMESPACE_BYTES, NAMESPACE);
    our_version_2_0(&mut guest, &Form::new(&lab, 512, FlogSlots::ZeroOne), &nvdimm);
    kernels_version_2_0(&mut guest, &Form::new(&lab, 4096, FlogSlots::ZeroOne), &nvdimm);
    guest.power_off();
}

fn our_version_2_0(guest: &mut Guest, form: &Form, nvdimm: &Path) {
    let options = BttOptions {
        lba_bytes: form.lba_bytes,
        version: Version::V2_0,
        parent_uuid: *NAMESPACE.parse::<uuid::Uuid>().expect("a UUID").as_bytes(),
        ..BttOptions::default()
    };
    create_pool(&form.path, NAMESPACE_BYTES, &options);
    fill(&open_pool(&form.path));
    copy(&form.path, nvdimm, NAMESPACE_BYTES);
    guest.attach(1);
    form.assert(&guest.read_disk(1), false);
    form.rewrite(guest, 1);
    guest.detach(1);
    copy(nvdimm, &form.path, NAMESPACE_BYTES);
    form.assert_ours(true);
}

fn kernels_version_2_0(guest: &mut Guest, form: &Form, nvdimm: &Path) {
    copy(Path::new("/dev/zero"), nvdimm, NAMESPACE_BYTES);
    form.format(guest, 1);
    guest.detach(1);
    blank(&form.path, NAMESPACE_BYTES);
    copy(nvdimm, &form.path, NAMESPACE_BYTES);
    form.assert_ours(false);
    let device = open_pool(&form.path);
    assert_eq!(device.summary().version, Version::V2_0);
    assert_eq!(device.summary().parent_uuid.to_string(), NAMESPACE);
}

/// The kernel wants no block of 512 bytes in zero state, which libpmemblk makes of any block.
#[test]
fn the_kernel_reads_and_writes_pools_of_libpmemblk_that_were_converted() {
    let lab = Lab::enter();
    let forms = [512, 4096].map(|lba| Form::new(&lab, lba, FlogSlots::ZeroOne));
    let zeroed = 2..5;
    for form in &forms {
        create_pool(&form.path, POOL_BYTES + 4096, &BttOptions::libpmemblk(form.lba_bytes));
        let device = open_pool(&form.path);
        fill(&device);
        let bytes = u64::from(form.block_bytes());
        let flags = ZeroFlags::default();
        device.write_zeroes(zeroed.start * bytes, 3 * bytes, flags).expect("blocks are zeroed");
        drop(device);
        convert_pool(&form.path);
    }
    let mut guest = boot(&lab, &forms);
    for (nvdimm, form) in (1..).zip(&forms) {
        let mut data = guest.read_disk(nvdimm);
        let bytes = form.block_bytes() as usize;
        let [start, end] = [2, 5].map(|block| block * bytes);
        assert!(data[start..end].iter().all(|&byte| byte == 0), "{}", form.path.display());
        let stamps = stamped(zeroed.clone(), 3, form.block_bytes());
        data[start..end].copy_from_slice(&stamps);
        form.assert(&data, false);
        guest.write_disk(nvdimm, start as u64, &stamps);
        form.rewrite(&mut guest, nvdimm);
    }
    guest.power_off();
    for form in &forms {
        form.assert_ours(true);
    }
}

/// Copies the first `bytes` of a file over those of another.
fn copy(from: &Path, to: &Path, bytes: u64) {
    let copied = File::open(from).and_then(|from| {
        let mut to = File::options().write(true).open(to)?;
        std::io::copy(&mut from.take(bytes), &mut to)
    });
    assert_eq!(copied.expect("a file can be copied"), bytes, "{}", from.display());
}

/// An arena is 512 GiB at most, so two of them need a sparse file; only their metadata takes space.
#[test]
fn two_arenas_go_both_ways() {
    let lab = Lab::enter();
    let form = Form::new(&lab, 4096, FlogSlots::ZeroOne);
    create_pool(&form.path, (512 << 30) + POOL_BYTES, &BttOptions::default());
    let device = open_pool(&form.path);
    let border = border(&device);
    write_stamped(&device, border.clone(), 3);
    drop(device);
    let (offset, bytes) = (border.start * 4096, 4096 * BORDER_BLOCKS);
    let mut guest = boot(&lab, std::slice::from_ref(&form));
    assert!(guest.read_disk_at(1, offset, bytes) == stamped(border.clone(), 3, 4096));
    guest.write_disk(1, offset, &stamped(border.clone(), 9, 4096));
    guest.detach(1);
    let mut data = vec![0; bytes];
    open_pool(&form.path).read(offset, &mut data).expect("the pool can be read");
    assert!(data == stamped(border.clone(), 9, 4096));

    // The same place, now formatted by the kernel.
    copy(Path::new("/dev/zero"), &form.path, 8192);
    guest.format(1, 4096, UUID);
    guest.write_disk(1, offset, &stamped(border.clone(), 12, 4096));
    guest.power_off();
    let device = open_pool(&form.path);
    assert_eq!(device.summary().uuid.to_string(), UUID);
    assert_eq!(self::border(&device), border);
    device.read(offset, &mut data).expect("the pool can be read");
    assert!(data == stamped(border, 12, 4096));
}

const BORDER_BLOCKS: usize = 200;

/// The last blocks of the first of two arenas, and as many of the second.
fn border(device: &Btt) -> Range<u64> {
    let arenas = &device.summary().arenas;
    assert_eq!(arenas.len(), 2);
    let (border, half) = (u64::from(arenas[0].lbas), BORDER_BLOCKS as u64 / 2);
    border - half..border + half
}

/// A map entry has two more states: a block that reads as zeroes, and one whose content was lost.
#[test]
fn zeroed_and_lost_blocks_mean_the_same_to_both() {
    const ZEROED: Range<u64> = 40..60;
    const LOST: u64 = 70;
    let lab = Lab::enter();
    let form = Form::new(&lab, 4096, FlogSlots::ZeroOne);
    create_pool(&form.path, POOL_BYTES, &BttOptions::default());
    let device = open_pool(&form.path);
    fill(&device);
    let zeroed = device.write_zeroes(ZEROED.start * 4096, 20 * 4096, ZeroFlags::default());
    zeroed.expect("blocks can be zeroed");
    drop(device);
    let mut image = Image::read(&form.path);
    image.lose(u32::try_from(LOST).expect("small"));
    image.write(&form.path);
    let lost = open_pool(&form.path).read(LOST * 4096, &mut [0; 4096]);
    assert!(lost.is_err(), "block {LOST} is lost");

    let mut guest = boot(&lab, std::slice::from_ref(&form));
    assert!(guest.read_disk_at(1, ZEROED.start * 4096, 20 * 4096).iter().all(|&byte| byte == 0));
    let read = format!("dd if={} iflag=direct skip={LOST} bs=4096 count=1", guest.disk(1));
    let (status, output) = guest.try_run(&format!("{read} of=/dev/null 2>&1"));
    assert!(status != 0 && output.contains("Input/output error"), "{status}: {output}");
    guest.write_disk(1, 0, &stamped(0..100, 9, 4096));
    guest.power_off();
    assert_clean(&form.path);
    let generation = |block| if block < 100 { 9 } else { 3 };
    assert_stamped("after all", &read_all(&open_pool(&form.path)), 4096, generation);
}

/// The kernel stops at a block in the zero state and leaves the rest of the page that it reads into
/// as it was, so where several blocks share a page none may be in that state.
#[test]
fn zeroing_a_block_leaves_its_neighbours_readable() {
    const ZEROED: u64 = 17;
    let lab = Lab::enter();
    let form = Form::new(&lab, 512, FlogSlots::ZeroOne);
    create_pool(&form.path, POOL_BYTES, &BttOptions { lba_bytes: 512, ..BttOptions::default() });
    let device = open_pool(&form.path);
    write_stamped(&device, 0..64, 3);
    let zeroed = device.write_zeroes(ZEROED * 512, 512, ZeroFlags::default());
    zeroed.expect("blocks can be zeroed");
    drop(device);
    let mut guest = boot(&lab, std::slice::from_ref(&form));
    let data = guest.read_disk_at(1, 0, 64 * 512);
    let expected: Vec<u8> = (0..64)
        .flat_map(|block| if block == ZEROED { vec![0; 512] } else { stamp(block, 3, 512) })
        .collect();
    assert!(data == expected, "the kernel reads something else");
    guest.power_off();
}

/// The kernel reads a never-written block from its place on the medium, whatever that holds, so
/// zeroing has to reach such blocks, too.
#[test]
fn zeroing_a_block_that_was_never_written_is_seen_by_the_kernel() {
    let lab = Lab::enter();
    let form = Form::new(&lab, 4096, FlogSlots::ZeroOne);
    std::fs::write(&form.path, vec![0xee; usize::try_from(POOL_BYTES).expect("small")])
        .expect("the pool can be written");
    format_pool(&form.path, &BttOptions::default());
    let zeroed = open_pool(&form.path).write_zeroes(0, 4096, ZeroFlags::default());
    zeroed.expect("blocks can be zeroed");
    let mut guest = boot(&lab, std::slice::from_ref(&form));
    assert!(guest.read_disk_at(1, 0, 4096) == [0; 4096], "the kernel reads something else");
    guest.power_off();
}
