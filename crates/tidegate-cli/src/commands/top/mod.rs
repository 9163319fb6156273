//! `tidegate top`: shows the rates and latencies of a server on a terminal, again and again.

mod terminal;
mod view;

use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use tidegate::stack::Stat;

use crate::args::TopArgs;
use crate::control::stat_of;
use terminal::{Event, Terminal};
use view::{Order, View};

/// Time between two readings.
const INTERVAL: Duration = Duration::from_secs(1);
const CONTROL_C: u8 = 3;

/// Runs the command until a key or a signal ends it.
///
/// # Errors
/// Standard output is no terminal, or no server answers, or the server has ended.
pub(crate) fn run(args: &TopArgs) -> Result<()> {
    let before = read(args)?;
    let Some(terminal) = Terminal::open()? else {
        bail!(
            "`tidegate top` needs a terminal; `tidegate stat --json` prints the same numbers once"
        );
    };
    let ended = watch(args, &terminal, before);
    drop(terminal);
    ended
}

fn read(args: &TopArgs) -> Result<Stat> {
    stat_of(&args.target)?.of_server(
        &args.target,
        "start `tidegate serve` first",
        "the socket of a supervisor of `tidegate run`; `tidegate stat` reads it",
    )
}

/// Shows one reading after the other.
fn watch(args: &TopArgs, terminal: &Terminal, first: Stat) -> Result<()> {
    let (mut before, mut read_at) = ((first.clone(), Instant::now()), Instant::now());
    let (mut now, mut order, mut is_paused) = (first, Order::Tier, false);
    loop {
        let apart = read_at.duration_since(before.1);
        let mut lines = View { before: &before.0, now: &now, apart }.lines(order);
        lines.push(String::new());
        lines.push(keys(order, is_paused).to_owned());
        terminal.show(&lines)?;
        match terminal.wait(read_at + INTERVAL)? {
            Event::Key(b'q' | CONTROL_C) | Event::End => return Ok(()),
            Event::Key(b'p' | b' ') => is_paused = !is_paused,
            Event::Key(b's') if order == Order::Tier => order = Order::Slowest,
            Event::Key(b's') => order = Order::Tier,
            Event::Key(_) | Event::Resized | Event::Tick => {}
        }
        if Instant::now() < read_at + INTERVAL {
            continue;
        }
        if is_paused {
            // The next reading covers one interval again.
            (before.1, read_at) = (before.1 + read_at.elapsed(), Instant::now());
            continue;
        }
        before = (std::mem::replace(&mut now, read(args)?), read_at);
        read_at = Instant::now();
    }
}

fn keys(order: Order, is_paused: bool) -> &'static str {
    match (is_paused, order) {
        (true, _) => "PAUSED   p go on   q quit",
        (false, Order::Tier) => "q quit   p pause   s slowest first",
        (false, Order::Slowest) => "q quit   p pause   s in the order of tiers",
    }
}
