//! The frame of a program: it parses the command line, prints errors in one line on standard error,
//! and sets the exit status: 0 done, 1 failed, 2 wrong usage.

use std::process::ExitCode;

use clap::Parser;

const FAILED: u8 = 1;
const WRONG_USAGE: u8 = 2;

/// The reason why a program failed.
#[derive(Debug)]
pub struct Failure {
    /// The error, in words.
    pub message: String,
    /// Whether the command line was wrong.
    pub is_usage: bool,
}

/// Parses the command line and acts; errors begin with `name`.
pub fn run<C: Parser>(name: &str, act: impl FnOnce(C) -> Result<ExitCode, Failure>) -> ExitCode {
    match C::try_parse() {
        Ok(cli) => act(cli).unwrap_or_else(|failure| fail(name, &failure)),
        Err(error) if !error.use_stderr() => {
            // The user asked for help or version: a closed pipe is no failure.
            let _ = error.print();
            ExitCode::SUCCESS
        }
        Err(error) => {
            let message = format!("{} (see --help)", first_part(&error));
            fail(name, &Failure { message, is_usage: true })
        }
    }
}

/// Prints the failure as one line on standard error.
fn fail(name: &str, failure: &Failure) -> ExitCode {
    let words: Vec<_> = failure.message.split_whitespace().collect();
    eprintln!("{name}: {}", words.join(" "));
    ExitCode::from(if failure.is_usage { WRONG_USAGE } else { FAILED })
}

/// Returns the parser's message without its usage block.
fn first_part(error: &clap::Error) -> String {
    let text = error.render().to_string();
    let message = text.split("\n\nUsage:").next().unwrap_or(&text);
    let message = message.split("\n\nFor more information").next().unwrap_or(message);
    message.trim_start_matches("error: ").to_owned()
}
