//! A server in its own process: its addresses and its cost.

use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// The kernel reports CPU time in hundredths of a second, whatever its own clock (`USER_HZ`).
const CPU_CLOCK_TICK: Duration = Duration::from_millis(10);

pub struct ServeProcess {
    process: Child,
    /// Its addresses, in the order of their prefixes.
    pub addresses: Vec<String>,
}

impl ServeProcess {
    /// Starts the process and waits until it has logged an address after each of these prefixes, in this order.
    pub fn start(command: &mut Command, address_prefixes: &[&str]) -> Self {
        let mut process = command
            .stderr(Stdio::piped())
            .stdout(Stdio::null())
            .spawn()
            .expect("the server starts");
        let mut lines = BufReader::new(process.stderr.take().expect("stderr is piped")).lines();
        let mut next = |says: &str| {
            lines
                .by_ref()
                .map(|line| line.expect("stderr is text"))
                .find_map(|line| {
                    line.split_once(says)
                        .map(|(_, address)| address.trim().to_owned())
                })
                .expect("the server says where it listens")
        };
        let addresses = address_prefixes.iter().map(|says| next(says)).collect();
        std::thread::spawn(move || lines.for_each(drop));
        Self { process, addresses }
    }

    pub fn resident_mib(&self) -> u64 {
        resident_mib(&self.process.id().to_string())
    }

    /// Peak resident memory in MiB.
    pub fn peak_mib(&self) -> u64 {
        status_mib(&self.process.id().to_string(), "VmHWM:")
    }

    pub fn cpu(&self) -> Duration {
        cpu(&self.process.id().to_string())
    }

    /// The CPU time of its threads of this name, to the nanosecond.
    pub fn cpu_of_threads(&self, name: &str) -> Duration {
        cpu_of_threads(&self.process.id().to_string(), name)
    }
}

/// The CPU time of a process's threads of this name, to the nanosecond. `process` is its id, or `self`.
pub fn cpu_of_threads(process: &str, name: &str) -> Duration {
    let tasks = std::fs::read_dir(format!("/proc/{process}/task")).expect("the process is there");
    let text = |file: PathBuf| std::fs::read_to_string(file).unwrap_or_default();
    let named = tasks
        .flatten()
        .map(|task| task.path())
        .filter(|task| text(task.join("comm")).trim() == name);
    let nanos = named.filter_map(|task| {
        text(task.join("schedstat"))
            .split(' ')
            .next()?
            .parse::<u64>()
            .ok()
    });
    Duration::from_nanos(nanos.sum())
}

/// Resident memory in MiB. `process` is a process id, or `self`.
pub fn resident_mib(process: &str) -> u64 {
    status_mib(process, "VmRSS:")
}

fn status_mib(process: &str, field: &str) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix(field));
    line.and_then(|kib| kib.trim().trim_end_matches(" kB").parse::<u64>().ok())
        .unwrap_or(0)
        / 1024
}

/// The CPU time of all its threads since it began, in user and kernel mode.
pub fn cpu(process: &str) -> Duration {
    let stat =
        std::fs::read_to_string(format!("/proc/{process}/stat")).expect("the process is there");
    // The name in parentheses may contain anything; user and system time are the 12th and 13th field behind it.
    let (_, fields) = stat.rsplit_once(')').expect("a stat line");
    let ticks = fields
        .split_whitespace()
        .skip(11)
        .take(2)
        .map(|ticks| ticks.parse::<u32>().expect("ticks"));
    CPU_CLOCK_TICK * ticks.sum::<u32>()
}

impl Drop for ServeProcess {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
