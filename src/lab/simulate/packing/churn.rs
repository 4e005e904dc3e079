//! Arrivals with departures: a loss system. Pods arrive at random (Poisson), are drawn from the trace with replacement, and end
//! after an exponential time; a pod that does not fit is rejected for good. The result is the rejected share of the requested
//! GPUs.

use super::arrivals::{ArrivalDice, Arrivals};
use super::placer::{Placer, PodArrival};
use super::run::PackingRun;
use super::trace::PlayedTrace;
use crate::simulate::events::EventQueue;
use serde::Serialize;
use std::str::FromStr;
use stowage_scheduling::testkit::random::Random;
use stowage_scheduling::units::{Millis, Moment};

/// The mean running time of pods. Only ratios of times matter; a day in milliseconds makes rounding irrelevant.
const LIFETIME: Millis = Millis::seconds(86_400);
/// The warm-up from an empty cluster: after it the influence of the beginning is e⁻³, 5 %.
const WARM_UP: u64 = 3;
/// Lifetimes that are counted after the warm-up: some 40,000 arrivals on the whole trace.
const COUNTED: u64 = 5;

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
    pub fn of_one(self) -> f64 {
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
    pub asked: u64,
    pub rejected: u64,
}

impl Rejections {
    /// The rejected share of the requested GPUs, in percent.
    pub fn percent(&self) -> f64 {
        100.0 * self.rejected as f64 / self.asked.max(1) as f64
    }
}

enum ChurnEvent {
    Comes,
    Ends(usize),
}

/// One run; the same arrivals and lifetimes for every policy. `ranks` are the seed's.
pub fn churn(
    setting: &PlayedTrace,
    ranks: &Arrivals,
    load: OfferedLoad,
    placer: &mut dyn Placer,
) -> Rejections {
    let mut stream = PodStream::new(setting, ranks.seed, load);
    let mut world = PackingRun::new(setting, &ranks.ranks, None);
    let mut rejections = Rejections::default();
    let mut events = EventQueue::default();
    if let Some(stream) = &mut stream {
        events.at(stream.next_comes(Moment::default()), ChurnEvent::Comes);
    }
    let (begins, ends) = (
        Moment::default() + LIFETIME.times(WARM_UP),
        LIFETIME.times(WARM_UP + COUNTED),
    );
    while let Some(event) = events.take() {
        let now = events.now();
        let Some(stream) = stream.as_mut().filter(|_| now < Moment::default() + ends) else {
            break;
        };
        match event {
            ChurnEvent::Ends(number) => world.end(number, placer),
            ChurnEvent::Comes => {
                let (arrival, lifetime) = stream.draw(setting);
                let is_placed = world.admit(arrival, placer).node.is_some();
                if is_placed {
                    events.at(now + lifetime, ChurnEvent::Ends(arrival.number));
                }
                if now >= begins {
                    let asked = setting.kinds[arrival.kind].milli_gpus();
                    rejections.asked += asked;
                    rejections.rejected += if is_placed { 0 } else { asked };
                }
                events.at(stream.next_comes(now), ChurnEvent::Comes);
            }
        }
    }
    rejections
}

/// An endless sequence of pods.
struct PodStream {
    /// In milliseconds.
    mean_gap: f64,
    drawn: usize,
    gaps: Random,
    draws: Random,
    lifetimes: Random,
}

impl PodStream {
    /// `None` if no pod requests a GPU, or there is none.
    fn new(setting: &PlayedTrace, seed: u64, load: OfferedLoad) -> Option<Self> {
        let asked: u64 = setting
            .pods
            .iter()
            .map(|pod| setting.kinds[pod.kind].milli_gpus())
            .sum();
        let mean_asked = asked as f64 / setting.pods.len().max(1) as f64;
        let kept_busy = setting.capacity() as f64 * load.of_one();
        (asked > 0 && kept_busy > 0.0).then(|| Self {
            mean_gap: LIFETIME.0 as f64 * mean_asked / kept_busy,
            drawn: 0,
            gaps: ArrivalDice::Gaps.of(seed),
            draws: ArrivalDice::Draws.of(seed),
            lifetimes: ArrivalDice::Lifetimes.of(seed),
        })
    }

    fn next_comes(&mut self, now: Moment) -> Moment {
        now + self.gaps.gap(self.mean_gap)
    }

    fn draw(&mut self, setting: &PlayedTrace) -> (PodArrival, Millis) {
        let pod = self.draws.below(setting.pods.len());
        let arrival = PodArrival {
            number: self.drawn,
            pod,
            kind: setting.pods[pod].kind,
        };
        self.drawn += 1;
        (arrival, self.lifetimes.gap(LIFETIME.0 as f64))
    }
}

#[cfg(test)]
mod tests {
    use super::super::baseline::fit::BestFit;
    use super::super::baseline::scored::Scored;
    use super::super::testing::{kind, setting};
    use super::*;

    #[test]
    fn a_single_size_is_turned_away_as_erlang_says() {
        // Ten servers at a load of 1: Erlang's B(10, 10) = 0.2146.
        let nodes = [(1_000_000, 1); 10];
        let setting = setting(&nodes, &[kind(1000, 1, 1000)]);
        let of_seed = |seed| {
            let ranks = Arrivals::of(&setting, seed);
            churn(
                &setting,
                &ranks,
                "1".parse().unwrap(),
                &mut Scored::new(&setting, BestFit),
            )
        };
        let all: Vec<Rejections> = (0..400).map(of_seed).collect();
        let asked: u64 = all.iter().map(|one| one.asked).sum();
        let rejected: u64 = all.iter().map(|one| one.rejected).sum();
        let percent = Rejections { asked, rejected }.percent();
        assert!((percent - 21.46).abs() < 1.0, "{percent}");
        assert_eq!(of_seed(7), of_seed(7));
    }

    #[test]
    fn a_trace_without_gpus_asks_for_nothing() {
        let setting = setting(&[(64_000, 1)], &[kind(1000, 0, 0)]);
        let ranks = Arrivals::of(&setting, 42);
        let load = "0.9".parse().unwrap();
        let rejections = churn(&setting, &ranks, load, &mut Scored::new(&setting, BestFit));
        assert_eq!(rejections, Rejections::default());
        assert_eq!(rejections.percent(), 0.0);
    }

    #[test]
    fn a_load_is_a_positive_number() {
        assert_eq!("0.95".parse::<OfferedLoad>().unwrap().of_one(), 0.95);
        for text in ["", "0", "-1", "95%", "nan", "11", "inf"] {
            assert!(text.parse::<OfferedLoad>().is_err(), "{text}");
        }
    }
}
