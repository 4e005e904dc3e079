//! Which Bindings replicas are asked for, and which they are writing: beside what it is asked for, a replica writes one Binding
//! of a pod at a time, in a settling loop.

use super::*;

/// By the replica's client and the pod's UID.
type WriteKey = (String, String);

#[derive(Default)]
pub(crate) struct BindingWrites {
    asked: Mutex<BTreeMap<WriteKey, usize>>,
    /// By UID: the node to which the pod was to be bound last.
    nodes: Mutex<BTreeMap<String, String>>,
    written: Mutex<BTreeMap<WriteKey, usize>>,
    /// Pods of which more Bindings were written at once than allowed.
    too_many: Mutex<Vec<String>>,
}

/// One of a count, until it is dropped.
pub struct Counted<'a> {
    counts: &'a Mutex<BTreeMap<WriteKey, usize>>,
    key: WriteKey,
}

impl<'a> Counted<'a> {
    fn new(counts: &'a Mutex<BTreeMap<WriteKey, usize>>, key: WriteKey) -> Self {
        *counts.lock().entry(key.clone()).or_default() += 1;
        Self { counts, key }
    }
}

impl Drop for Counted<'_> {
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
    pub fn ask(&self, client: &str, uid: &str, node: &str) -> Counted<'_> {
        self.nodes.lock().insert(uid.to_owned(), node.to_owned());
        Counted::new(&self.asked, (client.to_owned(), uid.to_owned()))
    }

    /// UIDs of pods that are being bound.
    pub fn asked_for(&self) -> BTreeSet<String> {
        self.asked
            .lock()
            .keys()
            .map(|(_, uid)| uid.clone())
            .collect()
    }

    /// Whether a Binding of the pod is asked for or being written.
    pub fn concern(&self, uid: &str) -> bool {
        [&self.asked, &self.written]
            .iter()
            .any(|counts| counts.lock().keys().any(|(_, of)| of == uid))
    }

    /// The node to which the pod was to be bound last.
    pub fn node_of(&self, uid: &str) -> Option<String> {
        self.nodes.lock().get(uid).cloned()
    }

    /// Violations that were found since the last call.
    pub(crate) fn take_too_many(&self) -> Vec<String> {
        std::mem::take(&mut self.too_many.lock())
    }

    /// A replica writes a Binding, until it is answered.
    pub fn begin(&self, client: &str, binding: &Value) -> Counted<'_> {
        let uid = binding["metadata"]["uid"]
            .as_str()
            .unwrap_or_default()
            .to_owned();
        let key = (client.to_owned(), uid);
        let being_written = Counted::new(&self.written, key.clone());
        let count = |counts: &Mutex<BTreeMap<WriteKey, usize>>| {
            counts.lock().get(&key).copied().unwrap_or(0)
        };
        let (written, asked) = (count(&self.written), count(&self.asked));
        if written > asked + 1 {
            let name = binding["metadata"]["name"].as_str().unwrap_or_default();
            self.too_many.lock().push(format!(
                "{client} writes {written} Bindings of {name} at once, and is asked for {asked}"
            ));
        }
        being_written
    }
}
