//! Which Bindings replicas are asked for, and which they are writing: beside what it is asked for, a replica writes one Binding
//! of a pod at a time, in a settling loop.

use super::*;

/// By the replica's client and the pod's UID.
type WriteKey = (String, String);

#[derive(Default)]
pub(crate) struct BindingWrites {
    requested: Mutex<BTreeMap<WriteKey, usize>>,
    /// By UID: the node to which the pod was to be bound last.
    last_nodes: Mutex<BTreeMap<String, String>>,
    in_flight: Mutex<BTreeMap<WriteKey, usize>>,
    /// Pods of which more Bindings were written at once than allowed.
    violations: Mutex<Vec<String>>,
}

/// One of a count, until it is dropped.
pub struct CountGuard<'a> {
    counts: &'a Mutex<BTreeMap<WriteKey, usize>>,
    key: WriteKey,
}

impl<'a> CountGuard<'a> {
    fn new(counts: &'a Mutex<BTreeMap<WriteKey, usize>>, key: WriteKey) -> Self {
        *counts.lock().entry(key.clone()).or_default() += 1;
        Self { counts, key }
    }
}

impl Drop for CountGuard<'_> {
    fn drop(&mut self) {
        let mut counts = self.counts.lock();
        let count = counts.entry(self.key.clone()).or_default();
        *count -= 1;
        if *count == 0 {
            counts.remove(&self.key);
        }
    }
}

impl BindingWrites {
    /// kube-scheduler asks a replica for a Binding, until it is answered.
    pub fn begin_request(&self, client: &str, uid: &str, node: &str) -> CountGuard<'_> {
        self.last_nodes
            .lock()
            .insert(uid.to_owned(), node.to_owned());
        CountGuard::new(&self.requested, (client.to_owned(), uid.to_owned()))
    }

    /// UIDs of pods that are being bound.
    pub fn requested_uids(&self) -> BTreeSet<String> {
        self.requested
            .lock()
            .keys()
            .map(|(_, uid)| uid.clone())
            .collect()
    }

    /// Whether a Binding of the pod is asked for or being written.
    pub fn is_pending(&self, uid: &str) -> bool {
        [&self.requested, &self.in_flight]
            .iter()
            .any(|counts| counts.lock().keys().any(|(_, of)| of == uid))
    }

    /// The node to which the pod was to be bound last.
    pub fn node_of(&self, uid: &str) -> Option<String> {
        self.last_nodes.lock().get(uid).cloned()
    }

    /// Violations that were found since the last call.
    pub(crate) fn take_violations(&self) -> Vec<String> {
        std::mem::take(&mut self.violations.lock())
    }

    /// A replica writes a Binding, until it is answered.
    pub fn begin_write(&self, client: &str, binding: &Value) -> CountGuard<'_> {
        let uid = binding["metadata"]["uid"]
            .as_str()
            .unwrap_or_default()
            .to_owned();
        let key = (client.to_owned(), uid);
        let being_written = CountGuard::new(&self.in_flight, key.clone());
        let count = |counts: &Mutex<BTreeMap<WriteKey, usize>>| {
            counts.lock().get(&key).copied().unwrap_or(0)
        };
        let (written, requested) = (count(&self.in_flight), count(&self.requested));
        if written > requested + 1 {
            let name = binding["metadata"]["name"].as_str().unwrap_or_default();
            self.violations.lock().push(format!(
                "{client} writes {written} Bindings of {name} at once, and is asked for {requested}"
            ));
        }
        being_written
    }
}
