//! The outcome of each request, drawn in advance: most are answered soon and truly, some are not.

use std::time::Duration;
use stowage::kubernetes::port::WriteTimes;
use stowage::lab::demo::api_server::ApiServer;
use stowage::lab::demo::api_server::faults::{DelayStage, InjectedFault, Operation};
use stowage::lab::simulate::random::Random;

/// More than a history has of any.
const REQUESTS: usize = 600;

const WRITES: [Operation; 4] =
    [Operation::Binding, Operation::PodStatus, Operation::Eviction, Operation::Pod];
const LISTS: [Operation; 3] = [Operation::ListPods, Operation::ListNodes, Operation::ListBudgets];

/// Orders a fate for every request to come. With a proxy, some Bindings land later than the write times allow.
pub fn order(api: &ApiServer, dice: &mut Random, times: WriteTimes, proxy: bool) {
    for _ in 0..REQUESTS {
        for operation in WRITES {
            let buffers = proxy && operation == Operation::Binding;
            api.faults().next(operation, 1, of_write(dice, times, buffers));
        }
        api.faults().next(Operation::Lease, 1, of_lease(dice));
        api.faults().next(Operation::GetLease, 1, soon(dice));
        api.faults().next(Operation::GetPod, 1, of_read(dice));
        for operation in LISTS {
            api.faults().next(operation, 1, of_list(dice));
        }
    }
}

fn of_write(dice: &mut Random, times: WriteTimes, buffers: bool) -> InjectedFault {
    let latest = times.latest_landing().mul_f64(0.99);
    match dice.below(100) {
        0..40 if buffers => {
            let later =
                times.latest_landing() + between(dice, Duration::from_secs(5), Duration::from_secs(40));
            InjectedFault::LandsLate(DelayStage::Network, later)
        }
        0..25 => InjectedFault::LandsLate(DelayStage::Network, up_to(dice, latest)),
        25..33 => InjectedFault::LandsLate(DelayStage::Queue, up_to(dice, 2 * times.server)),
        33..38 => InjectedFault::LandsLate(DelayStage::Commit, up_to(dice, times.server + times.commit)),
        38..46 => InjectedFault::LosesAnswer,
        46..52 => InjectedFault::ArrivesTwice(up_to(dice, latest)),
        52..54 => InjectedFault::Fails,
        54..56 => InjectedFault::Throttles(1),
        _ => soon(dice),
    }
}

fn of_lease(dice: &mut Random) -> InjectedFault {
    match dice.below(20) {
        0 => InjectedFault::LosesAnswer,
        1 => InjectedFault::LandsLate(DelayStage::Network, up_to(dice, Duration::from_secs(5))),
        2 => InjectedFault::Fails,
        _ => soon(dice),
    }
}

fn of_read(dice: &mut Random) -> InjectedFault {
    match dice.below(6) {
        0 => InjectedFault::Fails,
        1 => InjectedFault::AnswersLate(up_to(dice, Duration::from_secs(4))),
        _ => soon(dice),
    }
}

/// A page shows the cluster as of its list's beginning, however late it comes in.
fn of_list(dice: &mut Random) -> InjectedFault {
    match dice.below(3) {
        0 => InjectedFault::AnswersLate(up_to(dice, Duration::from_secs(6))),
        _ => soon(dice),
    }
}

fn soon(dice: &mut Random) -> InjectedFault {
    InjectedFault::AnswersLate(between(dice, Duration::from_millis(1), Duration::from_millis(30)))
}

fn up_to(dice: &mut Random, most: Duration) -> Duration {
    between(dice, Duration::from_millis(20), most)
}

pub fn between(dice: &mut Random, least: Duration, most: Duration) -> Duration {
    let span = most.saturating_sub(least).as_millis() as usize;
    least + Duration::from_millis(dice.below(span + 1) as u64)
}
