//! What is kept of the API server's objects, as a tree of field names.
//!
//! A field that no tree names never reaches a decoder. Whoever reads a new field of a pod or a node adds it here.

use std::iter::Peekable;
use std::str::SplitWhitespace;
use std::sync::LazyLock;

/// A field that is kept. Items of a list are kept by the tree of the list.
#[derive(Debug)]
pub struct KeptField {
    pub name: &'static str,
    /// The fields of its value that are kept; `None` for all of them.
    members: Option<Vec<Self>>,
    /// Whether fields that are not named are kept, too.
    keeps_unnamed: bool,
    /// Whether it stands for every name that begins like its own.
    is_prefix: bool,
    /// Whether a stand-in has its value, too.
    pub is_essential: bool,
    /// Whether its items take kilobytes once they are decoded, whatever is in them.
    pub is_heavy: bool,
    /// The names from the object down to it.
    pub path: Vec<&'static str>,
}

const WHOLE_FIELD: KeptField = KeptField {
    name: "",
    members: None,
    keeps_unnamed: false,
    is_prefix: false,
    is_essential: false,
    is_heavy: false,
    path: Vec::new(),
};

static WHOLE: KeptField = WHOLE_FIELD;

impl KeptField {
    /// What is kept of the value of this field; `None` if nothing is.
    pub fn member(&'static self, name: &[u8]) -> Option<&'static Self> {
        let Some(members) = &self.members else {
            return Some(&WHOLE);
        };
        let matches = |one: &&Self| match one.is_prefix {
            true => name.starts_with(one.name.as_bytes()),
            false => name == one.name.as_bytes(),
        };
        members
            .iter()
            .find(matches)
            .or(self.keeps_unnamed.then_some(&WHOLE))
    }

    fn parse(texts: [&'static str; 2]) -> Self {
        let (mut members, mut has_rest) = (Vec::new(), false);
        for text in texts {
            let (more, rest) = parse_fields(&mut text.split_whitespace().peekable(), &[]);
            members.extend(more);
            has_rest |= rest;
        }
        Self {
            members: Some(members),
            keeps_unnamed: has_rest,
            path: Vec::new(),
            ..WHOLE_FIELD
        }
    }
}

/// Parses fields. `!` behind a name: [`KeptField::is_essential`]; `#`: `is_heavy`; `%`: `is_prefix`; `*` alone: `keeps_unnamed`.
fn parse_fields(
    words: &mut Peekable<SplitWhitespace<'static>>,
    path: &[&'static str],
) -> (Vec<KeptField>, bool) {
    let (mut members, mut has_rest) = (Vec::new(), false);
    while let Some(word) = words.next().filter(|word| *word != "}") {
        if word == "*" {
            has_rest = true;
            continue;
        }
        let name = word.trim_end_matches(['!', '#', '%']);
        let has_sign = |sign| word[name.len()..].contains(sign);
        let path: Vec<&str> = path.iter().copied().chain([name]).collect();
        let inner = words.next_if_eq(&"{").map(|_| parse_fields(words, &path));
        let (inner, rest) = inner.unzip();
        let signs = KeptField {
            is_prefix: has_sign('%'),
            is_essential: has_sign('!'),
            is_heavy: has_sign('#'),
            ..WHOLE_FIELD
        };
        members.push(KeptField {
            name,
            members: inner,
            keeps_unnamed: rest == Some(true),
            path,
            ..signs
        });
    }
    (members, has_rest)
}

/// One kind of object: how it is called in paths, what is kept of it, how much, and what stands for one beyond that.
#[derive(Debug)]
pub struct Resource {
    pub plural: &'static str,
    pub kept: KeptField,
    /// The memory that one object may take, decoded.
    pub max_bytes: usize,
    /// The object with the answers that are safe.
    pub stand_in: &'static str,
}

const KIB: usize = 1 << 10;

/// The fields that are kept of every kind, and of a list, a watch event and a Status.
const COMMON: &str = "
kind apiVersion type message reason code details
metadata {
  name! namespace! uid! resourceVersion! generation creationTimestamp! deletionTimestamp! deletionGracePeriodSeconds!
  continue remainingItemCount labels ownerReferences
  annotations {
    stowage.dev/devices! stowage.dev/vram-granted! stowage.dev/exclusive-granted! stowage.dev/borrowed-from! stowage.dev/leader-epoch!
    stowage.dev/vram-limits!
    stowage.dev/gpus! stowage.dev/exclusive! stowage.dev/% k8s.io/% kubernetes.io/config.% prometheus.io/% prometheus.kserve.io/%
    dual-pods.llm-d.ai/requester nvidia.com/container.%
    internal.serving.kserve.io/storage-initializer-sourceuri karpenter.sh/do-not-disrupt controller.kubernetes.io/pod-deletion-cost
    volcano.sh/last-checkpoint-time scheduling.k8s.io/group-name scheduling.volcano.sh/group-name kueue.x-k8s.io/%
    leaderworkerset.sigs.k8s.io/size pv.kubernetes.io/% volume.kubernetes.io/% volume.beta.kubernetes.io/%
  }
}";

const POD: &str = "
spec {
  nodeName! priority! priorityClassName! schedulerName! preemptionPolicy serviceAccountName hostNetwork
  terminationGracePeriodSeconds schedulingGates schedulingGroup resourceClaims nodeSelector tolerations
  resources { requests { cpu! memory! hugepages-2Mi! hugepages-1Gi! * } * } overhead { cpu! memory! ephemeral-storage! * }
  affinity {
    nodeAffinity { requiredDuringSchedulingIgnoredDuringExecution }
    podAffinity { requiredDuringSchedulingIgnoredDuringExecution }
    podAntiAffinity { requiredDuringSchedulingIgnoredDuringExecution { topologyKey! namespaces! namespaceSelector! * } }
  }
  topologySpreadConstraints { whenUnsatisfiable }
  volumes# {
    name persistentVolumeClaim { claimName } ephemeral { } configMap { } csi { } downwardAPI { } emptyDir { } gitRepo { }
    hostPath { } image { } nfs { } projected { } secret { }
  }
  initContainers# {
    name image imagePullPolicy restartPolicy! ports { hostPort! protocol! hostIP! * } readinessProbe { } startupProbe { }
    resources { limits { stowage.dev/vram! nvidia.com/%! * } requests { %! } }
  }
  containers# {
    name image imagePullPolicy restartPolicy ports { hostPort! protocol! hostIP! * } readinessProbe { } startupProbe { }
    resources { limits { stowage.dev/vram! nvidia.com/%! * } requests { %! } }
  }
}
status {
  phase! startTime podIP nominatedNodeName conditions extendedResourceClaimStatus { }
  initContainerStatuses { name containerID ready restartCount resources { limits requests } allocatedResources }
  containerStatuses {
    name containerID ready restartCount resources { limits requests } allocatedResources
    state { running { } terminated { } } lastState { terminated { } }
  }
}";

const NODE: &str = "
spec { unschedulable taints }
status { capacity allocatable conditions { type status } nodeInfo { systemUUID machineID } images { names sizeBytes } }";

const UNREADABLE_AFFINITY: &str = r#"{"spec":{"nodeAffinity":{"required":{"nodeSelectorTerms":[{"matchExpressions":[{"operator":"?"}]}]}}}}"#;

/// Kinds that are many, or that tenants write. A page has at most 250 objects.
static RESOURCES: LazyLock<[Resource; 8]> = LazyLock::new(|| {
    let resource = |plural, text, bound, stand_in| Resource {
        plural,
        kept: KeptField::parse([COMMON, text]),
        max_bytes: bound * KIB,
        stand_in,
    };
    [
        resource(
            "pods",
            POD,
            256,
            r#"{"metadata":{"annotations":{"karpenter.sh/do-not-disrupt":"true"}}}"#,
        ),
        // Not written by tenants, and the images of a node may be a thousand.
        resource("nodes", NODE, 4096, r#"{"spec":{"unschedulable":true}}"#),
        // A selector that cannot be read covers every pod of the namespace, and without a status nothing is allowed.
        resource(
            "poddisruptionbudgets",
            "*",
            32,
            r#"{"spec":{"selector":{"matchExpressions":[{"operator":"?"}]}}}"#,
        ),
        resource(
            "persistentvolumeclaims",
            "*",
            32,
            r#"{"status":{"phase":"Lost"}}"#,
        ),
        resource("persistentvolumes", "*", 32, UNREADABLE_AFFINITY),
        resource("storageclasses", "*", 32, "{}"),
        // Which GPUs it publishes is not known: the node is its driver's.
        resource(
            "resourceslices",
            "spec { driver! nodeName! allNodes! pool! * } *",
            1024,
            r#"{"spec":{"devices":[{"name":"unknown"}]}}"#,
        ),
        resource("namespaces", "", 32, "{}"),
    ]
});

impl Resource {
    pub fn pods() -> &'static Self {
        &RESOURCES[0]
    }

    /// The kind that a request's path is about.
    pub fn from_path(path: &str) -> Option<&'static Self> {
        let mut parts = path.split('/').skip(1);
        let skipped = if parts.next()? == "api" { 1 } else { 2 };
        let rest: Vec<&str> = parts.skip(skipped).take(3).collect();
        let plural = match rest[..] {
            ["namespaces", _, plural] => plural,
            _ => rest.first()?,
        };
        RESOURCES.iter().find(|resource| resource.plural == plural)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_names_its_resource_whatever_namespaces_and_nodes_are_called() {
        for (path, plural) in [
            ("/api/v1/pods", Some("pods")),
            (
                "/api/v1/namespaces/nodes/pods/namespaces/status",
                Some("pods"),
            ),
            ("/api/v1/nodes/pods", Some("nodes")),
            ("/api/v1/namespaces", Some("namespaces")),
            ("/api/v1/namespaces/pods", Some("namespaces")),
            (
                "/apis/policy/v1/poddisruptionbudgets",
                Some("poddisruptionbudgets"),
            ),
            (
                "/apis/policy/v1/namespaces/pods/poddisruptionbudgets/x",
                Some("poddisruptionbudgets"),
            ),
            ("/api/v1/namespaces/pods/secrets/x", None),
            (
                "/apis/coordination.k8s.io/v1/namespaces/a/leases/pods",
                None,
            ),
            ("/version", None),
            ("", None),
        ] {
            assert_eq!(
                Resource::from_path(path).map(|resource| resource.plural),
                plural,
                "{path}"
            );
        }
    }
}
