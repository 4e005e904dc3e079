//! A conflict as it is reported: by kind in metrics, in words on the pods, in logs and in an explanation.

use crate::ids::{GpuUuid, NodeName, PodKey, PodUid};
use crate::units::{Bytes, plural};
use serde::{Deserialize, Serialize};
use std::fmt;

/// Allocations of one GPU that exceed what it has.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct OverAllocation {
    pub kind: OverAllocationKind,
    pub node: NodeName,
    pub gpu: GpuUuid,
    /// The pods that were granted or keep a part of the GPU, in order of UID.
    pub parties: Vec<Party>,
    /// The GPU's capacity: total − what the driver reserves. Headroom is left out: a policy that raises it makes no conflict.
    /// `None` if the node does not say.
    pub capacity: Option<Bytes>,
}

#[derive(
    Debug,
    Clone,
    Copy,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Serialize,
    Deserialize,
    strum::IntoStaticStr,
    strum::VariantArray,
)]
#[strum(serialize_all = "kebab-case", const_into_str)]
#[serde(rename_all = "kebab-case")]
pub enum OverAllocationKind {
    /// Bound pods were granted more than the GPU has.
    Overcommitted,
    /// A pod that has the GPU exclusively is not alone on it.
    ExclusiveShared,
    /// Reservations keep more than the GPU has, or one of several keeps it whole.
    ReservationsOverlap,
    /// A reservation keeps VRAM of a bound pod that is not its victim.
    ReservationOverBound,
    /// A bound pod records a GPU that its node does not have.
    UnknownGpu,
}

/// A pod's part in a conflict.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Party {
    pub uid: PodUid,
    pub key: PodKey,
    /// VRAM on this GPU.
    pub bytes: Bytes,
    pub role: PartyRole,
}

/// Why a pod counts on a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PartyRole {
    Shares,
    Exclusive,
    Holds,
    HoldsExclusive,
}

impl PartyRole {
    pub fn is_exclusive(self) -> bool {
        matches!(self, Self::Exclusive | Self::HoldsExclusive)
    }
}

/// How many pods a text names; an Event's note has 1,024 bytes, and a name may have 500.
const MAX_NAMED_PODS: usize = 4;

/// The text with the names of all pods: for those who operate the cluster.
impl fmt::Display for OverAllocation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.write(f, &|_| true)
    }
}

impl OverAllocation {
    /// The text of the Event on one of the pods, without names of other namespaces.
    pub fn text_for(&self, reader: &PodKey) -> String {
        self.text_naming(&|pod| pod.namespace == reader.namespace)
    }

    /// The text with the names of the pods that its reader may see. The others are one count and one sum.
    pub fn text_naming(&self, shows: &dyn Fn(&PodKey) -> bool) -> String {
        fmt::from_fn(|f| self.write(f, shows)).to_string()
    }

    fn write(&self, f: &mut fmt::Formatter<'_>, shows: &dyn Fn(&PodKey) -> bool) -> fmt::Result {
        let Self {
            kind,
            node,
            gpu,
            parties,
            capacity,
        } = self;
        let pods = NamedPods { parties, shows };
        let sum: Bytes = parties.iter().map(|party| party.bytes).sum();
        let has = capacity.map_or_else(String::new, |capacity| format!(" of {capacity}"));
        match kind {
            OverAllocationKind::Overcommitted => {
                write!(
                    f,
                    "GPU {gpu} of node {node} is overcommitted: {pods} were granted {sum}{has}."
                )
            }
            OverAllocationKind::ExclusiveShared => write!(
                f,
                "GPU {gpu} of node {node} is exclusive to one pod and has {} pods: {pods}.",
                parties.len()
            ),
            OverAllocationKind::ReservationsOverlap => {
                write!(
                    f,
                    "Reservations on GPU {gpu} of node {node} overlap: {pods} reserve {sum}{has}."
                )
            }
            OverAllocationKind::ReservationOverBound => {
                write!(
                    f,
                    "GPU {gpu} of node {node} is reserved and in use: {pods} add up to {sum}{has}."
                )
            }
            OverAllocationKind::UnknownGpu => {
                write!(
                    f,
                    "Node {node} has no GPU {gpu}, which its Binding granted to {pods}."
                )
            }
        }
    }
}

#[derive(Clone, Copy)]
struct NamedPods<'a> {
    parties: &'a [Party],
    shows: &'a dyn Fn(&PodKey) -> bool,
}

impl fmt::Display for NamedPods<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (shown, hidden): (Vec<_>, Vec<_>) = self
            .parties
            .iter()
            .partition(|party| (self.shows)(&party.key));
        if !hidden.is_empty() {
            let sum: Bytes = hidden.iter().map(|party| party.bytes).sum();
            write!(f, "{} of others ({sum})", plural(hidden.len(), "pod"))?;
        }
        for (index, party) in shown.iter().take(MAX_NAMED_PODS).enumerate() {
            let Party {
                key, bytes, role, ..
            } = party;
            let between = if index == 0 && hidden.is_empty() {
                ""
            } else {
                ", "
            };
            match role {
                PartyRole::Shares => write!(f, "{between}{key} ({bytes})")?,
                PartyRole::Exclusive => write!(f, "{between}{key} ({bytes}, exclusive)")?,
                PartyRole::Holds => write!(f, "{between}{key} ({bytes}, reserved)")?,
                PartyRole::HoldsExclusive => write!(f, "{between}{key} (reserved exclusively)")?,
            }
        }
        match shown.len().saturating_sub(MAX_NAMED_PODS) {
            0 => Ok(()),
            more => write!(f, " and {more} more"),
        }
    }
}
