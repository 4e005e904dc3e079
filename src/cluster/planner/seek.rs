//! Has waiting pods planned, and puts the steps into force: each hold is taken in the ledger itself, which checks it again,
//! before anything is written.

use super::Planner;
use super::course::Course;
use super::ended::is_nominated;
use super::outcome::Outcome;
use crate::control_plane::{Notice, NoticeKind, PlanState, StatusChange};
use crate::ids::{PodKey, PodUid};
use crate::scheduling::ledger::{Conflict, Gate, Ledger, Pending, Phase, Way};
use crate::scheduling::plan::{Place, Step, Why, plan};
use std::sync::Arc;
use tracing::{info, warn};

/// Pods looked at in one go. A plan of this many takes a fraction of a second at a thousand nodes.
const LOOKED_AT: usize = 256;

impl Planner {
    pub(super) async fn seek(&mut self) {
        let Some((scratch, pending)) = self.queue() else { return };
        let stock = self.service.stock().snapshot();
        // The threads that answer filter are not for this.
        let planned = tokio::task::spawn_blocking(move || plan(scratch, &stock, &pending)).await;
        for step in planned.into_iter().flatten() {
            match step {
                Step::Place(places) => self.take(places),
                Step::Wake { uid, key } => self.wake(uid, key),
                Step::Wait { uid, key, why } => self.wait(uid, key, why),
            }
        }
    }

    /// Who is due, and a copy of the books to place them on.
    fn queue(&self) -> Option<(Ledger, Vec<Pending>)> {
        let mut ledger = self.service.ledger();
        let pending = ledger.pending(LOOKED_AT);
        (!pending.is_empty()).then(|| (ledger.clone(), pending))
    }

    /// Holds the places, all or none.
    fn take(&mut self, places: Vec<Place>) {
        let mut ledger = self.service.ledger();
        if let Err((place, conflict)) = hold_all(&mut ledger, &places) {
            info!(pod = %place.key, %conflict, "the room changed while the plan was made");
            return places.iter().for_each(|place| ledger.note_sought(&place.uid));
        }
        places.iter().for_each(|place| ledger.note_ordered(&place.hold.victims));
        let now = ledger.now();
        drop(ledger);
        for place in places {
            self.courses.insert(place.uid.clone(), Course::own(now, place.by));
            self.begin(place);
        }
    }

    /// Where others leave, the hold is written down before the first is told. Where nobody does, the pod itself is told.
    fn begin(&mut self, place: Place) {
        let Place { uid, key, hold, price, exact, by } = place;
        let node = &hold.node;
        info!(pod = %key, %node, victims = ?hold.victims, ?price, exact, ?by, "place planned");
        let is_gated = self.gate_of(&uid) == Some(Gate::Planned);
        if hold.victims.is_empty() {
            let held = self.service.ledger().held_by(&uid);
            return held.iter().for_each(|held| self.tell(held));
        }
        let gpus = hold.devices.iter().map(|uuid| uuid.as_str()).collect::<Vec<_>>().join(", ");
        let text = format!("{} pod(s) leave {node} for this pod; it gets {gpus}", hold.victims.len());
        self.control_plane.notify(Notice {
            key: key.clone(),
            uid: uid.clone(),
            kind: NoticeKind::RoomHeld,
            text,
        });
        let mut change = StatusChange::hold(hold.clone());
        if is_gated {
            change.plan = Some(PlanState::MakingRoom { node: hold.node });
        }
        if let Some(course) = self.courses.get_mut(&uid) {
            course.is_writing = true;
        }
        let control_plane = self.control_plane.clone();
        self.write(async move {
            let written = control_plane.write_status(&key, &uid, &change).await;
            Some(Outcome::Held { key, uid, written })
        });
    }

    fn gate_of(&self, uid: &PodUid) -> Option<Gate> {
        match &self.service.ledger().entry(uid)?.phase {
            Phase::Waiting(waiting) => Some(waiting.gate),
            _ => None,
        }
    }

    fn wake(&mut self, uid: PodUid, key: PodKey) {
        self.service.ledger().note_woken(&uid);
        let control_plane = self.control_plane.clone();
        self.write(async move {
            // Should it fail, the pod's turn comes again.
            if let Err(error) = control_plane.write_status(&key, &uid, &StatusChange::touch()).await {
                warn!(pod = %key, %error, "a pod was not told that there is room for it");
            }
            None
        });
    }

    /// There is no place for the pod. Behind the gate it stays only as long as the policy says, and not at all if it would
    /// never be placed there.
    fn wait(&mut self, uid: PodUid, key: PodKey, why: Why) {
        let mut ledger = self.service.ledger();
        ledger.note_sought(&uid);
        let Some(entry) = ledger.entry(&uid) else { return };
        let Phase::Waiting(waiting) = &entry.phase else { return };
        let has_waited = ledger.now().since(waiting.since) >= ledger.policy().planning.gated_at_most;
        let (is_gated, is_grouped) = (waiting.gate == Gate::Planned, entry.stake.group.is_some());
        drop(ledger);
        if !is_gated {
            return;
        }
        if is_grouped {
            let text = format!("The pod's group is not placed: {why}.");
            return self.control_plane.notify(Notice { key, uid, kind: NoticeKind::GroupFailed, text });
        }
        let is_hopeless = matches!(why, Why::CannotJudge(_) | Why::ByPlugin);
        if has_waited || is_hopeless {
            self.release(uid, key, why);
        }
    }

    /// In shadow mode nobody is placed; a pod behind the gate would wait for ever.
    pub(super) fn release_all(&mut self) {
        let pending = self.service.ledger().pending(LOOKED_AT);
        for pod in pending.into_iter().filter(|pod| matches!(pod.way, Way::Gated)) {
            self.service.ledger().note_sought(&pod.uid);
            self.release(pod.uid, pod.key, Why::Shadowing);
        }
    }

    /// Lets a gated pod through without a place: autoscalers and people see only what the scheduler has refused.
    pub(super) fn release(&mut self, uid: PodUid, key: PodKey, why: Why) {
        let text = format!("The planner has no place for the pod; the scheduler looks for one: {why}.");
        self.control_plane.notify(Notice {
            key: key.clone(),
            uid: uid.clone(),
            kind: NoticeKind::PlanFailed,
            text,
        });
        let mut change = StatusChange::plan(PlanState::Released { why: Arc::from(why.said()) });
        // Of an earlier plan, which came to nothing.
        if is_nominated(&self.service.ledger(), &uid) {
            change = change.and_clear_nomination();
        }
        let control_plane = self.control_plane.clone();
        self.write(async move {
            let released = async {
                control_plane.write_status(&key, &uid, &change).await?;
                control_plane.lift_gate(&key, &uid).await
            };
            // Should it fail, the pod's turn comes again.
            if let Err(error) = released.await {
                warn!(pod = %key, %error, "a gated pod was not let through");
            }
            None
        });
    }
}

fn hold_all<'a>(ledger: &mut Ledger, places: &'a [Place]) -> Result<(), (&'a Place, Conflict)> {
    for (n, place) in places.iter().enumerate() {
        if let Err(conflict) = place.take(ledger) {
            places[..n].iter().for_each(|held| ledger.drop_hold(&held.uid));
            return Err((place, conflict));
        }
    }
    Ok(())
}
