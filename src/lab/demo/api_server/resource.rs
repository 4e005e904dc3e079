//! The kinds that this API server stores, and their request paths.
//!
//! Pure: a path in, a target out. What may be done to a target is not decided here.

/// One kind of object, as discovery would describe it.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Resource {
    pub plural: &'static str,
    pub kind: &'static str,
    /// `v1`, or `group/version`.
    pub api_version: &'static str,
    pub namespaced: bool,
}

const fn cluster_wide(
    api_version: &'static str,
    plural: &'static str,
    kind: &'static str,
) -> Resource {
    Resource {
        plural,
        kind,
        api_version,
        namespaced: false,
    }
}

const fn namespaced(
    api_version: &'static str,
    plural: &'static str,
    kind: &'static str,
) -> Resource {
    Resource {
        plural,
        kind,
        api_version,
        namespaced: true,
    }
}

static RESOURCES: [Resource; 15] = [
    cluster_wide("v1", "nodes", "Node"),
    namespaced("v1", "pods", "Pod"),
    cluster_wide("v1", "namespaces", "Namespace"),
    namespaced("v1", "secrets", "Secret"),
    namespaced("v1", "configmaps", "ConfigMap"),
    namespaced("coordination.k8s.io/v1", "leases", "Lease"),
    namespaced("events.k8s.io/v1", "events", "Event"),
    cluster_wide("scheduling.k8s.io/v1", "priorityclasses", "PriorityClass"),
    namespaced("policy/v1", "poddisruptionbudgets", "PodDisruptionBudget"),
    cluster_wide("resource.k8s.io/v1", "resourceslices", "ResourceSlice"),
    cluster_wide("v1", "persistentvolumes", "PersistentVolume"),
    namespaced("v1", "persistentvolumeclaims", "PersistentVolumeClaim"),
    cluster_wide("storage.k8s.io/v1", "storageclasses", "StorageClass"),
    // Reviews are answered, never stored.
    cluster_wide("authentication.k8s.io/v1", "tokenreviews", "TokenReview"),
    cluster_wide(
        "authorization.k8s.io/v1",
        "subjectaccessreviews",
        "SubjectAccessReview",
    ),
];

impl Resource {
    pub fn named(plural: &str) -> Option<&'static Self> {
        RESOURCES.iter().find(|resource| resource.plural == plural)
    }

    /// The resources of a group's version, if the path asks for those (`/apis/{group}/{version}`) and there are any.
    pub(crate) fn in_version(path: &str) -> Vec<&'static Self> {
        let version = path.strip_prefix("/apis/").unwrap_or_default();
        RESOURCES
            .iter()
            .filter(|resource| resource.api_version == version)
            .collect()
    }

    /// The group as error texts name it: `pods`, `leases.coordination.k8s.io`.
    pub fn qualified(&self) -> String {
        match self.api_version.split_once('/') {
            Some((group, _)) => format!("{}.{group}", self.plural),
            None => self.plural.to_owned(),
        }
    }

    pub(crate) fn is_pods(&self) -> bool {
        self.plural == "pods"
    }

    pub(crate) fn is_token_reviews(&self) -> bool {
        self.plural == "tokenreviews"
    }

    pub(crate) fn is_access_reviews(&self) -> bool {
        self.plural == "subjectaccessreviews"
    }

    /// Whether `status` is written through its own subresource only.
    pub fn has_status(&self) -> bool {
        matches!(self.plural, "pods" | "nodes" | "poddisruptionbudgets")
    }
}

/// What a request path points at.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct RequestTarget {
    pub resource: &'static Resource,
    /// Empty: the whole cluster, or a kind without namespaces.
    pub namespace: String,
    pub name: Option<String>,
    pub subresource: Option<String>,
}

impl RequestTarget {
    /// Reads `/api/v1/…` and `/apis/{group}/{version}/…`.
    pub fn from_path(path: &str) -> Option<Self> {
        let segments: Vec<&str> = path
            .split('/')
            .filter(|segment| !segment.is_empty())
            .collect();
        match segments.as_slice() {
            ["api", version, rest @ ..] => Self::from_segments(version, rest),
            ["apis", group, version, rest @ ..] => {
                Self::from_segments(&format!("{group}/{version}"), rest)
            }
            _ => None,
        }
    }

    fn from_segments(api_version: &str, segments: &[&str]) -> Option<Self> {
        let (namespace, rest) = match segments {
            ["namespaces", namespace, rest @ ..] if !rest.is_empty() => (*namespace, rest),
            _ => ("", segments),
        };
        let (plural, rest) = rest.split_first()?;
        let resource = RESOURCES
            .iter()
            .find(|resource| resource.plural == *plural && resource.api_version == api_version)?;
        let (name, subresource) = match rest {
            [] => (None, None),
            [name] => (Some(*name), None),
            [name, subresource] => (Some(*name), Some(*subresource)),
            _ => return None,
        };
        Some(Self {
            resource,
            namespace: namespace.to_owned(),
            name: name.map(str::to_owned),
            subresource: subresource.map(str::to_owned),
        })
    }

    /// Parses the short form that the in-process handle uses: `nodes/a`, `pods/default/a`, `pods`.
    pub(crate) fn from_short(short: &str) -> Option<Self> {
        let segments: Vec<&str> = short.split('/').collect();
        let resource = Resource::named(segments.first()?)?;
        let (namespace, name) = match (resource.namespaced, &segments[1..]) {
            (_, []) => ("", None),
            (true, [namespace]) => (*namespace, None),
            (true, [namespace, name]) => (*namespace, Some(*name)),
            (false, [name]) => ("", Some(*name)),
            _ => return None,
        };
        Some(Self {
            resource,
            namespace: namespace.to_owned(),
            name: name.map(str::to_owned),
            subresource: None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_names_its_resource_namespace_object_and_subresource() {
        let target = RequestTarget::from_path("/api/v1/namespaces/default/pods/a/binding").unwrap();
        assert_eq!(target.resource.kind, "Pod");
        assert_eq!(target.namespace, "default");
        assert_eq!(target.name.as_deref(), Some("a"));
        assert_eq!(target.subresource.as_deref(), Some("binding"));
    }

    #[test]
    fn namespaces_themselves_are_a_resource() {
        let target = RequestTarget::from_path("/api/v1/namespaces/default").unwrap();
        assert_eq!(
            (target.resource.plural, target.name.as_deref()),
            ("namespaces", Some("default"))
        );
    }

    #[test]
    fn a_group_that_does_not_serve_the_resource_is_not_found() {
        assert_eq!(RequestTarget::from_path("/apis/policy/v1/pods"), None);
        assert_eq!(RequestTarget::from_path("/metrics"), None);
    }
}
