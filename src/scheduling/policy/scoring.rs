//! What makes one place better than another, in the owner's weights.

use serde::{Deserialize, Serialize};

/// How much each part of a score counts. A part is 0 (nothing to say against the place) to 1,000; the place with the least
/// weighted sum wins. The defaults let a step of one outweigh all of the next: first that no busy engine is disturbed,
/// then how soon the model answers, then how well the GPU is filled.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Weights {
    /// What is lost of the cluster's free VRAM for those who come after: see [`PackingRules`](super::PackingRules).
    pub packing: u32,
    /// How near the engines there are to what the pod's class allows.
    pub kv_headroom: u32,
    /// How long until the pod's model answers there.
    pub time_to_ready: u32,
    /// How many others are on the chosen GPUs.
    pub interference: u32,
    /// GPUs of one pod that do not reach each other over NVLink.
    pub topology: u32,
    /// Pods of the same model on the node.
    pub spread: u32,
}

impl Default for Weights {
    fn default() -> Self {
        Self { packing: 1, kv_headroom: 40, time_to_ready: 20, interference: 0, topology: 5, spread: 0 }
    }
}
