//! The two kube-schedulers beside the replicas, as far as the Lease is concerned: the holder renews it every two seconds, and the
//! other takes it when it was given up or has not been renewed for its duration.

use super::clock::HOSTS;
use crate::demo::api_server::ApiServer;
use serde_json::{Value, json};
use tokio::time::{Duration, Instant};

pub const LEASE: &str = "leases/kube-system/kube-scheduler";
/// Duration of the Lease: kube-scheduler's default.
const LEASE_DURATION_SECONDS: u64 = 15;
const RENEW_INTERVAL: Duration = Duration::from_secs(2);

#[derive(Debug)]
pub(crate) struct SchedulerLease {
    holder: Option<usize>,
    renewed: Instant,
    transitions: u64,
    /// No renewal is like another.
    renewals: i64,
    /// Processes so far: a holder's name is never that of another.
    processes_started: u64,
}

impl SchedulerLease {
    pub fn start(api: &ApiServer) -> Self {
        let mut this = Self {
            holder: None,
            renewed: Instant::now(),
            transitions: 0,
            renewals: 0,
            processes_started: 0,
        };
        let lease =
            json!({ "metadata": { "name": "kube-scheduler" }, "spec": this.lease_spec("") });
        api.create("leases/kube-system", lease)
            .expect("the Lease is there");
        this
    }

    pub fn transitions(&self) -> u64 {
        self.transitions
    }

    /// What time does; `can_act` says which of the two can reach the API server.
    pub fn advance(&mut self, api: &ApiServer, can_act: [bool; 2]) {
        match self.holder {
            Some(holder) if can_act[holder] => {
                if self.renewed.elapsed() >= RENEW_INTERVAL {
                    self.renew(api, holder);
                }
            }
            Some(_) if self.renewed.elapsed() < Duration::from_secs(LEASE_DURATION_SECONDS) => {}
            _ => {
                if let Some(next) = can_act.iter().position(|can_act| *can_act) {
                    self.transitions += 1;
                    self.processes_started += 1;
                    self.holder = Some(next);
                    self.renew(api, next);
                }
            }
        }
    }

    /// The holder's scheduler ends in order.
    pub fn release(&mut self, api: &ApiServer, host: usize) {
        if self.holder == Some(host) {
            self.holder = None;
            api.patch(LEASE, &json!({ "spec": self.lease_spec("") }))
                .expect("the Lease is there");
        }
    }

    fn renew(&mut self, api: &ApiServer, holder: usize) {
        self.renewed = Instant::now();
        let identity = format!("{}_{}", HOSTS[holder], self.processes_started);
        api.patch(LEASE, &json!({ "spec": self.lease_spec(&identity) }))
            .expect("the Lease is there");
    }

    fn lease_spec(&mut self, holder: &str) -> Value {
        self.renewals += 1;
        let renewed =
            jiff::Timestamp::from_second(1_000_000 + self.renewals).expect("the Lease is there");
        let seconds = if holder.is_empty() {
            1
        } else {
            LEASE_DURATION_SECONDS
        };
        json!({
            "holderIdentity": holder, "leaseDurationSeconds": seconds, "leaseTransitions": self.transitions,
            "renewTime": format!("{renewed:.6}"),
        })
    }
}
