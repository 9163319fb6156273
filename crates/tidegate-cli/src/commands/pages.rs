//! `tidegate pages DIR`: man pages and completions, made from the help texts; for `make install`.

use std::path::Path;

use anyhow::{Context, Result};
use clap::CommandFactory;
use clap_complete::Shell;

use crate::args::{Cli, PagesArgs};

/// Shells with the directory below `share` where each looks for completions.
const SHELLS: [(Shell, &str); 3] = [
    (Shell::Bash, "bash-completion/completions"),
    (Shell::Zsh, "zsh/site-functions"),
    (Shell::Fish, "fish/vendor_completions.d"),
];

/// Writes a page for each command, and completions for each shell, below the directory.
///
/// # Errors
/// A file cannot be written.
pub(crate) fn run(args: &PagesArgs) -> Result<()> {
    let pages = args.share.join("man/man1");
    make(&pages)?;
    clap_mangen::generate_to(Cli::command(), &pages)
        .with_context(|| format!("cannot write the pages in {}", pages.display()))?;
    for (shell, directory) in SHELLS {
        let directory = args.share.join(directory);
        make(&directory)?;
        let written =
            clap_complete::generate_to(shell, &mut Cli::command(), "tidegate", &directory);
        let path = written.with_context(|| format!("cannot write in {}", directory.display()))?;
        if shell == Shell::Bash {
            // The loader of completions looks for this name.
            std::fs::rename(&path, directory.join("tidegate"))?;
        }
    }
    Ok(())
}

fn make(directory: &Path) -> Result<()> {
    std::fs::create_dir_all(directory)
        .with_context(|| format!("cannot make the directory {}", directory.display()))
}
