//! A day behind each autoscaler.

use super::*;
use crate::needs;
use crate::simulate::fleet::engines::{
    EngineSpec, EngineState, GpuSpeed, ModelShape, Slo, max_rate_per_s, steady_state,
};
use crate::simulate::fleet::traffic::{
    DayOfTraffic, Gaps, RequestSize, Service, TrafficText, built_in, minutes,
};
use stowage_scheduling::contention::Contention;
use stowage_scheduling::policy::AutoscalingRules;
use stowage_scheduling::units::{Bytes, Millis, Moment, Percent};

const SLO: Slo = Slo {
    ttft_s: 5.0,
    tpot_s: 0.2,
};
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
    inside: f64,
}

fn run(traffic: DayOfTraffic, scaler: impl Scaler, replicas: u32) -> Run {
    let mut pods = SimulatedReplicas::new(replicas, START, Millis::seconds(120));
    let mut day = ServingDay::new(spec(), traffic, SLO, scaler, Moment(0));
    let mut ready = Vec::new();
    for second in (0..=DAY_S).step_by(STEP_S as usize) {
        let now = Moment(0) + Millis::seconds(second);
        pods.tick(&mut day, now);
        if second % 60 == 0 {
            ready.push(pods.ready());
        }
    }
    let inside = day.waiting() + day.running();
    Run {
        tally: day.tally,
        ready,
        inside,
    }
}

impl Run {
    fn mean(&self, hours: std::ops::Range<usize>) -> f64 {
        let minutes = &self.ready[hours.start * 60..hours.end * 60];
        minutes.iter().map(|ready| f64::from(*ready)).sum::<f64>() / minutes.len() as f64
    }

    fn ttft_s(&self, share: f64) -> f64 {
        self.tally.latencies.ttft.quantile_s(share).unwrap()
    }

    /// A row of `autoscalers.md`.
    fn row(&self, traffic: &str, scaler: &str) -> String {
        let tally = &self.tally;
        format!(
            "| {traffic} | {scaler} | {:.0} | {:.1} % | {:.0} | {:.2} s | {:.1} % |",
            tally.replica_seconds / 3600.0,
            100.0 * tally.kv_occupancy_seconds / tally.replica_seconds,
            tally.longest_queue,
            self.ttft_s(0.99),
            100.0 * tally.latencies.attained(),
        )
    }

    /// Whatever came is done, refused or still inside.
    fn conserves(&self) {
        let ServingTally {
            arrived,
            completed,
            refused,
            ..
        } = self.tally;
        assert!(
            (arrived - completed - refused - self.inside).abs() < 1e-6 * arrived,
            "{arrived} came, {completed} are done"
        );
    }
}

/// The autoscaler that ships with its defaults, and with the load at which an engine is to work as a share of the most it keeps
/// up with.
fn defaults() -> ShippedScaler {
    ShippedScaler::new(AutoscalingRules::default())
}

fn aimed(size: RequestSize, share: f64) -> ShippedScaler {
    let most = max_rate_per_s(&spec(), size.prompt, size.output);
    let at = steady_state(
        &spec(),
        share * most,
        size.prompt,
        size.output,
        &Contention::ALONE,
    )
    .unwrap();
    let (kv_cache, running) = (
        Percent::from_share(at.kv_occupancy).unwrap(),
        at.running.ceil() as u32,
    );
    ShippedScaler::new(AutoscalingRules {
        kv_cache,
        running: Some(running),
        ..AutoscalingRules::default()
    })
}

fn utilization() -> UtilizationScaler {
    UtilizationScaler::new(0.8, 1, 60)
}

const CHAT: RequestSize = RequestSize::CONVERSATION;
const CODE: RequestSize = RequestSize::CODE;

fn check_table(rows: &[String]) {
    const TABLE: &str = include_str!("autoscalers.md");
    let missing: Vec<&str> = rows
        .iter()
        .map(String::as_str)
        .filter(|row| !TABLE.contains(row))
        .collect();
    assert!(
        missing.is_empty(),
        "autoscalers.md lacks:\n{}",
        missing.join("\n")
    );
}

#[test]
fn the_shipped_autoscaler_follows_a_day_and_utilization_does_not_see_the_night() {
    let day = || built_in::working_day(42, 100.0, CHAT);
    let (shipped, baseline) = (
        run(day(), aimed(CHAT, 0.6), 2),
        run(day(), utilization(), 2),
    );
    [&shipped, &baseline].into_iter().for_each(Run::conserves);
    let (night, busy) = (shipped.mean(2..5), shipped.mean(10..16));
    assert!(
        night < 0.15 * busy && night < 2.5,
        "{night} at night, {busy} by day"
    );
    // A second of the peak is 100 requests.
    assert!(
        shipped.tally.longest_queue < 100.0,
        "{}",
        shipped.tally.longest_queue
    );
    assert!(shipped.tally.latencies.attained() > 0.999 && shipped.ttft_s(0.99) < 1.0);
    assert!(
        baseline.mean(2..5) > 5.0 * night,
        "{} at night, {night} of the shipped one",
        baseline.mean(2..5)
    );
    assert!(baseline.tally.replica_seconds > 2.0 * shipped.tally.replica_seconds);
    check_table(&[
        shipped.row("chat, generated", "shipped, 60 % of the most"),
        baseline.row("chat, generated", "GPU utilization 80 %"),
    ]);
}

#[test]
fn a_kv_target_beyond_the_knee_lets_requests_wait() {
    for (what, size, peak) in [
        ("chat, generated", CHAT, 100.0),
        ("code, generated", CODE, 60.0),
    ] {
        let day = || built_in::working_day(42, peak, size);
        let (near, beyond) = (run(day(), aimed(size, 0.6), 2), run(day(), defaults(), 2));
        [&near, &beyond].into_iter().for_each(Run::conserves);
        assert!(
            near.tally.latencies.attained() > 0.999,
            "{what}: {}",
            near.tally.latencies.attained()
        );
        assert!(
            beyond.tally.longest_queue > 10.0 * near.tally.longest_queue.max(1.0),
            "{what}"
        );
        assert!(
            beyond.ttft_s(0.99) > SLO.ttft_s,
            "{what}: {} s",
            beyond.ttft_s(0.99)
        );
        check_table(&[
            near.row(what, "shipped, 60 % of the most"),
            beyond.row(what, "shipped, default targets"),
        ]);
    }
}

#[test]
fn the_traces_days_are_followed() {
    const FILE: &str = "llm/llm_24h_per_minute.csv";
    let Some(text) = needs::trace(FILE) else {
        return;
    };
    let source = TrafficText {
        file: FILE,
        text: &text,
    };
    for (what, service, size, peak) in [
        ("chat, trace", Service::Conversation, CHAT, 100.0),
        ("code, trace", Service::Code, CODE, 60.0),
    ] {
        let day = || {
            minutes::read(source, service, Gaps::Refuse)
                .unwrap()
                .with_peak(peak)
        };
        let (shipped, baseline) = (
            run(day(), aimed(size, 0.6), 6),
            run(day(), utilization(), 6),
        );
        [&shipped, &baseline].into_iter().for_each(Run::conserves);
        assert!(
            shipped.tally.latencies.attained() > 0.999 && shipped.tally.longest_queue < 100.0,
            "{what}"
        );
        assert!(
            baseline.tally.replica_seconds > 1.5 * shipped.tally.replica_seconds,
            "{what}"
        );
        if service == Service::Code {
            let (quiet, busy) = (shipped.mean(7..10), shipped.mean(16..20));
            assert!(
                quiet < 0.25 * busy,
                "{quiet} in the quiet hours, {busy} in the busy ones"
            );
        }
        check_table(&[
            shipped.row(what, "shipped, 60 % of the most"),
            baseline.row(what, "GPU utilization 80 %"),
        ]);
    }
}

#[test]
fn requests_of_a_lost_replica_move_to_the_others() {
    let replica = |id, state| Replica {
        id,
        state,
        contention: Contention::ALONE,
    };
    let day = built_in::working_day(1, 8.0, CHAT);
    let start = Moment(0) + Millis::seconds(10 * 3600);
    let mut day = ServingDay::new(spec(), day, SLO, utilization(), start);
    let at = |seconds: u64| start + Millis::seconds(seconds);
    let mut tick = |seconds: u64, up: &[Replica]| {
        day.tick(
            at(seconds),
            &Replicas {
                up,
                starting: 0,
                ready_in: START,
            },
        );
        (day.waiting(), day.running(), day.tally.clone())
    };
    let (waiting, ..) = tick(10, &[]);
    assert!(waiting > 50.0, "nothing serves: {waiting} wait");
    let both = [
        replica(1, ReplicaState::Ready),
        replica(2, ReplicaState::Ready),
    ];
    tick(20, &both);
    let (.., served) = tick(60, &both);
    assert!(
        served.latencies.ttft.quantile_s(1.0).unwrap() > 10.0,
        "what waited for a replica waited from its arrival"
    );
    let (_, running, _) = tick(65, &[both[0]]);
    let (waiting, after, tally) = tick(70, &[both[0]]);
    assert!(
        tally.restarted > 5.0 && after > 0.9 * running,
        "{} restarted",
        tally.restarted
    );
    assert!((tally.arrived - tally.completed - waiting - after).abs() < 1e-6 * tally.arrived);
    let draining = [
        replica(1, ReplicaState::Terminating),
        replica(3, ReplicaState::Ready),
    ];
    tick(80, &draining);
    tick(140, &draining);
    assert!(day.engine(1).unwrap().is_idle() && day.engine(3).unwrap().running() > 5.0);
    assert_eq!(day.by_fewest_requests(), [3]);
    let asleep = [
        replica(1, ReplicaState::Asleep),
        replica(3, ReplicaState::Ready),
    ];
    day.tick(
        at(150),
        &Replicas {
            up: &asleep,
            starting: 0,
            ready_in: START,
        },
    );
    assert_eq!(day.engine(1).unwrap().state(), EngineState::Asleep);
}
