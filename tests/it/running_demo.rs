//! `stowage demo` with its story played, for tests that look at it from outside.

use crate::client::TEST_TIMEOUT;
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::channel;

/// A process that ends with the test.
pub struct KillOnDrop(pub Child);

impl Drop for KillOnDrop {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

pub struct RunningDemo {
    /// Its operators' address, such as `http://127.0.0.1:40123`.
    pub operators: String,
    _process: KillOnDrop,
}

impl RunningDemo {
    pub fn start() -> Self {
        let mut process = Command::new(env!("CARGO_BIN_EXE_stowage"))
            .arg("demo")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let (sender, lines) = channel();
        let out = BufReader::new(process.stdout.take().unwrap());
        let process = KillOnDrop(process);
        std::thread::spawn(move || {
            out.lines()
                .map_while(Result::ok)
                .try_for_each(|line| sender.send(line))
        });
        loop {
            let line = lines
                .recv_timeout(4 * TEST_TIMEOUT)
                .expect("the demo names its operators' address");
            if let Some(operators) = operators_address(&line) {
                return Self {
                    operators,
                    _process: process,
                };
            }
        }
    }
}

/// The demo names it when its story has been played.
fn operators_address(line: &str) -> Option<String> {
    let (_, after) = line.split_once("Look around: ")?;
    Some(after.split_once("/ in a browser")?.0.to_owned())
}
