//! Counts requests by kind and client: tests make assertions about the request path with it.

use parking_lot::Mutex;
use std::collections::BTreeMap;

/// One kind of request: Kubernetes' verb and the resource with its subresource, by the client's User-Agent.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct ApiCall {
    pub client: String,
    /// get, list, watch, create, update, patch, delete.
    pub verb: &'static str,
    /// `pods`, `pods/binding`, `nodes/status`, …
    pub resource: String,
}

/// Counters of all requests over HTTP; calls of the in-process handle are not counted.
#[derive(Debug, Default)]
pub struct ApiCallCounts(Mutex<BTreeMap<ApiCall, u64>>);

impl ApiCallCounts {
    /// Requests of this kind from any client.
    pub fn count(&self, verb: &str, resource: &str) -> u64 {
        self.sum(|call| call.verb == verb && call.resource == resource)
    }

    /// Requests of this kind from one client.
    pub fn count_by(&self, client: &str, verb: &str, resource: &str) -> u64 {
        self.sum(|call| call.client == client && call.verb == verb && call.resource == resource)
    }

    /// All requests that read without watching, from one client: none belong on a request path.
    pub fn reads_by(&self, client: &str) -> u64 {
        self.sum(|call| call.client == client && matches!(call.verb, "get" | "list"))
    }

    pub fn all(&self) -> BTreeMap<ApiCall, u64> {
        self.0.lock().clone()
    }

    pub(super) fn record(&self, call: ApiCall) {
        *self.0.lock().entry(call).or_default() += 1;
    }

    fn sum(&self, counts: impl Fn(&ApiCall) -> bool) -> u64 {
        self.0
            .lock()
            .iter()
            .filter(|(call, _)| counts(call))
            .map(|(_, count)| count)
            .sum()
    }
}
