//! Whether pods may be evicted for another, and what their node is without them.

use super::gpu_views::GpuView;
use super::oracle::Checked;
use super::record::{Age, KnownState, MOST_GPUS, PodSpec, Record, each};

/// Pods that must have left before a pod can be placed.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Evictions {
    /// They are evicted for it.
    pub evicted: Vec<u32>,
    /// They leave anyway, or have ended.
    pub awaited: Vec<u32>,
}

/// What pods that leave use beyond their grants.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Leftover {
    IsGivenBack,
    Stays,
}

impl Evictions {
    pub fn all(&self) -> Vec<u32> {
        self.evicted.iter().chain(&self.awaited).copied().collect()
    }
}

impl Record {
    /// The victims of other pods' reservations.
    fn spoken_for(&self, pod: u32) -> impl Iterator<Item = u32> {
        let others = self.known.iter().filter(move |other| **other != pod);
        others
            .filter_map(|other| self.kept(*other))
            .flat_map(|kept| kept.victims.iter().copied())
    }

    /// Whether a pod that is not in a group, or all of whose group leaves, may be evicted for another.
    pub(crate) fn may_be_evicted(&self, victim: u32, preemptor: u32) -> Result<(), &'static str> {
        let (entry, spec) = (&self.pods[victim as usize], self.spec(preemptor));
        let rules = self.rules.class(entry.spec.class);
        let KnownState::Bound(_, since) = entry.told else {
            return Err("is not bound");
        };
        if entry.leaving.is_some() {
            return Err("leaves already");
        }
        if !rules.is_preemptible {
            return Err("is of a class that is not preemptible");
        }
        if entry.spec.priority >= spec.priority {
            return Err("is not of lower priority");
        }
        if entry.spec.do_not_disrupt && rules.honors_do_not_disrupt {
            return Err("is not to be disrupted");
        }
        if self.now.saturating_sub(entry.started.min(since)) < rules.min_runtime {
            return Err("has not run for long enough");
        }
        if self.rules.tenant_limit.is_some()
            && self.is_of_tenant(&entry.spec) != self.is_of_tenant(spec)
        {
            return Err("is of another tenant");
        }
        if self.spoken_for(preemptor).any(|other| other == victim) {
            return Err("leaves for another pod");
        }
        Ok(())
    }

    pub(super) fn is_of_tenant(&self, spec: &PodSpec) -> bool {
        spec.namespace == 0
    }

    pub(crate) fn check_evictions(
        &self,
        pod: u32,
        node: u8,
        evictions: &Evictions,
        may_violate_budgets: bool,
    ) -> Checked {
        let Evictions { evicted, awaited } = evictions;
        if !evicted.is_empty() && !self.spec(pod).may_preempt {
            return Err(format!(
                "pod {pod} does not preempt, and {evicted:?} are evicted for it"
            ));
        }
        for victim in evicted {
            self.may_be_evicted(*victim, pod)
                .map_err(|why| format!("pod {victim} is evicted for pod {pod}, and {why}"))?;
            self.check_group(*victim, evicted, awaited)?;
        }
        for awaited in awaited {
            let is_leaving = self.pods[*awaited as usize].leaving.is_some();
            let has_ended =
                self.told(*awaited) == KnownState::Nothing && self.may_have_memory(node, *awaited);
            if !is_leaving && !has_ended {
                return Err(format!(
                    "pod {pod} waits for pod {awaited} to leave, which stays"
                ));
            }
            if self.spoken_for(pod).any(|other| other == *awaited) {
                return Err(format!(
                    "pod {pod} waits for pod {awaited}, as another pod does"
                ));
            }
        }
        let is_here = |victim: &u32| {
            self.told(*victim)
                .place()
                .is_some_and(|place| place.node == node)
        };
        if !evicted.is_empty() && !evicted.iter().any(is_here) {
            return Err(format!(
                "none of {evicted:?}, which are evicted for pod {pod}, is on node {node}"
            ));
        }
        if may_violate_budgets {
            Ok(())
        } else {
            self.check_budgets(pod, evicted)
        }
    }

    /// A group leaves whole.
    fn check_group(&self, victim: u32, evicted: &[u32], awaited: &[u32]) -> Checked {
        let Some((group, _)) = self.spec(victim).group else {
            return Ok(());
        };
        let is_member = |pod: &&u32| {
            self.spec(**pod)
                .group
                .is_some_and(|(other, _)| other == group)
        };
        let stays = |pod: &&u32| {
            self.told(**pod).place().is_some()
                && self.pods[**pod as usize].leaving.is_none()
                && !evicted.contains(pod)
                && !awaited.contains(pod)
        };
        match self.known.iter().filter(is_member).find(stays) {
            None => Ok(()),
            Some(other) => Err(format!(
                "pod {victim} is evicted, and pod {other} of its group stays"
            )),
        }
    }

    fn check_budgets(&self, pod: u32, evicted: &[u32]) -> Checked {
        for (namespace, budgets) in self.budgets.iter().enumerate() {
            for (app, budget) in budgets.iter().enumerate() {
                let Some(allowed) = *budget else { continue };
                let covers = |spec: &PodSpec| {
                    (usize::from(spec.namespace), usize::from(spec.app)) == (namespace, app)
                };
                let counts = |victim: &u32| {
                    covers(self.spec(*victim))
                        && self.rules.class(self.spec(*victim).class).honors_budgets
                };
                let taken = evicted.iter().filter(|victim| counts(victim)).count() as u32;
                let is_underway = |victim: &u32| {
                    covers(self.spec(*victim))
                        && self.told(*victim) != KnownState::Nothing
                        && self.pods[*victim as usize].leaving.is_none()
                };
                let mut others: Vec<u32> = self.spoken_for(pod).filter(is_underway).collect();
                others.sort_unstable();
                others.dedup();
                if taken > 0 && taken + others.len() as u32 > allowed {
                    let others = others.len();
                    return Err(format!(
                        "{taken} pods are evicted for pod {pod} and {others} for others, where a budget allows {allowed}"
                    ));
                }
            }
        }
        Ok(())
    }

    /// Whether the pod would fit on the node without all pods that may be evicted by themselves, which no group or budget keeps.
    pub(crate) fn fits_by_evictions(&mut self, pod: u32, node: u8, offered: &[u32]) -> bool {
        let goes = |victim: &u32| {
            let spec = self.spec(*victim);
            let budget = self.budgets[usize::from(spec.namespace)][usize::from(spec.app)];
            self.may_be_evicted(*victim, pod).is_ok() && spec.group.is_none() && budget.is_none()
        };
        let all_go = offered.iter().all(goes);
        let has_no_say = self.is_closed(node) || self.age_of(node) == Age::Expired;
        if !all_go
            || !self.spec(pod).may_preempt
            || has_no_say
            || self.allowance(pod, &[]).is_some()
        {
            return false;
        }
        let views = self.views_after(node, pod, offered, Leftover::Stays);
        let spec = *self.spec(pod);
        let keeps_spare = self.keeps_spare_from(&spec);
        self.takers(&views, &spec, keeps_spare).count_ones() >= spec.gpus
    }

    /// What is left of a node's GPUs once these pods have left, for a pod that has nothing there.
    pub(crate) fn views_after(
        &self,
        node: u8,
        pod: u32,
        leaving: &[u32],
        leftover: Leftover,
    ) -> [GpuView; MOST_GPUS] {
        let mut views = self.views_without(node, Some(pod));
        for pod in leaving {
            let place = self.charged(*pod).filter(|place| place.node == node);
            let gpus = place.map_or(0, |place| place.gpus);
            for (gpu, view) in views.iter_mut().enumerate() {
                let is_here = gpus >> gpu & 1 == 1;
                let charge = if is_here {
                    self.spec(*pod).charge(view.capacity)
                } else {
                    0
                };
                let attributed = self.attributed(node, gpu, *pod);
                if leftover == Leftover::IsGivenBack {
                    view.unaccounted = view
                        .unaccounted
                        .saturating_sub(attributed.saturating_sub(charge));
                }
                if is_here {
                    view.charged = view.charged.saturating_sub(charge);
                    view.tenants -= 1;
                    view.is_exclusive &= !self.spec(*pod).is_exclusive;
                }
                // With the last pod, also one that has ended and whose memory is there, its engines are gone.
                if view.tenants == 0 && (is_here || attributed > 0) {
                    (view.is_starting, view.load) = (false, None);
                }
            }
        }
        let stays = |other: &&u32| !leaving.contains(other) && **other != pod;
        views.iter_mut().for_each(|view| view.classes = 0);
        for pod in self.nodes[usize::from(node)].here.iter().filter(stays) {
            let kept = || {
                self.kept(*pod)
                    .filter(|kept| self.is_resolved(kept))
                    .map(|kept| kept.place)
            };
            let place = self
                .charged(*pod)
                .or_else(kept)
                .filter(|place| place.node == node);
            for gpu in place.into_iter().flat_map(|place| each(place.gpus)) {
                views[gpu].classes |= 1 << self.spec(*pod).class;
            }
        }
        views
    }
}
