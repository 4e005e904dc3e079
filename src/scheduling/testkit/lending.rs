//! Engines that sleep and lend, as agents report them.

use super::cluster::LedgerCluster;
use super::names::{gpu_at, node, uid};
use crate::policy::{Class, Policy, SleepingRule, built_in_classes};
use crate::units::{Bytes, Millis};
use crate::verbs::observe::ReadingReported;
use crate::vocabulary::node_reading::{EngineLoad, GpuReading, NodeReading, SleepState};

/// The default policy, whose serving pods lend as soon as three reports show them asleep.
pub fn lending_policy() -> Policy {
    let classes = built_in_classes()
        .into_iter()
        .map(|class| match class.name.as_str() {
            "serving" => Class {
                sleeping: SleepingRule::Lend,
                ..class
            },
            _ => class,
        });
    let mut policy = Policy::default().with_classes(classes.collect()).unwrap();
    policy.planning.lending.after = Millis::seconds(2);
    policy
}

impl LedgerCluster {
    /// A second later, the agent of a node with one GPU reports so many GiB in use there: by these pods, and beside them. The
    /// engines of some of them sleep.
    pub fn report_use(&mut self, on: &str, used: &[(&str, u64)], beside: u64, asleep: &[&str]) {
        self.report_sleep(on, used, beside, asleep, &[]);
    }

    /// The same, where some engines are seen to be awake.
    pub fn report_sleep(
        &mut self,
        on: &str,
        used: &[(&str, u64)],
        beside: u64,
        asleep: &[&str],
        awake: &[&str],
    ) {
        self.advance(1);
        let mut attributed: Vec<_> = used
            .iter()
            .map(|(pod, gib)| (uid(pod), Bytes::gib(*gib)))
            .collect();
        attributed.sort_unstable();
        let sum: Bytes = attributed.iter().map(|(_, bytes)| *bytes).sum();
        let gpu = GpuReading {
            uuid: gpu_at(on, 0),
            used: Some(sum + Bytes::gib(beside)),
            attributed,
            engine_load: EngineLoad::NONE,
        };
        let states = [(asleep, SleepState::Asleep), (awake, SleepState::Awake)];
        let mut sleep: Vec<_> = states
            .into_iter()
            .flat_map(|(pods, state)| pods.iter().map(move |pod| (uid(pod), state)))
            .collect();
        sleep.sort_unstable_by(|a, b| a.0.cmp(&b.0));
        let reading = NodeReading {
            sampled: self.ledger().now(),
            gpus: vec![gpu],
            sleep,
            ..NodeReading::default()
        };
        self.apply(ReadingReported {
            node: node(on),
            reading: reading.into(),
        });
    }

    /// Three reports show that the engine sleeps on the node's one GPU, and uses 4 GiB.
    pub fn report_engine_asleep(&mut self, engine: &str, on: &str) {
        (0..3).for_each(|_| self.report_use(on, &[(engine, 4)], 0, &[engine]));
    }
}
