//! Has preemptible neighbours leave engines that are under pressure.

use super::Planner;
use crate::control_plane::EvictionReason;
use crate::scheduling::plan::Relief;
use crate::units::Millis;

/// Agents report once a second: more often there is nothing new.
const LOOK_EVERY: Millis = Millis::seconds(1);

impl Planner {
    pub(super) fn relieve(&mut self) {
        let ledger = self.service.ledger();
        let now = ledger.now();
        if now < self.look_at_pressure {
            return;
        }
        let leaving = self.pressure.look(&ledger);
        drop(ledger);
        self.look_at_pressure = now + LOOK_EVERY;
        leaving.into_iter().for_each(|relief| self.have_leave(relief));
    }

    fn have_leave(&mut self, relief: Relief) {
        let Relief { uid, key, engine, gpu } = relief;
        let mut ledger = self.service.ledger();
        if !ledger.may_order(std::slice::from_ref(&uid)) {
            return tracing::warn!(pod = %key, %engine, "it stays: enough pods were evicted within the minute");
        }
        ledger.note_ordered(std::slice::from_ref(&uid));
        ledger.note_evicted(&uid);
        drop(ledger);
        let (control_plane, why) = (self.control_plane.clone(), EvictionReason::Pressure { engine, gpu });
        self.write(async move {
            // Should it fail, and the pressure last, its turn or another's comes again.
            let outcome = control_plane.evict(&key, &uid, &why).await;
            tracing::info!(pod = %key, ?outcome, why = why.reason(), "evicted");
            None
        });
    }
}
