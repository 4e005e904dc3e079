//! The receiver of the agent's reports: an extender that accepts them all and does nothing.

use axum::Router;
use axum::body::Bytes;
use axum::routing::post;
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;
use stowage_report::NodeReport;

/// Timeout of one report: longer than any start takes; an agent that reports nothing for so long will not.
const REPORT_TIMEOUT: Duration = Duration::from_secs(30);

pub struct ReportSink {
    pub url: String,
    bodies: Receiver<Bytes>,
}

impl ReportSink {
    pub async fn start() -> Self {
        let (taken, bodies) = channel();
        let take = move |body: Bytes| async move {
            // The receiver may have been dropped.
            let _ = taken.send(body);
            r#"{"accepted":1,"dropped":0}"#
        };
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0")
            .await
            .expect("a port");
        let url = format!("http://{}", listener.local_addr().expect("an address"));
        let router = Router::new().route("/v1/reports", post(take));
        tokio::spawn(async { axum::serve(listener, router).await });
        Self { url, bodies }
    }

    /// Waits for a report that meets a condition.
    pub fn wait_for_report(&mut self, is_it: impl Fn(&NodeReport) -> bool) {
        const MAX_REPORTS: usize = 30;
        let mut last = self.nth_report(1);
        for _ in 0..MAX_REPORTS {
            if is_it(&last) {
                return;
            }
            last = self.nth_report(1);
        }
        panic!("after {MAX_REPORTS} reports the agent does not tell the whole node: {last:#?}");
    }

    /// Waits for `count` more reports and returns the last of them.
    pub fn nth_report(&mut self, count: usize) -> NodeReport {
        let mut last = Bytes::new();
        for _ in 0..count {
            last = self
                .bodies
                .recv_timeout(REPORT_TIMEOUT)
                .expect("the agent reports");
        }
        serde_json::from_slice(&last).expect("a report")
    }
}
