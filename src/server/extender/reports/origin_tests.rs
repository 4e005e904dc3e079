//! Which machine a report is of, when another one has got the node's name.

use super::*;
use crate::extender::request::RequestLimits;
use crate::kubernetes::testing::Recorder;
use crate::service::{ServerState, TimeSource};
use serde_json::json;
use std::cell::Cell;
use std::time::Duration;
use stowage_kubernetes_objects::port::AgentNode;
use stowage_scheduling::policy::Policy;
use stowage_scheduling::verbs::observe::NodeObserved;
use stowage_scheduling::vocabulary::gpu::Health;
use stowage_scheduling::vocabulary::node::{NodeIdentity, NodeKind};

thread_local! {
    /// Time since the replica started.
    static SECONDS: Cell<u64> = const { Cell::new(0) };
}

/// When the replica started, by the wall clock.
const STARTED: i64 = 1_700_000_000;

const TIME: TimeSource = TimeSource {
    monotonic: || Duration::from_secs(SECONDS.get()),
    wall: || jiff::Timestamp::from_second(STARTED + SECONDS.get() as i64).unwrap(),
};

/// A replica that has just started, in a cluster of one node.
struct NewReplica {
    extender: Extender,
}

impl NewReplica {
    fn start() -> Self {
        SECONDS.set(0);
        let state = ServerState::with_time_source(TIME, Policy::default());
        let limits = RequestLimits::default();
        Self {
            extender: Extender::new(state, Arc::new(Recorder::default()), limits),
        }
    }

    /// The watch shows this Node object on this machine. It was created when the replica started.
    fn show_on(&self, uid: &str, machine: Option<&str>) {
        self.show_created(uid, machine, created(uid));
    }

    fn show_created(&self, uid: &str, machine: Option<&str>, created: i64) {
        let (uid, machine) = (uid.into(), machine.map(Into::into));
        let identity = Some(NodeIdentity {
            uid,
            machine,
            created: Some(created),
        });
        let observed = NodeObserved {
            identity,
            ..NodeObserved::new(node(), NodeKind::Stowage)
        };
        self.extender.state.cluster().apply(observed);
    }

    /// The same, on a machine of its own.
    fn show(&self, uid: &str) {
        self.show_on(uid, Some(uid));
    }

    /// Whether a report counts that comes so many seconds after the start. The agent has a boot for each kind of GPUs.
    fn takes(&self, sender: &Sender, seconds: u64, gpus: &str) -> bool {
        let gpu = |index| json!({ "uuid": format!("GPU-{gpus}-{index}"), "index": index, "model": "H100", "totalBytes": 80u64 << 30 });
        let report = json!({
            "node": "n", "bootId": gpus, "sequence": seconds + 1, "ageMillis": 0, "gpus": [gpu(0), gpu(1)],
        });
        self.takes_text(sender, seconds, &report.to_string())
    }

    fn takes_text(&self, sender: &Sender, seconds: u64, text: &str) -> bool {
        SECONDS.set(seconds);
        match reports(
            &self.extender,
            sender,
            self.extender.state.now(),
            text.as_bytes(),
        ) {
            Ok(taken) => {
                assert_eq!(taken.accepted, 1, "it is not dropped for another reason");
                true
            }
            Err(error) => {
                assert_eq!(error.code(), "replaced-node");
                false
            }
        }
    }

    /// The healthy GPUs that the ledger knows, shortened.
    fn gpus(&self) -> Vec<String> {
        let devices = self
            .extender
            .state
            .cluster()
            .ledger()
            .node(&node())
            .unwrap()
            .devices
            .clone();
        let healthy = devices
            .iter()
            .filter(|device| device.health == Health::Healthy);
        healthy
            .map(|device| device.uuid.as_str().replace("GPU-", ""))
            .collect()
    }
}

/// When the Node was created.
fn created(uid: &str) -> i64 {
    STARTED
        + ["first", "second", "third"]
            .iter()
            .position(|known| *known == uid)
            .unwrap() as i64
}

/// The agent whose token names this Node object, and was issued so many seconds after that was created.
fn agent_since(uid: &str, seconds: i64) -> Sender {
    let issued = Some(created(uid) + seconds);
    Sender::AgentOn(AgentNode {
        name: node(),
        uid: Some(uid.into()),
        issued,
    })
}

fn node() -> NodeName {
    NodeName::parse("n").unwrap()
}

/// The agent whose token names this Node object, and does not say when it was issued.
fn agent(uid: &str) -> Sender {
    Sender::AgentOn(AgentNode {
        name: node(),
        uid: Some(uid.into()),
        issued: None,
    })
}

#[test]
fn a_late_report_of_the_old_machine_does_not_restore_its_gpus() {
    for senders in [
        [Sender::Anyone, Sender::Anyone],
        [agent("first"), agent("second")],
    ] {
        for (machines, is_taken) in [
            ([Some("one"), Some("two")], false),
            ([None, None], false),
            ([Some("one"), Some("one")], true),
        ] {
            let replica = NewReplica::start();
            replica.show_on("first", machines[0]);
            assert!(replica.takes(&senders[0], 0, "old"));
            replica.show_on("second", machines[1]);
            assert_eq!(
                replica.takes(&senders[0], 1, "old"),
                is_taken,
                "{machines:?}"
            );
            assert_eq!(replica.gpus().len(), if is_taken { 2 } else { 0 });
            assert!(
                replica.takes(&senders[1], 2, "new"),
                "an agent that starts on the new machine"
            );
            assert_eq!(replica.gpus(), ["new-0", "new-1"]);
        }
    }
}

/// It knows no agent of the machine before.
#[test]
fn a_late_first_report_of_the_old_machine_is_not_attributed_to_the_new_one() {
    let replica = NewReplica::start();
    replica.show("second");
    assert!(!replica.takes(&agent("first"), 0, "old"));
    assert!(replica.takes(&agent("second"), 1, "new"));
    assert!(!replica.takes(&agent("first"), 2, "old"));
    assert!(
        !replica.takes(&agent("first"), 40, "old"),
        "the Node has another agent"
    );
    assert!(replica.takes(&agent("second"), 41, "new"));
    assert_eq!(replica.gpus(), ["new-0", "new-1"]);
}

#[test]
fn an_agent_that_is_ahead_of_the_watch_of_nodes_counts_as_soon_as_its_node_shows() {
    let replica = NewReplica::start();
    replica.show("first");
    assert!(replica.takes(&agent("first"), 0, "old"));
    assert!(
        !replica.takes(&agent("second"), 1, "new"),
        "it is not on the first machine"
    );
    replica.show("second");
    assert!(replica.takes(&agent("second"), 2, "new"));
}

/// A token names the Node before for up to an hour, and some machines say nothing of themselves.
#[test]
fn an_agent_whose_node_registered_again_counts_at_once_or_when_no_late_report_can_come() {
    for (machine, counts_at_once) in [(Some("machine"), true), (None, false)] {
        let replica = NewReplica::start();
        replica.show_on("first", machine);
        assert!(replica.takes(&agent("first"), 0, "its"));
        replica.show_on("second", machine);
        assert_eq!(replica.takes(&agent("first"), 1, "its"), counts_at_once);
        assert_eq!(replica.takes(&agent("first"), 30, "its"), counts_at_once);
        assert!(replica.takes(&agent("first"), 31, "its"));
        assert_eq!(replica.gpus(), ["its-0", "its-1"]);
    }
}

/// The machine before is not known, or the token names no Node.
#[test]
fn an_agent_whose_token_does_not_name_the_node_counts_when_no_late_report_can_come() {
    for sender in [
        agent("first"),
        Sender::AgentOn(AgentNode {
            name: node(),
            uid: None,
            issued: None,
        }),
    ] {
        let replica = NewReplica::start();
        replica.show("second");
        assert!(!replica.takes(&sender, 0, "its"));
        assert!(!replica.takes(&sender, 29, "its"));
        replica.show("third");
        assert!(!replica.takes(&sender, 30, "its"), "the time begins again");
        assert!(!replica.takes(&sender, 59, "its"));
        assert!(replica.takes(&sender, 60, "its"));
    }
}

#[test]
fn the_nodes_own_agent_replaces_one_that_counted_because_there_was_none() {
    let replica = NewReplica::start();
    replica.show("first");
    assert!(replica.takes(&agent("first"), 0, "old"));
    replica.show_on("second", None);
    assert!(!replica.takes(&agent("first"), 1, "old"));
    assert!(replica.takes(&agent("first"), 31, "old"));
    // Its kubelet shows the machine late.
    replica.show_on("second", Some("second"));
    assert!(replica.takes(&agent("second"), 40, "new"));
    assert!(!replica.takes(&agent("first"), 41, "old-again"));
    assert!(replica.takes(&agent("second"), 42, "new"));
    assert_eq!(replica.gpus(), ["new-0", "new-1"]);
}

#[test]
fn reports_from_an_agent_of_another_machine_never_count() {
    let replica = NewReplica::start();
    replica.show("first");
    let old = agent_since("first", 0);
    assert!(replica.takes(&old, 0, "old"));
    replica.show("second");
    for seconds in [1, 40, 1000] {
        assert!(!replica.takes(&old, seconds, "old"));
    }
    assert_eq!(replica.gpus(), Vec::<String>::new());
}

/// API servers take the Node that a token names from a cache.
#[test]
fn an_agent_whose_token_was_issued_since_is_the_present_nodes_own_whichever_it_names() {
    let replica = NewReplica::start();
    replica.show("first");
    assert!(replica.takes(&agent_since("first", 0), 0, "old"));
    replica.show("second");
    assert!(replica.takes(&agent_since("first", 1), 1, "new"));
    assert_eq!(replica.gpus(), ["new-0", "new-1"]);
}

/// No machine that had the name before can have sent it.
#[test]
fn every_token_counts_for_a_node_older_than_two_minutes() {
    for (age, counts) in [(119, false), (120, true)] {
        let replica = NewReplica::start();
        replica.show_created("second", Some("machine"), STARTED - age);
        assert_eq!(replica.takes(&agent("first"), 0, "its"), counts, "{age}");
    }
}

/// An agent's pod may be followed by another on the same machine.
#[test]
fn a_late_report_of_an_earlier_agent_of_the_same_machine_does_not_end_the_boot_of_the_nodes_own() {
    let replica = NewReplica::start();
    replica.show_on("first", Some("machine"));
    assert!(replica.takes(&agent("first"), 0, "its"));
    replica.show_on("second", Some("machine"));
    assert!(replica.takes(&agent("second"), 1, "its-own"));
    assert!(!replica.takes(&agent("first"), 2, "its-restarted"));
    assert!(replica.takes(&agent("second"), 3, "its-own"));
}

#[test]
fn removed_nodes_have_no_entry() {
    let replica = NewReplica::start();
    replica.show("second");
    assert!(!replica.takes(&agent("first"), 0, "old"));
    assert_eq!(replica.extender.board.origins.names(), [node()]);
    replica.extender.board.retain_nodes(|_| false);
    assert_eq!(replica.extender.board.origins.names(), []);
}

/// Without tokens, whose reports they are shows only in whether more come.
#[test]
fn a_client_without_a_token_counts_on_the_next_machine_once_no_late_report_can_come() {
    let missing = json!([{ "part": "gpus", "reason": "no driver yet" }]);
    let without_gpus =
        json!({ "node": "n", "bootId": "its", "sequence": 1, "gpus": null, "missing": missing });
    for first in [None, Some(without_gpus.to_string())] {
        let replica = NewReplica::start();
        replica.show("first");
        let is_taken = match &first {
            Some(text) => replica.takes_text(&Sender::Anyone, 0, text),
            None => replica.takes(&Sender::Anyone, 0, "its"),
        };
        assert!(is_taken);
        replica.show("second");
        for (seconds, is_taken) in [(60, false), (89, false), (90, true), (91, true)] {
            assert_eq!(
                replica.takes(&Sender::Anyone, seconds, "its"),
                is_taken,
                "{seconds}"
            );
        }
        replica.show("third");
        assert!(
            !replica.takes(&Sender::Anyone, 92, "its"),
            "it was on the second"
        );
    }
}
