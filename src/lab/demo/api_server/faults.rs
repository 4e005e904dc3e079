//! Faults that a test orders in advance: the next requests of a kind, of any client or of one, fail.
//!
//! Orders only. `delivery` decides when a request is performed, how often, and what its client is answered; faults of whole
//! connections are in `connections`.

use parking_lot::Mutex;
use std::time::Duration;

/// What can be made to fail.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Operation {
    Binding,
    Eviction,
    /// A patch or update of a pod itself.
    Pod,
    /// A patch or update of `pods/…/status`.
    PodStatus,
    /// A patch or update of `nodes/…/status`.
    NodeStatus,
    /// A creation, patch or update of a Lease.
    Lease,
    /// A patch or update of a Secret.
    Secret,
    /// A patch or update of a ConfigMap.
    ConfigMap,
    TokenReview,
    GetSecret,
    GetPod,
    GetLease,
    /// A list, or one page of it.
    ListPods,
    ListNodes,
    ListBudgets,
    /// The request that begins a watch.
    WatchPods,
    WatchNodes,
    WatchBudgets,
}

/// Where a late write is held up. The server's `timeout` counts from the write's arrival.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DelayStage {
    /// On its way, in a proxy that buffers: the server's `timeout` has not begun.
    Network,
    /// Before the commit, in the server's queue or in an admission webhook: once its `timeout` has passed it is answered 504
    /// and never lands.
    Queue,
    /// In the commit: once its `timeout` has passed it is answered 504, and lands all the same.
    Commit,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum InjectedFault {
    /// Written at once, answered after this long: the client that gave up does not know it succeeded.
    AnswersLate(Duration),
    /// Performed at once, answered when [`super::held_requests::HeldRequests`] releases it. A list page shows the cluster as of the
    /// request's arrival.
    AnswersWhenReleased,
    /// Written at once; the connection breaks before the answer is sent.
    LosesAnswer,
    /// Accepted now, written after this long, whether or not its client still waits.
    CommitsLate(DelayStage, Duration),
    /// Accepted now, written when [`super::held_requests::HeldRequests`] releases it, whether or not its client still waits.
    CommitsWhenReleased(DelayStage),
    /// Written and answered, and written again after this long: a proxy between client and server repeats it.
    ArrivesTwice(Duration),
    /// Written and answered, and written again when [`super::held_requests::HeldRequests`] releases the repetition.
    ArrivesAgainWhenReleased,
    /// 500, nothing written.
    Fails,
    /// 409, nothing written.
    Conflicts,
    /// 403, nothing written.
    Forbids,
    /// 429 without `Retry-After`, nothing written.
    TooManyRequests,
    /// 429 with `Retry-After` in seconds, nothing written.
    Throttles(u64),
    /// 410: the version that a list continues from or a watch resumes from has been compacted.
    Expired,
    /// Nothing written, and no answer until the server stops.
    Hangs,
}

/// Draws the outcome of a client's request that no order was given for; `None` where it succeeds at once.
pub(crate) type FaultSource = Box<dyn FnMut(&str, Operation) -> Option<InjectedFault> + Send>;

/// Faults still to be applied, in order, and those that were applied.
#[derive(Default)]
pub struct InjectedFaults {
    orders: Mutex<Vec<FaultOrder>>,
    source: Mutex<Option<FaultSource>>,
    applied: Mutex<Vec<(Operation, InjectedFault)>>,
}

#[derive(Debug)]
struct FaultOrder {
    operation: Operation,
    /// `None`: any.
    client: Option<String>,
    fault: InjectedFault,
}

impl InjectedFaults {
    /// Makes the next `count` requests of this kind go wrong, after those ordered before.
    pub fn fail_next(&self, operation: Operation, count: usize, fault: InjectedFault) {
        self.add_order(None, operation, count, fault);
    }

    /// Makes the next `count` requests of this kind from one client go wrong, after those ordered before.
    pub fn fail_next_from(
        &self,
        client: &str,
        operation: Operation,
        count: usize,
        fault: InjectedFault,
    ) {
        self.add_order(Some(client), operation, count, fault);
    }

    /// From here on the outcome of each request without an order is drawn.
    pub fn set_source(&self, source: FaultSource) {
        *self.source.lock() = Some(source);
    }

    pub fn clear(&self) {
        self.orders.lock().clear();
        *self.source.lock() = None;
    }

    /// How many ordered faults are still to be applied.
    pub fn pending_count(&self) -> usize {
        self.orders.lock().len()
    }

    /// The faults that were applied, in order.
    pub fn applied_faults(&self) -> Vec<(Operation, InjectedFault)> {
        self.applied.lock().clone()
    }

    fn add_order(
        &self,
        client: Option<&str>,
        operation: Operation,
        count: usize,
        fault: InjectedFault,
    ) {
        let order = || FaultOrder {
            operation,
            client: client.map(str::to_owned),
            fault,
        };
        self.orders
            .lock()
            .extend(std::iter::repeat_with(order).take(count));
    }

    pub(super) fn take(&self, client: &str, operation: Operation) -> Option<InjectedFault> {
        let mut orders = self.orders.lock();
        let applies = |order: &FaultOrder| {
            order.operation == operation && order.client.as_deref().is_none_or(|of| of == client)
        };
        let ordered = orders
            .iter()
            .position(applies)
            .map(|index| orders.remove(index).fault);
        drop(orders);
        let fault = ordered.or_else(|| self.source.lock().as_mut()?(client, operation))?;
        self.applied.lock().push((operation, fault));
        Some(fault)
    }
}
