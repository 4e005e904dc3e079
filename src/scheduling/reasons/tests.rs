//! What holds of all reasons.

use super::*;
use serde_json::json;

#[test]
fn a_reason_has_the_same_code_for_a_gpu_in_json_and_for_its_node() {
    let (by, starting) = (
        Vec::new(),
        Misfit::EngineStarting {
            starting: 1,
            asked: 1,
        },
    );
    let pairs = [
        (Obstacle::KeptSpare, Misfit::KeptSpare { kept: 1, asked: 1 }),
        (
            Obstacle::EngineStarting {
                by: by.clone(),
                opens_in_millis: None,
            },
            starting,
        ),
        (
            Obstacle::ClassExcluded { by },
            Misfit::ClassExcluded {
                usable: 1,
                excluded_classes: 1,
                asked: 1,
            },
        ),
    ];
    for (obstacle, misfit) in pairs {
        assert_eq!(
            serde_json::to_value(&obstacle).unwrap()["code"],
            json!(misfit.code())
        );
        assert_eq!(obstacle.code(), misfit.code());
    }
}

#[test]
fn no_two_reasons_of_a_level_have_one_code_and_each_change_takes_away_a_reason_of_a_node() {
    for codes in [Misfit::CODES, Obstacle::CODES, WaitReason::CODES] {
        let different: std::collections::BTreeSet<_> = codes.iter().collect();
        assert_eq!(different.len(), codes.len(), "{codes:?}");
    }
    assert!(LIFTS.iter().all(|(code, _)| Misfit::CODES.contains(code)));
}

#[test]
fn a_conflict_says_what_the_node_lacks() {
    let conflict = AllocationFailure::from(Misfit::NoHealthyGpu { gpus: 2 });
    assert_eq!(conflict.code(), "no-healthy-gpu");
    assert_eq!(
        conflict.to_string(),
        "the node no longer fits: none of the node's 2 GPUs is healthy"
    );
}

/// After a force deletion on a node that was gone, for one: its containers run on, and no grant is theirs.
#[test]
fn unaccounted_vram_is_attributed_to_processes_of_no_pod() {
    let (per_gpu, most) = (Bytes::gib(20), Bytes::gib(5));
    let occupied = Misfit::Occupied {
        per_gpu,
        asked: 1,
        large_enough: 0,
        most,
    };
    assert!(
        occupied
            .to_string()
            .contains("VRAM in use by processes of no known pod"),
        "{occupied}"
    );
}
