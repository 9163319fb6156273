//! `delay:TIME,URL`: another backing, slowed down.

use std::sync::Arc;
use std::time::Duration;

use super::{BackingError, BackingUrl, OpenBacking, Opening, Scheme, parse_time};
use crate::device::delay::{Delay, Delays};

/// The longest delay.
const TIME_MAX: Duration = Duration::from_secs(60);

/// `delay:TIME,URL`.
pub(super) static DELAY: Scheme = Scheme {
    name: "delay",
    syntax: "delay:TIME,URL",
    about: "another backing, whose requests take at least TIME: for tests and demonstrations",
    example: "delay:20ms,file:/srv/disk.img",
    identified_by: "that of the backing behind the comma",
    parse: |rest| parts(rest).map(|_| rest.to_owned()),
    place: |rest| parts(rest).ok()?.1.place(),
    open,
};

/// Splits the URL into the delay of a request and the delayed backing.
fn parts(rest: &str) -> Result<(Duration, BackingUrl), String> {
    let (time, url) =
        rest.split_once(',').ok_or_else(|| format!("`delay:{rest}` has no `,URL`"))?;
    let delay = parse_time(time)
        .filter(|delay| *delay <= TIME_MAX)
        .ok_or_else(|| format!("the delay `{time}` is no time up to 60s, such as 20ms"))?;
    // One delay is enough, and the nesting of a URL needs a bound.
    if url.starts_with("delay:") {
        return Err(format!("`delay:{rest}` delays a delay: name one with the sum"));
    }
    Ok((delay, BackingUrl::named(url)?))
}

fn open(rest: &str, opening: &Opening<'_>) -> Result<OpenBacking, BackingError> {
    let unfit = |reason| BackingError::Unfit { url: format!("delay:{rest}"), reason };
    let (delay, url) = parts(rest).map_err(unfit)?;
    let delays = Delays::of_each(u64::try_from(delay.as_nanos()).unwrap_or(u64::MAX));
    let backing = url.open(opening)?;
    Ok(OpenBacking { device: Arc::new(Delay::new(backing.device, delays)), ..backing })
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::path::Path;
    use std::time::Instant;

    use super::*;
    use crate::device::{BlockDeviceExt, WriteFlags};

    #[test]
    #[expect(clippy::disallowed_methods, reason = "what is tested is the time that passes")]
    fn a_delayed_backing_is_the_same_backing_and_slow() {
        let open = |url: &str| {
            let url: BackingUrl = url.parse().unwrap();
            url.open(&Opening { pool: Path::new("/nowhere"), block_bytes: None }).unwrap()
        };
        let (plain, delayed) = (open("null:1M"), open("delay:3ms,null:1M"));
        assert_eq!(delayed.observer.identity(), plain.observer.identity());
        assert_eq!(delayed.name, plain.name, "a pool finds it again without the delay");
        assert_eq!(delayed.device.geometry(), plain.device.geometry());
        let begun = Instant::now();
        delayed.device.write(0, &[1; 4096], WriteFlags::default()).unwrap();
        assert!(begun.elapsed() >= Duration::from_millis(3));
    }

    #[test]
    fn wrong_delays_are_refused() {
        for url in [
            "delay:",
            "delay:20ms",
            "delay:,null:1M",
            "delay:20,null:1M",
            "delay:61s,null:1M",
            "delay:20ms,null:",
            "delay:1ms,delay:1ms,null:1M",
        ] {
            assert!(url.parse::<BackingUrl>().is_err(), "{url}");
        }
    }
}
