//! Judges whether a backing is the one that a pool left, and unchanged since: a function of the
//! state in the pool and the state that is seen.

use std::time::Duration;

use crate::pool::{BackingIdentity, BackingState};
use crate::size::Size;

/// How long after the last note of the time a write of the pool may have changed a file. A writer
/// notes the time at most half a second before its write. The rest is the time that the write may
/// take to reach the kernel on a busy machine.
const LATE: Duration = Duration::from_secs(2);

/// How a pool is to treat a backing.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Judgement {
    /// The identity under which engines know the backing: the first one that it had for the pool.
    pub(super) identity: u64,
    /// Why the backing may not be as the pool left it, or `None`.
    pub(super) doubt: Option<String>,
}

/// Judges a backing in the state `seen` with the present name and identity `called`. The pool
/// remembers the backing as `bound`, and its state as `kept`, which older programs did not store.
pub(super) fn judge(
    bound: Option<&BackingIdentity>,
    kept: Option<&BackingState>,
    seen: &BackingState,
    called: &BackingIdentity,
) -> Judgement {
    let Some(bound) = bound else {
        return Judgement { identity: called.identity, doubt: None };
    };
    let same = |doubt| Judgement { identity: bound.identity, doubt };
    let other = |doubt| Judgement { identity: called.identity, doubt };
    match kept {
        _ if seen.said == 0 => other(Some(says_nothing(called))),
        Some(kept) if may_say(kept, seen.said) => same(change(kept, seen)),
        None if bound.identity == seen.said => same(None),
        None if bound.name == called.name => same(Some(format!(
            "an older release knew the backing {} by its name alone, which may be another disk's \
             by now",
            called.name
        ))),
        // Clients have made another file system since: this disk is a clone from before.
        _ if called.identity == bound.identity => other(Some(format!(
            "the backing {} has not the UUID that the pool left on it",
            called.name
        ))),
        _ => other(None),
    }
}

/// Returns whether a backing that the pool left in the state `kept` may have the identity `said`.
/// After a power failure a disk may have the identity that it had before clients made another file
/// system.
fn may_say(kept: &BackingState, said: u64) -> bool {
    kept.said == said || (kept.is_writing && kept.said_before == said)
}

/// Returns the doubt about a disk without an identity, which nothing tells from others.
fn says_nothing(called: &BackingIdentity) -> String {
    format!(
        "the backing {} says nothing by which it can be told from other disks: it has no serial \
         number, WWID or UUID, and neither a partition table nor a file system with one lies on \
         it; a serial (virtio), a dm UUID (`dmsetup rename --setuuid`) or a GPT would do",
        called.name
    )
}

/// Returns how another program changed a backing that the pool left in the state `kept`.
fn change(kept: &BackingState, seen: &BackingState) -> Option<String> {
    if kept.size_bytes != seen.size_bytes {
        let (seen, kept) = (Size { bytes: seen.size_bytes }, Size { bytes: kept.size_bytes });
        return Some(format!("the backing was changed since: its size is {seen}, and was {kept}"));
    }
    let what = if kept.is_writing { change_while_writing(kept, seen) } else { touched(kept, seen) };
    what.map(|what| format!("the backing was changed since: {what}"))
}

/// Compares all of the state: the pool noted it at rest.
fn touched(kept: &BackingState, seen: &BackingState) -> Option<String> {
    let differ = |kept: u64, seen: u64| kept != 0 && seen != 0 && kept != seen;
    // A file system may keep whole seconds only.
    let is_rounded = seen.modified_ns == kept.modified_ns / 1_000_000_000 * 1_000_000_000;
    if differ(kept.modified_ns, seen.modified_ns) && !is_rounded {
        return Some(match seen.modified_ns.checked_sub(kept.modified_ns) {
            Some(later_ns) => {
                let later = Duration::from_nanos(later_ns).as_secs_f64();
                format!("the file was written to {later:.1} s after the pool left it")
            }
            None => "the file has an older time than the pool left it with".into(),
        });
    }
    if differ(kept.areas, seen.areas) {
        return Some("its first or last bytes, where file systems count mounts, are others".into());
    }
    let is_one_count = kept.boot == seen.boot && kept.disk_sequence == seen.disk_sequence;
    (is_one_count && kept.disk_sequence != 0 && kept.changed_sectors != seen.changed_sectors)
        .then(|| "the kernel has counted writes to the disk that are not the pool's".into())
}

/// Compares the times only. The pool was writing when it was killed, and its last writes cannot be
/// told from another program's.
fn change_while_writing(kept: &BackingState, seen: &BackingState) -> Option<String> {
    if seen.modified_ns == 0 || kept.modified_ns == 0 {
        return None;
    }
    let latest_ns =
        kept.noted_ns.saturating_add(u64::try_from(LATE.as_nanos()).unwrap_or(u64::MAX));
    if seen.modified_ns > latest_ns {
        let late = Duration::from_nanos(seen.modified_ns - kept.noted_ns).as_secs_f64();
        return Some(format!("the file was written to {late:.1} s after the pool wrote last"));
    }
    // After the clock went back, the pool's own writes have older times too.
    let is_older = seen.modified_ns < kept.modified_ns && kept.noted_ns >= kept.modified_ns;
    is_older.then(|| "the file has an older time than the pool left it with".into())
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    const SECOND_NS: u64 = 1_000_000_000;

    fn left() -> BackingState {
        BackingState {
            said: 7,
            size_bytes: 1 << 20,
            block_bytes: 4096,
            is_writing: false,
            noted_ns: 1000 * SECOND_NS,
            modified_ns: 990 * SECOND_NS + 5,
            areas: 3,
            boot: [1; 16],
            disk_sequence: 4,
            changed_sectors: 100,
            mark: 0,
            mark_before: 0,
            said_before: 0,
        }
    }

    fn called(identity: u64, name: &str) -> BackingIdentity {
        BackingIdentity::new(identity, name)
    }

    /// Judges a backing for a pool that knows the backing `/dev/sda` as number 5.
    fn of(kept: Option<BackingState>, seen: BackingState, name: &str) -> Judgement {
        let bound = called(5, "/dev/sda");
        judge(Some(&bound), kept.as_ref(), &seen, &called(seen.said.max(1), name))
    }

    #[test]
    fn an_untouched_backing_is_the_same_whatever_its_name_is() {
        let same = Judgement { identity: 5, doubt: None };
        assert_eq!(of(Some(left()), left(), "/dev/sda"), same);
        assert_eq!(of(Some(left()), left(), "/dev/sdb"), same);
        // After a boot the kernel's counts begin anew.
        let seen = BackingState { boot: [2; 16], changed_sectors: 1, ..left() };
        assert_eq!(of(Some(left()), seen, "/dev/sda"), same);
        let seen = BackingState { disk_sequence: 9, changed_sectors: 1, ..left() };
        assert_eq!(of(Some(left()), seen, "/dev/sda"), same);
        let seen = BackingState { modified_ns: 990 * SECOND_NS, ..left() };
        assert_eq!(of(Some(left()), seen, "/dev/sda"), same, "whole seconds");
    }

    #[test]
    fn another_disk_of_that_name_is_another_backing() {
        let found = of(Some(left()), BackingState { said: 8, ..left() }, "/dev/sda");
        assert_eq!(found, Judgement { identity: 8, doubt: None });
    }

    #[test]
    fn a_name_alone_decides_nothing() {
        for kept in [Some(left()), Some(BackingState { said: 0, ..left() }), None] {
            let found = of(kept, BackingState { said: 0, ..left() }, "/dev/sda");
            assert!(found.doubt.is_some_and(|it| it.contains("serial")), "{kept:?}");
        }
        let found = of(None, left(), "/dev/sda");
        assert!(found.doubt.is_some_and(|it| it.contains("older release")));
        assert_eq!(of(None, left(), "/dev/sdb"), Judgement { identity: 7, doubt: None });
    }

    /// A backing that is judged to be the bound one without a doubt gets the dirty pages.
    #[test]
    fn an_identity_of_before_is_not_that_of_now() {
        // The disk was formatted through the pool: known as 5, and now it tells 7. An older clone
        // tells 5.
        let found = of(Some(left()), BackingState { said: 5, ..left() }, "/dev/sdb");
        assert!(found.doubt.is_some_and(|it| it.contains("UUID")));
        // The disk told nothing at its last use.
        let silent = BackingState { said: 0, ..left() };
        let found = of(Some(silent), BackingState { said: 5, ..left() }, "/dev/sda");
        assert!(found.doubt.is_some());
        // A disk that tells nothing never has the number of a disk that tells one.
        let found = of(Some(left()), silent, "/dev/sdb");
        assert!(found.identity != 5 && found.doubt.is_some());
    }

    #[test]
    fn a_pool_that_was_killed_knows_its_disk_by_the_identity_before_too() {
        let formatted = BackingState { is_writing: true, said_before: 6, ..left() };
        let at_rest = BackingState { is_writing: false, ..formatted };
        let durable = BackingState { said_before: 0, ..formatted };
        let same = Judgement { identity: 5, doubt: None };
        for kept in [formatted, at_rest, durable] {
            assert_eq!(of(Some(kept), left(), "/dev/sda"), same, "{kept:?}");
            for said in [0, 5, 6, 8] {
                let found = of(Some(kept), BackingState { said, ..left() }, "/dev/sda");
                assert_eq!(found == same, said == 6 && kept == formatted, "{said} {kept:?}");
            }
        }
        // The disk has said nothing for a while: its clients erased all signatures.
        let erased = BackingState { said: 0, ..formatted };
        let silent = BackingState { said: 0, ..left() };
        assert!(of(Some(erased), silent, "/dev/sda").doubt.is_some());
        assert_eq!(of(Some(erased), BackingState { said: 6, ..left() }, "/dev/sda"), same);
    }

    #[test]
    fn an_older_pool_knows_its_disk_by_what_the_disk_says() {
        let found = of(None, BackingState { said: 5, ..left() }, "/dev/sdb");
        assert_eq!(found, Judgement { identity: 5, doubt: None });
    }

    #[test]
    fn each_trace_of_another_program_is_a_doubt() {
        let later = left().modified_ns + 1;
        for seen in [
            BackingState { size_bytes: 1 << 21, ..left() },
            BackingState { size_bytes: 1 << 19, ..left() },
            BackingState { modified_ns: later, ..left() },
            BackingState { modified_ns: 900 * SECOND_NS, ..left() },
            BackingState { areas: 4, ..left() },
            BackingState { changed_sectors: 101, ..left() },
        ] {
            let found = of(Some(left()), seen, "/dev/sda");
            assert_eq!(found.identity, 5);
            assert!(found.doubt.is_some_and(|it| it.contains("changed since")), "{seen:?}");
        }
    }

    #[test]
    fn what_a_killed_pool_wrote_is_its_own_and_what_came_long_after_is_not() {
        let kept = BackingState { is_writing: true, ..left() };
        let at = |ns: u64| BackingState { areas: 9, changed_sectors: 7, modified_ns: ns, ..left() };
        let is_changed = |seen| of(Some(kept), seen, "/dev/sda").doubt.is_some();
        let timeless = BackingState { modified_ns: 0, ..kept };
        let found = of(Some(timeless), at(1003 * SECOND_NS), "/dev/sda");
        assert_eq!(found.doubt, None, "a loop device, whose file gets writes late");
        for own_ns in [left().modified_ns, 999 * SECOND_NS, 1001 * SECOND_NS] {
            assert!(!is_changed(at(own_ns)), "{own_ns}");
        }
        assert!(is_changed(at(1003 * SECOND_NS)));
        assert!(is_changed(at(980 * SECOND_NS)), "restored");
        let turned_back = BackingState { noted_ns: 500 * SECOND_NS, ..kept };
        let own = at(499 * SECOND_NS);
        assert_eq!(of(Some(turned_back), own, "/dev/sda").doubt, None, "the clock went back");
    }
}
