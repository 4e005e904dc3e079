//! A day behind each autoscaler.

use super::*;
use crate::lab::simulate::fleet::engines::{EngineSpec, GpuSpeed, ModelShape, Slo};
use crate::lab::simulate::fleet::traffic::{
    DayOfTraffic, Gaps, RequestSize, Service, TrafficText, built_in, minutes,
};
use crate::needs;
use crate::scheduling::policy::AutoscalingRules;
use crate::units::{Bytes, Millis, Moment};

const SLO: Slo = Slo { ttft_s: 5.0, tpot_s: 0.2 };
const DAY_S: u64 = 86_400;
const STEP_S: u64 = 5;
const START: Millis = Millis::seconds(90);

/// A 70B model on four H100.
fn spec() -> EngineSpec {
    EngineSpec::new(&ModelShape::LLAMA_70B, &GpuSpeed::H100, 4, Bytes::gib(72)).unwrap()
}

struct Run {
    tally: ServingTally,
    /// Ready replicas at the end of every minute.
    ready: Vec<u32>,
    /// How often the wanted number fell and rose.
    turns: usize,
    inside: f64,
}

fn run(traffic: DayOfTraffic, scaler: impl Scaler, replicas: u32) -> Run {
    let mut pods = PretendPods::new(replicas, START, Millis::seconds(120));
    let mut day = ServingDay::new(spec(), traffic, SLO, scaler, Moment(0));
    let (mut ready, mut wanted) = (Vec::new(), vec![replicas]);
    for second in (0..=DAY_S).step_by(STEP_S as usize) {
        let now = Moment(0) + Millis::seconds(second);
        wanted.push(pods.tick(&mut day, now).replicas);
        if second % 60 == 0 {
            ready.push(pods.ready());
        }
    }
    wanted.dedup();
    let turns = wanted.windows(3).filter(|three| (three[0] < three[1]) != (three[1] < three[2])).count();
    let inside = day.waiting() + day.running();
    Run { tally: day.tally, ready, turns, inside }
}

impl Run {
    fn mean(&self, hours: std::ops::Range<usize>) -> f64 {
        let minutes = &self.ready[hours.start * 60..hours.end * 60];
        minutes.iter().map(|ready| f64::from(*ready)).sum::<f64>() / minutes.len() as f64
    }

    fn print(&self, what: &str) {
        let tally = &self.tally;
        let kv = tally.kv_occupancy_seconds / tally.replica_seconds;
        println!(
            "{what}: ready by hour {:?}, replica-hours {:.1}, mean KV {:.1} %, longest queue {:.0}, TTFT p50 {:.2} p99 {:.2} s, TPOT p99 {:.3} s, in time {:.2} %, restarted {:.1}, turns {}",
            self.ready.iter().step_by(60).collect::<Vec<_>>(),
            tally.replica_seconds / 3600.0,
            100.0 * kv,
            tally.longest_queue,
            tally.latencies.ttft.quantile_s(0.5).unwrap_or(0.0),
            tally.latencies.ttft.quantile_s(0.99).unwrap_or(0.0),
            tally.latencies.tpot.quantile_s(0.99).unwrap_or(0.0),
            100.0 * tally.latencies.attained(),
            tally.restarted,
            self.turns,
        );
    }
}

fn shipped() -> ShippedScaler {
    ShippedScaler::new(AutoscalingRules::default())
}

#[test]
fn explore() {
    for (name, size, peak) in [("conv", RequestSize::CONVERSATION, 100.0), ("code", RequestSize::CODE, 60.0)]
    {
        let day = || built_in::working_day(42, peak, size);
        run(day(), shipped(), 2).print(&format!("{name} shipped"));
        run(day(), ShippedScaler::new(AutoscalingRules { running: Some(16), ..Default::default() }), 2)
            .print(&format!("{name} shipped running 16"));
        run(day(), UtilisationScaler::new(0.8, 1, 24), 2).print(&format!("{name} utilisation"));
        const FILE: &str = "llm/llm_24h_per_minute.csv";
        let Some(text) = needs::trace(FILE) else { continue };
        let service = if name == "code" { Service::Code } else { Service::Conversation };
        let day = || {
            minutes::read(TrafficText { file: FILE, text: &text }, service, Gaps::Refuse)
                .unwrap()
                .with_peak(peak)
        };
        run(day(), shipped(), 6).print(&format!("{name} trace shipped"));
        run(day(), ShippedScaler::new(AutoscalingRules { running: Some(16), ..Default::default() }), 2)
            .print(&format!("{name} trace shipped running 16"));
        run(day(), UtilisationScaler::new(0.8, 1, 24), 6).print(&format!("{name} trace utilisation"));
    }
}
