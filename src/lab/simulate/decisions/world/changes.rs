//! Pods, budgets, policies and the process itself come and go.

use super::{Event, World};
use crate::simulate::decisions::core_under_test::{demand, place_of, pod_number};
use crate::simulate::decisions::oracle::Checked;
use crate::simulate::decisions::record::{GIB, Kept, KnownState, NodeRecord, PodSpec, Record};
use crate::simulate::decisions::rules::{APPS, CLASSES, NAMESPACES, SLACK};
use std::sync::Arc;
use stowage_scheduling::ids::LeaderEpoch;
use stowage_scheduling::kube_filters::{Amounts, FilterNode, Requirements};
use stowage_scheduling::verbs::Cluster;
use stowage_scheduling::verbs::observe::{
    BudgetDeleted, BudgetObserved, FilterPod, FilterPodObserved, NodeObserved,
};
use stowage_scheduling::verbs::tick::{ClockAdvanced, LeadershipBegan, PolicySet};
use stowage_scheduling::verbs::wait::MayBeRefused;
use stowage_scheduling::vocabulary::disruption_budget::DisruptionBudget;
use stowage_scheduling::vocabulary::label_selector::{Requirement, Selector};
use stowage_scheduling::vocabulary::node::NodeKind;

/// What a reservation may last beyond its slack, whatever it says.
const LONGEST_GRACE: u64 = 3_600_000;

impl World<'_> {
    /// A pod comes, or a group of pods. With enough pods in the world one leaves instead.
    pub(super) fn arrive(&mut self) -> Checked {
        if self.alive.len() >= self.most_pods {
            return self.leave();
        }
        let is_gated = self.draws.chance(30);
        let spec = self.draw_spec();
        let size = if self.draws.chance(12) {
            self.draws.between(2, 3) as u32
        } else {
            1
        };
        let group = (size > 1).then(|| {
            self.groups = self.groups.wrapping_add(1);
            (self.groups, size)
        });
        for _ in 0..size {
            let is_gated = is_gated || group.is_some();
            let pod = self.add_pod(PodSpec { group, ..spec }, is_gated);
            self.note(|| {
                format!(
                    "pod {pod} comes, {}gated: {spec:?}",
                    if is_gated { "" } else { "not " }
                )
            });
            // A request may come before the watch shows the pod.
            match is_gated || self.draws.chance(80) {
                true => self.show_pod(pod),
                false => self.events.push_back(Event::Changed(pod)),
            }
            self.show_to_filters(pod);
        }
        Ok(())
    }

    fn draw_spec(&mut self) -> PodSpec {
        let draws = &mut self.draws;
        let gpus = draws.of(&[1, 1, 1, 1, 1, 1, 2, 2, 3, 4]);
        let class = draws.below(CLASSES.len()) as u8;
        PodSpec {
            per_gpu: draws.of(&[2, 4, 4, 8, 9, 14, 17, 20, 30, 35, 36, 60, 71, 72]) * GIB,
            gpus,
            is_exclusive: draws.chance(12),
            priority: match class {
                0 => draws.of(&[0, 10, 100]),
                _ => draws.of(&[-100, -10, 0, 10]),
            },
            class,
            namespace: draws.below(NAMESPACES.len()) as u8,
            app: draws.below(APPS.len()) as u8,
            may_preempt: draws.chance(85),
            do_not_disrupt: draws.chance(15),
            group: None,
            grace: draws.of(&[0, 1_000, 30_000]),
        }
    }

    /// The view of kube-scheduler's filters learns of a waiting pod.
    pub(super) fn show_to_filters(&mut self, pod: u32) {
        let uid = self.pods[pod as usize].uid.clone();
        let wants = FilterPod::Waiting(Requirements::default());
        self.core.apply(FilterPodObserved { uid, pod: wants });
    }

    /// A pod is deleted: it is gone at once, or after a while.
    pub(super) fn leave(&mut self) -> Checked {
        let Some(pod) = self.random_pod(|world, pod| world.api[pod as usize].leaving.is_none())
        else {
            return Ok(());
        };
        let is_bound = self.api[pod as usize].bound.is_some();
        match is_bound && self.draws.chance(50) {
            true => self.begin_to_leave(pod),
            false => self.end_pod(pod),
        }
        Ok(())
    }

    /// The pod has its grace to end.
    pub(super) fn begin_to_leave(&mut self, pod: u32) {
        let grace = self.draws.of(&[0, 500, 5_000, 20_000]);
        self.api[pod as usize].leaving = Some(self.record.now + grace);
        self.note(|| format!("pod {pod} leaves within {grace} ms"));
        self.events.push_back(Event::Changed(pod));
    }

    pub(super) fn change_budget(&mut self) -> Checked {
        let (namespace, app) = (
            self.draws.below(NAMESPACES.len()),
            self.draws.below(APPS.len()),
        );
        let allowed = self.draws.of(&[None, None, Some(0), Some(1), Some(2)]);
        self.record.budgets[namespace][app] = allowed;
        self.show_budget(namespace, app);
        Ok(())
    }

    fn show_budget(&mut self, namespace: usize, app: usize) {
        let (namespace_name, name) = (NAMESPACES[namespace].to_owned(), APPS[app].to_owned());
        match self.record.budgets[namespace][app] {
            None => self.core.apply(BudgetDeleted {
                namespace: namespace_name,
                name,
            }),
            Some(allowed) => self.core.apply(BudgetObserved(DisruptionBudget {
                namespace: namespace_name,
                selector: Selector::All(vec![Requirement::is("app", &name)]),
                name,
                allowed,
                unhealthy_may_go: false,
            })),
        }
    }

    pub(super) fn change_policy(&mut self) -> Checked {
        self.active = 1 - self.active;
        self.record.rules = self.policies[self.active].clone();
        self.record.note_tenants();
        self.record.touch_all();
        self.tally.swaps += 1;
        let policy = self.record.rules.policy(self.core.planted);
        self.core.apply(PolicySet {
            policy,
            prepared: None,
        });
        self.note(|| "the other policy comes into force".into());
        // Requests that were read before are of the policy before.
        if self.draws.chance(50) {
            self.classify();
        }
        Ok(())
    }

    fn classify(&mut self) {
        let policy = self.core.cluster.policy().clone();
        for pod in &self.alive {
            self.pods[*pod as usize].demand = demand(self.record.spec(*pod), &policy);
        }
    }

    /// The state is stored, and goes on as a loaded one.
    pub(super) fn store(&mut self) -> Checked {
        let state = self.core.cluster.export();
        self.core.cluster = Cluster::load(state)
            .map_err(|error| format!("a stored state is not loaded: {error}"))?;
        Ok(())
    }

    /// Another process leads. No write of the one before it can land any more.
    pub(super) fn restart(&mut self) -> Checked {
        self.end_writes()?;
        self.tally.restarts += 1;
        self.note(|| "the process restarts".into());
        let hardware = self
            .record
            .nodes
            .iter()
            .map(|node| NodeRecord::new(node.hardware.clone()))
            .collect();
        let pods = std::mem::take(&mut self.record.pods);
        self.record = Record {
            nodes: hardware,
            known: Vec::new(),
            ..self.record.clone()
        };
        self.record.pods = pods;
        self.record.forget_evictions();
        for entry in &mut self.record.pods {
            (entry.told, entry.kept, entry.starting, entry.offered) =
                (KnownState::Nothing, None, None, None);
            (entry.open, entry.leaving) = (Default::default(), None);
        }
        self.events.clear();
        self.core.cluster = Cluster::new(Arc::new(self.record.rules.policy(self.core.planted)));
        self.core.scores = Default::default();
        self.classify();
        self.show_everything();
        self.tick(true)?;
        (0..self.record.nodes.len() as u8).try_for_each(|node| self.check_promised(node))
    }

    /// All nodes and pods are listed, and then the process leads.
    pub(super) fn show_everything(&mut self) {
        let now = self.now();
        self.core.apply(ClockAdvanced(now));
        for node in 0..self.record.nodes.len() as u8 {
            let name = self.node_names[usize::from(node)].clone();
            let (labels, taints, allocatable) =
                (Arc::default(), Arc::default(), Amounts::default());
            let machine = FilterNode {
                name: name.clone(),
                labels,
                taints,
                allocatable,
                pods: 1000,
            };
            let observed = NodeObserved::new(name, NodeKind::Stowage);
            self.core.apply(NodeObserved {
                machine: Some(machine),
                ..observed
            });
            self.report_devices(node);
            if self.draws.chance(70) {
                self.report_of(node);
            }
        }
        for (namespace, app) in
            (0..NAMESPACES.len()).flat_map(|n| (0..APPS.len()).map(move |app| (n, app)))
        {
            self.show_budget(namespace, app);
        }
        for pod in self.alive.clone() {
            self.show_pod(pod);
            if self.api[pod as usize].bound.is_none() {
                self.show_to_filters(pod);
                self.take_over(pod);
            }
        }
        self.core
            .apply(LeadershipBegan(LeaderEpoch::new("lease", 1, "nonce")));
        let pods = self.core.cluster.may_be_refused().into_iter().collect();
        self.core.apply(MayBeRefused {
            pods,
            then: self.core.cluster.now(),
        });
    }

    /// A new process takes over the reservation that the pod shows.
    fn take_over(&mut self, pod: u32) {
        let Some(reservation) = self.api[pod as usize].condition.clone() else {
            return;
        };
        let victims: Vec<u32> = reservation.victims.iter().map(pod_number).collect();
        let place = place_of(&reservation);
        for victim in &victims {
            if self.record.told(*victim) == KnownState::Nothing {
                self.record.note_missed(place.node, *victim);
            }
        }
        let latest = self.record.now + LONGEST_GRACE + SLACK;
        let (deadline, made) = (reservation.deadline.0.min(latest), self.record.now);
        let kept = Kept {
            place,
            victims,
            deadline,
            made,
        };
        self.record.edit(pod, |entry| {
            (entry.kept, entry.was_kept) = (Some(kept), true)
        });
    }

    /// What is promised on a node is no more than it has.
    fn check_promised(&mut self, node: u8) -> Checked {
        for (gpu, view) in self.record.views(node).into_iter().enumerate() {
            if view.charged > view.capacity {
                let (charged, capacity) = (view.charged, view.capacity);
                return Err(format!(
                    "{charged} of {capacity} B are promised on node {node} GPU {gpu}"
                ));
            }
        }
        Ok(())
    }
}
