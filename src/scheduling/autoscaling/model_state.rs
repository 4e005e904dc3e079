//! The number of replicas of one model over time: what its load asks for, held and limited as the policy says.

use super::desired::{Decisive, DesiredReplicas, SignalNeed};
use super::load::ModelLoad;
use super::recommendations::Recommendations;
use super::signals::{MilliReplicas, Need, Signal, knows_occupancy, needs};
use super::trend::LoadTrend;
use crate::policy::AutoscalingRules;
use crate::units::{Millis, Moment};
use serde::{Deserialize, Serialize};

/// Four evaluations of fifteen seconds. After a longer pause it is unknown what was asked for meanwhile, and a whole window has
/// to pass before the number falls.
const LONGEST_PAUSE: Millis = Millis::seconds(60);

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
struct Asked {
    replicas: u32,
    by: Decisive,
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
        if self.desired.is_some() && now.since(self.latest) > LONGEST_PAUSE {
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
        let asked = asked(rules, load, &needs, before);
        self.trend.add(load, now);
        let queued = |need: &Need| {
            need.signal == Signal::Waiting && need.most > MilliReplicas::whole(load.awake())
        };
        (self.serving, self.is_queued) = (load.serving, needs.iter().any(queued));
        let longest = rules.scale_up.window.max(rules.scale_down.window);
        self.recommendations
            .add(asked.replicas.clamp(min, max), now, longest);
        let (held, by) = self.held(rules, before, &asked, now);
        let (stepped, by) = self.stepped(rules, load, before, (held, by), now);
        let (replicas, by) = within(stepped, by, asked.replicas, (min, max));
        if replicas > before {
            self.falling = None;
        }
        self.desired = Some(replicas);
        DesiredReplicas {
            replicas,
            asked: asked.replicas,
            wake: asked.wake,
            serving: load.serving,
            starting: load.starting,
            asleep: load.asleep,
            by,
            ready_in: load.ready_in.min(rules.look_ahead),
            needs: needs.iter().map(SignalNeed::from).collect(),
        }
    }

    /// Applies the windows: the number rises to the least and falls to the most that was asked for within them.
    fn held(
        &self,
        rules: &AutoscalingRules,
        before: u32,
        asked: &Asked,
        now: Moment,
    ) -> (u32, Decisive) {
        let recent = &self.recommendations;
        let (up, down) = (rules.scale_up.window, rules.scale_down.window);
        let least = recent
            .least_within(now, up)
            .filter(|_| recent.covers(now, up));
        let most = recent
            .most_within(now, down)
            .filter(|_| recent.covers(now, down));
        match (least, most) {
            (Some(least), _) if least > before => (least, asked.by),
            (_, Some(most)) if most < before => (most, asked.by),
            _ if asked.replicas == before => (before, asked.by),
            _ => (before, Decisive::Window),
        }
    }

    /// Applies the step limits: not too many replicas start at once, and not too many go at once.
    fn stepped(
        &mut self,
        rules: &AutoscalingRules,
        load: &ModelLoad,
        before: u32,
        (wanted, by): (u32, Decisive),
        now: Moment,
    ) -> (u32, Decisive) {
        if wanted > before {
            let most = highest(rules, load).max(before);
            return if wanted > most {
                (most, Decisive::Step)
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
        let least = u32::try_from(u64::from(from).saturating_sub(step))
            .unwrap_or(from)
            .min(before);
        if wanted < least {
            (least, Decisive::Step)
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

fn within(wanted: u32, by: Decisive, asked: u32, (min, max): (u32, u32)) -> (u32, Decisive) {
    let replicas = wanted.clamp(min, max);
    let by = match by {
        _ if replicas == max && asked > max => Decisive::Max,
        _ if replicas == min && asked < min => Decisive::Min,
        by => by,
    };
    (replicas, by)
}

/// The most replicas there may be: a step beyond those that serve. Those that start are within it, so that a slow start does
/// not let the number rise step by step. Those that sleep are there.
fn highest(rules: &AutoscalingRules, load: &ModelLoad) -> u32 {
    let serving = u64::from(load.serving);
    let step =
        u64::from(rules.scale_up.replicas).max(serving * u64::from(rules.scale_up.percent) / 100);
    u32::try_from(serving + u64::from(load.asleep) + step).unwrap_or(u32::MAX)
}

fn asked(rules: &AutoscalingRules, load: &ModelLoad, needs: &[Need], before: u32) -> Asked {
    let is_known = knows_occupancy(rules, load) || load.awake() == 0;
    let by = |need: Option<&Need>| {
        need.map_or(Decisive::NoReplicas, |need| Decisive::Signal(need.signal))
    };
    let up = needs
        .iter()
        .max_by_key(|need| (need.least, std::cmp::Reverse(need.signal)));
    let down = needs
        .iter()
        .max_by_key(|need| (need.most, std::cmp::Reverse(need.signal)));
    let least = with_reserve(rules, up.map_or(MilliReplicas(0), |need| need.least));
    let most = with_reserve(rules, down.map_or(MilliReplicas(0), |need| need.most));
    let (low, high) = tolerated(rules, before);
    let (replicas, by) = match before {
        _ if with_sleepers(load, least) > high => (with_sleepers(load, least).rounded_up(), by(up)),
        _ if !is_known => (before, Decisive::UnknownLoad),
        _ if with_sleepers(load, most) < low => (with_sleepers(load, most).rounded_up(), by(down)),
        _ => (before, Decisive::Tolerance),
    };
    let awake = load.awake();
    let (_, enough) = tolerated(rules, awake);
    let more = if least > enough {
        least.rounded_up().saturating_sub(awake)
    } else {
        0
    };
    Asked {
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
fn tolerated(rules: &AutoscalingRules, replicas: u32) -> (MilliReplicas, MilliReplicas) {
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
