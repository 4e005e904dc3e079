//! The assignment of CPU cores: the server gets the last one, the rest of the bench the others.

use std::ffi::OsStr;
use std::process::{Command, Stdio};

/// A core for one command; any core where cores cannot be assigned.
pub struct OneCore {
    core: Option<usize>,
}

impl OneCore {
    /// Reserves the last core, and keeps this process off it.
    pub fn reserve() -> Self {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let last = cores - 1;
        let others = format!("0-{}", last.saturating_sub(1));
        let mut leave = Command::new("taskset");
        leave
            .args(["-acp", &others, &std::process::id().to_string()])
            .stdout(Stdio::null());
        let is_given = last > 0 && leave.status().is_ok_and(|status| status.success());
        Self {
            core: is_given.then_some(last),
        }
    }

    /// Description for people.
    pub fn describe(&self) -> String {
        match self.core {
            Some(core) => format!("the server on core {core}, everything else on the others"),
            None => "no core to itself for the server: taskset or a second core is missing".into(),
        }
    }

    pub fn command(&self, program: impl AsRef<OsStr>) -> Command {
        let Some(core) = self.core else {
            return Command::new(program);
        };
        let mut command = Command::new("taskset");
        command.args(["-c", &core.to_string()]).arg(program);
        command
    }
}
