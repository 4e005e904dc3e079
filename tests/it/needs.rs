//! What a test needs and the repository does not carry. A test that does not find it ends, and says on standard error that it is
//! skipped, and why; in CI it fails if `.ci/run` should have installed it.
//!
//! The unit tests of the library include this file, too: all tests skip alike.

use std::fmt::Display;
use std::io::Write;
use std::path::PathBuf;

/// Names the folder of the traces. `none` states that this machine has none.
const TRACES: &str = "STOWAGE_TRACES";
/// Set by CI systems.
const CI: &str = "CI";

/// Says that the current test is skipped, and why.
pub fn report_skipped(why: impl Display) {
    let thread = std::thread::current();
    // Not `println!`: the test passes, and the output of a test that passes is not shown.
    let _ = writeln!(
        std::io::stderr(),
        "skipped: {}: {why}",
        thread.name().unwrap_or("a test")
    );
}

/// Says that the current test is skipped, because a program is missing that `.ci/run` installs.
///
/// # Panics
///
/// In CI: what nothing has checked is not taken for checked.
pub fn skip_not_installed(program: &str, package: &str) {
    assert!(
        !is_ci(),
        "{program} is not installed: .ci/run has to install Debian's package {package}"
    );
    report_skipped(format_args!(
        "{program} is not installed; Debian has it in the package {package}"
    ));
}

fn is_ci() -> bool {
    std::env::var_os(CI).is_some_and(|ci| !ci.is_empty())
}

/// A file of the traces that the published figures are of; `None`, with a line that says so, where there are none.
///
/// # Panics
///
/// In CI, unless `STOWAGE_TRACES` is `none`: a figure that nothing has checked is not taken for checked.
pub fn trace(name: &str) -> Option<String> {
    let folder = std::env::var_os(TRACES);
    if folder.as_deref().is_some_and(|folder| folder == "none") {
        report_skipped(format_args!("{name}: {TRACES} is none"));
        return None;
    }
    // A folder that is not absolute is below the repository, whatever package's test this is.
    let folder = folder.map_or_else(|| PathBuf::from("../shared/traces"), PathBuf::from);
    let file = PathBuf::from(env!("CARGO_WORKSPACE_DIR"))
        .join(folder)
        .join(name);
    match std::fs::read_to_string(&file) {
        Ok(text) => Some(text),
        Err(error) => {
            let why = format!("{}: {error}", file.display());
            assert!(
                !is_ci(),
                "{why}; {TRACES} names the folder of the traces, or is `none`: CI skips nothing by itself"
            );
            report_skipped(why);
            None
        }
    }
}
