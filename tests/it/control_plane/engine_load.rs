//! KV caches that agents report decide where the real scheduler's pods go.

use super::fleet::{node, pod};
use super::processes::eventually;
use super::world::RealControlPlane;
use super::{ALWAYS, annotation, node_of, submit, wait_until_all_bound};
use serde_json::json;
use std::collections::BTreeMap;

const H100: &str = "NVIDIA-H100-80GB-HBM3";
const PCIE: &str = "NVIDIA-H100-PCIe";
const MIB: u64 = 81_559;

#[tokio::test(flavor = "multi_thread")]
async fn of_gpus_with_equal_vram_at_66_and_2_percent_the_emptier_kv_cache_gets_the_pod() {
    let nodes = vec![
        node("pair", 2, MIB, PCIE),
        node("a-full", 1, MIB, H100),
        node("b-empty", 1, MIB, H100),
    ];
    let Some(mut world) = RealControlPlane::start_all(nodes.clone(), &ALWAYS).await else {
        return;
    };
    world.begin_scheduling().await;
    let caches = [(0, 0, 66), (0, 1, 2), (1, 0, 66), (2, 0, 2)];
    for (node, gpu, percent) in caches {
        world.set_kv_cache_usage(&nodes[node].uuid(gpu), f64::from(percent) / 100.0);
    }
    eventually("the figures are known", async || {
        let ledger = world.ledger().await?;
        let known = ledger["snapshot"]["nodes"].as_array()?.iter().all(|known| {
            let of = |(node, gpu, percent): (usize, u32, u8)| {
                let counted = &known["gpus"][gpu as usize]["engine_load"]["kv_cache"];
                // An engine at 2 % is hardly told from none.
                known["name"] != nodes[node].name.as_str()
                    || percent == 2
                    || *counted == u64::from(percent)
            };
            caches.into_iter().all(of)
        });
        known.then_some(())
    })
    .await;

    let on = |name: &str, model: &str| {
        let mut pod = pod(name, 10, &json!({}), "stowage-serving");
        let selector = BTreeMap::from([("nvidia.com/gpu.product".to_owned(), model.to_owned())]);
        pod.spec.as_mut().unwrap().node_selector = Some(selector);
        pod
    };
    submit(
        &world.client,
        &[on("of-two-gpus", PCIE), on("of-two-nodes", H100)],
    )
    .await;
    let bound = wait_until_all_bound(&mut world, 2).await;
    let named = |name: &str| {
        bound
            .iter()
            .find(|pod| pod.metadata.name.as_deref() == Some(name))
            .unwrap()
    };
    assert_eq!(
        annotation(named("of-two-gpus"), "stowage.dev/devices"),
        Some(&*nodes[0].uuid(1))
    );
    assert_eq!(node_of(named("of-two-nodes")), Some("b-empty"));
    println!(
        "two pods bound beside the emptier caches; {}",
        world.versions()
    );
}
