//! What the API server does not let this replica read, for people: in `/readyz` and the metrics. What follows from a refusal is
//! decided where the objects are watched.

use parking_lot::Mutex;
use std::collections::BTreeMap;

/// Kinds of objects, by the name of their resource, with the status of the refusal.
#[derive(Debug, Default)]
pub struct RefusedReads(Mutex<BTreeMap<&'static str, u16>>);

impl RefusedReads {
    /// Records a refusal. Answers whether it is new.
    pub fn note(&self, what: &'static str, status: u16) -> bool {
        self.0.lock().insert(what, status).is_none()
    }

    /// Records that the objects were shown. Answers whether that is new.
    pub fn note_shown(&self, what: &str) -> bool {
        self.0.lock().remove(what).is_some()
    }

    pub fn is_refused(&self, what: &str) -> bool {
        self.0.lock().contains_key(what)
    }

    /// What is refused and how that ends; `None` if nothing is.
    pub fn describe(&self) -> Option<String> {
        let refused = self.0.lock();
        let named: Vec<String> = refused.iter().map(|(what, status)| format!("{what} ({status})")).collect();
        (!named.is_empty()).then(|| {
            format!(
                "the API server does not show {}; let Stowage's service account list and watch them, as manifests/base/rbac.yaml does",
                named.join(", ")
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_refused_is_named_until_it_is_shown() {
        let reads = RefusedReads::default();
        assert_eq!(reads.describe(), None);
        assert!(reads.note("resourceslices", 403) && !reads.note("resourceslices", 403));
        reads.note("pods", 401);
        let text = reads.describe().unwrap();
        assert!(text.contains("does not show pods (401), resourceslices (403); let"), "{text}");
        assert!(reads.is_refused("pods") && reads.note_shown("pods") && !reads.note_shown("pods"));
        assert!(!reads.is_refused("pods") && reads.is_refused("resourceslices"));
    }
}
