//! Pods with as much content as possible, to be classified by any policy. Nothing here reads the policy.

use stowage_scheduling::units::Bytes;
use stowage_scheduling::vocabulary::classification::PodTraits;

/// The plainest pod; the largest that expressions are evaluated for, whose texts are `a` or what the policy itself is
/// written in; and one beyond that.
pub fn pods(data: &[u8]) -> Vec<PodTraits> {
    let said: String = String::from_utf8_lossy(data)
        .chars()
        .filter(|c| c.is_ascii_graphic())
        .take(253)
        .collect();
    vec![
        PodTraits::default(),
        large("a".repeat(253), 300),
        large(said, 100),
        large("a".repeat(512), 5000),
    ]
}

fn large(text: String, labels: usize) -> PodTraits {
    let value: String = text.chars().take(63).collect();
    let mut pod = PodTraits {
        namespace: text.clone(),
        priority_class: text.clone(),
        model: text.clone(),
        service_account: text.clone(),
        priority: i32::MAX,
        gpus: u32::MAX,
        vram: Bytes(u64::MAX),
        kv_cache: Bytes(u64::MAX),
        ..PodTraits::default()
    };
    pod.labels = (0..labels)
        .map(|n| (format!("{n:063}"), value.clone()))
        .collect();
    pod.labels
        .extend(["a", "app", "team", "x"].map(|key| (key.into(), value.clone())));
    pod.resources = (0..256)
        .map(|n| format!("{n:03}{text}").chars().take(512).collect())
        .collect();
    pod
}
