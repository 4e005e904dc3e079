//! Replicas per model: the answer follows the load that agents report of their engines, up at once and down after the window.
//! The clock is driven by the test.

use serde_json::{Value, json};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use stowage::extender::reports::{Sender, reports};
use stowage::extender::request::RequestLimits;
use stowage::extender::{Extender, autoscaling, operators};
use stowage::kubernetes::dump::{Dump, DumpControlPlane};
use stowage::kubernetes::index::ClusterIndex;
use stowage::scheduling::policy::Policy;
use stowage::service::{Service, TimeSource};
use tower::ServiceExt;

/// Seconds since the test began.
static SECONDS: AtomicU64 = AtomicU64::new(0);
const MODEL: &str = "org/model";

struct Driven {
    extender: Extender,
    sequence: u64,
}

impl Driven {
    fn new() -> Self {
        let monotonic = || Duration::from_secs(SECONDS.load(Ordering::SeqCst));
        let service =
            Service::timed_by(TimeSource { monotonic, wall: jiff::Timestamp::now }, Policy::default());
        let dump = json!({ "items": [{ "kind": "Node", "metadata": { "name": "node-a" } }] }).to_string();
        let dump = Dump::of(dump, Path::new("test"));
        let control_plane = DumpControlPlane::load(&dump, &service, &mut ClusterIndex::default()).unwrap();
        Self {
            extender: Extender::new(service, Arc::new(control_plane), RequestLimits::default()),
            sequence: 0,
        }
    }

    /// Fifteen seconds pass, four engines report this load, and the models are evaluated.
    fn passes_with(&mut self, kv_cache: f64, waiting: u64) {
        SECONDS.fetch_add(15, Ordering::SeqCst);
        self.sequence += 1;
        let engine = |n: u32| {
            json!({
                "pod": format!("pod-{n}"), "engine": "vllm", "gpus": [], "state": "serving", "model": MODEL,
                "kvCacheUsage": kv_cache, "waiting": waiting, "running": 8,
            })
        };
        let report = json!({
            "node": "node-a", "bootId": "boot", "sequence": self.sequence, "gpus": [],
            "engines": (0..4).map(engine).collect::<Vec<_>>(),
        });
        let now = self.extender.service.now();
        let taken = reports(&self.extender, &Sender::Anyone, now, report.to_string().as_bytes()).unwrap();
        assert_eq!(taken.accepted, 1);
        autoscaling::evaluate(&self.extender);
    }

    async fn page(&self, query: &str) -> (u16, String) {
        let request = axum::http::Request::get(format!("{}{query}", autoscaling::PATH));
        let request = request.body(axum::body::Body::empty()).unwrap();
        let answer = operators::router(self.extender.clone()).oneshot(request).await.unwrap();
        let status = answer.status().as_u16();
        let body = axum::body::to_bytes(answer.into_body(), 1 << 20).await.unwrap();
        (status, String::from_utf8(body.to_vec()).unwrap())
    }

    async fn desired(&self) -> (u64, String) {
        let (status, text) = self.page(&format!("?model={MODEL}")).await;
        assert_eq!(status, 200, "{text}");
        let page: Value = serde_json::from_str(&text).unwrap();
        let desired = page["desiredReplicas"].as_u64().unwrap();
        let metric = format!("\nstowage_model_desired_replicas{{model=\"{MODEL}\"}} {desired}\n");
        let metrics = self.extender.service.metrics.render();
        assert!(metrics.contains(&metric), "{metrics}");
        (desired, page["reason"].as_str().unwrap().to_owned())
    }
}

#[tokio::test]
async fn the_desired_replicas_follow_the_load_of_the_engines_and_fall_after_the_window() {
    let mut driven = Driven::new();
    let (status, text) = driven.page(&format!("?model={MODEL}")).await;
    assert_eq!(status, 503, "{text}");
    driven.passes_with(0.7, 0);
    assert_eq!(driven.desired().await, (4, "tolerance".to_owned()));
    driven.passes_with(1.0, 8);
    assert_eq!(driven.desired().await, (7, "waiting".to_owned()), "32 waiting requests at 5 a replica");
    let mut falls_after = 0;
    while driven.desired().await.0 == 7 {
        driven.passes_with(0.1, 0);
        falls_after += 15;
        assert!(falls_after <= 600, "it never falls");
    }
    assert!(falls_after > 300, "it fell after {falls_after} s");
    let (status, text) = driven.page("?model=other").await;
    assert!(status == 404 && text.contains("autoscaling.models"), "{status}: {text}");
    let (status, text) = driven.page("").await;
    assert!(status == 400 && text.contains("?model=MODEL"), "{status}: {text}");
}
