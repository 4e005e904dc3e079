//! The steps after a bind request, one answer of the API server at a time.

use super::*;
use crate::ledger::{AllocationFailure, ObservedWaiting};
use crate::testkit::{LedgerCluster, demand_of, gpu_at, key, node, uid};
use crate::verbs::bind::{BindAnswer, BindAsked, BindDecision};
use crate::verbs::filter::FilterAsked;
use crate::verbs::observe::PodDeleted;
use crate::verbs::request::VerbRequest;
use crate::verbs::tick::{ClockAdvanced, LeadershipBegan, LeadershipEnded};
use crate::vocabulary::demand::Sharing;
use crate::vocabulary::disruption_info::ObservedDisruptionInfo;
use crate::vocabulary::placement::Reservation;

const LANDING: Millis = Millis::seconds(16);

/// Two nodes with a GPU each, and one pending pod.
struct BindFixture {
    cluster: LedgerCluster,
}

impl BindFixture {
    fn new() -> Self {
        let mut cluster = LedgerCluster::new(&[("a", 1), ("b", 1)]);
        cluster.add_waiting("p", demand_of(40 << 30, 1, Sharing::Shared, 0));
        Self { cluster }
    }

    fn ask(&mut self, name: &str) -> BindDecision {
        let asked = BindAsked::for_pod(self.cluster.ledger(), &uid("p"), &node(name)).unwrap();
        match self.cluster.apply(asked) {
            Ok(BindAnswer::Write(decision)) => decision,
            other => panic!("{other:?}"),
        }
    }

    fn answered(
        &mut self,
        decision: &BindDecision,
        stage: BindingStage,
        answer: BindingAnswer,
    ) -> BindingStep {
        let placement = decision.placement.clone();
        self.cluster.apply(BindingAnswered {
            uid: uid("p"),
            placement,
            stage,
            answer,
            max_commit_delay: LANDING,
        })
    }

    fn read(&mut self, decision: &BindDecision, stage: BindingStage, pod: PodRead) -> BindingStep {
        let asked = self.cluster.ledger().now();
        self.read_since(asked, decision, stage, pod)
    }

    fn read_since(
        &mut self,
        asked: Moment,
        decision: &BindDecision,
        stage: BindingStage,
        pod: PodRead,
    ) -> BindingStep {
        let (uid, placement) = (uid("p"), decision.placement.clone());
        self.cluster.apply(BindingRead {
            uid,
            placement,
            stage,
            pod,
            requested_at: asked,
            max_commit_delay: LANDING,
        })
    }

    /// Asks for node `a`, leaves the Binding without an answer, and starts its settling loop.
    fn left_open(&mut self) -> BindDecision {
        let decision = self.ask("a");
        assert_eq!(
            self.answered(&decision, REQUEST, BindingAnswer::Unknown),
            BindingStep::Settle
        );
        assert!(self.settle(&decision).is_some());
        decision
    }

    /// A settling loop wants to begin.
    fn settle(&mut self, decision: &BindDecision) -> Option<BindingStep> {
        self.cluster.apply(SettlingAsked {
            uid: uid("p"),
            placement: decision.placement.clone(),
        })
    }

    /// An API server that hangs has left a Binding to node `a` open, with its loop. The pod is deleted then, and kube-scheduler,
    /// whose watch lags, asks for it once more.
    fn deleted_with_an_open_binding(&mut self) -> BindDecision {
        let open = self.left_open();
        self.cluster.apply(PodDeleted(uid("p")));
        self.cluster
            .add_waiting("p", demand_of(40 << 30, 1, Sharing::Shared, 0));
        open
    }

    /// The Lease is taken for the `nth` time, by this replica.
    fn lead(&mut self, nth: i32) {
        self.cluster
            .apply(LeadershipBegan(LeaderEpoch::new("lease", nth, "nonce")));
    }

    fn pass(&mut self, time: Millis) {
        let now = self.cluster.ledger().now() + time;
        self.cluster.apply(ClockAdvanced(now));
    }

    fn is_assumed(&self) -> bool {
        self.cluster
            .ledger()
            .pod_state(&uid("p"))
            .unwrap()
            .is_assumed()
    }
}

const REQUEST: BindingStage = BindingStage::Request { is_new: true };
const SETTLING: BindingStage = BindingStage::Settling;

#[test]
fn a_written_binding_binds_the_pod() {
    let mut bench = BindFixture::new();
    let decision = bench.ask("a");
    assert_eq!(
        bench.answered(&decision, REQUEST, BindingAnswer::Written),
        BindingStep::Bound
    );
    assert!(!bench.is_assumed());
    assert_eq!(bench.cluster.unsettled_bindings(), 0);
}

#[test]
fn a_refused_binding_frees_the_gpus() {
    let mut bench = BindFixture::new();
    let decision = bench.ask("a");
    let step = bench.answered(&decision, REQUEST, BindingAnswer::Refused);
    assert_eq!(
        (step, bench.is_assumed()),
        (BindingStep::Failed(AllocationFailure::Refused), false)
    );
}

#[test]
fn a_second_requests_refusal_does_not_free_what_the_first_may_still_bind() {
    let mut bench = BindFixture::new();
    let first = bench.ask("a");
    let second = bench.ask("a");
    assert!(!second.is_new);
    let stage = BindingStage::Request { is_new: false };
    assert_eq!(
        bench.answered(&second, stage, BindingAnswer::Refused),
        BindingStep::Failed(AllocationFailure::Refused)
    );
    assert!(bench.is_assumed());
    assert_eq!(
        bench.answered(&first, REQUEST, BindingAnswer::Written),
        BindingStep::Bound
    );
}

#[test]
fn a_conflict_is_settled_by_a_read() {
    let devices = Some(Arc::from([gpu_at("b", 0)]));
    for (pod, step) in [
        (
            PodRead::Bound {
                node: node("a"),
                devices: None,
                borrows: false,
            },
            BindingStep::Bound,
        ),
        (
            PodRead::Bound {
                node: node("b"),
                devices,
                borrows: false,
            },
            BindingStep::Failed(AllocationFailure::BoundElsewhere { node: node("b") }),
        ),
        (
            PodRead::Gone,
            BindingStep::Failed(AllocationFailure::PodGone),
        ),
        (PodRead::Unbound, BindingStep::Settle),
        (PodRead::Failed, BindingStep::Settle),
    ] {
        let mut bench = BindFixture::new();
        let decision = bench.ask("a");
        assert_eq!(
            bench.answered(&decision, REQUEST, BindingAnswer::Conflict),
            BindingStep::Read
        );
        assert_eq!(bench.read(&decision, REQUEST, pod.clone()), step, "{pod:?}");
    }
}

#[test]
fn nothing_is_kept_of_a_conflict_that_a_read_settles() {
    for pod in [
        PodRead::Bound {
            node: node("a"),
            devices: None,
            borrows: false,
        },
        PodRead::Bound {
            node: node("b"),
            devices: None,
            borrows: false,
        },
        PodRead::Gone,
    ] {
        let mut bench = BindFixture::new();
        let decision = bench.ask("a");
        bench.answered(&decision, REQUEST, BindingAnswer::Conflict);
        bench.read(&decision, REQUEST, pod.clone());
        assert_eq!(bench.cluster.unsettled_bindings(), 0, "{pod:?}");
    }
}

#[test]
fn a_read_for_another_request_ends_no_settling_loop() {
    let mut bench = BindFixture::new();
    let first = bench.ask("a");
    bench.answered(&first, REQUEST, BindingAnswer::Unknown);
    bench.settle(&first);
    let second = bench.ask("a");
    let stage = BindingStage::Request { is_new: false };
    bench.answered(&second, stage, BindingAnswer::Conflict);
    let pod = PodRead::Bound {
        node: node("a"),
        devices: None,
        borrows: false,
    };
    assert_eq!(bench.read(&second, stage, pod), BindingStep::Bound);
    assert_eq!(bench.settle(&first), None, "it runs still");
    assert_eq!(
        bench.read(&first, SETTLING, PodRead::Unbound),
        BindingStep::Over
    );
    assert_eq!(bench.cluster.unsettled_bindings(), 0);
}

#[test]
fn an_unanswered_binding_is_written_again_until_a_read_or_a_write_settles_it() {
    let mut bench = BindFixture::new();
    let decision = bench.ask("a");
    assert_eq!(
        bench.answered(&decision, REQUEST, BindingAnswer::Unknown),
        BindingStep::Settle
    );
    let first = bench.settle(&decision);
    assert!(matches!(first, Some(BindingStep::Pause(_))), "{first:?}");
    assert_eq!(bench.settle(&decision), None, "one loop for each placement");
    let step = bench.read(&decision, SETTLING, PodRead::Failed);
    assert!(matches!(step, BindingStep::Pause(_)), "{step:?}");
    assert_eq!(
        bench.read(&decision, SETTLING, PodRead::Unbound),
        BindingStep::Write
    );
    let step = bench.answered(&decision, SETTLING, BindingAnswer::Unknown);
    assert!(matches!(step, BindingStep::Pause(_)), "{step:?}");
    assert_eq!(
        bench.read(&decision, SETTLING, PodRead::Unbound),
        BindingStep::Write
    );
    assert_eq!(
        bench.answered(&decision, SETTLING, BindingAnswer::Written),
        BindingStep::Bound
    );
    assert_eq!(bench.cluster.unsettled_bindings(), 0);
}

/// The loop used to go on as long as the pod was assumed, wherever: it wrote the given up Binding again, and the pod was bound
/// to GPUs that had been given to others.
#[test]
fn a_settling_loop_ends_when_its_placement_is_given_up_and_the_pod_assumed_elsewhere() {
    let mut bench = BindFixture::new();
    let decision = bench.left_open();
    bench.pass(LANDING + Millis(1));
    assert_eq!(
        bench.answered(&decision, SETTLING, BindingAnswer::Refused),
        BindingStep::Over
    );
    let elsewhere = bench.ask("b");
    assert_eq!(
        bench.read(&decision, SETTLING, PodRead::Unbound),
        BindingStep::Over
    );
    assert_eq!(
        bench.answered(&elsewhere, REQUEST, BindingAnswer::Written),
        BindingStep::Bound
    );
}

#[test]
fn a_refusal_frees_nothing_while_an_earlier_write_may_still_land() {
    let mut bench = BindFixture::new();
    let decision = bench.left_open();
    bench.pass(Millis::seconds(9));
    assert_eq!(
        bench.read(&decision, SETTLING, PodRead::Unbound),
        BindingStep::Write
    );
    let step = bench.answered(&decision, SETTLING, BindingAnswer::Refused);
    assert!(matches!(step, BindingStep::Pause(_)), "{step:?}");
    assert!(bench.is_assumed());
}

/// No watch would show the end of such an allocation: it has shown that of the pod.
#[test]
fn a_refused_binding_is_settled_if_an_earlier_one_of_a_pod_that_is_gone_may_still_land() {
    for name in ["a", "b"] {
        let mut bench = BindFixture::new();
        let open = bench.deleted_with_an_open_binding();
        let asked = bench.ask(name);
        assert!(asked.is_new);
        assert_eq!(
            bench.answered(&asked, REQUEST, BindingAnswer::Refused),
            BindingStep::Settle
        );
        let own = bench.settle(&asked);
        let earlier = bench.read(&open, SETTLING, PodRead::Failed);
        let steps = [Some(earlier), own];
        let going_on = steps
            .iter()
            .flatten()
            .filter(|step| matches!(step, BindingStep::Pause(_)))
            .count();
        assert_eq!(going_on, 1, "one loop for {name}: {steps:?}");
        assert_eq!(
            bench.read(&asked, SETTLING, PodRead::Gone),
            BindingStep::Failed(AllocationFailure::PodGone)
        );
        assert!(bench.cluster.ledger().pod_state(&uid("p")).is_none());
        assert_eq!(bench.cluster.unsettled_bindings(), 0);
    }
}

#[test]
fn the_end_of_an_earlier_loop_does_not_settle_what_has_been_written_since() {
    let mut bench = BindFixture::new();
    let open = bench.deleted_with_an_open_binding();
    let asked = bench.ask("b");
    assert_eq!(
        bench.answered(&asked, REQUEST, BindingAnswer::Unknown),
        BindingStep::Settle
    );
    assert_eq!(
        bench.read(&open, SETTLING, PodRead::Failed),
        BindingStep::Over
    );
    assert!(bench.settle(&asked).is_some());
    assert_eq!(
        bench.read(&asked, SETTLING, PodRead::Unbound),
        BindingStep::Write
    );
    let step = bench.answered(&asked, SETTLING, BindingAnswer::Refused);
    assert!(matches!(step, BindingStep::Pause(_)), "{step:?}");
    assert!(bench.is_assumed(), "the first of the two may land");
}

/// Between the two terms another replica led, and may have allocated the GPUs to other pods.
#[test]
fn a_placement_of_an_earlier_term_is_not_written_again_and_is_given_up_once_no_write_of_it_can_land()
 {
    let mut bench = BindFixture::new();
    bench.lead(1);
    let decision = bench.left_open();
    bench.cluster.apply(LeadershipEnded);
    bench.lead(3);
    let step = bench.read(&decision, SETTLING, PodRead::Unbound);
    assert!(
        matches!(step, BindingStep::Pause(_)),
        "the earlier write may land: {step:?}"
    );
    let asked = BindAsked::for_pod(bench.cluster.ledger(), &uid("p"), &node("a")).unwrap();
    let unsettled = AllocationFailure::Unsettled { node: node("a") };
    assert_eq!(bench.cluster.apply(asked), Err(unsettled));
    assert!(bench.is_assumed());
    bench.pass(LANDING + Millis(1));
    assert_eq!(
        bench.read(&decision, SETTLING, PodRead::Unbound),
        BindingStep::Over
    );
    assert!(!bench.is_assumed(), "the GPU is free");
    assert_eq!(bench.cluster.unsettled_bindings(), 0);
    assert!(bench.ask("a").is_new, "and allocated in the present term");
}

#[test]
fn a_placement_of_an_earlier_term_that_was_written_is_the_pods() {
    let mut bench = BindFixture::new();
    bench.lead(1);
    let decision = bench.left_open();
    bench.lead(3);
    bench.pass(LANDING + Millis(1));
    let pod = PodRead::Bound {
        node: node("a"),
        devices: None,
        borrows: false,
    };
    assert_eq!(bench.read(&decision, SETTLING, pod), BindingStep::Bound);
}

/// Another leader may have ended it, and given the GPU to another pod.
#[test]
fn a_reservation_of_an_earlier_term_that_would_not_be_made_now_goes_with_the_placement() {
    for is_taken in [false, true] {
        let mut bench = BindFixture::new();
        bench.lead(1);
        let (devices, deadline) = (
            Arc::from([gpu_at("a", 0)]),
            bench.cluster.ledger().now() + Millis::seconds(600),
        );
        let reservation = Reservation {
            node: node("a"),
            devices,
            victims: Arc::default(),
            deadline,
        };
        bench
            .cluster
            .ledger_mut()
            .reserve(&uid("p"), reservation)
            .unwrap();
        let decision = bench.left_open();
        bench.cluster.apply(LeadershipEnded);
        if is_taken {
            let demand = demand_of(40 << 30, 1, Sharing::Shared, 0);
            bench.cluster.add_running(
                "q",
                ("a", 0),
                demand,
                None,
                ObservedDisruptionInfo::default(),
            );
        }
        bench.lead(3);
        bench.pass(LANDING + Millis(1));
        assert_eq!(
            bench.read(&decision, SETTLING, PodRead::Unbound),
            BindingStep::Over
        );
        bench.cluster.advance(1);
        assert_eq!(
            bench
                .cluster
                .ledger()
                .reservation_status_of(&uid("p"))
                .is_some(),
            !is_taken,
            "is taken: {is_taken}"
        );
    }
}

/// kube-apiserver may have answered the read before the write landed.
#[test]
fn a_read_that_began_while_a_write_could_land_gives_no_placement_up() {
    let mut bench = BindFixture::new();
    bench.lead(1);
    let decision = bench.ask("a");
    bench.pass(Millis::seconds(5));
    bench.answered(&decision, REQUEST, BindingAnswer::Unknown);
    bench.settle(&decision);
    bench.lead(3);
    bench.pass(LANDING);
    let asked = bench.cluster.ledger().now();
    bench.pass(Millis::seconds(5));
    let step = bench.read_since(asked, &decision, SETTLING, PodRead::Unbound);
    assert!(matches!(step, BindingStep::Pause(_)), "{step:?}");
    assert!(bench.is_assumed());
    let asked = asked + Millis(1);
    assert_eq!(
        bench.read_since(asked, &decision, SETTLING, PodRead::Unbound),
        BindingStep::Over
    );
}

/// While no Binding is answered, memory may be taken, and start gates open, where the pod was to go.
#[test]
fn a_placement_is_written_again_for_ten_seconds_and_given_up_once_no_write_of_it_can_land() {
    let mut bench = BindFixture::new();
    let decision = bench.left_open();
    bench.pass(Millis(9_999));
    assert!(!bench.ask("a").is_new, "kube-scheduler asks again");
    bench.answered(
        &decision,
        BindingStage::Request { is_new: false },
        BindingAnswer::Unknown,
    );
    assert_eq!(
        bench.read(&decision, SETTLING, PodRead::Unbound),
        BindingStep::Write
    );
    bench.answered(&decision, SETTLING, BindingAnswer::Unknown);
    bench.pass(Millis(1));
    let step = bench.read(&decision, SETTLING, PodRead::Unbound);
    assert!(matches!(step, BindingStep::Pause(_)), "{step:?}");
    let asked = BindAsked::for_pod(bench.cluster.ledger(), &uid("p"), &node("a")).unwrap();
    let unsettled = AllocationFailure::Unsettled { node: node("a") };
    assert_eq!(bench.cluster.apply(asked), Err(unsettled));
    bench.pass(LANDING);
    assert_eq!(
        bench.read(&decision, SETTLING, PodRead::Unbound),
        BindingStep::Over
    );
    assert!(bench.ask("a").is_new, "it is decided anew");
}

/// The API server answered the read before the pod went, slowly. Then a late request of kube-scheduler named the pod once more.
#[test]
fn a_read_that_is_older_than_its_pods_end_brings_no_pod_back() {
    for answer in [None, Some(BindingAnswer::Written)] {
        let mut bench = BindFixture::new();
        let first = bench.ask("a");
        let second = bench.ask("a");
        assert_eq!(
            bench.answered(&first, REQUEST, BindingAnswer::Written),
            BindingStep::Bound
        );
        bench.cluster.apply(PodDeleted(uid("p")));
        let demand = demand_of(40 << 30, 1, Sharing::Shared, 0);
        let disruption = Some(ObservedDisruptionInfo::default());
        let waiting = ObservedWaiting::default();
        let request = VerbRequest {
            uid: uid("p"),
            key: key("p"),
            demand,
            waiting,
            disruption,
        };
        bench.cluster.apply(FilterAsked(request));
        let stage = BindingStage::Request { is_new: false };
        let step = match answer {
            Some(answer) => bench.answered(&second, stage, answer),
            None => {
                let pod = PodRead::Bound {
                    node: node("a"),
                    devices: second.placement.recorded_gpus(),
                    borrows: false,
                };
                bench.read(&second, stage, pod)
            }
        };
        assert_eq!(
            step,
            BindingStep::Bound,
            "it was bound, and kube-scheduler forgets it"
        );
        assert_eq!(
            bench.cluster.ledger().pod_state(&uid("p")).unwrap().node(),
            None,
            "no watch would show its end"
        );
    }
}
