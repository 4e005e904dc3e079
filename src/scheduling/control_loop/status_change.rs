//! Changes that the planner makes to pods and their results: evictions with their reasons, and changes of a pod's status. Data
//! and its texts; nothing here sends a request or decides.

use crate::coded::coded;
use crate::ids::{GpuUuid, NodeName, PodKey};
use crate::units::Bytes;
use crate::vocabulary::placement::Reservation;
use std::sync::Arc;
use std::time::Duration;

coded! {
    /// Why a pod is evicted, and for which pod. With it goes the reason of the victim's condition, which never changes, and the pod
    /// that the text names: as `pod {}`, so that [`Self::text_for`] finds it.
    #[derive(Debug, Clone, PartialEq, Eq)]
    pub enum EvictionReason: (&'static str, Option<&PodKey>) {
        /// A pod of higher priority needs its GPU.
        "preemption" Preempted { by: PodKey },
            "Preempted by pod {by}, which has a higher priority."
            => ("Preempted", Some(by));
        /// It used a share that its tenant had borrowed, and a pod of the share's owner is pending.
        "reclaim" Reclaimed { owner: Arc<str>, by: PodKey },
            "Tenant {owner} reclaimed its guarantee for pod {by}. This pod used capacity that its own tenant had borrowed."
            => ("Reclaimed", Some(by));
        /// An engine on its GPU is short of KV cache or has a growing queue.
        "relief" Pressure { engine: PodKey, gpu: GpuUuid },
            "The engine of pod {engine} on GPU {gpu} is overloaded (KV cache or queue) and has precedence."
            => ("EnginePressure", Some(engine));
        /// It can run elsewhere, and a pending pod fits nowhere else.
        "consolidation" Consolidated { to_fit: PodKey },
            "Evicted for pod {to_fit}, which fits only on the GPUs of this pod, while this pod fits on other GPUs."
            => ("Consolidated", Some(to_fit));
        /// Another pod of its group is evicted, and the group is evicted as a whole.
        "group" GroupEvicted { group: Arc<str>, by: PodKey },
            "Its group {group} is evicted for pod {by}; a group is evicted as a whole or not at all."
            => ("GroupEvicted", Some(by));
        /// The rest of its group was not placed in time, and the policy keeps no part of one.
        "incomplete-group" GroupIncomplete { group: Arc<str> },
            "Not all pods of its group {group} were bound in time, and the policy keeps no part of a group."
            => ("GroupIncomplete", None);
        /// Its VRAM is lent by a sleeping engine, which wakes; or, if that is early, will soon.
        "loan-end" LoanEnded { lender: Option<PodKey>, gpu: GpuUuid, is_early: bool },
            "{}", loan_ended(lender.as_ref(), gpu, *is_early)
            => ("LoanEnded", lender.as_ref());
        /// Its GPU was allocated to another pod as well, and it has not started.
        "conflict" Conflict { with: PodKey, gpu: GpuUuid },
            "GPU {gpu} was also allocated to pod {with}. This pod had not started, so it is evicted; its controller may recreate it."
            => ("GpuConflict", Some(with));
        /// It used more VRAM than it was granted for longer than the policy allows.
        "overuse" Overuse { granted: Bytes, used: Bytes },
            "Its processes use {used} of VRAM and it was granted {granted}, for longer than the policy allows."
            => ("Overuse", None);
        /// It uses GPUs, was given none, and its namespace may not see all GPUs.
        "ungranted" Ungranted { used: Bytes },
            "Its processes use {used} of VRAM of a node of Stowage's, and Stowage gave it no GPU."
            => ("Ungranted", None);
    }
}

fn loan_ended(lender: Option<&PodKey>, gpu: &GpuUuid, is_early: bool) -> String {
    let Some(lender) = lender else {
        return format!(
            "The VRAM on GPU {gpu} that was lent to this pod is needed by an engine that lent it."
        );
    };
    match is_early {
        true => format!(
            "The engines beside that of pod {lender} are full, so it gets back the VRAM on GPU {gpu} that it lent to this pod while it sleeps."
        ),
        false => format!(
            "The engine of pod {lender} needs the VRAM on GPU {gpu} that it lent to this pod."
        ),
    }
}

impl EvictionReason {
    /// The condition's reason: one word for each kind.
    pub fn reason(&self) -> &'static str {
        self.entry().0
    }

    /// The message for the victim's owner, [without names](crate::ids::PodKey::name_shown_to) of other namespaces.
    pub fn text_for(&self, victim: &PodKey) -> String {
        let (text, (_, named)) = (self.to_string(), self.entry());
        match named {
            Some(pod) => text.replace(&format!("pod {pod}"), &pod.name_shown_to(victim)),
            None => text,
        }
    }
}

coded! {
    /// The result of an eviction.
    #[derive(Debug, Clone, PartialEq, Eq)]
    pub enum EvictionOutcome {
        /// The eviction was accepted; the pod is gone when the watch says so.
        "written" Evicted, "evicted";
        /// There is no such pod any more.
        "gone" Gone, "the pod is gone";
        /// Nothing was done: a disruption budget allows none, or the API server or this replica cannot at the moment. With the pause
        /// that the API server asks for, if any.
        "later" TryLater { after: Option<Duration> },
            "not allowed at the moment{}", after.map(|after| format!("; the API server asks for a pause of {} s", after.as_secs())).unwrap_or_default();
        /// No eviction was requested: what the pod was to be evicted for is over. Its condition may have been written.
        "called-off" CalledOff, "called off";
        /// Nothing was done, and a retry will not help.
        "refused" Refused { message: String }, "refused: {message}";
        /// No answer, or an inconclusive one: it may have been evicted.
        "unknown" Unknown { message: String }, "unanswered: {message}";
    }
}

/// Changes of one pod's status, all written in one request. [`Default`] changes nothing.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct StatusChange {
    pub reservation: Option<ReservationChange>,
    pub nomination: Option<NominationChange>,
    pub requeue: Option<RequeueMark>,
    pub plan: Option<PlanState>,
    pub eviction: Option<EvictionCondition>,
    pub wake: Option<WakeAnswer>,
}

/// The new value of the condition `stowage.dev/Reserved`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ReservationChange {
    Set(Reservation),
    Ended,
}

/// The new value of `status.nominatedNodeName`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NominationChange {
    To(NodeName),
    Cleared,
}

/// Changes something that no reader uses about a pending pod, so that kube-scheduler retries it: the condition
/// `stowage.dev/Requeued`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RequeueMark;

/// The planner's progress with a gated pod, or its last state when the gate was lifted: the condition `stowage.dev/Placed`.
///
/// A `why` has no figure that changes: each new text is a write.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PlanState {
    /// It is nominated to that node.
    Nominated { node: NodeName },
    /// It will be nominated to that node when its victims are gone.
    Preempting { node: NodeName },
    /// No placement yet. Written once for each reason.
    Unschedulable { why: Arc<str> },
    /// Its gate was lifted without a nomination.
    GateRemoved { why: Arc<str> },
    /// It was nominated and not bound there in time. Written once; the `why` is kube-scheduler's own text and may have figures.
    Rejected { node: NodeName, why: Arc<str> },
}

/// The new value of the condition `stowage.dev/DisruptionTarget`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum EvictionCondition {
    Evicting(EvictionReason),
    /// It is not evicted after all.
    Cancelled,
}

/// The new value of the condition `stowage.dev/Wakeable`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum WakeAnswer {
    /// The engine may wake: this answers that request.
    Wakeable { request: Arc<str> },
    /// It has asked, and pods that borrow from it are still there.
    Reclaiming,
    /// It does not ask any more: it may lend again once this is seen.
    Withdrawn,
}

impl StatusChange {
    pub fn wake(answer: WakeAnswer) -> Self {
        Self {
            wake: Some(answer),
            ..Self::default()
        }
    }

    pub fn reservation(reservation: Reservation) -> Self {
        Self {
            reservation: Some(ReservationChange::Set(reservation)),
            ..Self::default()
        }
    }

    pub fn end_reservation() -> Self {
        Self {
            reservation: Some(ReservationChange::Ended),
            ..Self::default()
        }
    }

    pub fn end_reservation_and_nomination() -> Self {
        Self {
            nomination: Some(NominationChange::Cleared),
            ..Self::end_reservation()
        }
    }

    /// Makes kube-scheduler retry the pod.
    pub fn requeue() -> Self {
        Self::default().and_requeue()
    }

    pub fn nominate(node: NodeName) -> Self {
        Self::default().and_nominate(node)
    }

    pub fn clear_nomination() -> Self {
        Self::default().and_clear_nomination()
    }

    pub fn plan(state: PlanState) -> Self {
        Self::default().and_plan(state)
    }

    pub fn eviction(mark: EvictionCondition) -> Self {
        Self {
            eviction: Some(mark),
            ..Self::default()
        }
    }

    pub fn and_nominate(self, node: NodeName) -> Self {
        Self {
            nomination: Some(NominationChange::To(node)),
            ..self
        }
    }

    pub fn and_clear_nomination(self) -> Self {
        Self {
            nomination: Some(NominationChange::Cleared),
            ..self
        }
    }

    pub fn and_requeue(self) -> Self {
        Self {
            requeue: Some(RequeueMark),
            ..self
        }
    }

    pub fn and_plan(self, state: PlanState) -> Self {
        Self {
            plan: Some(state),
            ..self
        }
    }

    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// The part that the write is for, as a metric label.
    pub fn kind(&self) -> &'static str {
        match self {
            Self {
                reservation: Some(_),
                ..
            } => "reservation",
            Self {
                nomination: Some(_),
                ..
            } => "nomination",
            Self { plan: Some(_), .. } => "plan",
            Self {
                eviction: Some(_), ..
            } => "eviction-reason",
            Self { wake: Some(_), .. } => "wake",
            Self {
                requeue: Some(RequeueMark),
                ..
            } => "requeue",
            _ => "nothing",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn every_eviction_reason_is_unique_and_its_text_names_the_pod_or_group() {
        let (llama, group) = (
            PodKey::parse("team-a", "llama").unwrap(),
            Arc::<str>::from("team-b/train"),
        );
        let reasons = [
            (
                EvictionReason::Preempted { by: llama.clone() },
                "team-a/llama",
            ),
            (
                EvictionReason::Reclaimed {
                    owner: "a".into(),
                    by: llama.clone(),
                },
                "team-a/llama",
            ),
            (
                EvictionReason::Pressure {
                    engine: llama.clone(),
                    gpu: GpuUuid::from_index(3),
                },
                "team-a/llama",
            ),
            (
                EvictionReason::Consolidated {
                    to_fit: llama.clone(),
                },
                "team-a/llama",
            ),
            (
                EvictionReason::LoanEnded {
                    lender: Some(llama.clone()),
                    gpu: GpuUuid::from_index(3),
                    is_early: false,
                },
                "team-a/llama",
            ),
            (
                EvictionReason::Conflict {
                    with: llama.clone(),
                    gpu: GpuUuid::from_index(3),
                },
                "team-a/llama",
            ),
            (
                EvictionReason::GroupEvicted {
                    group: group.clone(),
                    by: llama,
                },
                "team-a/llama",
            ),
            (EvictionReason::GroupIncomplete { group }, "team-b/train"),
        ];
        for (reason, named) in &reasons {
            let text = reason.to_string();
            assert!(text.contains(named) && text.ends_with('.'), "{text}");
            let text_in = |namespace| reason.text_for(&PodKey::parse(namespace, "victim").unwrap());
            assert_eq!(text_in("team-a"), text);
            assert!(
                !text_in("team-b").contains("team-a"),
                "{}",
                text_in("team-b")
            );
            assert!(
                reason
                    .reason()
                    .bytes()
                    .all(|byte| byte.is_ascii_alphabetic()),
                "{}",
                reason.reason()
            );
        }
        let words: BTreeSet<&str> = reasons.iter().map(|(reason, _)| reason.reason()).collect();
        assert_eq!(words.len(), reasons.len());
    }

    #[test]
    fn a_write_is_labelled_by_its_most_important_part() {
        let node = NodeName::parse("a").unwrap();
        let nominated = StatusChange::nominate(node).and_requeue();
        assert_eq!(nominated.kind(), "nomination");
        assert_eq!(
            nominated
                .and_plan(PlanState::Unschedulable { why: "why".into() })
                .kind(),
            "nomination"
        );
        assert_eq!(
            StatusChange {
                reservation: Some(ReservationChange::Ended),
                ..StatusChange::requeue()
            }
            .kind(),
            "reservation"
        );
        assert_eq!(StatusChange::requeue().kind(), "requeue");
        assert!(StatusChange::default().is_empty() && !StatusChange::requeue().is_empty());
    }
}
