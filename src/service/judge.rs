//! Judges pods by the policy in force, beside the ledger's lock, and remembers whom it has judged: the replicas of a workload
//! show the same, and a scheduler asks several times for each pod.
//!
//! What it says may be outdated by the time the ledger is locked; the version in a judgement tells, and whoever has the lock
//! judges anew.

use crate::scheduling::ledger::Judgements;
use crate::scheduling::policy::{Judgement, Policy, Traits};
use dashmap::DashMap;
use parking_lot::RwLock;
use rustc_hash::FxBuildHasher;
use std::sync::Arc;

/// Kinds of pods that are remembered; some megabytes. A cluster with more judges some of them again.
const REMEMBERED: usize = 8192;

pub struct Judge {
    in_force: RwLock<Arc<InForce>>,
}

/// A policy, and what it said of whom it was asked about.
struct InForce {
    policy: Arc<Policy>,
    known: DashMap<Traits, Judgement, FxBuildHasher>,
}

/// What a judge will know when its policy comes into force. Made beforehand, so that the first scheduler to ask after a change
/// of policy waits no longer than any other.
pub struct Remembered(DashMap<Traits, Judgement, FxBuildHasher>);

impl Remembered {
    pub fn of(judged: &Judgements) -> Self {
        let known = judged.iter().take(REMEMBERED);
        Self(known.map(|(traits, judgement)| (Traits::clone(traits), *judgement)).collect())
    }
}

impl Judge {
    pub fn of(policy: Arc<Policy>) -> Self {
        Self { in_force: RwLock::new(Arc::new(InForce { policy, known: DashMap::default() })) }
    }

    pub fn set(&self, policy: Arc<Policy>, remembered: Remembered) {
        *self.in_force.write() = Arc::new(InForce { policy, known: remembered.0 });
    }

    pub fn judge(&self, traits: &Traits) -> Judgement {
        let in_force = self.in_force.read().clone();
        let version = in_force.policy.version;
        if let Some(known) = in_force.known.get(traits) {
            return Judgement { version, ..*known };
        }
        let judgement = in_force.policy.judge(traits);
        if in_force.known.len() >= REMEMBERED {
            in_force.known.clear();
        }
        in_force.known.insert(traits.clone(), judgement);
        judgement
    }
}
