//! What readings change in the ledger, one by one. Random histories against DESIGN's formula are in `scheduling::proptests`.

mod charges;
mod engine_loads;
mod leaving;
mod silence;
mod starting;
mod waking;

use crate::evicting::{BudgetRules, cheapest_victims};
use crate::ids::{GpuUuid, NodeName, PodUid};
use crate::ledger::{AssumeResult, Ledger, ObservedPhase, ObservedWaiting, PodObservation};
use crate::placing::fit::{Misfit, fit};
use crate::policy::{ExpiredRule, Policy};
use crate::testkit::{self, LedgerCluster, START, apply_plan, gpu, gpu_pair, key, uid, whole_gpu};
use crate::units::{Bytes, Millis, Moment, Percent};
use crate::vocabulary::demand::{ContainerRequest, Demand, PodRequest};
use crate::vocabulary::model_tier::NodeModelSet;
use crate::vocabulary::node::NodeKind;
use crate::vocabulary::node_reading::{EngineLoad, Freshness, GpuReading, NodeReading, UnreadPod};
use crate::vocabulary::placement::Reservation;
use std::collections::BTreeSet;
use std::sync::Arc;

/// One node `n` with two 100 GiB GPUs, of which 90 GiB each can be allocated; a margin is 5 GiB.
struct MeasurementFixture {
    ledger: LedgerCluster,
    now: Moment,
}

impl MeasurementFixture {
    fn new() -> Self {
        Self::with(Policy::default())
    }

    fn with(policy: Policy) -> Self {
        let ledger = LedgerCluster::empty(policy).with_node("n", gpu_pair(Bytes::gib(100)));
        Self { ledger, now: START }
    }

    fn wait(&mut self, name: &str, gib: u64, priority: i32) -> Demand {
        self.ledger.ledger_mut().set_now(self.now);
        let demand = demand(gib, priority, self.ledger.ledger().policy());
        self.ledger.add_waiting(name, demand.clone());
        demand
    }

    /// Bound and starting.
    fn bind(&mut self, name: &str, gib: u64, priority: i32) -> Vec<String> {
        self.wait(name, gib, priority);
        let assumed = self
            .ledger
            .ledger_mut()
            .assume(&uid(name), &node())
            .unwrap();
        let AssumeResult::New(placement) = assumed else {
            panic!("{name} was bound before")
        };
        self.ledger
            .ledger_mut()
            .confirm(&uid(name), &node(), Some(placement.devices.clone()));
        placement
            .devices
            .iter()
            .map(|uuid| uuid.to_string())
            .collect()
    }

    fn observe_bound(&mut self, name: &str, gib: u64, devices: Option<&[&str]>, starting: bool) {
        self.ledger.ledger_mut().set_now(self.now);
        let demand = demand(gib, 0, self.ledger.ledger().policy());
        let devices = devices.map(|uuids| uuids.iter().map(|uuid| gpu(uuid)).collect());
        let state = ObservedPhase::Bound {
            node: node(),
            devices,
            starting,
            ran: None,
        };
        self.ledger.observe(name, demand, state, None);
    }

    /// A reading sampled now; each GPU as (used, attributed to pods).
    fn read(&mut self, gpus: [(u64, &[(&str, u64)]); 2]) {
        self.read_with(gpus, EngineLoad::NONE);
    }

    fn read_with(&mut self, gpus: [(u64, &[(&str, u64)]); 2], on_a: EngineLoad) {
        self.pass(1);
        let readings =
            ["GPU-a", "GPU-b"]
                .into_iter()
                .zip(gpus)
                .map(|(uuid, (used, attributed))| GpuReading {
                    uuid: gpu(uuid),
                    used: Some(Bytes::gib(used)),
                    attributed: attributed
                        .iter()
                        .map(|(name, gib)| (uid(name), Bytes::gib(*gib)))
                        .collect(),
                    engine_load: if uuid == "GPU-a" {
                        on_a
                    } else {
                        EngineLoad::NONE
                    },
                });
        let reading = NodeReading {
            sampled: self.now,
            gpus: readings.collect(),
            holdings: NodeModelSet::default(),
            ..NodeReading::default()
        };
        self.ledger
            .ledger_mut()
            .take_reading(&node(), reading.into());
    }

    fn pass(&mut self, seconds: u64) {
        self.now = self.now + Millis::seconds(seconds);
        self.ledger.ledger_mut().expire(self.now);
    }

    /// `GPU-a`, once these victims are gone.
    fn reservation_on_a(&self, victims: impl Into<Arc<[PodUid]>>, seconds: u64) -> Reservation {
        let deadline = self.now + Millis::seconds(seconds);
        Reservation {
            node: node(),
            devices: Arc::from([gpu("GPU-a")]),
            victims: victims.into(),
            deadline,
        }
    }

    fn free(&mut self) -> [u64; 2] {
        let snapshot = self.ledger.snapshot();
        let gpus = &snapshot.node("n").unwrap().gpus;
        [gpus[0].free().0 >> 30, gpus[1].free().0 >> 30]
    }

    fn freshness(&mut self) -> Freshness {
        self.ledger.snapshot().node("n").unwrap().freshness
    }

    fn verdict(&mut self, demand: &Demand) -> Result<(), Misfit> {
        fit(self.ledger.snapshot().node("n").unwrap(), demand).map(drop)
    }
}

fn node() -> NodeName {
    testkit::node("n")
}

/// Of class `serving`, or `opportunistic` if the priority is negative.
fn demand(gib: u64, priority: i32, policy: &Policy) -> Demand {
    let vram = format!("{gib}Gi");
    let containers = [ContainerRequest {
        vram: Some(&vram),
        ..ContainerRequest::plain("engine")
    }];
    let request = PodRequest {
        priority,
        grace: Millis::seconds(1),
        ..PodRequest::plain("default", &containers)
    };
    Demand::from_pod(&request, policy).unwrap()
}
