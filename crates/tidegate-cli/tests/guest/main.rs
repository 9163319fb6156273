//! x
mod initramfs;
mod vm;mod label;
use vm::{Guest, Nvdimm};
#[test]
fn explore() {
    let dir = tempfile::tempdir().unwrap();
    let t = std::time::Instant::now();
    let sizes: Vec<u64> = std::env::var("SIZES").unwrap_or("16777216".into()).split(',').map(|s| s.parse().unwrap()).collect();
    let n: Vec<_> = sizes.iter().enumerate().map(|(i, s)| {
        let path = dir.path().join(format!("n{i}"));
        std::fs::File::create(&path).unwrap().set_len(*s).unwrap();
        if std::env::var("LABEL").is_ok() {label::initialise(&path).unwrap();}
        Nvdimm { path, label_bytes: std::env::var("LABEL").map_or(0, |l| l.parse().unwrap()) }
    }).collect();
    let mut g = Guest::boot(dir.path(), &n);
    eprintln!("boot {:?}", t.elapsed());
    let script = std::fs::read_to_string(std::env::var("SCRIPT").unwrap()).unwrap();
    for l in script.lines() {
        let t = std::time::Instant::now();
        let r = g.try_run(l);
        eprintln!("$ {l}\n{}\n-> {} {:?}", r.1, r.0, t.elapsed());
    }
    eprintln!("{}", g.console_tail());
    g.power_off();
    eprintln!("total {:?}", t.elapsed());
    if let Ok(keep) = std::env::var("KEEP") { for (i, n) in n.iter().enumerate() { std::fs::copy(&n.path, format!("{keep}{i}")).unwrap(); } }
}
