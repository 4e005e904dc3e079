//! Child processes that end with the test, and print their output if it fails.

use rustix::process::{Pid, Signal, kill_process};
use std::ffi::OsString;
use std::fs::File;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Longest wait for a condition, well above what anything here takes on a busy machine of two cores.
pub const TEST_TIMEOUT: Duration = Duration::from_secs(120);
const POLL_INTERVAL: Duration = Duration::from_millis(100);
/// Lines of a log that are shown where a test fails.
const LOG_TAIL_LINES: usize = 60;

pub struct TestProcess {
    name: String,
    child: Child,
    log: PathBuf,
    /// The program and its arguments.
    line: Vec<OsString>,
}

impl TestProcess {
    /// Starts `command` with its output in `folder`. A process of the same name appends to its predecessor's.
    pub fn start(name: &str, command: &mut Command, folder: &Path) -> Self {
        let log = folder.join(format!("{name}.log"));
        let line = [command.get_program()]
            .into_iter()
            .chain(command.get_args())
            .map(OsString::from)
            .collect();
        let child = spawn(name, command, &log);
        Self {
            name: name.into(),
            child,
            log,
            line,
        }
    }

    /// Kills it and starts it again as it was started.
    pub fn restart(&mut self, after: Duration) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        std::thread::sleep(after);
        self.child = spawn(
            &self.name,
            Command::new(&self.line[0]).args(&self.line[1..]),
            &self.log,
        );
    }

    /// Starts it again if it has ended by itself, as a kubelet does.
    pub fn revive(&mut self) {
        if self.child.try_wait().unwrap().is_some() {
            self.restart(Duration::ZERO);
        }
    }

    /// It does nothing for so long, and knows nothing of it.
    pub fn pause(&self, time: Duration) {
        self.signal(Signal::STOP);
        std::thread::sleep(time);
        self.signal(Signal::CONT);
    }

    fn signal(&self, signal: Signal) {
        // One that has ended takes none; `check` says so.
        let _ = kill_process(Pid::from_child(&self.child), signal);
    }

    /// Fails where the process has ended by itself.
    pub fn check(&mut self) {
        if let Some(status) = self.child.try_wait().unwrap() {
            panic!("{} ended: {status}", self.name);
        }
    }

    /// The processor time that it has taken, in all its threads.
    pub fn cpu_time(&self) -> Duration {
        cpu_time(&self.child.id().to_string())
    }

    pub fn log(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// As a crash would: nothing is finished or given up.
    pub fn kill(self) {}

    /// As a kubelet does at first: it finishes what it does.
    pub fn terminate(mut self) {
        self.signal(Signal::TERM);
        let _ = self.child.wait();
    }
}

impl Drop for TestProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() {
            let log = self.log();
            let lines: Vec<&str> = log.lines().collect();
            println!("--- {}, the last lines of {}:", self.name, lines.len());
            lines[lines.len().saturating_sub(LOG_TAIL_LINES)..]
                .iter()
                .for_each(|line| println!("{line}"));
        }
    }
}

/// That of the test itself.
pub fn own_cpu_time() -> Duration {
    cpu_time("self")
}

fn cpu_time(process: &str) -> Duration {
    /// Linux counts in hundredths of a second towards programs, whatever its own clock.
    const CLOCK_TICK: Duration = Duration::from_millis(10);
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).unwrap();
    // The name before the last parenthesis may have spaces in it. User and system time are the 14th and 15th field of all.
    let after_name = stat.rsplit(')').next().unwrap();
    let ticks = after_name
        .split_whitespace()
        .skip(11)
        .take(2)
        .map(|field| field.parse::<u32>().unwrap());
    CLOCK_TICK * ticks.sum::<u32>()
}

fn spawn(name: &str, command: &mut Command, log: &Path) -> Child {
    let file = File::options().create(true).append(true).open(log).unwrap();
    let command = command
        .stdin(Stdio::null())
        .stdout(file.try_clone().unwrap())
        .stderr(file);
    command
        .spawn()
        .unwrap_or_else(|error| panic!("{name}: {error}"))
}

/// What a command that ends by itself said, and whether it succeeded.
pub struct CommandOutput {
    pub is_success: bool,
    pub output: String,
}

pub fn run(command: &mut Command) -> CommandOutput {
    let output = command
        .stdin(Stdio::null())
        .output()
        .unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let said = [output.stdout, output.stderr]
        .map(|text| String::from_utf8_lossy(&text).into_owned())
        .concat();
    CommandOutput {
        is_success: output.status.success(),
        output: said,
    }
}

/// Free loopback ports.
pub fn free_ports<const N: usize>() -> [u16; N] {
    // All are bound before the first is released, so that no two are equal.
    let listeners: [TcpListener; N] =
        std::array::from_fn(|_| TcpListener::bind("127.0.0.1:0").unwrap());
    listeners.map(|listener| listener.local_addr().unwrap().port())
}

/// Polls until there is an answer.
pub async fn eventually<T>(what: &str, mut look: impl AsyncFnMut() -> Option<T>) -> T {
    let started = Instant::now();
    loop {
        if let Some(answer) = look().await {
            return answer;
        }
        assert!(
            started.elapsed() < TEST_TIMEOUT,
            "after {TEST_TIMEOUT:?} it was still not so: {what}"
        );
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}

/// Calls `look`, which asserts a condition, again and again for this long.
pub async fn throughout(time: Duration, mut look: impl AsyncFnMut()) {
    let started = Instant::now();
    while started.elapsed() < time {
        look().await;
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}
