//! Resources that pods request and nodes have, except GPUs: kube-scheduler's own sums, and host ports.
//!
//! GPUs and their memory belong to the ledger and must not be entered here: code that reads a pod or a node leaves them out.

use crate::units::{Bytes, MilliCpu};
use crate::vocabulary::demand::{ContainerRole, total_pod_request};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;

pub const CPU: &str = "cpu";
pub const MEMORY: &str = "memory";
pub const EPHEMERAL_STORAGE: &str = "ephemeral-storage";

/// Amounts as manifests name them: CPU in thousandths of a core, everything else in whole bytes or pieces.
pub type AmountsByResource<'a> = BTreeMap<&'a str, u64>;

/// What one container requests.
#[derive(Debug, Clone)]
pub struct ContainerResourceList<'a> {
    pub role: ContainerRole,
    pub amounts: AmountsByResource<'a>,
}

/// What one pod requests, or one node has.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ResourceList {
    pub cpu: MilliCpu,
    pub memory: Bytes,
    pub ephemeral_storage: Bytes,
    /// Huge pages and extended resources, in order of name.
    pub others: Arc<[(Arc<str>, u64)]>,
}

impl ResourceList {
    pub fn from_amounts(named: &AmountsByResource<'_>) -> Self {
        let amount = |name: &str| named.get(name).copied().unwrap_or(0);
        let others = named
            .iter()
            .filter(|(name, _)| !matches!(**name, CPU | MEMORY | EPHEMERAL_STORAGE));
        Self {
            cpu: MilliCpu(amount(CPU)),
            memory: Bytes(amount(MEMORY)),
            ephemeral_storage: Bytes(amount(EPHEMERAL_STORAGE)),
            others: others
                .map(|(name, amount)| (Arc::from(*name), *amount))
                .collect(),
        }
    }

    /// Kube-scheduler's pod-request formula (`PodRequests` in component-helpers): the running containers or the largest init
    /// step, pod-level resources in place of that, and the runtime's overhead on top.
    ///
    /// `containers` is in the order in which they start.
    pub fn for_pod(
        containers: &[ContainerResourceList<'_>],
        pod_level: &AmountsByResource<'_>,
        overhead: &AmountsByResource<'_>,
    ) -> Self {
        let maps = containers
            .iter()
            .map(|container| &container.amounts)
            .chain([pod_level, overhead]);
        let names: BTreeSet<&str> = maps.flat_map(|amounts| amounts.keys().copied()).collect();
        let of_containers = |name: &str| {
            let parts = containers.iter().map(|container| {
                (
                    container.role,
                    Bytes(container.amounts.get(name).copied().unwrap_or(0)),
                )
            });
            total_pod_request(parts).0
        };
        let amount = |name: &str| {
            let requested = pod_level.get(name).filter(|_| is_pod_level(name)).copied();
            let requested = requested.unwrap_or_else(|| of_containers(name));
            requested.saturating_add(overhead.get(name).copied().unwrap_or(0))
        };
        Self::from_amounts(&names.into_iter().map(|name| (name, amount(name))).collect())
    }

    /// The amounts that are not zero, by name.
    pub fn nonzero(&self) -> impl Iterator<Item = (&str, u64)> {
        let basic = [
            (CPU, self.cpu.0),
            (MEMORY, self.memory.0),
            (EPHEMERAL_STORAGE, self.ephemeral_storage.0),
        ];
        let others = self.others.iter().map(|(name, amount)| (&**name, *amount));
        basic
            .into_iter()
            .chain(others)
            .filter(|(_, amount)| *amount > 0)
    }

    pub fn get(&self, name: &str) -> u64 {
        match name {
            CPU => self.cpu.0,
            MEMORY => self.memory.0,
            EPHEMERAL_STORAGE => self.ephemeral_storage.0,
            _ => self
                .others
                .binary_search_by(|(other, _)| (**other).cmp(name))
                .map_or(0, |index| self.others[index].1),
        }
    }
}

/// Whether a pod may request the resource at pod level.
fn is_pod_level(resource: &str) -> bool {
    matches!(resource, CPU | MEMORY) || resource.starts_with("hugepages-")
}

/// Sums of the requests of a node's pods. Only ever added to: without a pod, the sum is recomputed from the others.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct RequestedSums {
    pub pods: u64,
    cpu: MilliCpu,
    memory: Bytes,
    ephemeral_storage: Bytes,
    others: BTreeMap<Arc<str>, u64>,
}

impl RequestedSums {
    pub fn add(&mut self, pod: &ResourceList) {
        self.pods += 1;
        self.cpu = MilliCpu(self.cpu.0.saturating_add(pod.cpu.0));
        self.memory += pod.memory;
        self.ephemeral_storage += pod.ephemeral_storage;
        for (name, amount) in pod.others.iter() {
            let sum = self.others.entry(name.clone()).or_default();
            *sum = sum.saturating_add(*amount);
        }
    }

    pub fn get(&self, name: &str) -> u64 {
        match name {
            CPU => self.cpu.0,
            MEMORY => self.memory.0,
            EPHEMERAL_STORAGE => self.ephemeral_storage.0,
            _ => self.others.get(name).copied().unwrap_or(0),
        }
    }
}

/// The address that stands for every address of the node.
pub const ANY_ADDRESS: &str = "0.0.0.0";

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct HostPort {
    pub ip: String,
    pub protocol: String,
    pub port: u32,
}

impl HostPort {
    /// Whether two pods cannot both listen: same port, same protocol, and the same address or one of them on every address.
    pub fn conflicts_with(&self, other: &Self) -> bool {
        let is_everywhere = |port: &Self| port.ip == ANY_ADDRESS;
        self.port == other.port
            && self.protocol == other.protocol
            && (self.ip == other.ip || is_everywhere(self) || is_everywhere(other))
    }
}

impl fmt::Display for HostPort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{} on {}", self.port, self.protocol, self.ip)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn container(role: ContainerRole, cpu: u64) -> ContainerResourceList<'static> {
        ContainerResourceList {
            role,
            amounts: [(CPU, cpu), ("example.com/nic", cpu)].into(),
        }
    }

    fn of_pod(containers: &[ContainerResourceList<'_>]) -> ResourceList {
        ResourceList::for_pod(
            containers,
            &AmountsByResource::new(),
            &AmountsByResource::new(),
        )
    }

    #[test]
    fn a_pod_requests_its_running_containers_or_its_largest_init_step() {
        use ContainerRole::{Init, Main, Sidecar};
        let small = of_pod(&[
            container(Init, 3),
            container(Sidecar, 1),
            container(Main, 2),
            container(Main, 4),
        ]);
        assert_eq!((small.cpu.0, small.get("example.com/nic")), (7, 7));
        let large_start = of_pod(&[
            container(Sidecar, 1),
            container(Init, 9),
            container(Main, 2),
        ]);
        assert_eq!(large_start.cpu.0, 10);
        // Before the sidecar started it did not count.
        let early = of_pod(&[
            container(Init, 9),
            container(Sidecar, 1),
            container(Main, 2),
        ]);
        assert_eq!(early.cpu.0, 9);
    }

    #[test]
    fn pod_level_resources_replace_the_containers_sum_and_overhead_is_added() {
        let containers = [container(ContainerRole::Main, 5)];
        let pod_level = [(CPU, 3), ("example.com/nic", 1)].into();
        let overhead = [(CPU, 1), (MEMORY, 7)].into();
        let amounts = ResourceList::for_pod(&containers, &pod_level, &overhead);
        // A pod cannot request extended resources at pod level.
        assert_eq!(
            amounts.nonzero().collect::<Vec<_>>(),
            [(CPU, 4), (MEMORY, 7), ("example.com/nic", 5)]
        );
    }

    #[test]
    fn sums_saturate_at_the_largest_number() {
        let mut taken = RequestedSums::default();
        let huge = ResourceList::from_amounts(
            &[
                (CPU, u64::MAX),
                (MEMORY, u64::MAX),
                ("example.com/nic", u64::MAX),
            ]
            .into(),
        );
        taken.add(&huge);
        taken.add(&huge);
        assert_eq!((taken.pods, taken.get(CPU)), (2, u64::MAX));
        assert_eq!(
            (taken.get(MEMORY), taken.get("example.com/nic")),
            (u64::MAX, u64::MAX)
        );
    }
}

#[cfg(test)]
mod host_ports_tests {
    use super::*;

    fn port(ip: &str, protocol: &str, port: u32) -> HostPort {
        HostPort {
            ip: ip.into(),
            protocol: protocol.into(),
            port,
        }
    }

    #[test]
    fn two_pods_share_a_host_port_only_with_different_protocols_or_addresses() {
        let everywhere = port("0.0.0.0", "TCP", 80);
        assert!(everywhere.conflicts_with(&port("10.0.0.1", "TCP", 80)));
        assert!(port("10.0.0.1", "TCP", 80).conflicts_with(&everywhere));
        assert!(port("10.0.0.1", "TCP", 80).conflicts_with(&port("10.0.0.1", "TCP", 80)));
        assert!(!port("10.0.0.1", "TCP", 80).conflicts_with(&port("10.0.0.2", "TCP", 80)));
        assert!(!everywhere.conflicts_with(&port("0.0.0.0", "UDP", 80)));
        assert!(!everywhere.conflicts_with(&port("0.0.0.0", "TCP", 81)));
    }
}
