//! The machines under the nodes: GPUs, and the processes that use their memory. What is true of them is decided here; agents
//! report it, and may report it wrongly.

use super::clock;
use super::oracle::{devices_of, granted_per_gpu};
use super::world::GPUS;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;
use stowage_scheduling::testkit::random::Random;

/// Capacity of each GPU.
pub(crate) const GPU_CAPACITY_BYTES: u64 = 80 << 30;

/// A pod's process on each of its GPUs.
#[derive(Debug, Clone)]
pub struct Process {
    pub pid: u32,
    pub node: String,
    /// Indices on its node.
    pub gpus: Vec<usize>,
    /// On each of them.
    pub used_per_gpu: u64,
    /// Once its pod has ended: when that was, and when its memory is free.
    pub ended_and_freed: Option<(Duration, Duration)>,
}

pub(crate) struct Machines {
    dice: Random,
    /// By the pod's UID.
    pub processes: BTreeMap<String, Process>,
    /// The next process whose pod ends keeps its memory for so long.
    pub next_linger: Duration,
    last_pid: u32,
    /// How often a node has got another machine.
    generations: BTreeMap<String, u32>,
}

impl Machines {
    pub fn new(dice: Random) -> Self {
        Self {
            dice,
            processes: BTreeMap::new(),
            next_linger: Duration::ZERO,
            last_pid: 100,
            generations: BTreeMap::new(),
        }
    }

    /// Processes of running pods begin, and those of pods that are gone end.
    pub fn advance(&mut self, pods: &[Arc<Value>]) {
        let mut alive = BTreeSet::new();
        for pod in pods
            .iter()
            .filter(|pod| pod["status"]["phase"] == "Running")
        {
            let (Some(uid), Some((node, gpus))) =
                (pod["metadata"]["uid"].as_str(), devices_of(pod))
            else {
                continue;
            };
            alive.insert(uid.to_owned());
            if !self.processes.contains_key(uid) {
                let granted = granted_per_gpu(pod).unwrap_or_default();
                let used = granted / 100 * (70 + self.dice.below(31) as u64);
                self.last_pid += 1;
                let process = Process {
                    pid: self.last_pid,
                    node,
                    gpus,
                    used_per_gpu: used,
                    ended_and_freed: None,
                };
                self.processes.insert(uid.to_owned(), process);
            }
        }
        let now = clock::elapsed();
        for (uid, process) in &mut self.processes {
            if !alive.contains(uid) && process.ended_and_freed.is_none() {
                process.ended_and_freed = Some((now, now + std::mem::take(&mut self.next_linger)));
            }
        }
        self.processes
            .retain(|_, process| process.ended_and_freed.is_none_or(|(_, ends)| ends > now));
    }

    pub fn processes_on(
        &self,
        node: &str,
        gpu: usize,
    ) -> impl Iterator<Item = (&String, &Process)> {
        let is_here = move |process: &Process| process.node == node && process.gpus.contains(&gpu);
        self.processes
            .iter()
            .filter(move |(_, process)| is_here(process))
    }

    /// NVML's name of a GPU.
    pub fn uuid(&self, node: &str, gpu: usize) -> String {
        format!("GPU-{node}m{}-{gpu}", self.generation(node))
    }

    pub fn has_gpu(&self, node: &str, uuid: &str) -> bool {
        (0..GPUS).any(|gpu| self.uuid(node, gpu) == uuid)
    }

    pub fn generation(&self, node: &str) -> u32 {
        self.generations.get(node).copied().unwrap_or(0)
    }

    /// The node's machine is gone, with all that ran on it. The next one has other GPUs.
    pub fn replace_machine(&mut self, node: &str) {
        self.processes.retain(|_, process| process.node != node);
        *self.generations.entry(node.to_owned()).or_default() += 1;
    }

    pub fn used_on(&self, node: &str, gpu: usize) -> u64 {
        self.processes_on(node, gpu)
            .map(|(_, process)| process.used_per_gpu)
            .sum()
    }
}
