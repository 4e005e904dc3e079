//! Which class takes which pod, and which policies are invalid.

use super::*;
use crate::ids::GpuModel;
use crate::vocabulary::cluster_share::TenantUsage;
use crate::vocabulary::headroom::Headroom;

fn class_of(priority: i32, priority_class: &str, sharing: Sharing) -> String {
    let policy = Policy::default();
    let pod = PodTraits {
        priority,
        priority_class: priority_class.into(),
        sharing,
        ..PodTraits::default()
    };
    policy.class(policy.classify(&pod).class).name.clone()
}

#[test]
fn the_default_classes_follow_what_a_pod_shows() {
    assert_eq!(class_of(0, "", Sharing::Shared), "serving");
    assert_eq!(class_of(-10, "", Sharing::Shared), "opportunistic");
    assert_eq!(class_of(-10, "", Sharing::Exclusive), "opportunistic");
    assert_eq!(class_of(0, "stowage-batch", Sharing::Shared), "batch");
    assert_eq!(class_of(5, "", Sharing::Exclusive), "dedicated");
}

#[test]
fn a_policy_without_a_last_resort_is_refused() {
    let matches = Match {
        namespaces: vec!["jobs".into()],
        ..Match::default()
    };
    let only_jobs = Class {
        matches,
        ..Class::new("jobs")
    };
    let refused = Policy::default().with_classes(vec![only_jobs]);
    assert_eq!(
        refused,
        Err(PolicyError::NoCatchAll {
            last: "jobs".into()
        })
    );
}

#[test]
fn unknown_and_duplicate_names_are_refused() {
    let lonely = Class {
        shares_with: Some(vec!["nobody".into()]),
        ..Class::new("lonely")
    };
    let refused = Policy::default().with_classes(vec![lonely]);
    assert_eq!(
        refused,
        Err(PolicyError::UnknownClass {
            name: "nobody".into()
        })
    );
    let twins = vec![Class::new("twin"), Class::new("twin")];
    let refused = Policy::default().with_classes(twins);
    assert_eq!(
        refused,
        Err(PolicyError::SameName {
            what: "classes",
            name: "twin".into()
        })
    );
    let tenants = vec![Tenant::new("a", &["x"]), Tenant::new("b", &["x"])];
    let refused = Policy::default().with_tenants(tenants);
    assert_eq!(
        refused,
        Err(PolicyError::SharedNamespace {
            namespace: "x".into()
        })
    );
}

#[test]
fn two_classes_share_a_gpu_only_if_both_agree() {
    let open = Class::new("open");
    let picky = Class {
        shares_with: Some(vec!["open".into()]),
        ..Class::new("picky")
    };
    let alone = Class {
        shares_with: Some(vec![]),
        ..Class::new("alone")
    };
    let all = vec![open, picky, alone];
    let class_exclusions = |class: usize, other: usize| {
        class_terms(&all[class], &all)
            .class_exclusions
            .contains(ClassId::from_index(other))
    };
    assert_eq!(
        [
            class_exclusions(0, 0),
            class_exclusions(0, 1),
            class_exclusions(0, 2)
        ],
        [false, false, true]
    );
    assert_eq!(
        [
            class_exclusions(1, 0),
            class_exclusions(1, 1),
            class_exclusions(1, 2)
        ],
        [false, true, true]
    );
    assert_eq!(
        [
            class_exclusions(2, 0),
            class_exclusions(2, 1),
            class_exclusions(2, 2)
        ],
        [true, true, true]
    );
}

#[test]
fn headroom_follows_the_longest_part_of_the_models_name() {
    let percent = |n| Percent::new(n).unwrap();
    let models = [("a100", percent(8)), ("a100-sxm4-80gb", percent(6))]
        .map(|(k, v)| (k.to_owned(), v))
        .into();
    let headroom = Headroom {
        default: percent(10),
        models,
    };
    let of = |name: &str| headroom.percent_for(&GpuModel::parse(name).unwrap()).get();
    assert_eq!(
        [
            of("NVIDIA-A100-SXM4-80GB"),
            of("NVIDIA-A100-PCIE-40GB"),
            of("NVIDIA-H100")
        ],
        [6, 8, 10]
    );
}

#[test]
fn the_dominant_share_grows_with_the_scarcest_borrowed_resource_and_shrinks_with_weight() {
    let whole = TenantUsage {
        vram: crate::units::Bytes::gib(1000),
        milli_gpus: 10_000,
    };
    let used = |gib, milli_gpus| TenantUsage {
        vram: crate::units::Bytes::gib(gib),
        milli_gpus,
    };
    let tenant = Tenant {
        guarantee: used(100, 1000),
        ..Tenant::new("a", &[])
    };
    assert_eq!(tenant.dominant_share(used(100, 1000), whole), 0);
    assert_eq!(tenant.dominant_share(used(200, 4000), whole), 300_000);
    assert_eq!(
        Tenant {
            weight: 3,
            ..tenant
        }
        .dominant_share(used(200, 4000), whole),
        100_000
    );
}
