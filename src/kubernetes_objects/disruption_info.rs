//! Reads the keys on which a pod's eviction depends into an [`ObservedDisruptionInfo`].
//!
//! Most keys are other projects': a pod that has them already needs no others. A value that cannot be parsed counts as missing;
//! nothing here rejects a pod.

use super::{
    DISRUPTION_TARGET_CONDITION, RESERVED_CONDITION, annotation, asks_for_gpu, kube_filters,
    user_annotations, wakeable_request,
};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use stowage_scheduling::ids::OwnerUid;
use stowage_scheduling::units::Millis;
use stowage_scheduling::units::text::parse_duration;
use stowage_scheduling::vocabulary::disruption_info::{
    CheckpointAge, DisruptionInfo, GroupKey, GroupKind, ObservedDisruptionInfo, ObservedLoan,
    PlacelessMember, PodDeletion, PodHealth, Replacement,
};

/// When the pod last saved its work, RFC 3339; Stowage's own key first.
const CHECKPOINT_KEYS: [&str; 2] = [
    "stowage.dev/checkpoint-time",
    "volcano.sh/last-checkpoint-time",
];
const DO_NOT_DISRUPT: &str = "karpenter.sh/do-not-disrupt";
/// On the object that the kubelet makes of a static pod, for all to see.
const MIRROR_ANNOTATION: &str = "kubernetes.io/config.mirror";
const DELETION_COST: &str = "controller.kubernetes.io/pod-deletion-cost";

/// Characters of a wake request that count: it is repeated in a condition.
const MAX_WAKE_REQUEST_CHARS: usize = 128;

/// Kueue's labels on pods that it has admitted, and on pods that are queued for it.
const KUEUE_MANAGED: [&str; 2] = ["kueue.x-k8s.io/managed", "kueue.x-k8s.io/podset"];
const KUEUE_QUEUE: &str = "kueue.x-k8s.io/queue-name";

/// Labels that number the pods of one owner, the narrower first.
const INDEX_LABELS: [&str; 3] = [
    "batch.kubernetes.io/job-completion-index",
    "leaderworkerset.sigs.k8s.io/worker-index",
    "apps.kubernetes.io/pod-index",
];

/// One label that names a pod's group.
struct GroupLabel {
    kind: GroupKind,
    name: MetadataKey,
    /// A second label that distinguishes several groups of that name.
    part: Option<&'static str>,
    size: Option<MetadataKey>,
}

#[derive(Clone, Copy)]
enum MetadataKey {
    Label(&'static str),
    Annotation(&'static str),
    /// `spec.schedulingGroup.podGroupName`.
    SchedulingGroup,
    /// The Workload of a pod that Kueue manages: by the annotation, or, of a Job, by the Job.
    KueueWorkload,
}

/// The Workload's name on pods that Kueue has started; some versions write it on pods of topology-aware Workloads only.
const KUEUE_WORKLOAD: &str = "kueue.x-k8s.io/workload";
const JOB_NAME: [&str; 2] = ["batch.kubernetes.io/job-name", "job-name"];
const GROUP_MIN: &str = "stowage.dev/group-min";

/// In order of precedence: Kubernetes' own, of which no part may ever be evicted, Stowage's, then labels that name one gang, then
/// labels that name a whole job.
const GROUP_LABELS: [GroupLabel; 12] = [
    group_label(
        GroupKind::SchedulingGroup,
        MetadataKey::SchedulingGroup,
        Some(MetadataKey::Annotation(GROUP_MIN)),
    ),
    group_label(
        GroupKind::Stowage,
        MetadataKey::Label("stowage.dev/group"),
        Some(MetadataKey::Annotation(GROUP_MIN)),
    ),
    group_label(
        GroupKind::PodGroup,
        MetadataKey::Label("scheduling.x-k8s.io/pod-group"),
        None,
    ),
    group_label(
        GroupKind::PodGroup,
        MetadataKey::Label("pod-group.scheduling.sigs.k8s.io/name"),
        Some(MetadataKey::Label(
            "pod-group.scheduling.sigs.k8s.io/min-available",
        )),
    ),
    GroupLabel {
        part: Some("leaderworkerset.sigs.k8s.io/group-index"),
        ..group_label(
            GroupKind::LeaderWorkerSet,
            MetadataKey::Label("leaderworkerset.sigs.k8s.io/name"),
            Some(MetadataKey::Annotation("leaderworkerset.sigs.k8s.io/size")),
        )
    },
    group_label(
        GroupKind::KueuePodGroup,
        MetadataKey::Label("kueue.x-k8s.io/pod-group-name"),
        Some(MetadataKey::Annotation(
            "kueue.x-k8s.io/pod-group-total-count",
        )),
    ),
    group_label(
        GroupKind::Volcano,
        MetadataKey::Annotation("scheduling.k8s.io/group-name"),
        None,
    ),
    group_label(
        GroupKind::Volcano,
        MetadataKey::Annotation("scheduling.volcano.sh/group-name"),
        None,
    ),
    group_label(
        GroupKind::JobSet,
        MetadataKey::Label("jobset.sigs.k8s.io/jobset-name"),
        None,
    ),
    group_label(
        GroupKind::KubeflowJob,
        MetadataKey::Label("training.kubeflow.org/job-name"),
        None,
    ),
    group_label(
        GroupKind::RayCluster,
        MetadataKey::Label("ray.io/cluster"),
        None,
    ),
    group_label(GroupKind::KueueWorkload, MetadataKey::KueueWorkload, None),
];

const fn group_label(kind: GroupKind, name: MetadataKey, size: Option<MetadataKey>) -> GroupLabel {
    GroupLabel {
        kind,
        name,
        part: None,
        size,
    }
}

/// Whether a do-not-disrupt value protects the pod: `true`, or a duration that has not passed since the pod was created.
fn is_protected_by(text: &str, pod: &Pod, now: Timestamp) -> bool {
    let age = pod
        .metadata
        .creation_timestamp
        .as_ref()
        .map(|created| now.duration_since(created.0));
    let age = age.map_or(0, |age| u64::try_from(age.as_millis()).unwrap_or(0));
    text == "true" || parse_duration(text).is_ok_and(|protected| age < protected.0)
}

/// The pod's disruption info; ages are computed by wall time, `now`.
pub fn observed_disruption_info(pod: &Pod, now: Timestamp) -> ObservedDisruptionInfo {
    let (group, group_size) = group(pod).unzip();
    ObservedDisruptionInfo {
        disruption_info: DisruptionInfo {
            do_not_disrupt: annotation(pod, DO_NOT_DISRUPT)
                .is_some_and(|text| is_protected_by(text, pod, now)),
            deletion_cost: annotation(pod, DELETION_COST)
                .and_then(|cost| cost.parse().ok())
                .unwrap_or_default(),
            group,
            group_size: group_size.flatten(),
            owner: owner(pod),
            index: index(pod),
            queue_managed: is_queue_managed(pod),
            replacement: replacement(pod),
            claims: kube_filters::lasting_claims(pod),
            health: health(pod),
            ..DisruptionInfo::default()
        },
        stamp: checkpoint_age(pod, now),
        leaving: deletion(pod, now),
        loan: loan(pod),
        shows_eviction: is_true(pod, DISRUPTION_TARGET_CONDITION),
        shows_reservation: is_true(pod, RESERVED_CONDITION),
    }
}

/// The pod as a group's member that needs no GPU any more; `None` if it has no group, needs a GPU, has failed or is being deleted.
pub fn member_without_placement(pod: &Pod) -> Option<PlacelessMember> {
    let phase = pod
        .status
        .as_ref()
        .and_then(|status| status.phase.as_deref());
    let has_ended = phase == Some("Succeeded");
    let is_there = phase != Some("Failed") && pod.metadata.deletion_timestamp.is_none();
    let (group, _) = group(pod).filter(|_| has_ended || is_there && !asks_for_gpu(pod))?;
    Some(PlacelessMember {
        group,
        owner: owner(pod),
        index: index(pod),
        has_ended,
    })
}

fn is_true(pod: &Pod, condition: &str) -> bool {
    let conditions = pod
        .status
        .iter()
        .filter_map(|status| status.conditions.as_ref())
        .flatten();
    conditions
        .filter(|one| one.type_ == condition)
        .any(|one| one.status == "True")
}

/// Whether the pod is the mirror of a static one. Anyone may name a Node as owner; the API server takes this annotation only with a
/// node's name, and only when the pod is created.
pub(crate) fn is_mirror(pod: &Pod) -> bool {
    annotation(pod, MIRROR_ANNOTATION).is_some()
}

fn replacement(pod: &Pod) -> Replacement {
    if is_mirror(pod) {
        return Replacement::Static;
    }
    match owners(pod).any(|owner| owner.kind == "DaemonSet") || kube_filters::names_one_node(pod) {
        true => Replacement::SameNode,
        false => Replacement::Anywhere,
    }
}

fn health(pod: &Pod) -> PodHealth {
    match pod
        .status
        .as_ref()
        .and_then(|status| status.phase.as_deref())
    {
        Some("Pending") => PodHealth::Pending,
        Some("Running") if !is_true(pod, "Ready") => PodHealth::Unready,
        _ => PodHealth::Ready,
    }
}

fn owners(pod: &Pod) -> impl Iterator<Item = &OwnerReference> {
    pod.metadata.owner_references.iter().flatten()
}

/// What the pod shows of VRAM that engines lend.
fn loan(pod: &Pod) -> ObservedLoan {
    let request = annotation(pod, user_annotations::WAKE_REQUESTED);
    ObservedLoan {
        borrows: super::borrows(pod),
        has_vram_limits: super::has_vram_limits(pod),
        wake_requested: request.map(|request| {
            request
                .chars()
                .take(MAX_WAKE_REQUEST_CHARS)
                .collect::<String>()
                .into()
        }),
        wakeable: wakeable_request(pod),
    }
}

fn group(pod: &Pod) -> Option<(GroupKey, Option<u32>)> {
    GROUP_LABELS.iter().find_map(|keys| {
        let name = keys.name.value_in(pod).filter(|name| !name.is_empty())?;
        let part = keys.part.and_then(|key| label(pod, key));
        let name = part.map_or_else(|| name.into(), |part| format!("{name}/{part}").into());
        let namespace = pod
            .metadata
            .namespace
            .as_deref()
            .unwrap_or("default")
            .into();
        let size = keys.size.and_then(|key| key.value_in(pod)?.parse().ok());
        Some((
            GroupKey {
                namespace,
                kind: keys.kind,
                name,
            },
            size,
        ))
    })
}

impl MetadataKey {
    fn value_in(self, pod: &Pod) -> Option<&str> {
        match self {
            Self::Label(key) => label(pod, key),
            Self::Annotation(key) => annotation(pod, key),
            Self::SchedulingGroup => pod
                .spec
                .as_ref()?
                .scheduling_group
                .as_ref()?
                .pod_group_name
                .as_deref(),
            Self::KueueWorkload => {
                let job = || JOB_NAME.iter().find_map(|key| label(pod, key));
                annotation(pod, KUEUE_WORKLOAD)
                    .or_else(job)
                    .filter(|_| is_queue_managed(pod))
            }
        }
    }
}

fn checkpoint_age(pod: &Pod, now: Timestamp) -> CheckpointAge {
    let Some(text) = CHECKPOINT_KEYS.iter().find_map(|key| annotation(pod, key)) else {
        return CheckpointAge::None;
    };
    let Ok(stamp) = text.trim().parse::<Timestamp>() else {
        return CheckpointAge::Unreadable;
    };
    match millis_between(stamp, now) {
        Ok(ago) => CheckpointAge::Ago(ago),
        Err(ahead) => CheckpointAge::Ahead(ahead),
    }
}

/// The deletion under way, if there is one. The deletion timestamp is the end of the grace period.
fn deletion(pod: &Pod, now: Timestamp) -> Option<PodDeletion> {
    let ends = pod.metadata.deletion_timestamp.as_ref()?.0;
    let grace = pod.metadata.deletion_grace_period_seconds.unwrap_or(0);
    let grace = Millis::seconds(grace.try_into().unwrap_or(0));
    Some(match millis_between(ends, now) {
        Ok(over) => PodDeletion {
            asked_ago: grace + over,
            grace,
        },
        Err(left) => {
            // More than it was given is left only by a clock that is behind.
            let grace = if grace == Millis(0) { left } else { grace };
            PodDeletion {
                asked_ago: Millis(grace.0.saturating_sub(left.0)),
                grace,
            }
        }
    })
}

/// The time from `earlier` to `later`, or as an error the time back if they are in the other order.
fn millis_between(earlier: Timestamp, later: Timestamp) -> Result<Millis, Millis> {
    let millis = later.duration_since(earlier).as_millis();
    let length = Millis(u64::try_from(millis.unsigned_abs()).unwrap_or(u64::MAX));
    if millis < 0 { Err(length) } else { Ok(length) }
}

fn owner(pod: &Pod) -> Option<OwnerUid> {
    OwnerUid::parse(&controller(pod)?.uid).ok()
}

fn controller(pod: &Pod) -> Option<&OwnerReference> {
    owners(pod).find(|owner| owner.controller == Some(true))
}

/// The kind and name of what makes a pod again. The ReplicaSet between a pod and its Deployment is named after both.
pub fn workload(pod: &Pod) -> Option<(&str, &str)> {
    let controller = controller(pod)?;
    let hash = label(pod, "pod-template-hash").filter(|_| controller.kind == "ReplicaSet");
    let deployment = hash.and_then(|hash| controller.name.strip_suffix(hash)?.strip_suffix('-'));
    Some(match deployment {
        Some(name) => ("Deployment", name),
        None => (&controller.kind, &controller.name),
    })
}

fn index(pod: &Pod) -> Option<u32> {
    INDEX_LABELS
        .iter()
        .find_map(|key| label(pod, key))?
        .parse()
        .ok()
}

fn is_queue_managed(pod: &Pod) -> bool {
    let is_set = |key: &&str| label(pod, key).is_some_and(|value| value != "false");
    KUEUE_MANAGED.iter().any(is_set) || label(pod, KUEUE_QUEUE).is_some()
}

fn label<'a>(pod: &'a Pod, key: &str) -> Option<&'a str> {
    pod.metadata.labels.as_ref()?.get(key).map(String::as_str)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn now() -> Timestamp {
        "2026-03-01T12:00:00Z".parse().unwrap()
    }

    fn of(metadata: serde_json::Value) -> ObservedDisruptionInfo {
        let pod: Pod = serde_json::from_value(json!({ "metadata": metadata })).unwrap();
        observed_disruption_info(&pod, now())
    }

    #[test]
    fn our_own_checkpoint_stamp_goes_before_another_projects() {
        let both = json!({"annotations": {
            "stowage.dev/checkpoint-time": "2026-03-01T11:59:00Z",
            "volcano.sh/last-checkpoint-time": "2026-03-01T11:00:00Z",
        }});
        assert_eq!(of(both).stamp, CheckpointAge::Ago(Millis::seconds(60)));
        let one = json!({"annotations": {"volcano.sh/last-checkpoint-time": "2026-03-01T11:00:00+00:00"}});
        assert_eq!(of(one).stamp, CheckpointAge::Ago(Millis::seconds(3600)));
    }

    #[test]
    fn a_duration_protects_a_pod_for_so_long_from_its_creation_on() {
        let kept = |text: &str| {
            let annotations = json!({"karpenter.sh/do-not-disrupt": text});
            let metadata =
                json!({"creationTimestamp": "2026-03-01T10:00:00Z", "annotations": annotations});
            of(metadata).disruption_info.do_not_disrupt
        };
        assert_eq!(["true", "4h", "2h30m", "90000s"].map(kept), [true; 4]);
        assert_eq!(["false", "", "2h", "0", "4", "soon"].map(kept), [false; 6]);
    }

    #[test]
    fn an_unreadable_checkpoint_time_differs_from_none_and_from_a_future_one() {
        let stamp =
            |text: &str| of(json!({"annotations": {"stowage.dev/checkpoint-time": text}})).stamp;
        assert_eq!(stamp("yesterday"), CheckpointAge::Unreadable);
        assert_eq!(stamp(""), CheckpointAge::Unreadable);
        assert_eq!(
            stamp("2026-03-01T12:00:30Z"),
            CheckpointAge::Ahead(Millis::seconds(30))
        );
        assert_eq!(of(json!({})).stamp, CheckpointAge::None);
    }

    #[test]
    fn a_pod_that_leaves_says_by_when() {
        let leaving = |stamp: &str, grace: i64| {
            let leaving =
                of(json!({"deletionTimestamp": stamp, "deletionGracePeriodSeconds": grace}))
                    .leaving;
            leaving.map(|leaving| (leaving.asked_ago.0 / 1000, leaving.grace.0 / 1000))
        };
        assert_eq!(leaving("2026-03-01T12:00:20Z", 30), Some((10, 30)));
        assert_eq!(leaving("2026-03-01T11:59:00Z", 30), Some((90, 30)));
        assert_eq!(leaving("2026-03-01T12:00:20Z", 0), Some((0, 20)));
        // Only if this clock is behind is more left than was given.
        assert_eq!(leaving("2026-03-01T13:00:00Z", 30), Some((0, 30)));
        assert_eq!(of(json!({})).leaving, None);
    }

    #[test]
    fn a_group_is_recognized_by_any_of_its_labels() {
        let group = |metadata| {
            let disruption_info = of(metadata).disruption_info;
            (
                disruption_info.group.map(|group| group.to_string()),
                disruption_info.group_size,
            )
        };
        let some = |text: &str, size| (Some(text.to_owned()), size);
        assert_eq!(
            group(
                json!({"labels": {"stowage.dev/group": "g", "ray.io/cluster": "r"}, "annotations": {"stowage.dev/group-min": "4"}})
            ),
            some("group default/g", Some(4))
        );
        let lws = json!({
            "namespace": "ns",
            "labels": {"leaderworkerset.sigs.k8s.io/name": "llama", "leaderworkerset.sigs.k8s.io/group-index": "1"},
            "annotations": {"leaderworkerset.sigs.k8s.io/size": "2"},
        });
        assert_eq!(
            group(lws),
            some("LeaderWorkerSet group ns/llama/1", Some(2))
        );
        let workload = |keys: serde_json::Value| group(json!({"labels": keys}));
        let managed =
            json!({"kueue.x-k8s.io/podset": "main", "batch.kubernetes.io/job-name": "train"});
        assert_eq!(
            workload(managed),
            some("Kueue Workload default/train", None)
        );
        assert_eq!(
            workload(json!({"batch.kubernetes.io/job-name": "train"})),
            (None, None),
            "not Kueue's"
        );
        let named = json!({
            "labels": {"kueue.x-k8s.io/podset": "main", "job-name": "train"},
            "annotations": {"kueue.x-k8s.io/workload": "job-train-1a2b"},
        });
        assert_eq!(
            group(named),
            some("Kueue Workload default/job-train-1a2b", None)
        );
        let volcano = json!({"annotations": {"scheduling.k8s.io/group-name": "v"}});
        assert_eq!(group(volcano), some("Volcano pod group default/v", None));
        let unreadable = json!({"labels": {"pod-group.scheduling.sigs.k8s.io/name": "p", "pod-group.scheduling.sigs.k8s.io/min-available": "some"}});
        assert_eq!(group(unreadable), some("pod group default/p", None));
        assert_eq!(
            group(json!({"labels": {"scheduling.k8s.io/group-name": "an annotation's key"}})),
            (None, None)
        );
    }

    #[test]
    fn the_pod_group_of_kubernetes_goes_before_all_labels() {
        let pod = |spec: serde_json::Value| {
            let labels = json!({"stowage.dev/group": "g"});
            let metadata = json!({"labels": labels, "annotations": {"stowage.dev/group-min": "4"}});
            let spec = serde_json::from_value(json!({"metadata": metadata, "spec": spec})).unwrap();
            let info = observed_disruption_info(&spec, now()).disruption_info;
            (info.group.unwrap().to_string(), info.group_size)
        };
        let group =
            json!({"containers": [], "schedulingGroup": {"podGroupName": "train-workers-0"}});
        assert_eq!(
            pod(group),
            ("PodGroup default/train-workers-0".into(), Some(4))
        );
        for none in [
            json!({"containers": []}),
            json!({"containers": [], "schedulingGroup": {}}),
        ] {
            assert_eq!(pod(none), ("group default/g".into(), Some(4)));
        }
    }

    #[test]
    fn only_the_keys_that_protect_a_pod_are_read() {
        let disruption_info = of(json!({
            "annotations": {"karpenter.sh/do-not-disrupt": "true", "controller.kubernetes.io/pod-deletion-cost": "-7"},
            "labels": {"kueue.x-k8s.io/managed": "true"},
            "ownerReferences": [
                {"apiVersion": "v1", "kind": "A", "name": "a", "uid": "not-the-controller"},
                {"apiVersion": "v1", "kind": "B", "name": "b", "uid": "owner", "controller": true},
            ],
        }))
        .disruption_info;
        assert!(disruption_info.do_not_disrupt && disruption_info.queue_managed);
        assert_eq!(
            (disruption_info.deletion_cost, disruption_info.owner),
            (-7, OwnerUid::parse("owner").ok())
        );
        let plain = of(json!({
            "annotations": {"karpenter.sh/do-not-disrupt": "no", "controller.kubernetes.io/pod-deletion-cost": "1e9"},
            "labels": {"kueue.x-k8s.io/managed": "false"},
        }));
        assert_eq!(plain, ObservedDisruptionInfo::default());
    }
}
