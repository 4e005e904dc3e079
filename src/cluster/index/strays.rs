//! Pods behind the planner's gate that it will never place: they ask for no GPU, or nobody understands for what. The ledger does
//! not know them, and nobody else would let them through.

use super::Index;
use crate::contract;
use crate::ids::{PodKey, PodUid};
use crate::scheduling::plan::Why;
use k8s_openapi::api::core::v1::Pod;

impl Index {
    /// In order of UID.
    pub fn strays(&self) -> impl Iterator<Item = (&PodUid, &PodKey, Why)> {
        self.strays.iter().map(|(uid, (key, why))| (uid, key, *why))
    }

    pub(super) fn note_stray(&mut self, uid: &PodUid, key: &PodKey, pod: &Pod, is_unknown: bool) {
        let is_over = contract::is_finished(pod) || pod.metadata.deletion_timestamp.is_some();
        if !is_unknown || is_over || !contract::gates(pod).only_ours() {
            self.strays.remove(uid);
            return;
        }
        let why = if contract::asks_for_gpu(pod) { Why::NotUnderstood } else { Why::AsksForNoGpu };
        self.strays.insert(uid.clone(), (key.clone(), why));
    }
}
