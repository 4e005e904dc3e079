//! The agents: one a node, each with its own kept-alive connection, each reporting once a second at a moment of its own.

use crate::node::{CacheUsage, ReportingNode};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use stowage_scheduling::testkit::random::Random;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until};

const REPORT_INTERVAL: Duration = Duration::from_secs(1);

/// All agents, on one thread.
pub struct Fleet {
    reporting: watch::Sender<Option<CacheUsage>>,
    pub tally: Arc<ReportTally>,
}

/// The counts of reports so far, by the extender's answer.
#[derive(Default)]
pub struct ReportTally {
    pub reports: AtomicU64,
    pub bytes: AtomicU64,
    /// Sum of the times from sending to the answer, in microseconds.
    pub micros: AtomicU64,
}

impl Fleet {
    /// Connects them; none reports before [`Fleet::report`].
    pub fn connect(nodes: usize, address: String) -> Self {
        let (reporting, is_reporting) = watch::channel(None);
        let tally = Arc::new(ReportTally::default());
        let (of_agents, (ready, connected)) = (tally.clone(), std::sync::mpsc::channel());
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()
                .expect("a runtime");
            runtime.block_on(async {
                let mut agents = tokio::task::JoinSet::new();
                for place in 0..nodes {
                    let stream = TcpStream::connect(&address)
                        .await
                        .expect("the extender listens to agents");
                    stream.set_nodelay(true).expect("TCP has no delay");
                    let agent = FleetAgent {
                        node: ReportingNode::new(place, 1),
                        stream,
                        answer: Vec::new(),
                    };
                    agents.spawn(agent.run(place, is_reporting.clone(), of_agents.clone()));
                }
                ready.send(()).expect("somebody waits");
                while let Some(ended) = agents.join_next().await {
                    // With a failed agent, every figure of the bench would be wrong.
                    if ended.is_err() {
                        std::process::exit(1);
                    }
                }
            });
        });
        connected.recv().expect("the agents connect");
        Self { reporting, tally }
    }

    pub fn report(&self, caches: CacheUsage) {
        self.reporting.send_replace(Some(caches));
    }

    pub fn pause(&self) {
        self.reporting.send_replace(None);
    }
}

struct FleetAgent {
    node: ReportingNode,
    stream: TcpStream,
    answer: Vec<u8>,
}

impl FleetAgent {
    /// Reports until the fleet is dropped.
    async fn run(
        mut self,
        place: usize,
        mut reporting: watch::Receiver<Option<CacheUsage>>,
        tally: Arc<ReportTally>,
    ) {
        let phase = Duration::from_micros(
            Random::seeded(place as u64, 0).below(REPORT_INTERVAL.as_micros() as usize) as u64,
        );
        while reporting.wait_for(Option::is_some).await.is_ok() {
            let mut due = Instant::now() + phase;
            while reporting.borrow().is_some() {
                sleep_until(due).await;
                let Some(caches) = *reporting.borrow() else {
                    break;
                };
                self.report(caches, &tally).await;
                // One that is late does not make up for it, as the real one does not.
                due = (due + REPORT_INTERVAL).max(Instant::now());
            }
        }
    }

    async fn report(&mut self, caches: CacheUsage, tally: &ReportTally) {
        let body = self.node.next(caches);
        let mut request = format!(
            "POST /v1/reports HTTP/1.1\r\nhost: stowage\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
            body.len()
        )
        .into_bytes();
        request.extend_from_slice(&body);
        let sent = Instant::now();
        self.stream
            .write_all(&request)
            .await
            .expect("the report is sent");
        self.read_answer().await;
        tally
            .micros
            .fetch_add(sent.elapsed().as_micros() as u64, Ordering::Relaxed);
        tally.bytes.fetch_add(body.len() as u64, Ordering::Relaxed);
        tally.reports.fetch_add(1, Ordering::Relaxed);
    }

    /// Reads the answer, which must be the short text that a report was accepted.
    async fn read_answer(&mut self) {
        const TAKEN: &[u8] = br#"{"accepted":1,"dropped":0}"#;
        self.answer.clear();
        while !self.answer.ends_with(TAKEN) {
            let read = self
                .stream
                .read_buf(&mut self.answer)
                .await
                .expect("an answer");
            assert!(
                read > 0 && self.answer.len() < 1024,
                "{}",
                String::from_utf8_lossy(&self.answer)
            );
        }
        assert!(
            self.answer.starts_with(b"HTTP/1.1 200"),
            "{}",
            String::from_utf8_lossy(&self.answer)
        );
    }
}
