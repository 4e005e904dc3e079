//! What is left of each GPU by the [record](super::record), and which GPUs a pod may take.

use super::record::{Age, GpuReadingRecord, MOST_GPUS, Mask, PodSpec, Record, each};
use super::rules::MARGIN;

/// What is left of a GPU.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct GpuView {
    pub capacity: u64,
    pub charged: u64,
    pub unaccounted: u64,
    /// Pods and reservations.
    pub tenants: u32,
    pub is_exclusive: bool,
    pub is_starting: bool,
    /// The classes of its pods, by bit.
    pub classes: u8,
    pub load: Option<(u8, u32)>,
    pub is_healthy: bool,
    pub is_slice: bool,
    pub is_wholly_free: bool,
}

impl Record {
    /// What is left of each GPU of a node.
    pub fn views(&mut self, node: u8) -> [GpuView; MOST_GPUS] {
        if let Some(views) = self.nodes[usize::from(node)].views {
            return views;
        }
        let views = self.views_without(node, None);
        self.nodes[usize::from(node)].views = Some(views);
        views
    }

    /// The same if a pod had nothing there.
    pub(crate) fn views_without(&self, node: u8, except: Option<u32>) -> [GpuView; MOST_GPUS] {
        let entry = &self.nodes[usize::from(node)];
        let mut views = [GpuView::default(); MOST_GPUS];
        let age = entry.age(self.now);
        for (gpu, hardware) in entry.hardware.iter().enumerate() {
            let seen = entry
                .reading
                .as_ref()
                .and_then(|reading| reading.gpus[gpu].as_ref());
            views[gpu] = GpuView {
                capacity: hardware.capacity,
                is_healthy: entry.healthy >> gpu & 1 == 1,
                is_slice: hardware.is_slice,
                unaccounted: self.unaccounted(node, gpu, age, seen),
                load: seen
                    .filter(|_| age == Age::Fresh)
                    .and_then(|seen| seen.load),
                ..GpuView::default()
            };
        }
        for pod in entry.here.iter().filter(|pod| Some(**pod) != except) {
            self.charge(node, *pod, &mut views);
        }
        for pod in entry.here.iter().filter(|pod| Some(**pod) != except) {
            self.charge_kept(node, *pod, &mut views);
        }
        for (view, hardware) in views.iter_mut().zip(&entry.hardware) {
            view.is_wholly_free = view.tenants == 0
                && view.charged == 0
                && view.is_healthy
                && !view.is_slice
                && view.unaccounted <= hardware.total * MARGIN / 100;
        }
        views
    }

    fn charge(&self, node: u8, pod: u32, views: &mut [GpuView; MOST_GPUS]) {
        let entry = &self.pods[pod as usize];
        let Some(place) = self.charged(pod).filter(|place| place.node == node) else {
            return;
        };
        for gpu in each(place.gpus) {
            let view = &mut views[gpu];
            view.charged += entry.spec.charge(view.capacity);
            view.tenants += 1;
            view.is_exclusive |= entry.spec.is_exclusive;
            view.is_starting |= entry.starting.is_some();
            view.classes |= 1 << entry.spec.class;
        }
    }

    /// A reservation takes what its victims do not take already.
    fn charge_kept(&self, node: u8, pod: u32, views: &mut [GpuView; MOST_GPUS]) {
        let Some(kept) = self
            .kept(pod)
            .filter(|kept| kept.place.node == node && self.is_resolved(kept))
        else {
            return;
        };
        let spec = self.spec(pod);
        for gpu in each(kept.place.gpus) {
            let capacity = views[gpu].capacity;
            let of_victim = |victim: &u32| match self.is_charged_on(*victim, node, gpu) {
                true => self.spec(*victim).charge(capacity),
                false => 0,
            };
            let victims: u64 = kept.victims.iter().map(of_victim).sum();
            let view = &mut views[gpu];
            view.charged += spec.charge(capacity).saturating_sub(victims);
            view.tenants += 1;
            view.is_exclusive |= spec.is_exclusive;
            view.is_starting |= self.rules.class(spec.class).engine;
            view.classes |= 1 << spec.class;
        }
    }

    fn unaccounted(&self, node: u8, gpu: usize, age: Age, seen: Option<&GpuReadingRecord>) -> u64 {
        let entry = &self.nodes[usize::from(node)];
        let margin = entry.hardware[gpu].total * MARGIN / 100;
        let seen = match (age, seen) {
            (Age::Unreported, _) => return 0,
            (Age::Expired, _) | (_, None) => return margin,
            (Age::Fresh | Age::Stale, Some(seen)) => seen,
        };
        let granted = |pod: u32| match self.is_charged_on(pod, node, gpu) {
            true => self.spec(pod).charge(entry.hardware[gpu].capacity),
            false => 0,
        };
        let has = |(pod, bytes): &(u32, u64)| {
            self.kept_by_departed(node, gpu, *pod)
                .max(*bytes)
                .saturating_sub(granted(*pod))
        };
        let beyond: u64 = seen.attributed.iter().map(has).sum();
        let believed = entry.rests[gpu].into_iter().min().unwrap_or_default();
        let least = if age == Age::Stale || seen.used.is_none() {
            margin
        } else {
            0
        };
        (beyond + believed).max(least)
    }

    /// What a reading that is believed shows on a GPU with pods that have nothing on the node.
    pub fn used_without_grant(&self, node: u8, gpu: usize) -> u64 {
        let entry = &self.nodes[usize::from(node)];
        if !matches!(entry.age(self.now), Age::Fresh | Age::Stale) {
            return 0;
        }
        let seen = entry
            .reading
            .as_ref()
            .and_then(|reading| reading.gpus[gpu].as_ref());
        let attributed = seen.into_iter().flat_map(|seen| &seen.attributed);
        let ended = attributed.filter(|(pod, _)| !entry.here.contains(pod));
        ended
            .map(|(pod, bytes)| self.kept_by_departed(node, gpu, *pod).max(*bytes))
            .sum()
    }

    /// Whether a pod of a preemptible class may take no wholly free GPU now.
    pub(crate) fn keeps_spare_from(&mut self, spec: &PodSpec) -> bool {
        if self.rules.spare == 0 || !self.rules.class(spec.class).is_preemptible {
            return false;
        }
        let mut free = 0;
        for node in 0..self.nodes.len() as u8 {
            if !self.is_closed(node) {
                free += self
                    .views(node)
                    .iter()
                    .filter(|view| view.is_wholly_free)
                    .count() as u32;
            }
        }
        free < self.rules.spare + spec.gpus
    }

    /// The GPUs of a node that such a pod may take one of.
    pub fn takers(&self, views: &[GpuView; MOST_GPUS], spec: &PodSpec, keeps_spare: bool) -> Mask {
        let rules = self.rules.class(spec.class);
        let takes = |view: &GpuView| {
            let free = view
                .capacity
                .saturating_sub(view.charged)
                .saturating_sub(view.unaccounted);
            let is_too_busy = view.load.is_some_and(|(kv_cache, queue)| {
                rules.kv_cache_limit.is_some_and(|limit| kv_cache > limit)
                    || rules.queue_limit.is_some_and(|limit| queue > limit)
            });
            let is_spare = keeps_spare && view.is_wholly_free;
            let is_shared = spec.is_exclusive && view.tenants > 0;
            let is_taken =
                view.is_exclusive || is_shared || is_spare || rules.engine && view.is_starting;
            let is_whole = !view.is_slice || spec.gpus == 1;
            view.is_healthy
                && is_whole
                && !is_taken
                && spec.per_gpu <= free
                && self.may_share(spec.class, view.classes)
                && !is_too_busy
        };
        let takes = |(gpu, view): (usize, &GpuView)| if takes(view) { 1 << gpu } else { 0 };
        views
            .iter()
            .enumerate()
            .map(takes)
            .fold(0, |mask, bit: Mask| mask | bit)
    }

    /// Whether a class shares a GPU with all of these.
    fn may_share(&self, class: u8, others: u8) -> bool {
        let agree = |other: u8| {
            self.rules.class(class).shares >> other & 1 == 1
                && self.rules.class(other).shares >> class & 1 == 1
        };
        (0..8).filter(|other| others >> other & 1 == 1).all(agree)
    }
}
