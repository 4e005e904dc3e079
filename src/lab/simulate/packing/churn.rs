//! Arrivals with departures: a loss system. Pods arrive at random (Poisson), are drawn from the trace with replacement, and end
//! after an exponential time; a pod that does not fit is rejected for good. The result is the rejected share of the requested
//! GPUs.

use super::arrivals::{Arrivals, RandomStream};
use super::placer::{Placer, PodArrival};
use super::run::PackingRun;
use super::trace::WorkloadTrace;
use crate::simulate::events::EventQueue;
use serde::Serialize;
use std::str::FromStr;
use stowage_scheduling::testkit::random::Random;
use stowage_scheduling::units::{Millis, Moment};

/// The mean running time of pods. Only ratios of times matter; a day in milliseconds makes rounding irrelevant.
const MEAN_LIFETIME: Millis = Millis::seconds(86_400);
/// The warm-up from an empty cluster: after it the influence of the beginning is e⁻³, 5 %.
const WARM_UP_LIFETIMES: u64 = 3;
/// Lifetimes that are counted after the warm-up: some 40,000 arrivals on the whole trace.
const COUNTED_LIFETIMES: u64 = 5;

/// The mean requested share of the capacity, in thousandths.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct OfferedLoad(u32);

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{text:?} is no load; write the part of all GPUs that pods would keep busy, from 0.01 to 10, such as 0.95"
)]
pub struct BadLoad {
    text: String,
}

impl OfferedLoad {
    pub fn as_share(self) -> f64 {
        f64::from(self.0) / 1000.0
    }
}

impl FromStr for OfferedLoad {
    type Err = BadLoad;

    fn from_str(text: &str) -> Result<Self, BadLoad> {
        let load = text
            .trim()
            .parse::<f64>()
            .ok()
            .filter(|load| (0.01..=10.0).contains(load));
        load.map(|load| Self((load * 1000.0).round() as u32))
            .ok_or_else(|| BadLoad { text: text.into() })
    }
}

/// Requests after the warm-up, and the rejected part, in thousandths of GPUs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Rejections {
    #[serde(rename = "asked")]
    pub requested: u64,
    pub rejected: u64,
}

impl Rejections {
    /// The rejected share of the requested GPUs, in percent.
    pub fn percent(&self) -> f64 {
        100.0 * self.rejected as f64 / self.requested.max(1) as f64
    }
}

enum ChurnEvent {
    Arrives,
    Ends(usize),
}

/// One run; the same arrivals and lifetimes for every policy. `ranks` are the seed's.
pub fn churn(
    setting: &WorkloadTrace,
    ranks: &Arrivals,
    load: OfferedLoad,
    placer: &mut dyn Placer,
) -> Rejections {
    let mut stream = PodStream::new(setting, ranks.seed, load);
    let mut run = PackingRun::new(setting, &ranks.ranks, None);
    let mut rejections = Rejections::default();
    let mut events = EventQueue::default();
    if let Some(stream) = &mut stream {
        events.schedule(stream.next_arrival(Moment::default()), ChurnEvent::Arrives);
    }
    let (begins, ends) = (
        Moment::default() + MEAN_LIFETIME.times(WARM_UP_LIFETIMES),
        MEAN_LIFETIME.times(WARM_UP_LIFETIMES + COUNTED_LIFETIMES),
    );
    while let Some(event) = events.pop() {
        let now = events.now();
        let Some(stream) = stream.as_mut().filter(|_| now < Moment::default() + ends) else {
            break;
        };
        match event {
            ChurnEvent::Ends(number) => run.end(number, placer),
            ChurnEvent::Arrives => {
                let (arrival, lifetime) = stream.draw(setting);
                let is_placed = run.admit(arrival, placer).node.is_some();
                if is_placed {
                    events.schedule(now + lifetime, ChurnEvent::Ends(arrival.number));
                }
                if now >= begins {
                    let requested = setting.kinds[arrival.kind].milli_gpus();
                    rejections.requested += requested;
                    rejections.rejected += if is_placed { 0 } else { requested };
                }
                events.schedule(stream.next_arrival(now), ChurnEvent::Arrives);
            }
        }
    }
    rejections
}

/// An endless sequence of pods.
struct PodStream {
    /// In milliseconds.
    mean_gap_ms: f64,
    pods_drawn: usize,
    gaps: Random,
    draws: Random,
    lifetimes: Random,
}

impl PodStream {
    /// `None` if no pod requests a GPU, or there is none.
    fn new(setting: &WorkloadTrace, seed: u64, load: OfferedLoad) -> Option<Self> {
        let requested: u64 = setting
            .pods
            .iter()
            .map(|pod| setting.kinds[pod.kind].milli_gpus())
            .sum();
        let mean_asked = requested as f64 / setting.pods.len().max(1) as f64;
        let busy_milli_gpus = setting.capacity() as f64 * load.as_share();
        (requested > 0 && busy_milli_gpus > 0.0).then(|| Self {
            mean_gap_ms: MEAN_LIFETIME.0 as f64 * mean_asked / busy_milli_gpus,
            pods_drawn: 0,
            gaps: RandomStream::Gaps.seeded(seed),
            draws: RandomStream::Draws.seeded(seed),
            lifetimes: RandomStream::Lifetimes.seeded(seed),
        })
    }

    fn next_arrival(&mut self, now: Moment) -> Moment {
        now + self.gaps.exponential(self.mean_gap_ms)
    }

    fn draw(&mut self, setting: &WorkloadTrace) -> (PodArrival, Millis) {
        let pod = self.draws.below(setting.pods.len());
        let arrival = PodArrival {
            number: self.pods_drawn,
            pod,
            kind: setting.pods[pod].kind,
        };
        self.pods_drawn += 1;
        (arrival, self.lifetimes.exponential(MEAN_LIFETIME.0 as f64))
    }
}

#[cfg(test)]
mod tests {
    use super::super::baseline::fit::BestFit;
    use super::super::baseline::scored::ScoredPlacer;
    use super::super::testing::{kind, setting};
    use super::*;

    #[test]
    fn rejections_of_one_pod_size_match_erlang_b() {
        // Ten servers at a load of 1: Erlang's B(10, 10) = 0.2146.
        let nodes = [(1_000_000, 1); 10];
        let setting = setting(&nodes, &[kind(1000, 1, 1000)]);
        let of_seed = |seed| {
            let ranks = Arrivals::draw(&setting, seed);
            churn(
                &setting,
                &ranks,
                "1".parse().unwrap(),
                &mut ScoredPlacer::new(&setting, BestFit),
            )
        };
        let all: Vec<Rejections> = (0..400).map(of_seed).collect();
        let requested: u64 = all.iter().map(|one| one.requested).sum();
        let rejected: u64 = all.iter().map(|one| one.rejected).sum();
        let percent = Rejections {
            requested,
            rejected,
        }
        .percent();
        assert!((percent - 21.46).abs() < 1.0, "{percent}");
        assert_eq!(of_seed(7), of_seed(7));
    }

    #[test]
    fn a_trace_without_gpus_asks_for_nothing() {
        let setting = setting(&[(64_000, 1)], &[kind(1000, 0, 0)]);
        let ranks = Arrivals::draw(&setting, 42);
        let load = "0.9".parse().unwrap();
        let rejections = churn(
            &setting,
            &ranks,
            load,
            &mut ScoredPlacer::new(&setting, BestFit),
        );
        assert_eq!(rejections, Rejections::default());
        assert_eq!(rejections.percent(), 0.0);
    }

    #[test]
    fn a_load_is_a_positive_number() {
        assert_eq!("0.95".parse::<OfferedLoad>().unwrap().as_share(), 0.95);
        for text in ["", "0", "-1", "95%", "nan", "11", "inf"] {
            assert!(text.parse::<OfferedLoad>().is_err(), "{text}");
        }
    }
}
