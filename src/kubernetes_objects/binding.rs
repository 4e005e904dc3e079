//! The Binding, with everything that the pod's containers need to find their GPUs.

use super::binding_annotations;
use k8s_openapi::api::core::v1::{Binding, ObjectReference};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use std::collections::BTreeMap;
use stowage_scheduling::ids::{GpuUuid, LeaderEpoch, PodKey, PodUid};
use stowage_scheduling::vocabulary::demand::{Demand, Sharing};
use stowage_scheduling::vocabulary::memory_fraction::MemoryFraction;
use stowage_scheduling::vocabulary::placement::Placement;

/// The kind that NVIDIA's container runtime resolves by itself, in memory: no file has it, and nothing else finds its devices.
pub const IN_MEMORY_CDI_KIND: &str = "runtime.nvidia.com/gpu";

const MIB: u64 = 1 << 20;
/// Maximum bytes of an annotation key's name, behind its domain.
const MAX_KEY_NAME_BYTES: usize = 63;

/// The Binding that puts a pod on its node, with everything that the pod's containers need to find their GPUs, in one write. A
/// pod that uses a device plugin gets a plain one: the kubelet gives its containers their GPUs. Without a CDI kind, as NVIDIA's
/// legacy mode wants it, GPUs go by their bare UUIDs.
pub fn binding(
    key: &PodKey,
    uid: &PodUid,
    demand: &Demand,
    placement: &Placement,
    cdi_kind: Option<&str>,
    epoch: &LeaderEpoch,
) -> Binding {
    let annotations = (!demand.is_allocated_externally())
        .then(|| annotations(demand, placement, cdi_kind, epoch));
    Binding {
        metadata: ObjectMeta {
            name: Some(key.name.to_string()),
            namespace: Some(key.namespace.to_string()),
            uid: Some(uid.to_string()),
            annotations,
            ..ObjectMeta::default()
        },
        target: ObjectReference {
            kind: Some("Node".into()),
            name: Some(placement.node.to_string()),
            ..ObjectReference::default()
        },
    }
}

/// Bytes of the annotations that a Binding adds at most: keys and short values, the GPUs by their UUIDs and twice and in each
/// container by their CDI names, the UIDs of lenders, and for each container two keys with their values.
pub(crate) fn max_added_bytes(demand: &Demand) -> usize {
    let (gpus, containers) = (demand.gpus as usize, demand.containers.len());
    2048 + gpus * 96 * (containers + 3) + containers * 512
}

fn annotations(
    demand: &Demand,
    placement: &Placement,
    cdi_kind: Option<&str>,
    epoch: &LeaderEpoch,
) -> BTreeMap<String, String> {
    let names = gpu_names(placement, cdi_kind);
    let mut annotations = BTreeMap::from([
        (
            binding_annotations::DEVICES.to_owned(),
            join(&placement.devices),
        ),
        (
            binding_annotations::GRANTED.to_owned(),
            placement.granted.0.to_string(),
        ),
        (
            binding_annotations::EXCLUSIVE.to_owned(),
            (demand.sharing == Sharing::Exclusive).to_string(),
        ),
        (
            binding_annotations::MEMORY_FRACTION.to_owned(),
            placement.memory_fraction.to_string(),
        ),
        (
            binding_annotations::LEADER_EPOCH.to_owned(),
            epoch.to_string(),
        ),
    ]);
    if !placement.borrowed_from.is_empty() {
        let lenders: Vec<&str> = placement.borrowed_from.iter().map(PodUid::as_str).collect();
        annotations.insert(
            binding_annotations::BORROWED_FROM.to_owned(),
            lenders.join(","),
        );
    }
    // Exactly one of them gives a container its GPUs: without the annotation the variable is empty, and that is none.
    if placement.has_vram_limits {
        let key = binding_annotations::VRAM_LIMITS.to_owned();
        annotations.insert(key, binding_annotations::BY_FRACTIONING.to_owned());
        annotations.extend(vram_limits(demand, placement, &names));
    } else {
        let visible_devices = binding_annotations::VISIBLE_DEVICES.to_owned();
        annotations.insert(visible_devices, names.clone());
        annotations
            .extend(nri_keys(demand, cdi_kind).filter_map(|(_, key)| Some((key?, names.clone()))));
    }
    annotations.extend(container_fractions(demand, placement));
    annotations
}

/// What gpu-fractioning gives each container: its GPUs, which it hands to the runtime by these names, and what the driver keeps for it
/// and lets it have on each. A borrower is kept nothing, for which the least that can be said is a mebibyte: so an owner that needs its
/// VRAM gets it at once.
fn vram_limits(
    demand: &Demand,
    placement: &Placement,
    names: &str,
) -> impl Iterator<Item = (String, String)> {
    let is_borrower = !placement.borrowed_from.is_empty();
    demand.containers.iter().flat_map(move |container| {
        let mebibytes = (demand.limit_of(container).0 / MIB).max(1);
        let kept = if is_borrower { 1 } else { mebibytes };
        let key = |suffix: &str| {
            let prefix = binding_annotations::LIMITS_PREFIX;
            format!("{prefix}{}{suffix}", container.name)
        };
        let compute = demand.terms.compute.map(|mode| {
            let mode: &str = mode.into();
            (
                key(binding_annotations::COMPUTE_MODE_SUFFIX),
                mode.to_owned(),
            )
        });
        let limits = [
            (
                key(binding_annotations::LIMITED_DEVICES_SUFFIX),
                names.to_owned(),
            ),
            (
                key(binding_annotations::VRAM_REQUEST_SUFFIX),
                format!("{kept}Mi"),
            ),
            (
                key(binding_annotations::VRAM_LIMIT_SUFFIX),
                format!("{mebibytes}Mi"),
            ),
        ];
        limits.into_iter().chain(compute)
    })
}

/// The containers that request VRAM, each with the key of its annotation for the NRI plugin, if it can have one.
pub fn nri_keys<'a>(
    demand: &'a Demand,
    cdi_kind: Option<&str>,
) -> impl Iterator<Item = (&'a str, Option<String>)> {
    // A plugin would look for a specification, and fail the container if there is none.
    let is_read = cdi_kind.is_some_and(|kind| kind != IN_MEMORY_CDI_KIND);
    demand
        .containers
        .iter()
        .filter(move |_| is_read)
        .map(|one| (&*one.name, nri_key(&one.name)))
}

/// The key for the NRI plugin; `None` if the container's name is too long for one. The API server takes any key from a Binding,
/// and refuses each later write of a pod that has an invalid one: its kubelet could not report that it runs, or has ended.
fn nri_key(container: &str) -> Option<String> {
    let key = format!("{}{container}", binding_annotations::NRI_PREFIX);
    let (_, name) = key.split_once('/')?;
    (name.len() <= MAX_KEY_NAME_BYTES).then_some(key)
}

/// Where several containers ask, each container's own part of the pod's fraction: told the pod's, each would use all of it.
fn container_fractions(
    demand: &Demand,
    placement: &Placement,
) -> impl Iterator<Item = (String, String)> {
    let several = (demand.containers.len() > 1).then_some(&demand.containers);
    several
        .into_iter()
        .flat_map(|containers| containers.iter())
        .map(|container| {
            let fraction = match placement.has_vram_limits {
                true => MemoryFraction::of_limit(demand.limit_of(container)),
                false => {
                    let whole = placement.memory_fraction;
                    whole.for_container(container.vram, demand.vram())
                }
            };
            (
                format!(
                    "{}{}",
                    container.name,
                    binding_annotations::CONTAINER_FRACTION_SUFFIX
                ),
                fraction.to_string(),
            )
        })
}

/// The names of the pod's GPUs. In the CDI modes they are fully qualified: a bare UUID is taken there for one of the runtime's
/// default kind, of which a node need not have a specification.
fn gpu_names(placement: &Placement, cdi_kind: Option<&str>) -> String {
    let prefix = cdi_kind.map(|kind| format!("{kind}=")).unwrap_or_default();
    let name = |uuid: &GpuUuid| match uuid.index() {
        Some(index) => format!("{prefix}{index}"),
        None => format!("{prefix}{uuid}"),
    };
    placement
        .devices
        .iter()
        .map(name)
        .collect::<Vec<_>>()
        .join(",")
}

fn join(devices: &[GpuUuid]) -> String {
    devices
        .iter()
        .map(GpuUuid::as_str)
        .collect::<Vec<_>>()
        .join(",")
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use stowage_scheduling::testkit::{demand_of, gpu, node, uid};
    use stowage_scheduling::units::Bytes;
    use stowage_scheduling::vocabulary::classification::ComputeMode;
    use stowage_scheduling::vocabulary::demand::VramContainer;

    #[test]
    fn no_binding_adds_more_than_it_is_allowed_for() {
        let longest = "c".repeat(53);
        for (gpus, containers, kind) in [
            (1_u32, 1, Some(IN_MEMORY_CDI_KIND)),
            (8, 3, Some("management.nvidia.com/gpu")),
            (64, 20, Some("nvidia.com/gpu")),
            (64, 1, None),
        ] {
            let containers = (0..containers).map(|n| VramContainer {
                name: format!("{}{n:02}", &longest[2..]).into(),
                vram: Bytes::gib(1),
            });
            let containers = containers.collect();
            let demand = Demand {
                containers,
                ..demand_of(1 << 40, gpus, Sharing::Shared, 0)
            };
            let uuid = |n: u32| gpu(&format!("MIG-{:08}-0000-0000-0000-000000000000", n));
            let lender = |n: u32| uid(&format!("{n:08}-0000-0000-0000-000000000000"));
            let placement = Placement {
                devices: (0..gpus).map(uuid).collect(),
                granted: demand.vram(),
                borrowed_from: (0..gpus).map(lender).collect(),
                ..Placement::from_plugin(node(&"n".repeat(253)))
            };
            let epoch = LeaderEpoch::new(lender(0).as_str(), i32::MAX, &"f".repeat(32));
            for has_vram_limits in [false, true] {
                let placement = Placement {
                    has_vram_limits,
                    ..placement.clone()
                };
                let added = annotations(&demand, &placement, kind, &epoch);
                let added: usize = added
                    .iter()
                    .map(|(key, value)| key.len() + value.len())
                    .sum();
                assert!(
                    added <= max_added_bytes(&demand),
                    "{added} of {}",
                    max_added_bytes(&demand)
                );
            }
        }
    }

    /// The annotations of a pod of two containers on two GPUs that are others' than those of every Binding.
    fn devices_and_limits(borrowed_from: &[&str], has_vram_limits: bool) -> Vec<(String, String)> {
        let container = |name: &str, gib| VramContainer {
            name: name.into(),
            vram: Bytes::gib(gib),
        };
        let demand = Demand {
            containers: [container("engine", 40), container("draft", 3)].into(),
            ..demand_of(43 << 29, 2, Sharing::Shared, 0)
        };
        let placement = Placement {
            devices: [gpu("GPU-a"), gpu("GPU-b")].into(),
            borrowed_from: borrowed_from.iter().map(|lender| uid(lender)).collect(),
            has_vram_limits,
            ..Placement::from_plugin(node("n"))
        };
        let epoch = LeaderEpoch::new("lease", 1, "nonce");
        annotations(&demand, &placement, Some("nvidia.com/gpu"), &epoch)
            .into_iter()
            .filter(|(key, _)| !key.starts_with("stowage.dev/") || key.ends_with("visible-devices"))
            .filter(|(key, _)| !key.ends_with("gpu-memory-fraction"))
            .collect()
    }

    #[test]
    fn one_writer_gives_each_container_its_gpus_and_the_driver_its_limits() {
        let all = |pairs: &[(&str, &str)]| -> Vec<(String, String)> {
            let owned = |(key, value): &(&str, &str)| ((*key).into(), (*value).into());
            pairs.iter().map(owned).collect()
        };
        let names = "nvidia.com/gpu=GPU-a,nvidia.com/gpu=GPU-b";
        let plain = all(&[
            ("nvidia.cdi.k8s.io/container.draft", names),
            ("nvidia.cdi.k8s.io/container.engine", names),
            ("stowage.dev/visible-devices", names),
        ]);
        assert_eq!(devices_and_limits(&[], false), plain);
        let limited = |draft, engine| {
            all(&[
                ("nvidia.com/container.draft.gpu-memory.limit", "1536Mi"),
                ("nvidia.com/container.draft.gpu-memory.request", draft),
                ("nvidia.com/container.draft.gpus.devices", names),
                ("nvidia.com/container.engine.gpu-memory.limit", "20480Mi"),
                ("nvidia.com/container.engine.gpu-memory.request", engine),
                ("nvidia.com/container.engine.gpus.devices", names),
            ])
        };
        assert_eq!(devices_and_limits(&[], true), limited("1536Mi", "20480Mi"));
        let borrower = devices_and_limits(&["lender"], true);
        for (key, _) in &borrower {
            let (_, name) = key.split_once('/').unwrap();
            let of_longest = name.len() - name.split('.').nth(1).unwrap().len() + 34;
            assert!(of_longest <= MAX_KEY_NAME_BYTES, "{key}");
        }
        assert_eq!(borrower, limited("1Mi", "1Mi"), "nothing is kept for it");
    }

    #[test]
    fn within_a_limit_each_container_plans_with_a_part_of_its_own() {
        let container = |name: &str, gib| VramContainer {
            name: name.into(),
            vram: Bytes::gib(gib),
        };
        let mut demand = Demand {
            containers: [container("engine", 40), container("draft", 4)].into(),
            ..demand_of(44 << 30, 1, Sharing::Shared, 0)
        };
        demand.terms.compute = Some(ComputeMode::SmSharing);
        let placement = Placement {
            has_vram_limits: true,
            ..Placement::from_plugin(node("n"))
        };
        let epoch = LeaderEpoch::new("lease", 1, "nonce");
        let written = annotations(&demand, &placement, None, &epoch);
        for (key, value) in [
            ("engine.container.stowage.dev/gpu-memory-fraction", "0.9200"),
            ("draft.container.stowage.dev/gpu-memory-fraction", "0.7500"),
            ("nvidia.com/container.engine.gpu-compute.mode", "sm-sharing"),
            ("stowage.dev/vram-limits", "gpu-fractioning"),
        ] {
            assert_eq!(written.get(key).map(String::as_str), Some(value), "{key}");
        }
    }

    proptest! {
        /// What sets the limits refuses to create a container whose figures are others: see `tests/fixtures/vram-limits.csv`.
        #[test]
        fn limits_are_whole_mebibytes_of_which_the_kept_part_is_no_more(
            vram in prop::collection::vec(1u64..1 << 46, 1..4),
            gpus in 1u32..17,
            borrows: bool,
        ) {
            let containers = vram.iter().enumerate().map(|(n, vram)| VramContainer {
                name: n.to_string().into(),
                vram: Bytes(*vram),
            });
            let demand = Demand {
                containers: containers.collect(),
                ..demand_of(vram.iter().sum(), gpus, Sharing::Shared, 0)
            };
            let placement = Placement {
                borrowed_from: borrows.then(|| uid("lender")).into_iter().collect(),
                has_vram_limits: true,
                ..Placement::from_plugin(node("n"))
            };
            let limits: BTreeMap<String, String> = vram_limits(&demand, &placement, "names").collect();
            for (n, vram) in vram.iter().enumerate() {
                let mebibytes = |suffix: &str| -> u64 {
                    let text = &limits[&format!("nvidia.com/container.{n}.gpu-memory.{suffix}")];
                    text.strip_suffix("Mi").expect("a unit").parse().expect("digits")
                };
                let (request, limit) = (mebibytes("request"), mebibytes("limit"));
                prop_assert!(1 <= request && request <= limit);
                prop_assert!(limit == 1 || limit * MIB * u64::from(gpus) <= *vram);
            }
        }
    }

    #[test]
    fn a_container_with_a_long_name_gets_no_invalid_annotation() {
        let (longest, longer) = ("c".repeat(53), "c".repeat(54));
        assert_eq!(
            nri_key(&longest),
            Some(format!("nvidia.cdi.k8s.io/container.{longest}"))
        );
        assert_eq!(nri_key(&longer), None);
        let container = |name: &str| VramContainer {
            name: name.into(),
            vram: Bytes::gib(1),
        };
        let mut demand = demand_of(2, 1, Sharing::Shared, 0);
        demand.containers = [container(&longest), container(&longer)].into();
        let keys = |kind| {
            nri_keys(&demand, kind)
                .map(|(_, key)| key.is_some())
                .collect::<Vec<_>>()
        };
        assert_eq!(keys(Some("nvidia.com/gpu")), [true, false]);
        assert_eq!(
            (keys(Some(IN_MEMORY_CDI_KIND)), keys(None)),
            (vec![], vec![]),
            "nobody reads it there"
        );
    }
}
