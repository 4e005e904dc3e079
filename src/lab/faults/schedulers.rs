//! The two kube-schedulers beside the replicas, as far as the Lease is concerned: the holder renews it every two seconds, and the
//! other takes it when it was given up or has not been renewed for its duration.

use super::clock::HOSTS;
use crate::demo::api_server::ApiServer;
use serde_json::{Value, json};
use tokio::time::{Duration, Instant};

pub const LEASE: &str = "leases/kube-system/kube-scheduler";
/// Duration of the Lease: kube-scheduler's default.
const DURATION_SECONDS: u64 = 15;
const RENEW_EVERY: Duration = Duration::from_secs(2);

#[derive(Debug)]
pub(crate) struct Schedulers {
    holder: Option<usize>,
    renewed: Instant,
    transitions: u64,
    /// No renewal is like another.
    renewals: i64,
    /// Processes so far: a holder's name is never that of another.
    processes: u64,
}

impl Schedulers {
    pub fn start(api: &ApiServer) -> Self {
        let mut this = Self {
            holder: None,
            renewed: Instant::now(),
            transitions: 0,
            renewals: 0,
            processes: 0,
        };
        let lease = json!({ "metadata": { "name": "kube-scheduler" }, "spec": this.spec("") });
        api.create("leases/kube-system", lease)
            .expect("the Lease is there");
        this
    }

    pub fn transitions(&self) -> u64 {
        self.transitions
    }

    /// What time does; `can_act` says which of the two can reach the API server.
    pub fn pass(&mut self, api: &ApiServer, can_act: [bool; 2]) {
        match self.holder {
            Some(holder) if can_act[holder] => {
                if self.renewed.elapsed() >= RENEW_EVERY {
                    self.renew(api, holder);
                }
            }
            Some(_) if self.renewed.elapsed() < Duration::from_secs(DURATION_SECONDS) => {}
            _ => {
                if let Some(next) = can_act.iter().position(|can_act| *can_act) {
                    self.transitions += 1;
                    self.processes += 1;
                    self.holder = Some(next);
                    self.renew(api, next);
                }
            }
        }
    }

    /// The holder's scheduler ends in order.
    pub fn give_up(&mut self, api: &ApiServer, of: usize) {
        if self.holder == Some(of) {
            self.holder = None;
            api.patch(LEASE, &json!({ "spec": self.spec("") }))
                .expect("the Lease is there");
        }
    }

    fn renew(&mut self, api: &ApiServer, holder: usize) {
        self.renewed = Instant::now();
        let identity = format!("{}_{}", HOSTS[holder], self.processes);
        api.patch(LEASE, &json!({ "spec": self.spec(&identity) }))
            .expect("the Lease is there");
    }

    fn spec(&mut self, holder: &str) -> Value {
        self.renewals += 1;
        let renewed =
            jiff::Timestamp::from_second(1_000_000 + self.renewals).expect("the Lease is there");
        let seconds = if holder.is_empty() {
            1
        } else {
            DURATION_SECONDS
        };
        json!({
            "holderIdentity": holder, "leaseDurationSeconds": seconds, "leaseTransitions": self.transitions,
            "renewTime": format!("{renewed:.6}"),
        })
    }
}
