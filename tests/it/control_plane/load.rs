//! Measurements beside the real control plane, run by hand in a release build (`cargo test --release --test it
//! control_plane::load -- --ignored --nocapture`): how long a bind takes beside a bare Binding ([`binds`]), what a pod costs each
//! process when it is planned, when it is filtered, and without Stowage ([`throughput`]), and how soon a refused pod is bound
//! when VRAM becomes free while a thousand others change all the time ([`wakes`]). `STOWAGE_BINARY` names the binary that is
//! measured; the tests themselves then need no release build.

mod binds;
mod throughput;
mod wakes;

use super::node_of;
use super::processes::eventually;
use super::world::RealControlPlane;
use futures::StreamExt;
use futures::stream;
use k8s_openapi::api::core::v1::Pod;
use kube::api::{DeleteParams, ListParams, PostParams};
use kube::runtime::WatchStreamExt;
use kube::runtime::watcher::{self, Event, watcher};
use kube::{Api, Client};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::task::JoinHandle;

/// With the time that a write has by default.
const ALWAYS: [&str; 2] = ["--lead-with", "always"];
const H100: &str = "NVIDIA-H100-80GB-HBM3";
const MIB: u64 = 81_559;

/// When each pod was first seen with a node.
struct BindingTimes {
    seen: Arc<Mutex<BTreeMap<String, Instant>>>,
    task: JoinHandle<()>,
}

impl BindingTimes {
    fn watch(client: Client) -> Self {
        let seen: Arc<Mutex<BTreeMap<String, Instant>>> = Arc::default();
        let noted = seen.clone();
        let task = tokio::spawn(async move {
            let pods: Api<Pod> = Api::default_namespaced(client);
            let mut events = watcher(pods, watcher::Config::default())
                .default_backoff()
                .boxed();
            while let Some(event) = events.next().await {
                if let Ok(Event::Apply(pod) | Event::InitApply(pod)) = event
                    && node_of(&pod).is_some()
                {
                    let name = pod.metadata.name.unwrap_or_default();
                    noted.lock().entry(name).or_insert_with(Instant::now);
                }
            }
        });
        Self { seen, task }
    }

    fn of(&self, name: &str) -> Option<Instant> {
        self.seen.lock().get(name).copied()
    }

    fn last(&self, prefix: &str, count: usize) -> Option<Instant> {
        let seen = self.seen.lock();
        let of_prefix: Vec<Instant> = seen
            .iter()
            .filter(|(name, _)| name.starts_with(prefix))
            .map(|(_, at)| *at)
            .collect();
        (of_prefix.len() >= count)
            .then(|| of_prefix.into_iter().max())
            .flatten()
    }
}

impl Drop for BindingTimes {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn create_all(client: &Client, pods: Vec<Pod>, clients: usize) {
    let api: Api<Pod> = Api::default_namespaced(client.clone());
    stream::iter(pods)
        .for_each_concurrent(clients, |pod| {
            let api = api.clone();
            async move { drop(api.create(&PostParams::default(), &pod).await.unwrap()) }
        })
        .await;
}

/// The value below which that part of sorted times lies, in milliseconds.
fn quantile(sorted: &[Duration], part: f64) -> f64 {
    sorted[((sorted.len() - 1) as f64 * part).round() as usize].as_secs_f64() * 1e3
}

async fn delete_all(world: &RealControlPlane) {
    let api: Api<Pod> = Api::default_namespaced(world.client.clone());
    api.delete_collection(
        &DeleteParams::default().grace_period(0),
        &ListParams::default(),
    )
    .await
    .unwrap();
    eventually("all pods are gone, from the ledger too", async || {
        let none = api
            .list(&ListParams::default())
            .await
            .ok()?
            .items
            .is_empty();
        (none && world.count("stowage_ledger_pods", "bound").await == 0).then_some(())
    })
    .await;
}
