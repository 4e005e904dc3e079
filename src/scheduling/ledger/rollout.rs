//! Rolling updates: a new pod of a Deployment may need the very GPUs of an old one, which its controller removes only when the new
//! one is ready.

use super::Ledger;
use super::pod_state::{PodPhase, PodState};
use crate::ids::{NodeName, PodKey, PodUid};
use crate::placing::fit::fit;
use crate::vocabulary::demand::Demand;

/// Labels by which controllers tell the pods of one template from those of the next.
const TEMPLATE_HASHES: [&str; 2] = ["pod-template-hash", "rollouts-pod-template-hash"];

/// In a ledger with more pods no predecessor is looked for: it takes a look at each.
const MOST_PODS: usize = 10_000;

/// Old pods that are tried.
const MOST_PREDECESSORS: usize = 8;

/// Whether a controller made the pod from a template: no other has a predecessor.
pub fn is_of_template(key: &PodKey, demand: &Demand) -> bool {
    workload(key, demand).is_some()
}

impl Ledger {
    /// The pod of an earlier template that has what this pending pod needs, and its node: without it, the pod would fit there.
    pub fn predecessor_in_the_way(&self, uid: &PodUid) -> Option<(&PodKey, &NodeName)> {
        let pod = self
            .pod_states
            .get(uid)
            .filter(|pod| pod.waiting().is_some() && !pod.demand.asks_plugin())?;
        let (name, hash) = workload(&pod.key, &pod.demand)?;
        if self.pod_states.in_no_order().nth(MOST_PODS).is_some() {
            return None;
        }
        let is_predecessor = |other: &PodState| {
            other.key.namespace == pod.key.namespace
                && other.key.name.starts_with(name)
                && workload(&other.key, &other.demand)
                    .is_some_and(|(other, of)| other == name && of != hash)
        };
        let bound = self
            .pod_states
            .in_no_order()
            .filter(|(_, other)| matches!(other.phase, PodPhase::Bound(_)));
        let mut old: Vec<_> = bound.filter(|(_, other)| is_predecessor(other)).collect();
        old.sort_by_key(|(uid, _)| *uid);
        let is_in_the_way = |(uid, other): &(&PodUid, &PodState)| {
            let without = other.node().and_then(|node| self.node_without(uid, node));
            without.is_some_and(|node| fit(&node, &pod.demand).is_ok())
        };
        old.into_iter()
            .take(MOST_PREDECESSORS)
            .find(is_in_the_way)
            .and_then(|(_, other)| Some((&other.key, other.node()?)))
    }
}

/// The name that a pod's controller has under every template, and the hash of this one. A ReplicaSet names its pods
/// `WORKLOAD-HASH-RANDOM`.
fn workload<'a>(key: &'a PodKey, demand: &'a Demand) -> Option<(&'a str, &'a str)> {
    let labels = &demand.traits.labels;
    let hash = TEMPLATE_HASHES
        .iter()
        .find_map(|key| labels.get(*key))
        .filter(|hash| !hash.is_empty())?;
    let (replica_set, _) = key.name.rsplit_once('-')?;
    let workload = replica_set.strip_suffix(hash.as_str())?.strip_suffix('-')?;
    (!workload.is_empty()).then_some((workload, hash))
}

#[cfg(test)]
mod tests {
    use crate::ledger::ObservedPhase;
    use crate::policy::Policy;
    use crate::testkit::{LedgerCluster, classified, demand_of, gpu, gpu_pair, node, uid};
    use crate::units::Bytes;
    use crate::vocabulary::classification::PodTraits;
    use crate::vocabulary::demand::{Demand, Sharing};

    fn demand(gib: u64, label: &str, hash: &str) -> Demand {
        let labels = [(label.to_owned(), hash.to_owned())].into();
        let traits = PodTraits {
            labels,
            ..PodTraits::default()
        };
        classified(
            demand_of(gib << 30, 1, Sharing::Shared, 0),
            traits,
            &Policy::default(),
        )
    }

    /// Two GPUs of 72 GiB: one has 60 GiB of a pod with this name and hash, the other 70 GiB of some pod.
    fn predecessor(old: (&str, &str), new: (&str, &str, &str), gib: u64) -> Option<String> {
        let mut ledger =
            LedgerCluster::empty(Policy::default()).with_node("n", gpu_pair(Bytes::gib(80)));
        for (name, demand, device) in [
            (old.0, demand(60, "pod-template-hash", old.1), "GPU-0"),
            (
                "some-6f7-abcde",
                demand(70, "pod-template-hash", "6f7"),
                "GPU-1",
            ),
        ] {
            let devices = Some([gpu(device)].into());
            let state = ObservedPhase::Bound {
                node: node("n"),
                devices,
                starting: false,
                ran: None,
            };
            ledger.observe(name, demand, state, None);
        }
        ledger.wait(new.0, demand(gib, new.1, new.2));
        ledger
            .predecessor_in_the_way(&uid(new.0))
            .map(|(pod, _)| pod.name.to_string())
    }

    #[test]
    fn a_new_pod_of_a_deployment_waits_for_its_own_predecessor() {
        let old = ("llama-6f7-abcde", "6f7");
        let hash = "pod-template-hash";
        assert_eq!(
            predecessor(old, ("llama-99c-fghij", hash, "99c"), 60).as_deref(),
            Some("llama-6f7-abcde")
        );
        assert_eq!(
            predecessor(("a-b-1-x", "1"), ("a-b-2-y", hash, "2"), 72).as_deref(),
            Some("a-b-1-x")
        );
        assert_eq!(
            predecessor(
                old,
                ("llama-99c-fghij", "rollouts-pod-template-hash", "99c"),
                60
            )
            .as_deref(),
            Some("llama-6f7-abcde")
        );
    }

    #[test]
    fn other_pods_are_no_predecessors() {
        let (old, hash) = (("llama-6f7-abcde", "6f7"), "pod-template-hash");
        for (new, gib) in [
            // Of the same template, of another workload, without a hash, with a name that no ReplicaSet gives.
            (("llama-6f7-fghij", hash, "6f7"), 60),
            (("llama-2-99c-fghij", hash, "99c"), 60),
            (("llam-99c-fghij", hash, "99c"), 60),
            (("llama-99c-fghij", "other", "99c"), 60),
            (("llama", hash, "99c"), 60),
            // It would not fit without it either.
            (("llama-99c-fghij", hash, "99c"), 73),
        ] {
            assert_eq!(predecessor(old, new, gib), None, "{new:?} {gib}");
        }
    }
}
