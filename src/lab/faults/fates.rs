//! The outcome of each request: most are answered soon and truly, some are not.
//!
//! Each operation has random numbers of its own, so that a history without some of its requests keeps the outcomes of the others.

use super::clock;
use super::fault::FaultKind;
use crate::demo::api_server::faults::{DelayStage, FaultSource, InjectedFault, Operation};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;
use stowage_kubernetes_objects::port::WriteTimes;
use stowage_scheduling::testkit::random::Random;

/// Purpose number of the first operation's random numbers, among the purposes of a seed.
const FIRST_OPERATION_PURPOSE: u64 = 100;
/// Purpose number of the random numbers that draw outages of all Bindings.
const OUTAGES_PURPOSE: u64 = 99;

/// Longer than any write is waited for.
const WEBHOOK_HANG: Duration = Duration::from_secs(3600);

/// Rules by which the outcomes of a history's requests are drawn.
pub(crate) struct RequestFaults {
    pub seed: u64,
    pub times: WriteTimes,
    /// Whether some writes land later than the write times allow.
    pub has_proxy: bool,
    pub without: BTreeSet<FaultKind>,
}

/// When a webhook stops answering, and when it answers again; simulated time.
type Outage = (Duration, Duration);

impl RequestFaults {
    pub fn into_source(self) -> FaultSource {
        let mut dice: BTreeMap<Operation, Random> = BTreeMap::new();
        let outages = outages(self.seed);
        Box::new(move |_, operation| {
            let purpose = FIRST_OPERATION_PURPOSE + operation as u64;
            let dice = dice
                .entry(operation)
                .or_insert_with(|| Random::seeded(self.seed, purpose));
            let (mut kind, mut fault) = self.draw_outcome(operation, dice)?;
            if operation == Operation::Binding
                && is_in_outage(&outages)
                && !self.without.contains(&FaultKind::HungWebhook)
            {
                (kind, fault) = (
                    Some(FaultKind::HungWebhook),
                    InjectedFault::CommitsLate(DelayStage::Queue, WEBHOOK_HANG),
                );
            }
            let is_left_out = kind.is_some_and(|kind| self.without.contains(&kind));
            Some(if is_left_out {
                quick_answer(dice)
            } else {
                fault
            })
        })
    }

    fn draw_outcome(
        &self,
        operation: Operation,
        dice: &mut Random,
    ) -> Option<(Option<FaultKind>, InjectedFault)> {
        Some(match operation {
            Operation::Binding => {
                self.draw_write_outcome(dice, if self.has_proxy { 40 } else { 0 })
            }
            Operation::PodStatus => {
                self.draw_write_outcome(dice, if self.has_proxy { 30 } else { 0 })
            }
            Operation::Eviction | Operation::Pod => self.draw_write_outcome(dice, 0),
            Operation::Lease => draw_lease_outcome(dice),
            Operation::GetLease => match dice.below(40) {
                0 => LOST_REQUEST,
                _ => (None, quick_answer(dice)),
            },
            Operation::TokenReview => (None, quick_answer(dice)),
            Operation::GetPod => draw_read_outcome(dice),
            Operation::ListPods | Operation::ListNodes | Operation::ListBudgets => {
                draw_list_outcome(dice)
            }
            Operation::NodeStatus => draw_node_status_outcome(dice),
            _ => return None,
        })
    }

    /// `delayed_percent` of a hundred writes are delayed by a proxy.
    fn draw_write_outcome(
        &self,
        dice: &mut Random,
        delayed_percent: usize,
    ) -> (Option<FaultKind>, InjectedFault) {
        let times = self.times;
        let latest = times.max_commit_delay().mul_f64(0.99);
        let late = |stage, delay| {
            (
                Some(FaultKind::LateWrite),
                InjectedFault::CommitsLate(stage, delay),
            )
        };
        match dice.below(100) {
            drawn if drawn < delayed_percent => {
                let later = times.max_commit_delay()
                    + random_duration(dice, Duration::from_secs(5), Duration::from_secs(40));
                (
                    Some(FaultKind::ProxyDelay),
                    InjectedFault::CommitsLate(DelayStage::Network, later),
                )
            }
            0..20 => late(DelayStage::Network, duration_up_to(dice, latest)),
            20..26 => late(DelayStage::Queue, duration_up_to(dice, 2 * times.server)),
            26..30 => late(
                DelayStage::Commit,
                duration_up_to(dice, times.server + times.commit),
            ),
            30..38 => (Some(FaultKind::LostAnswer), InjectedFault::LosesAnswer),
            38..43 => (
                Some(FaultKind::RepeatedWrite),
                InjectedFault::ArrivesTwice(duration_up_to(dice, latest)),
            ),
            43..45 => (Some(FaultKind::RefusedWrite), InjectedFault::Fails),
            45..48 => (
                Some(FaultKind::Throttling),
                InjectedFault::Throttles(1 + dice.below(3) as u64),
            ),
            48..50 => LOST_REQUEST,
            _ => (None, quick_answer(dice)),
        }
    }
}

/// In half of the histories there is one or another time at which no Binding is answered.
fn outages(seed: u64) -> Vec<Outage> {
    let mut dice = Random::seeded(seed, OUTAGES_PURPOSE);
    let outage = |dice: &mut Random| {
        let begins = random_duration(dice, Duration::from_secs(20), Duration::from_secs(220));
        (
            begins,
            begins + random_duration(dice, Duration::from_secs(5), Duration::from_secs(60)),
        )
    };
    (0..dice.below(4).saturating_sub(1))
        .map(|_| outage(&mut dice))
        .collect()
}

fn is_in_outage(outages: &[Outage]) -> bool {
    let now = clock::elapsed();
    outages
        .iter()
        .any(|(begins, ends)| (*begins..*ends).contains(&now))
}

/// What an applied fault is called; `None` for an answer that is only not immediate.
pub fn fault_kind(
    operation: Operation,
    fault: InjectedFault,
    times: WriteTimes,
) -> Option<FaultKind> {
    match (operation, fault) {
        (_, InjectedFault::AnswersLate(delay)) if delay <= MAX_QUICK_ANSWER => None,
        (Operation::Lease, _) => Some(FaultKind::LostLease),
        (_, InjectedFault::CommitsLate(DelayStage::Queue, WEBHOOK_HANG)) => {
            Some(FaultKind::HungWebhook)
        }
        (_, InjectedFault::CommitsLate(DelayStage::Network, delay))
            if delay > times.max_commit_delay() =>
        {
            Some(FaultKind::ProxyDelay)
        }
        (_, InjectedFault::CommitsLate(..)) => Some(FaultKind::LateWrite),
        (_, InjectedFault::Hangs) => Some(FaultKind::LostRequest),
        (_, InjectedFault::LosesAnswer) => Some(FaultKind::LostAnswer),
        (_, InjectedFault::ArrivesTwice(_)) => Some(FaultKind::RepeatedWrite),
        (_, InjectedFault::Throttles(_)) => Some(FaultKind::Throttling),
        (_, InjectedFault::AnswersLate(_)) => Some(FaultKind::SlowRead),
        (_, InjectedFault::Fails) => {
            let is_write = !matches!(
                operation,
                Operation::GetPod
                    | Operation::ListPods
                    | Operation::ListNodes
                    | Operation::ListBudgets
            );
            Some(if is_write {
                FaultKind::RefusedWrite
            } else {
                FaultKind::SlowRead
            })
        }
        _ => None,
    }
}

/// A request that is never answered: its client gives it up when its own timeout is over.
const LOST_REQUEST: (Option<FaultKind>, InjectedFault) =
    (Some(FaultKind::LostRequest), InjectedFault::Hangs);

/// The longest time that an undisturbed answer takes.
const MAX_QUICK_ANSWER: Duration = Duration::from_millis(30);

fn draw_lease_outcome(dice: &mut Random) -> (Option<FaultKind>, InjectedFault) {
    let lost = Some(FaultKind::LostLease);
    match dice.below(20) {
        0 => (lost, InjectedFault::LosesAnswer),
        1 => (
            lost,
            InjectedFault::CommitsLate(
                DelayStage::Network,
                duration_up_to(dice, Duration::from_secs(5)),
            ),
        ),
        2 => (lost, InjectedFault::Fails),
        3 => (lost, InjectedFault::Hangs),
        _ => (None, quick_answer(dice)),
    }
}

fn draw_read_outcome(dice: &mut Random) -> (Option<FaultKind>, InjectedFault) {
    let slow = Some(FaultKind::SlowRead);
    match dice.below(18) {
        0..3 => (slow, InjectedFault::Fails),
        3..6 => (
            slow,
            InjectedFault::AnswersLate(duration_up_to(dice, Duration::from_secs(4))),
        ),
        6 => LOST_REQUEST,
        _ => (None, quick_answer(dice)),
    }
}

/// A page shows the cluster as of its list's beginning, however late it comes in.
fn draw_list_outcome(dice: &mut Random) -> (Option<FaultKind>, InjectedFault) {
    match dice.below(8) {
        0..2 => (
            Some(FaultKind::SlowRead),
            InjectedFault::AnswersLate(duration_up_to(dice, Duration::from_secs(6))),
        ),
        2 => (Some(FaultKind::Throttling), InjectedFault::Throttles(1)),
        _ => (None, quick_answer(dice)),
    }
}

fn draw_node_status_outcome(dice: &mut Random) -> (Option<FaultKind>, InjectedFault) {
    match dice.below(10) {
        0 => (Some(FaultKind::RefusedWrite), InjectedFault::Fails),
        1 => (Some(FaultKind::LostAnswer), InjectedFault::LosesAnswer),
        2 => LOST_REQUEST,
        _ => (None, quick_answer(dice)),
    }
}

fn quick_answer(dice: &mut Random) -> InjectedFault {
    InjectedFault::AnswersLate(random_duration(
        dice,
        Duration::from_millis(1),
        MAX_QUICK_ANSWER,
    ))
}

fn duration_up_to(dice: &mut Random, most: Duration) -> Duration {
    random_duration(dice, 2 * MAX_QUICK_ANSWER, most)
}

pub fn random_duration(dice: &mut Random, least: Duration, most: Duration) -> Duration {
    let span = most.saturating_sub(least).as_millis() as usize;
    least + Duration::from_millis(dice.below(span + 1) as u64)
}
