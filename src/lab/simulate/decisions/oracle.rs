//! The oracle: whether an answer is right by the [record](super::record). Small worlds are searched by brute force: GPUs take a
//! pod independently of each other, so a node fits if enough of its GPUs take the pod.
//!
//! Both directions are checked. What passes must fit; what fits must not be refused, wherever it is certain what the core knows.

use super::gpu_views::GpuView;
use super::record::{Kept, KnownState, MOST_GPUS, Mask, Place, Record, each};
use super::tally::DecisionTally;
use super::victims::{Evictions, Leftover};

/// A promise that an answer breaks.
pub type Checked = Result<(), String>;

/// What filter or prioritize answered.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct SeenNodes {
    /// Best first.
    pub passed: Vec<Place>,
    /// Places among the names that were asked about, with the reason's code.
    pub refused: Vec<(usize, &'static str)>,
}

/// What bind answered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum SeenBind {
    Write {
        place: Place,
        granted: u64,
        fraction: u16,
        is_new: bool,
    },
    AlreadyBound,
    Conflict(&'static str),
}

/// What the core must say of the node on which GPUs are the pod's already.
enum OwnPlace {
    Passes(Place),
    Refuses,
    Open,
}

impl Record {
    /// Whether the pod fits on the node, whose GPUs these are.
    fn fits(&mut self, pod: u32, node: u8, views: &[GpuView; MOST_GPUS]) -> bool {
        if self.is_closed(node) {
            return false;
        }
        let spec = *self.spec(pod);
        let keeps_spare = self.keeps_spare_from(&spec);
        let takers = self.takers(views, &spec, keeps_spare);
        takers.count_ones() >= spec.gpus && self.is_within_limit(pod, node, takers, &[])
    }

    /// Whether the pod's tenant may have as many of these GPUs as the pod requests. GPUs of a node are alike.
    fn is_within_limit(&self, pod: u32, node: u8, takers: Mask, leaving: &[u32]) -> bool {
        let spec = self.spec(pod);
        let chosen = each(takers)
            .take(spec.gpus as usize)
            .fold(0, |mask, gpu| mask | 1 << gpu);
        let wanted = self.vram_on(spec, Place { node, gpus: chosen });
        self.allowance(pod, leaving)
            .is_none_or(|left| wanted <= left)
    }

    /// Whether the pod would fit on the node if it had nothing there.
    pub(crate) fn fits_anew(&mut self, pod: u32, node: u8) -> bool {
        let views = match self.nodes[usize::from(node)].here.contains(&pod) {
            true => self.views_without(node, Some(pod)),
            false => self.views(node),
        };
        self.fits(pod, node, &views)
    }

    /// A place that was answered has GPUs that the pod may take now.
    pub(crate) fn check_place(
        &mut self,
        pod: u32,
        place: Place,
        views: &[GpuView; MOST_GPUS],
        leaving: &[u32],
    ) -> Checked {
        let spec = *self.spec(pod);
        if place.gpus.count_ones() != spec.gpus {
            return Err(format!(
                "pod {pod} requests {} GPUs and gets {}",
                spec.gpus,
                shown(place)
            ));
        }
        let keeps_spare = self.keeps_spare_from(&spec);
        let takers = self.takers(views, &spec, keeps_spare);
        if place.gpus & !takers != 0 || self.is_closed(place.node) {
            return Err(format!(
                "pod {pod} gets {}, where it does not fit",
                shown(place)
            ));
        }
        if !self.is_within_limit(pod, place.node, place.gpus, leaving) {
            return Err(format!(
                "pod {pod} takes its tenant beyond its limit on {}",
                shown(place)
            ));
        }
        Ok(())
    }

    fn own_place(&mut self, pod: u32) -> Option<(u8, OwnPlace)> {
        match self.charged(pod) {
            Some(place) if self.nodes[usize::from(place.node)].is_kept_back => {
                return Some((place.node, OwnPlace::Open));
            }
            Some(place) => return Some((place.node, OwnPlace::Passes(place))),
            None => {}
        }
        let Kept { place, victims, .. } = self.kept(pod)?.clone();
        let is_there = |victim: u32| {
            self.told(victim)
                .place()
                .is_some_and(|at| at.node == place.node)
        };
        if victims.iter().any(|victim| is_there(*victim)) {
            return Some((place.node, OwnPlace::Refuses));
        }
        let certain = self.is_certain(place.node);
        if !certain
            || victims
                .iter()
                .any(|victim| self.may_have_memory(place.node, *victim))
        {
            return Some((
                place.node,
                if certain {
                    OwnPlace::Refuses
                } else {
                    OwnPlace::Open
                },
            ));
        }
        let mut views = self.views_without(place.node, Some(pod));
        for (gpu, view) in views.iter_mut().enumerate() {
            (view.unaccounted, view.load) = (self.used_without_grant(place.node, gpu), None);
        }
        let takers = self.takers(&views, self.spec(pod), false);
        let is_free =
            place.gpus & !takers == 0 && self.is_within_limit(pod, place.node, place.gpus, &[]);
        Some((
            place.node,
            if is_free {
                OwnPlace::Passes(place)
            } else {
                OwnPlace::Refuses
            },
        ))
    }

    /// `asked` are the nodes by name; `None` for a name that no node has.
    pub(crate) fn check_filter(
        &mut self,
        pod: u32,
        asked: &[Option<u8>],
        seen: &SeenNodes,
        shortlist: usize,
        tally: &mut DecisionTally,
    ) -> Checked {
        let own = self.own_place(pod);
        let own_at = own.as_ref().map(|(node, _)| *node);
        for (at, code) in &seen.refused {
            let Some(Some(node)) = asked.get(*at) else {
                continue;
            };
            match &own {
                Some((own_node, own_place)) if own_node == node => {
                    if let OwnPlace::Passes(place) = own_place {
                        return Err(format!(
                            "pod {pod} is refused ({code}) its own {}",
                            shown(*place)
                        ));
                    }
                }
                _ if !self.is_certain(*node) => tally.uncertain += 1,
                _ => {
                    tally.refusals += 1;
                    let views = self.views(*node);
                    if self.fits(pod, *node, &views) {
                        return Err(format!(
                            "pod {pod} is refused ({code}) node {node}, where it fits"
                        ));
                    }
                }
            }
        }
        for place in &seen.passed {
            tally.passes += 1;
            if !asked.contains(&Some(place.node)) {
                return Err(format!(
                    "node {} passes and was not asked about",
                    place.node
                ));
            }
            match &own {
                Some((node, own_place)) if *node == place.node => match own_place {
                    OwnPlace::Passes(own) if own == place => {}
                    OwnPlace::Open => {}
                    OwnPlace::Passes(own) => {
                        return Err(format!(
                            "{} passes, and pod {pod} has {}",
                            shown(*place),
                            shown(*own)
                        ));
                    }
                    OwnPlace::Refuses => {
                        return Err(format!(
                            "{} passes for pod {pod} before it is free",
                            shown(*place)
                        ));
                    }
                },
                _ => {
                    let views = self.views(place.node);
                    self.check_place(pod, *place, &views, &[])?;
                }
            }
        }
        if let Some((node, OwnPlace::Passes(place))) = &own
            && asked.contains(&Some(*node))
            && seen.passed.as_slice() != [*place]
        {
            return Err(format!(
                "other nodes pass beside pod {pod}'s own {}",
                shown(*place)
            ));
        }
        self.check_none_left_out(pod, asked, seen, shortlist, own_at)
    }

    /// A node that is neither passed nor refused fits, and is worse than a whole shortlist, or has just failed.
    fn check_none_left_out(
        &mut self,
        pod: u32,
        asked: &[Option<u8>],
        seen: &SeenNodes,
        shortlist: usize,
        own: Option<u8>,
    ) -> Checked {
        let (passed, refused) = (seen.passed.len(), seen.refused.len());
        let mut distinct: Vec<Option<u8>> = asked.to_vec();
        distinct.sort_unstable();
        distinct.dedup();
        let is_own_first = seen
            .passed
            .first()
            .is_some_and(|first| Some(first.node) == own);
        let just_failed = self.pods[pod as usize].offered;
        let left_out = distinct.len().saturating_sub(passed + refused);
        let excused = usize::from(
            passed > 0 && just_failed.is_some_and(|node| distinct.contains(&Some(node))),
        );
        if is_own_first || passed >= shortlist || left_out <= excused {
            return Ok(());
        }
        Err(format!(
            "of {} nodes {passed} pass and {refused} are refused for pod {pod}",
            distinct.len()
        ))
    }

    pub(crate) fn check_bind(
        &mut self,
        pod: u32,
        node: u8,
        seen: &SeenBind,
        tally: &mut DecisionTally,
    ) -> Checked {
        match (self.told(pod), seen) {
            (KnownState::Bound(place, _), SeenBind::AlreadyBound) if place.node == node => Ok(()),
            (KnownState::Bound(place, _), SeenBind::Conflict("bound-elsewhere"))
                if place.node != node =>
            {
                Ok(())
            }
            (
                KnownState::Assumed(known),
                SeenBind::Write {
                    place,
                    is_new: false,
                    ..
                },
            ) if known == *place && !self.is_old(pod) => Ok(()),
            (KnownState::Assumed(place), SeenBind::Conflict("unsettled"))
                if place.node != node || self.is_old(pod) =>
            {
                Ok(())
            }
            (KnownState::Nothing, SeenBind::Conflict("unknown-pod")) => Ok(()),
            (
                KnownState::Waiting,
                SeenBind::Write {
                    place,
                    granted,
                    fraction,
                    is_new: true,
                },
            ) if place.node == node => {
                self.check_grant(pod, *place, *granted, *fraction)?;
                match self.own_place(pod) {
                    Some((own_node, OwnPlace::Passes(own)))
                        if own_node == node && own == *place =>
                    {
                        Ok(())
                    }
                    Some((own_node, OwnPlace::Open)) if own_node == node => Ok(()),
                    Some((own_node, _)) if own_node == node => Err(format!(
                        "pod {pod} is bound to {} instead of what is kept",
                        shown(*place)
                    )),
                    _ => self.check_place(pod, *place, &self.views_without(node, Some(pod)), &[]),
                }
            }
            (KnownState::Waiting, SeenBind::Conflict(code)) => {
                if !self.is_certain(node) {
                    tally.uncertain += 1;
                    return Ok(());
                }
                tally.refusals += 1;
                let fits = match self.own_place(pod) {
                    Some((own, place)) if own == node => matches!(place, OwnPlace::Passes(_)),
                    _ => self.fits_anew(pod, node),
                };
                match fits {
                    true => Err(format!(
                        "bind refuses ({code}) pod {pod} node {node}, where it fits"
                    )),
                    false => Ok(()),
                }
            }
            (told, seen) => Err(format!(
                "bind answers {seen:?} for pod {pod} on node {node}, which is {told:?}"
            )),
        }
    }

    /// What the pod is told that it may use, on each GPU and in all.
    fn check_grant(&self, pod: u32, place: Place, granted: u64, fraction: u16) -> Checked {
        let (spec, node) = (self.spec(pod), &self.nodes[usize::from(place.node)]);
        if each(place.gpus).any(|gpu| gpu >= node.hardware.len()) {
            return Err(format!(
                "pod {pod} gets {}, which is not there",
                shown(place)
            ));
        }
        let asked = spec.vram();
        let is_right = match spec.is_exclusive {
            // Of what is used beside it, it has no part.
            true => granted >= asked && granted <= self.vram_on(spec, place),
            false => granted == asked,
        };
        let fits = |gpu: usize| {
            let hardware = &node.hardware[gpu];
            hardware.total / 10_000 * u64::from(fraction) <= spec.charge(hardware.capacity)
        };
        match is_right && each(place.gpus).all(fits) {
            true => Ok(()),
            false => Err(format!(
                "pod {pod} requests {asked} B, and gets {granted} B, {fraction} ten-thousandths"
            )),
        }
    }

    /// An answer of preempt that names victims.
    pub(crate) fn check_preemption(
        &mut self,
        pod: u32,
        place: Place,
        evictions: &Evictions,
    ) -> Checked {
        self.check_evictions(pod, place.node, evictions, self.rules.violates_budgets)?;
        self.check_room(pod, place, &evictions.all())
    }

    /// A place that the planner found.
    pub(crate) fn check_plan(&mut self, pod: u32, place: Place, evictions: &Evictions) -> Checked {
        if self.told(pod) != KnownState::Waiting || self.kept(pod).is_some() {
            return Err(format!("the planner places pod {pod}, which does not wait"));
        }
        self.check_evictions(pod, place.node, evictions, false)?;
        self.check_room(pod, place, &evictions.all())
    }

    /// Once these pods have left, the pod may take the place.
    fn check_room(&mut self, pod: u32, place: Place, leaving: &[u32]) -> Checked {
        let views = self.views_after(place.node, pod, leaving, Leftover::IsGivenBack);
        let checked = self.check_place(pod, place, &views, leaving);
        checked.map_err(|why| format!("{why}, once {leaving:?} have left"))
    }
}

pub fn shown(Place { node, gpus }: Place) -> String {
    let gpus: Vec<String> = each(gpus).map(|gpu| gpu.to_string()).collect();
    format!("node {node} GPU {}", gpus.join("+"))
}
