//! The number of replicas of one model over time: what its load asks for, held and limited as the policy says.

use super::desired::{DecidingFactor, DesiredReplicas, SignalNeed};
use super::load::ModelLoad;
use super::recommendations::Recommendations;
use super::signals::{MilliReplicas, Need, Signal, knows_occupancy, needs};
use super::trend::LoadTrend;
use crate::policy::AutoscalingRules;
use crate::units::{Millis, Moment};
use serde::{Deserialize, Serialize};

/// Four evaluations of fifteen seconds. After a longer pause it is unknown what was asked for meanwhile, and a whole window has
/// to pass before the number falls.
const MAX_EVALUATION_GAP: Millis = Millis::seconds(60);

/// The scaling state of one model.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelScaling {
    /// The latest answer; before the first, the replicas that are there count.
    desired: Option<u32>,
    latest: Moment,
    recommendations: Recommendations,
    trend: LoadTrend,
    /// How many replicas served then.
    serving: u32,
    /// The queue asked for more replicas than there were.
    is_queued: bool,
    /// When the current period of `scaleDown` began, and the number then.
    falling: Option<(Moment, u32)>,
}

/// The replicas that a load asks for, before windows and steps apply.
struct RequestedReplicas {
    replicas: u32,
    by: DecidingFactor,
    /// Sleeping replicas that it asks for.
    wake: u32,
}

impl ModelScaling {
    /// How many replicas the model needs now. The same calls give the same answers; a time that goes back counts as no time.
    pub fn decide(
        &mut self,
        rules: &AutoscalingRules,
        load: &ModelLoad,
        now: Moment,
    ) -> DesiredReplicas {
        let now = now.max(self.latest);
        if self.desired.is_some() && now.since(self.latest) > MAX_EVALUATION_GAP {
            self.recommendations.clear();
        }
        self.latest = now;
        let (min, max) = bounds(rules);
        let before = self
            .desired
            .unwrap_or_else(|| load.replicas())
            .clamp(min, max);
        if self.is_queued && load.serving > self.serving {
            self.trend.settle();
        }
        let needs = needs(rules, load, &self.trend, now);
        let requested = requested_replicas(rules, load, &needs, before);
        self.trend.add(load, now);
        let queued = |need: &Need| {
            need.signal == Signal::Waiting && need.max_replicas > MilliReplicas::whole(load.awake())
        };
        (self.serving, self.is_queued) = (load.serving, needs.iter().any(queued));
        let longest = rules.scale_up.window.max(rules.scale_down.window);
        self.recommendations
            .add(requested.replicas.clamp(min, max), now, longest);
        let (windowed, by) = self.after_windows(rules, before, &requested, now);
        let (stepped, by) = self.after_steps(rules, load, before, (windowed, by), now);
        let (replicas, by) = within_bounds(stepped, by, requested.replicas, (min, max));
        if replicas > before {
            self.falling = None;
        }
        self.desired = Some(replicas);
        DesiredReplicas {
            replicas,
            requested: requested.replicas,
            wake: requested.wake,
            serving: load.serving,
            starting: load.starting,
            asleep: load.asleep,
            by,
            ready_in: load.ready_in.min(rules.look_ahead),
            needs: needs.iter().map(SignalNeed::from).collect(),
        }
    }

    /// Applies the windows: the number rises to the least and falls to the most that was asked for within them.
    fn after_windows(
        &self,
        rules: &AutoscalingRules,
        before: u32,
        requested: &RequestedReplicas,
        now: Moment,
    ) -> (u32, DecidingFactor) {
        let recommendations = &self.recommendations;
        let (up, down) = (rules.scale_up.window, rules.scale_down.window);
        let min_recent = recommendations
            .min_within(now, up)
            .filter(|_| recommendations.covers(now, up));
        let max_recent = recommendations
            .max_within(now, down)
            .filter(|_| recommendations.covers(now, down));
        match (min_recent, max_recent) {
            (Some(least), _) if least > before => (least, requested.by),
            (_, Some(most)) if most < before => (most, requested.by),
            _ if requested.replicas == before => (before, requested.by),
            _ => (before, DecidingFactor::Window),
        }
    }

    /// Applies the step limits: not too many replicas start at once, and not too many go at once.
    fn after_steps(
        &mut self,
        rules: &AutoscalingRules,
        load: &ModelLoad,
        before: u32,
        (wanted, by): (u32, DecidingFactor),
        now: Moment,
    ) -> (u32, DecidingFactor) {
        if wanted > before {
            let max = max_after_step(rules, load).max(before);
            return if wanted > max {
                (max, DecidingFactor::Step)
            } else {
                (wanted, by)
            };
        }
        if wanted == before {
            return (wanted, by);
        }
        let down = &rules.scale_down;
        let (_, from) = match self
            .falling
            .filter(|(since, _)| now.since(*since) < down.period)
        {
            Some(period) => period,
            None => *self.falling.insert((now, before)),
        };
        let share = u64::from(from) * u64::from(down.percent.get()) / 100;
        let step = u64::from(down.replicas).max(share);
        let min = u32::try_from(u64::from(from).saturating_sub(step))
            .unwrap_or(from)
            .min(before);
        if wanted < min {
            (min, DecidingFactor::Step)
        } else {
            (wanted, by)
        }
    }
}

/// A minimum above the maximum is the maximum.
fn bounds(rules: &AutoscalingRules) -> (u32, u32) {
    (
        rules.min_replicas.min(rules.max_replicas),
        rules.max_replicas,
    )
}

fn within_bounds(
    wanted: u32,
    by: DecidingFactor,
    requested: u32,
    (min, max): (u32, u32),
) -> (u32, DecidingFactor) {
    let replicas = wanted.clamp(min, max);
    let by = match by {
        _ if replicas == max && requested > max => DecidingFactor::Max,
        _ if replicas == min && requested < min => DecidingFactor::Min,
        by => by,
    };
    (replicas, by)
}

/// The most replicas there may be: a step beyond those that serve. Those that start are within it, so that a slow start does
/// not let the number rise step by step. Those that sleep are there.
fn max_after_step(rules: &AutoscalingRules, load: &ModelLoad) -> u32 {
    let serving = u64::from(load.serving);
    let step =
        u64::from(rules.scale_up.replicas).max(serving * u64::from(rules.scale_up.percent) / 100);
    u32::try_from(serving + u64::from(load.asleep) + step).unwrap_or(u32::MAX)
}

fn requested_replicas(
    rules: &AutoscalingRules,
    load: &ModelLoad,
    needs: &[Need],
    before: u32,
) -> RequestedReplicas {
    let is_known = knows_occupancy(rules, load) || load.awake() == 0;
    let by = |need: Option<&Need>| {
        need.map_or(DecidingFactor::NoReplicas, |need| {
            DecidingFactor::Signal(need.signal)
        })
    };
    let up = needs
        .iter()
        .max_by_key(|need| (need.min_replicas, std::cmp::Reverse(need.signal)));
    let down = needs
        .iter()
        .max_by_key(|need| (need.max_replicas, std::cmp::Reverse(need.signal)));
    let min_awake = with_reserve(rules, up.map_or(MilliReplicas(0), |need| need.min_replicas));
    let max_awake = with_reserve(
        rules,
        down.map_or(MilliReplicas(0), |need| need.max_replicas),
    );
    let (low, high) = tolerance_band(rules, before);
    let (replicas, by) = match before {
        _ if with_sleepers(load, min_awake) > high => {
            (with_sleepers(load, min_awake).rounded_up(), by(up))
        }
        _ if !is_known => (before, DecidingFactor::UnknownLoad),
        _ if with_sleepers(load, max_awake) < low => {
            (with_sleepers(load, max_awake).rounded_up(), by(down))
        }
        _ => (before, DecidingFactor::Tolerance),
    };
    let awake = load.awake();
    let (_, enough) = tolerance_band(rules, awake);
    let more = if min_awake > enough {
        min_awake.rounded_up().saturating_sub(awake)
    } else {
        0
    };
    RequestedReplicas {
        replicas,
        by,
        wake: more.min(load.asleep),
    }
}

fn with_reserve(rules: &AutoscalingRules, need: MilliReplicas) -> MilliReplicas {
    let reserve = &rules.reserve;
    need.plus(MilliReplicas::whole(reserve.replicas).max(need.share(reserve.percent)))
}

/// Between these the number stays.
fn tolerance_band(rules: &AutoscalingRules, replicas: u32) -> (MilliReplicas, MilliReplicas) {
    let there = MilliReplicas::whole(replicas);
    let off = there.share(rules.tolerance);
    (MilliReplicas(there.0 - off.0.min(there.0)), there.plus(off))
}

/// The number of all replicas, if so many are to be awake. Sleeping ones stay: what they hold is lent or is worth keeping, and
/// which ones an HPA would remove is not Stowage's to say. They are woken before others start.
fn with_sleepers(load: &ModelLoad, awake: MilliReplicas) -> MilliReplicas {
    let (there, asleep) = (
        MilliReplicas::whole(load.awake()),
        MilliReplicas::whole(load.asleep),
    );
    if awake <= there {
        awake.plus(asleep)
    } else {
        awake.max(there.plus(asleep))
    }
}
