//! Takes back what Stowage wrote on nodes and pods, so that a cluster without it has nothing left that waits for it.
//!
//! Runs with the rights of the user who removes Stowage, after its manifests are deleted. What it finds it takes off with one
//! write each; those of pods and Leases name the object's UID. It can be interrupted and run again. [`leftovers`] says what there
//! is.

mod leftovers;

use futures::{StreamExt, stream};
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::api::{
    ApiResource, DeleteParams, DynamicObject, ListParams, Patch, PatchParams, Preconditions,
};
use kube::core::GroupVersionKind;
use kube::{Api, Client, Error, Resource};
use leftovers::{PodLeftovers, RemainingPodState};
use serde::de::DeserializeOwned;
use std::collections::BTreeMap;
use std::fmt::Debug;
use std::future::ready;
use std::time::Duration;
use stowage_kubernetes_objects as objects;
use stowage_scheduling::ids::{NodeName, PodKey};

/// Objects in one page of a list.
const LIST_PAGE_SIZE: u32 = 500;
/// Maximum number of attempts at a list: one whose pages expire before the last is read begins again.
const MAX_LIST_ATTEMPTS: u32 = 3;
/// Concurrent writes: tens of thousands of pods take minutes, and the load on the API server stays small.
const MAX_CONCURRENT_WRITES: usize = 8;

/// Leases of the shipped manifests, in `kube-system`: kube-scheduler's beside Stowage, and Stowage's own.
const LEASES: [&str; 2] = ["stowage-scheduler", "stowage"];
const LEASE_NAMESPACE: &str = "kube-system";

/// Longest wait, in seconds, to see whether a Lease is renewed: somebody waits at the command line.
const MAX_LEASE_SECONDS: u64 = 60;

/// Which pods are Stowage's own.
const OWN_PODS: &str = "app.kubernetes.io/name=stowage";
/// The label of every object of the manifests.
const OWN_OBJECTS: &str = "app.kubernetes.io/part-of=stowage";

#[derive(Debug, thiserror::Error)]
pub enum UninstallError {
    #[error(
        "Stowage still runs: {}. It would write again what is taken off here. Delete its manifests first: kubectl delete -k manifests/",
        .0.iter().map(PodKey::to_string).collect::<Vec<_>>().join(", ")
    )]
    StillRuns(Vec<PodKey>),
    #[error(
        "{holder} still renews the Lease {LEASE_NAMESPACE}/{lease}: a Stowage runs that is no pod in {LEASE_NAMESPACE}. Stop it first"
    )]
    StillLeads { holder: String, lease: &'static str },
    #[error("the API server did not list {what}: {error}")]
    List {
        what: &'static str,
        error: Box<Error>,
    },
}

/// What is left of Stowage in a cluster.
#[derive(Debug, Default)]
pub struct Leftovers {
    pub nodes: Vec<NodeName>,
    pods: Vec<PodLeftovers>,
    pub leases: Vec<FoundLease>,
    /// Pods with GPUs that Stowage chose, by namespace. They run on.
    pub running: BTreeMap<String, usize>,
    /// Pods that ask for VRAM and wait, by namespace. No scheduler will place them.
    pub pending: BTreeMap<String, usize>,
    /// Objects of manifests that were applied at some time, such as `configmaps/NAME`: a change of overlay leaves them, too.
    pub objects: Vec<String>,
}

impl Leftovers {
    /// Whether nothing is there to be taken off.
    pub fn is_empty(&self) -> bool {
        self.nodes.is_empty() && self.pods.is_empty() && self.leases.is_empty()
    }

    pub fn gated_pods(&self) -> usize {
        self.pods.iter().filter(|pod| pod.is_gated).count()
    }

    /// Pods with conditions of Stowage's, or nominated by it.
    pub fn marked_pods(&self) -> usize {
        self.pods.iter().filter(|pod| pod.has_status()).count()
    }

    fn add_pod(&mut self, pod: &Pod) {
        self.pods.extend(PodLeftovers::from_pod(pod));
        let Some(left_state) = leftovers::left_state(pod) else {
            return;
        };
        let by_namespace = match left_state {
            RemainingPodState::Running => &mut self.running,
            RemainingPodState::Pending => &mut self.pending,
        };
        *by_namespace
            .entry(pod.metadata.namespace.clone().unwrap_or_default())
            .or_default() += 1;
    }
}

/// A Lease that nobody renews.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FoundLease {
    pub name: &'static str,
    pub uid: Option<String>,
    pub version: Option<String>,
}

/// One write that did not succeed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WriteFailure {
    /// Such as `pod team-a/llama`.
    pub object: String,
    pub error: String,
}

/// Finds what is left of Stowage; writes nothing.
pub async fn find(client: &Client) -> Result<Leftovers, UninstallError> {
    refuse_while_running(client).await?;
    let all = ListParams::default();
    let nodes = fold_pages(
        client,
        "nodes",
        &all,
        |names: &mut Vec<NodeName>, node: &Node| {
            names.extend(leftovers::advertising_node(node));
        },
    );
    let pods = fold_pages(client, "pods", &all, Leftovers::add_pod);
    let objects = own_objects(client).await;
    Ok(Leftovers {
        nodes: nodes.await?,
        leases: leases(client).await?,
        objects,
        ..pods.await?
    })
}

/// Takes off what was found. What another has removed meanwhile is no failure.
pub async fn remove(client: &Client, found: &Leftovers) -> Vec<WriteFailure> {
    // Nodes first, so that no scheduler counts on VRAM that nobody allocates. Of a pod the gate goes last: a pod without it has
    // no mark of the planner left.
    let nodes = found.nodes.iter().map(Removal::Capacity);
    let statuses = found
        .pods
        .iter()
        .filter(|pod| pod.has_status())
        .map(Removal::Status);
    let gates = found
        .pods
        .iter()
        .filter(|pod| pod.is_gated)
        .map(Removal::Gate);
    let leases = found.leases.iter().map(Removal::Lease);
    let mut failures = Vec::new();
    for kind in [
        nodes.collect::<Vec<_>>(),
        statuses.collect(),
        gates.collect(),
        leases.collect(),
    ] {
        let outcomes = stream::iter(kind).map(async |write| {
            write.perform(client).await.err().map(|error| WriteFailure {
                object: write.object(),
                error,
            })
        });
        failures.extend(
            outcomes
                .buffered(MAX_CONCURRENT_WRITES)
                .filter_map(ready)
                .collect::<Vec<_>>()
                .await,
        );
    }
    failures
}

#[derive(Debug, Clone, Copy)]
enum Removal<'a> {
    Capacity(&'a NodeName),
    Status(&'a PodLeftovers),
    Gate(&'a PodLeftovers),
    Lease(&'a FoundLease),
}

impl Removal<'_> {
    fn object(self) -> String {
        match self {
            Self::Capacity(node) => format!("node {node}"),
            Self::Status(pod) | Self::Gate(pod) => format!("pod {}", pod.key),
            Self::Lease(lease) => format!("lease {LEASE_NAMESPACE}/{}", lease.name),
        }
    }

    async fn perform(self, client: &Client) -> Result<(), String> {
        let params = PatchParams::default();
        let pods = |pod: &PodLeftovers| Api::<Pod>::namespaced(client.clone(), &pod.key.namespace);
        let written = match self {
            Self::Capacity(node) => {
                let patch = Patch::Merge(leftovers::capacity_patch());
                Api::<Node>::all(client.clone())
                    .patch_status(node.as_str(), &params, &patch)
                    .await
                    .map(drop)
            }
            Self::Status(pod) => {
                let patch = Patch::Strategic(pod.status_patch());
                pods(pod)
                    .patch_status(&pod.key.name, &params, &patch)
                    .await
                    .map(drop)
            }
            Self::Gate(pod) => {
                let patch = Patch::Strategic(pod.gate_patch());
                pods(pod)
                    .patch(&pod.key.name, &params, &patch)
                    .await
                    .map(drop)
            }
            Self::Lease(FoundLease { name, uid, version }) => {
                let leases = Api::<Lease>::namespaced(client.clone(), LEASE_NAMESPACE);
                // A client that has renewed it meanwhile needs it.
                let unchanged = Preconditions {
                    uid: uid.clone(),
                    resource_version: version.clone(),
                };
                let params = DeleteParams::default().preconditions(unchanged);
                leases.delete(name, &params).await.map(drop)
            }
        };
        match written {
            // It is gone, or (409) it is another one by now, or was written at the same time: a second look shows what is left.
            Err(Error::Api(status)) if matches!(status.code, 404 | 409) => Ok(()),
            written => written.map_err(|error| error.to_string()),
        }
    }
}

async fn refuse_while_running(client: &Client) -> Result<(), UninstallError> {
    let own = ListParams::default().labels(OWN_PODS);
    let running = fold_pages(
        client,
        "Stowage's own pods",
        &own,
        |running: &mut Vec<PodKey>, pod: &Pod| {
            let key = objects::identity(pod).map(|(_, key)| key);
            // Elsewhere the label is anybody's.
            let is_own =
                |key: &PodKey| &*key.namespace == LEASE_NAMESPACE && !objects::is_finished(pod);
            running.extend(key.ok().filter(is_own));
        },
    );
    let running = running.await?;
    if running.is_empty() {
        Ok(())
    } else {
        Err(UninstallError::StillRuns(running))
    }
}

/// Objects of Stowage's manifests, of the kinds in which overlays and components differ. A kind that is not served, or may not be
/// listed, has none.
async fn own_objects(client: &Client) -> Vec<String> {
    const ADMISSION: &str = "admissionregistration.k8s.io";
    let mut found = Vec::new();
    for (group, kind) in [
        ("", "ConfigMap"),
        ("policy", "PodDisruptionBudget"),
        (ADMISSION, "ValidatingAdmissionPolicy"),
        (ADMISSION, "ValidatingAdmissionPolicyBinding"),
        (ADMISSION, "MutatingAdmissionPolicy"),
        (ADMISSION, "MutatingAdmissionPolicyBinding"),
    ] {
        let resource = ApiResource::from_gvk(&GroupVersionKind::gvk(group, "v1", kind));
        let api = Api::<DynamicObject>::all_with(client.clone(), &resource);
        let Ok(list) = api
            .list_metadata(&ListParams::default().labels(OWN_OBJECTS))
            .await
        else {
            continue;
        };
        // Elsewhere the label is anybody's.
        let is_own = |namespace: &String| namespace == LEASE_NAMESPACE;
        let own = list.items.into_iter().map(|one| one.metadata);
        let own = own.filter(|one| one.namespace.as_ref().is_none_or(is_own));
        found.extend(own.filter_map(|one| Some(format!("{}/{}", resource.plural, one.name?))));
    }
    found
}

/// The Leases, once it is clear that nobody renews them.
async fn leases(client: &Client) -> Result<Vec<FoundLease>, UninstallError> {
    let mut found = Vec::new();
    for name in LEASES {
        let Some(lease) = lease(client, name).await? else {
            continue;
        };
        let lease = match renewal_due(&lease) {
            None => Some(lease),
            Some(within) => {
                tokio::time::sleep(within).await;
                let later = self::lease(client, name).await?;
                let renewed = |later: &Lease| {
                    later.metadata.resource_version != lease.metadata.resource_version
                };
                if let Some(later) = later.as_ref().filter(|later| renewed(later)) {
                    return Err(UninstallError::StillLeads {
                        holder: holder(later),
                        lease: name,
                    });
                }
                later
            }
        };
        found.extend(lease.map(|lease| FoundLease {
            name,
            uid: lease.metadata.uid,
            version: lease.metadata.resource_version,
        }));
    }
    Ok(found)
}

async fn lease(client: &Client, name: &str) -> Result<Option<Lease>, UninstallError> {
    let found = Api::<Lease>::namespaced(client.clone(), LEASE_NAMESPACE)
        .get_opt(name)
        .await;
    found.map_err(|error| UninstallError::List {
        what: "Leases",
        error: error.into(),
    })
}

/// How long to look whether the holder renews it; `None` if nobody holds it, or its time is long over.
fn renewal_due(lease: &Lease) -> Option<Duration> {
    let spec = lease.spec.as_ref()?;
    spec.holder_identity
        .as_deref()
        .filter(|holder| !holder.is_empty())?;
    let lease_duration = spec
        .lease_duration_seconds
        .and_then(|seconds| u64::try_from(seconds).ok())
        .unwrap_or(15);
    let lease_duration = Duration::from_secs(lease_duration.min(MAX_LEASE_SECONDS));
    let since = jiff::Timestamp::now().duration_since(spec.renew_time.as_ref()?.0);
    // This machine's clock may differ from the holder's by as much again.
    (since.unsigned_abs() < 2 * lease_duration).then_some(lease_duration)
}

fn holder(lease: &Lease) -> String {
    let holder = lease
        .spec
        .as_ref()
        .and_then(|spec| spec.holder_identity.clone());
    holder.unwrap_or_else(|| "somebody".into())
}

/// Every object of a kind, a page at a time: a large cluster's pods would take a gigabyte at once.
async fn fold_pages<K, A>(
    client: &Client,
    what: &'static str,
    params: &ListParams,
    mut add: impl FnMut(&mut A, &K),
) -> Result<A, UninstallError>
where
    K: Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned,
    A: Default,
{
    let api = Api::<K>::all(client.clone());
    let (mut found, mut pages, mut attempts) =
        (A::default(), params.clone().limit(LIST_PAGE_SIZE), 1);
    loop {
        match api.list(&pages).await {
            Ok(list_page) => {
                list_page
                    .items
                    .iter()
                    .for_each(|object| add(&mut found, object));
                match list_page.metadata.continue_.filter(|next| !next.is_empty()) {
                    Some(next) => pages = pages.continue_token(&next),
                    None => return Ok(found),
                }
            }
            Err(Error::Api(status)) if status.code == 410 && attempts < MAX_LIST_ATTEMPTS => {
                (found, pages, attempts) = (
                    A::default(),
                    params.clone().limit(LIST_PAGE_SIZE),
                    attempts + 1,
                );
            }
            Err(error) => {
                return Err(UninstallError::List {
                    what,
                    error: error.into(),
                });
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn held(by: &str, renewed: jiff::Timestamp) -> Lease {
        let spec =
            json!({ "holderIdentity": by, "leaseDurationSeconds": 15, "renewTime": renewed });
        serde_json::from_value(json!({ "metadata": { "name": "stowage" }, "spec": spec })).unwrap()
    }

    #[test]
    fn only_a_lease_that_somebody_may_hold_is_waited_for() {
        let now = jiff::Timestamp::now();
        let ago = |seconds: i64| now - jiff::SignedDuration::from_secs(seconds);
        assert_eq!(
            renewal_due(&held("stowage-0", ago(1))),
            Some(Duration::from_secs(15))
        );
        assert_eq!(
            renewal_due(&held("stowage-0", ago(-20))),
            Some(Duration::from_secs(15)),
            "a clock that is behind"
        );
        assert_eq!(renewal_due(&held("stowage-0", ago(3600))), None);
        assert_eq!(renewal_due(&held("", ago(1))), None, "given up");
    }
}
