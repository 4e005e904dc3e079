//! The guard of the ledger's lock. A panic under the lock discards the ledger.
//!
//! A panic may leave a change half made, and no later check can find out which half. The pods on the API server are consistent:
//! leadership closes, and everything is relisted into an empty ledger. This module does not know what the ledger contains.

use super::Service;
use crate::scheduling::ledger::Ledger;
use parking_lot::MutexGuard;
use std::ops::{Deref, DerefMut};
use tracing::error;

/// The locked ledger. Take it for one call or a few; never across an await.
pub struct LedgerGuard<'a> {
    ledger: MutexGuard<'a, Ledger>,
    service: &'a Service,
    /// Whether the thread was already unwinding when it took the lock; then the panic did not interrupt a change under this
    /// lock.
    was_panicking: bool,
}

impl<'a> LedgerGuard<'a> {
    pub(super) fn new(service: &'a Service, ledger: MutexGuard<'a, Ledger>) -> Self {
        Self { ledger, service, was_panicking: std::thread::panicking() }
    }
}

impl Deref for LedgerGuard<'_> {
    type Target = Ledger;

    fn deref(&self) -> &Ledger {
        &self.ledger
    }
}

impl DerefMut for LedgerGuard<'_> {
    fn deref_mut(&mut self) -> &mut Ledger {
        &mut self.ledger
    }
}

impl Drop for LedgerGuard<'_> {
    fn drop(&mut self) {
        if !std::thread::panicking() || self.was_panicking {
            return;
        }
        // Leadership closes first, so that no reader mistakes the empty ledger for the cluster.
        self.service.gate.list_anew();
        *self.ledger = Ledger::new(self.ledger.policy().clone());
        self.ledger.set_now(self.service.now());
        self.service.metrics.ledgers_discarded.inc();
        error!(
            "a panic while the ledger was locked: the ledger is discarded, and the cluster is listed anew"
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::NodeName;
    use crate::scheduling::policy::Policy;
    use crate::scheduling::vocabulary::node::NodeKind;
    use std::panic::{AssertUnwindSafe, catch_unwind};

    fn synced() -> std::sync::Arc<Service> {
        let service = Service::with_stopped_clock(Policy::default());
        service.lead_from_the_start();
        service
    }

    fn add_node(ledger: &mut Ledger) {
        ledger.set_node(&NodeName::parse("a").unwrap(), NodeKind::Stowage, None);
    }

    #[test]
    fn read_a_panic_under_the_ledgers_lock_shuts_the_gate_and_discards_the_ledger() {
        let service = synced();
        let terms = service.gate.terms();
        let result = catch_unwind(AssertUnwindSafe(|| {
            let mut ledger = service.ledger();
            add_node(&mut ledger);
            panic!("in the middle of a change");
        }));
        assert!(result.is_err());
        assert!(!service.gate.is_synced(), "nobody is answered from half a change");
        assert!(terms.has_changed().unwrap(), "everything is listed anew");
        assert_eq!(service.ledger().totals().nodes, 0);
        assert_eq!(service.ledger().now(), service.now());
        assert_eq!(service.metrics.ledgers_discarded.get(), 1);
    }

    #[test]
    fn read_a_ledger_that_is_locked_while_its_thread_unwinds_from_something_else_is_kept() {
        struct LooksAtTheEnd<'a>(&'a Service);
        impl Drop for LooksAtTheEnd<'_> {
            fn drop(&mut self) {
                add_node(&mut self.0.ledger());
            }
        }
        let service = synced();
        let result = catch_unwind(AssertUnwindSafe(|| {
            let _looks = LooksAtTheEnd(&service);
            panic!("elsewhere");
        }));
        assert!(result.is_err());
        assert!(service.gate.is_synced());
        assert_eq!(service.ledger().totals().nodes, 1);
    }
}
