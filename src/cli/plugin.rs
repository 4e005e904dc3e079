//! `kubectl stowage`: kubectl runs an executable of the name `kubectl-stowage` on the path for it. Under that name the binary has
//! the commands that ask a cluster and none that run the service, and its usage says what the user typed.

use super::Cli;
use clap::{Command, CommandFactory};
use std::ffi::OsStr;
use std::path::Path;

/// A hyphen of a plugin's name is an underscore in its file's, where the name shall have one.
const PROGRAM_NAMES: [&str; 2] = ["kubectl-stowage", "kubectl_stowage"];
/// The commands that the plugin has.
const COMMANDS: [&str; 12] = [
    "assess",
    "bundle",
    "estimate",
    "explain",
    "models",
    "plan",
    "policy",
    "preflight",
    "replay",
    "top",
    "ui",
    "version",
];

/// Whether the process was started under the plugin's name.
pub fn is_plugin(program: Option<&OsStr>) -> bool {
    let name = program.map(Path::new).and_then(Path::file_stem);
    name.is_some_and(|name| {
        PROGRAM_NAMES
            .iter()
            .any(|program_name| name == *program_name)
    })
}

/// The command line of the plugin.
pub fn command() -> Command {
    let whole = Cli::command();
    let others: Vec<String> = whole
        .get_subcommands()
        .map(|command| command.get_name().to_owned())
        .collect();
    let others = others
        .into_iter()
        .filter(|name| !COMMANDS.contains(&&**name));
    // clap cannot remove a command: a hidden one is neither listed nor suggested, and `Cli::parsed` refuses it.
    let plugin = others.fold(whole, |command, name| {
        command.mut_subcommand(name, |one| one.hide(true))
    });
    plugin
        .name("kubectl-stowage")
        .bin_name("kubectl stowage")
        .about("What Stowage knows of the cluster, and why pods run where they do")
}

/// Whether the plugin has this command.
pub fn has_command(command: &str) -> bool {
    COMMANDS.contains(&command)
}
