//! The policy's files, as each host has them: the kubelet shows a change on one host after the other, and what it shows may be
//! broken. A process goes on under the last good policy, also under one that was good before it began.

use super::*;
use std::fs;
use std::path::PathBuf;
use std::sync::atomic::AtomicU64;
use stowage_policy_file::{self as policy_file, SourceText};
use stowage_scheduling::policy::{ConflictRule, Consolidation, Digest, Policy, WhenIncomplete};
use stowage_scheduling::units::Millis;
use stowage_server::policy_watch::{self, LastGoodStore, PolicyWatch};

/// A process has read a change by then, and taken it over, whatever the plans beside it take.
const POLICY_APPLY_TIME: Duration = Duration::from_secs(15);
/// How long a host's kubelet takes for a change, at most.
const MAX_KUBELET_DELAY: Duration = Duration::from_secs(40);
/// Texts that no policy parser accepts.
const INVALID_POLICIES: [&str; 3] = [
    "scoring: {shortlits: 1}\n",
    "classes: [{name: serving, match: ",
    "conflicts: yes\n",
];

/// Whether a history can keep its files.
pub fn check_folder() -> std::io::Result<()> {
    let folder = folder();
    fs::create_dir_all(&folder)?;
    fs::remove_dir(folder)
}

/// A new folder for one history's policy files.
fn folder() -> PathBuf {
    let number = NEXT_FOLDER_NUMBER.fetch_add(1, Ordering::Relaxed);
    std::env::temp_dir().join(format!("stowage-faults-{}-{number}", std::process::id()))
}

/// Number of the next folder: histories are played at the same time.
static NEXT_FOLDER_NUMBER: AtomicU64 = AtomicU64::new(0);

/// The good policies of a history, and the files of its hosts.
pub(crate) struct PolicyFiles {
    folder: PathBuf,
    texts: Vec<String>,
    digests: Vec<Digest>,
    hosts: [HostPolicy; HOSTS.len()],
}

/// What files say.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum PolicyText {
    /// The policy of that number.
    Good(usize),
    /// The text of that number, which is no policy.
    Broken(usize),
}

impl PolicyText {
    fn good(self) -> Option<usize> {
        match self {
            Self::Good(number) => Some(number),
            Self::Broken(_) => None,
        }
    }
}

/// The policy files of one host.
#[derive(Debug, Clone)]
struct HostPolicy {
    shown: PolicyText,
    since: Instant,
    /// What comes next, and when.
    pending: Option<(Instant, PolicyText)>,
    /// Which of the good ones may be in force in its process, or was in its last one.
    possible_policies: BTreeSet<usize>,
}

impl PolicyFiles {
    pub(super) fn new(features: HistoryFeatures) -> Self {
        let policies: Vec<Policy> = (0..4).map(|number| policy(number, features)).collect();
        let texts: Vec<String> = policies.iter().map(policy_text).collect();
        let digest = |text: &String| {
            let loaded = policy_file::load(&[SourceText::new("policy.yaml", text.as_str())]);
            loaded
                .map(|loaded| loaded.policy.digest)
                .expect("what is rendered can be read")
        };
        let digests = texts.iter().map(digest).collect();
        let host = HostPolicy {
            shown: PolicyText::Good(0),
            since: Instant::now(),
            pending: None,
            possible_policies: BTreeSet::new(),
        };
        let mut files = Self {
            folder: folder(),
            texts,
            digests,
            hosts: [host.clone(), host],
        };
        (0..HOSTS.len()).for_each(|host| files.show(host, PolicyText::Good(0)));
        files
    }

    fn path(&self, host: usize) -> PathBuf {
        self.folder.join(HOSTS[host])
    }

    /// What a process that begins on the host finds.
    pub fn open(&mut self, host: usize) -> (Policy, PolicyWatch) {
        if let Some(good) = self.hosts[host].shown.good() {
            self.hosts[host].possible_policies = [good].into();
        }
        let last_good = LastGoodStore::in_directory(self.folder.join("kept").join(HOSTS[host]));
        policy_watch::open(self.path(host), Some(last_good)).expect("there are files")
    }

    fn show(&mut self, host: usize, policy: PolicyText) {
        let text = match policy {
            PolicyText::Good(number) => self.texts[number].as_str(),
            PolicyText::Broken(number) => INVALID_POLICIES[number],
        };
        // A mounted ConfigMap is swapped as a whole.
        let (path, new) = (self.path(host), self.folder.join("new"));
        let written = fs::create_dir_all(&path)
            .and_then(|()| fs::write(&new, text))
            .and_then(|()| fs::rename(&new, path.join("policy.yaml")));
        written.expect("the system's folder for temporary files can be written");
        let HostPolicy {
            shown,
            since,
            possible_policies: good,
            ..
        } = &mut self.hosts[host];
        (*shown, *since) = (policy, Instant::now());
        good.extend(policy.good());
    }

    /// A change comes to each host in its own time.
    fn schedule_change(&mut self, policy: PolicyText, delays: [Duration; HOSTS.len()]) {
        for (host, after) in self.hosts.iter_mut().zip(delays) {
            host.pending = Some((Instant::now() + after, policy));
        }
    }

    /// What was to come by now is shown. Returns on which hosts.
    fn apply_due_changes(&mut self, by: Instant) -> Vec<(usize, PolicyText)> {
        let due = |host: &mut HostPolicy| {
            host.pending
                .take_if(|(at, _)| *at <= by)
                .map(|(_, policy)| policy)
        };
        let due: Vec<_> = self
            .hosts
            .iter_mut()
            .enumerate()
            .filter_map(|(at, host)| Some((at, due(host)?)))
            .collect();
        due.iter()
            .for_each(|(host, policy)| self.show(*host, *policy));
        due
    }

    /// A good policy that is shown for long, to a process that runs for as long, is the one in force.
    fn confirm_policy(&mut self, host: usize, started: Instant) {
        let HostPolicy {
            shown,
            since,
            possible_policies: good,
            ..
        } = &mut self.hosts[host];
        let shown_since = (*since).max(started);
        if let Some(shown) = shown
            .good()
            .filter(|_| shown_since.elapsed() >= POLICY_APPLY_TIME)
        {
            *good = [shown].into();
        }
    }

    fn may_be_in_force(&self, host: usize, digest: Digest) -> bool {
        self.hosts[host]
            .possible_policies
            .iter()
            .any(|good| self.digests[*good] == digest)
    }
}

impl Drop for PolicyFiles {
    fn drop(&mut self) {
        // What is left there harms nobody.
        let _ = fs::remove_dir_all(&self.folder);
    }
}

impl FaultyCluster {
    pub(super) fn disturb_policy(&mut self) {
        if self.dice.below(200) == 0 {
            let number = self.dice.below(4);
            if self.try_inject(FaultKind::PolicySwap) {
                self.change_policy(PolicyText::Good(number));
            }
        }
        if self.dice.below(200) == 0 {
            let number = self.dice.below(INVALID_POLICIES.len());
            if self.try_inject(FaultKind::BadPolicy) {
                self.change_policy(PolicyText::Broken(number));
            }
        }
    }

    fn change_policy(&mut self, policy: PolicyText) {
        let arrives = [0; HOSTS.len()]
            .map(|_| random_duration(&mut self.dice, Duration::ZERO, MAX_KUBELET_DELAY));
        self.policies.schedule_change(policy, arrives);
    }

    /// Once all is quiet, the files are a policy again.
    pub(super) fn restore_policy(&mut self) {
        self.policies
            .schedule_change(PolicyText::Good(0), [Duration::ZERO; HOSTS.len()]);
    }

    /// What the kubelets show, and whether each process goes by a policy that it may.
    pub(super) fn check_policies(&mut self) {
        for (host, policy) in self.policies.apply_due_changes(Instant::now()) {
            self.log(format!("the files of {} say {policy:?}", HOSTS[host]));
        }
        for host in 0..HOSTS.len() {
            let Some(replica) = &self.replicas[host] else {
                continue;
            };
            self.policies.confirm_policy(host, replica.started);
            let digest = replica.state.cluster().ledger().policy().digest;
            if !self.policies.may_be_in_force(host, digest) {
                let client = &replica.client;
                self.fail(format!(
                    "{client} acts under policy {digest}, which is not the last good one"
                ));
            }
        }
    }
}

/// A file that says the policy. JSON is YAML, and what has no value is left out.
fn policy_text(policy: &Policy) -> String {
    fn leave_out(value: &mut Value) {
        match value {
            Value::Object(fields) => {
                fields.retain(|_, value| !value.is_null());
                fields.values_mut().for_each(leave_out);
            }
            Value::Array(items) => items.iter_mut().for_each(leave_out),
            _ => {}
        }
    }
    let mut spec = json!(policy_file::render::render(policy));
    leave_out(&mut spec);
    // The class of all pods that are left has no conditions, not even empty ones.
    let classes = spec["classes"].as_array_mut().into_iter().flatten();
    let last = classes
        .filter(|class| class["name"] == "serving")
        .filter_map(Value::as_object_mut);
    last.for_each(|class| drop(class.remove("match")));
    spec.to_string()
}

/// The policies that a history swaps. Pages of engines are not played, and each has the headroom that the oracle knows.
fn policy(number: usize, features: HistoryFeatures) -> Policy {
    let mut policy = Policy::default();
    policy.conflicts = ConflictRule::EvictUnstarted;
    let mut classes = policy.classes().to_vec();
    classes
        .iter_mut()
        .for_each(|class| class.engine &= features.has_engines);
    if features.has_groups {
        policy.planning.groups.when_incomplete = WhenIncomplete::Evict;
    }
    let mut policy = policy
        .with_classes(classes)
        .expect("the default classes are valid");
    match number {
        0 => {}
        1 => policy.scoring.shortlist = 1,
        2 => policy.preemption.reservation_slack = Millis::seconds(10),
        _ => {
            policy.preemption.reservation_slack = Millis::seconds(60);
            // Pods are relisted. None is moved: they have no controllers.
            policy.planning.consolidation = Some(Consolidation {
                gain: Millis::seconds(3600),
            });
        }
    }
    policy
}
