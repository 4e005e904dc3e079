//! A real Prometheus, where this machine has one: it scrapes once a second what a test serves, under the shipped rules.

use super::rules;
use crate::client::{Client, TEST_TIMEOUT};
use crate::needs::skip_not_installed;
use serde_json::{Value, json};
use std::fmt::Write;
use std::io::{BufRead, BufReader, ErrorKind};
use std::net::SocketAddr;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use tempfile::TempDir;

/// A page that is scraped, and the labels that its series get from its target.
pub struct ScrapeTarget<'a> {
    pub job: &'a str,
    pub address: SocketAddr,
    pub labels: Value,
}

/// One series of an answer.
#[derive(Debug)]
pub struct Sample {
    pub labels: serde_json::Map<String, Value>,
    pub value: f64,
}

/// A Prometheus that ends with the test.
pub struct RunningPrometheus {
    child: Child,
    pub address: SocketAddr,
    _log: Receiver<String>,
    _folder: TempDir,
}

impl RunningPrometheus {
    /// `None`, with a line that says so, where there is none.
    pub fn start(targets: &[ScrapeTarget<'_>]) -> Option<Self> {
        Self::start_in(tempfile::tempdir().unwrap(), targets)
    }

    /// One whose blocks are already in `data` of this folder, however old.
    pub fn start_in(folder: TempDir, targets: &[ScrapeTarget<'_>]) -> Option<Self> {
        let jobs = targets.iter().map(|target| {
            let scraped =
                json!({ "targets": [target.address.to_string()], "labels": target.labels });
            json!({ "job_name": target.job, "static_configs": [scraped] })
        });
        let config = json!({
            "global": { "scrape_interval": "1s", "evaluation_interval": "1s" },
            "rule_files": [rules::root().join(rules::FILE)],
            "scrape_configs": jobs.collect::<Vec<_>>(),
        });
        // What JSON says, YAML says as well.
        let file = folder.path().join("prometheus.yml");
        std::fs::write(&file, config.to_string()).unwrap();
        let started = Command::new("prometheus")
            .arg(format!("--config.file={}", file.display()))
            .arg(format!(
                "--storage.tsdb.path={}",
                folder.path().join("data").display()
            ))
            .arg("--storage.tsdb.retention.time=100y")
            .arg("--web.listen-address=127.0.0.1:0")
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn();
        let mut child = match started {
            Err(error) if error.kind() == ErrorKind::NotFound => {
                skip_not_installed("prometheus", "prometheus");
                return None;
            }
            started => started.unwrap(),
        };
        let (lines, log) = channel();
        let stderr = BufReader::new(child.stderr.take().unwrap());
        std::thread::spawn(move || {
            // To its end, whether or not the lines are read: a full pipe would stop it.
            stderr
                .lines()
                .map_while(Result::ok)
                .for_each(|line| drop(lines.send(line)));
        });
        let unknown = SocketAddr::from(([127, 0, 0, 1], 0));
        let mut running = Self {
            child,
            address: unknown,
            _log: log,
            _folder: folder,
        };
        running.address = running.listens();
        crate::served::eventually("Prometheus is ready", || {
            Client::connect(running.address).get_page("/-/ready").status == 200
        });
        Some(running)
    }

    /// The address that its log names.
    fn listens(&self) -> SocketAddr {
        let mut log = String::new();
        while let Ok(line) = self._log.recv_timeout(TEST_TIMEOUT) {
            let address = line.contains("\"Listening on\"").then(|| {
                line.split("address=")
                    .nth(1)?
                    .split_whitespace()
                    .next()?
                    .parse()
                    .ok()
            });
            if let Some(address) = address.flatten() {
                return address;
            }
            writeln!(log, "{line}").unwrap();
        }
        panic!("Prometheus never said where it listens:\n{log}");
    }

    /// What an expression comes to now.
    pub fn query(&self, expression: &str) -> Vec<Sample> {
        let data = self.data(
            &format!("/api/v1/query?query={}", percent_encoded(expression)),
            expression,
        );
        assert_eq!(data["resultType"], "vector", "{expression}");
        let sample = |series: &Value| Sample {
            labels: series["metric"].as_object().unwrap().clone(),
            value: series["value"][1].as_str().unwrap().parse().unwrap(),
        };
        data["result"]
            .as_array()
            .unwrap()
            .iter()
            .map(sample)
            .collect()
    }

    /// Every rule of every group, with its health and its state.
    pub fn rules(&self) -> Vec<Value> {
        let data = self.data("/api/v1/rules", "the rules");
        let groups = data["groups"].as_array().unwrap().iter();
        groups
            .flat_map(|group| group["rules"].as_array().unwrap())
            .cloned()
            .collect()
    }

    fn data(&self, path: &str, what: &str) -> Value {
        let answer = Client::connect(self.address).get_page(path);
        assert_eq!(answer.status, 200, "{what}: {}", answer.text());
        answer.json()["data"].take()
    }
}

impl Drop for RunningPrometheus {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn percent_encoded(text: &str) -> String {
    let mut encoded = String::new();
    for byte in text.bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'_' | b'.' | b'~' => {
                encoded.push(byte.into())
            }
            other => write!(encoded, "%{other:02X}").unwrap(),
        }
    }
    encoded
}
