//! `tidegate list`: shows the devices of all servers of this machine on one page.

use std::io;

use anyhow::Result;
use tidegate::size::Size;
use tidegate_serve::control::Listed;

use crate::args::ListArgs;
use crate::control;
use crate::log::{Level, say};
use crate::output::{json, line, one_line};

/// The names of the columns.
const COLUMNS: [&str; 7] = ["export", "device", "state", "dirty", "pool", "backing", "addresses"];
/// The names of the columns of CSV.
const CSV_COLUMNS: &str = "export,block_device,state,cause,dirty_bytes,pool,backing,addresses,\
                           control,process";

/// Runs the command.
///
/// # Errors
/// Standard output is full.
pub(crate) fn run(args: &ListArgs) -> Result<()> {
    let servers = control::list();
    for socket in &servers.silent {
        say(Level::Warning, control::not_answered(socket));
    }
    if args.json {
        json(&servers)?;
    } else if args.csv {
        line(CSV_COLUMNS)?;
        servers.devices.iter().try_for_each(|device| line(csv(device)))?;
    } else {
        print(&servers.devices)?;
    }
    Ok(())
}

/// Prints a table, and a line for each device that is down below it.
fn print(devices: &[Listed]) -> io::Result<()> {
    let rows: Vec<_> =
        [COLUMNS.map(String::from)].into_iter().chain(devices.iter().map(row)).collect();
    table(&rows).iter().try_for_each(line)?;
    for device in devices {
        if let Some(cause) = &device.cause {
            line(format_args!("{} is down: {}", device.pool.display(), one_line(cause)))?;
        }
    }
    Ok(())
}

fn row(device: &Listed) -> [String; COLUMNS.len()] {
    let path = device.block_device.as_ref().map(|path| path.display().to_string());
    let dirty = device.dirty_bytes.map(|bytes| Size { bytes }.to_string());
    let cells = [
        device.export.clone(),
        path.unwrap_or_default(),
        device.state.clone(),
        dirty.unwrap_or_default(),
        device.pool.display().to_string(),
        device.backing.clone().unwrap_or_default(),
        device.addresses.join(" "),
    ];
    cells.map(|cell| if cell.is_empty() { "-".into() } else { one_line(&cell) })
}

/// Returns `rows` as lines with aligned columns.
fn table<const N: usize>(rows: &[[String; N]]) -> Vec<String> {
    let length = |cell: &String| cell.chars().count();
    let widths: [usize; N] =
        std::array::from_fn(|at| rows.iter().map(|row| length(&row[at])).max().unwrap_or(0));
    let aligned = |row: &[String; N]| {
        let cells = row.iter().zip(widths).map(|(cell, width)| format!("{cell:<width$}"));
        cells.collect::<Vec<_>>().join("  ").trim_end().to_owned()
    };
    rows.iter().map(aligned).collect()
}

/// Returns a line of CSV as RFC 4180 has it.
fn csv(device: &Listed) -> String {
    let path = |path: &Option<std::path::PathBuf>| {
        path.as_ref().map_or_else(String::new, |path| path.display().to_string())
    };
    let cells = [
        device.export.clone(),
        path(&device.block_device),
        device.state.clone(),
        device.cause.clone().unwrap_or_default(),
        device.dirty_bytes.map_or_else(String::new, |bytes| bytes.to_string()),
        device.pool.display().to_string(),
        device.backing.clone().unwrap_or_default(),
        device.addresses.join(" "),
        path(&device.control),
        device.process.to_string(),
    ];
    cells.map(|cell| quoted(&one_line(&cell))).join(",")
}

fn quoted(cell: &str) -> String {
    if cell.contains([',', '"']) {
        format!("\"{}\"", cell.replace('"', "\"\""))
    } else {
        cell.into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn down() -> Listed {
        Listed {
            export: "a \"b\"".into(),
            state: "down".into(),
            cause: Some("no pool,\nnone".into()),
            pool: "/p".into(),
            addresses: vec!["unix:/s".into(), "tcp:h:1".into()],
            process: 7,
            ..Listed::default()
        }
    }

    #[test]
    fn cells_of_csv_are_quoted_where_they_must_be() {
        let expected = "\"a \"\"b\"\"\",,down,\"no pool, none\",,/p,,unix:/s tcp:h:1,,7";
        assert_eq!(csv(&down()), expected);
        assert_eq!(CSV_COLUMNS.split(',').count(), 10);
    }

    #[test]
    fn columns_are_as_wide_as_their_widest_cell() {
        let up = Listed {
            dirty_bytes: Some(4096),
            state: "up".into(),
            pool: "/q".into(),
            ..Listed::default()
        };
        let lines = table(&[row(&up), row(&down())]);
        assert_eq!(lines[0], "-      -  up    4K  /q  -  -");
        assert_eq!(lines[1], "a \"b\"  -  down  -   /p  -  unix:/s tcp:h:1");
    }
}
