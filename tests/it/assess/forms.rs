//! Clusters whose GPUs a careless reader would miscount.

use super::*;

/// A node that says nothing of its GPUs but this.
fn bare_node(name: &str, labels: Value, offered: &str) -> Value {
    let mut node = node(labels, json!({ "nvidia.com/gpu": offered }));
    let metadata = node["metadata"].as_object_mut().unwrap();
    metadata["name"] = json!(name);
    let labels = metadata["labels"].as_object_mut().unwrap();
    labels.remove("nvidia.com/gpu.product");
    node
}

fn plain(name: &str) -> Value {
    pod(name, json!({}), json!({ "nvidia.com/gpu": "1" }))
}

fn counts(said: &Value) -> [Option<f64>; 3] {
    ["GPUs today", "GPUs requested", "GPUs that suffice"].map(|name| figure(said, name))
}

/// That nothing is said to be saved where something cannot be read.
fn is_unknown(said: &Value) {
    assert_eq!(figure(said, "GPUs that suffice"), None, "{said:#}");
    let summary = said["summary"].as_str().unwrap();
    assert!(summary.starts_with("Unknown: "), "{summary}");
}

fn gke(size: &str) -> Value {
    json!({ "cloud.google.com/gke-accelerator": "nvidia-h100-80gb", "cloud.google.com/gke-gpu-partition-size": size })
}

#[test]
fn a_partition_of_gke_is_a_part_of_a_gpu() {
    let said = |labels: Value, offered: &str| {
        of_items(&[bare_node("n1", labels, offered), plain("a")], &[]).json()
    };
    // Two GPUs in sevenths.
    let sevenths = said(gke("1g.10gb"), "14");
    assert_eq!(counts(&sevenths), [Some(2.0), Some(1.0), Some(1.0)]);
    let one = workload(&sevenths, "n/a");
    assert_eq!(
        (&one["ownGpu"], &one["why"]),
        (&json!("kept"), &json!("MIG slices stay as they are cut"))
    );
    // A GPU has four of these, with twice the memory of a seventh.
    assert_eq!(counts(&said(gke("1g.20gb"), "8"))[0], Some(2.0));
    let mut shared = gke("3g.40gb");
    shared["cloud.google.com/gke-max-shared-clients-per-gpu"] = json!("4");
    assert_eq!(counts(&said(shared, "16"))[0], Some(2.0));
    for unread in ["third", "9g.10gb"] {
        let said = said(gke(unread), "16");
        is_unknown(&said);
        let cautions = said["cautions"].to_string();
        let expected = "nothing says how many GPUs they have: 1 node, such as n1.";
        assert!(cautions.contains(expected), "{cautions}");
    }
}

#[test]
fn partitions_of_gke_request_their_parts() {
    let pods = ["a", "b", "c", "d", "e", "f", "g", "h"].map(plain);
    let node = bare_node("n1", gke("1g.10gb"), "14");
    let said = of_items(&[&[node][..], &pods].concat(), &[]).json();
    assert_eq!(counts(&said), [Some(2.0); 3]);
}

fn hami(register: &str) -> Value {
    let mut node = bare_node("n1", json!({}), "20");
    node["metadata"]["annotations"] = json!({ "hami.io/node-nvidia-register": register });
    let limits = json!({ "nvidia.com/gpu": "1", "nvidia.com/gpumem": "20k" });
    let pods = ["a", "b"].map(|name| pod(name, json!({}), limits.clone()));
    of_items(&[&[node][..], &pods].concat(), &[]).json()
}

#[test]
fn hami_registers_its_gpus_in_commas_before_2_8() {
    let seven = "GPU-1,10,81920,100,NVIDIA-NVIDIA A100-SXM4-80GB,0,true:";
    let nine = "GPU-2,10,81920,100,NVIDIA-NVIDIA A100-SXM4-80GB,1,true,1,hami-core:";
    for register in [
        seven.repeat(2),
        nine.repeat(2),
        format!("{seven}{nine}"),
        format!("{seven}{}", nine.trim_end_matches(':')),
    ] {
        let said = hami(&register);
        assert_eq!(counts(&said), [Some(2.0), Some(1.0), Some(2.0)]);
        let one = workload(&said, "n/a");
        assert_eq!(one["why"], "HAMi gives it a part of a GPU");
    }
    for unread in [
        "",
        "GPU-1,10,81920:",
        "GPU-1,10,81920,100,NVIDIA-X,0,true,1:",
        "[{\"id\":",
        "nothing",
    ] {
        is_unknown(&hami(unread));
    }
}

#[test]
fn slices_of_each_form_factor_are_parts_of_its_gpu() {
    let labelled = |product: &str, slices: &str| {
        let labels = json!({ "nvidia.com/gpu.count": slices, "nvidia.com/gpu.replicas": "1" });
        let mut node = bare_node("n1", labels, slices);
        node["metadata"]["labels"]["nvidia.com/gpu.product"] =
            json!(format!("{product}-MIG-1g.10gb"));
        node
    };
    let of_gke = |gpu: &str, slices: &str| {
        let mut labels = gke("1g.10gb");
        labels["cloud.google.com/gke-accelerator"] = json!(gpu);
        bare_node("n1", labels, slices)
    };
    for node in [
        labelled("NVIDIA-A100-80GB-PCIe", "14"),
        labelled("NVIDIA-A100-PCIE-40GB", "8"),
        labelled("NVIDIA-H100-PCIe", "14"),
        of_gke("nvidia-h100-mega-80gb", "14"),
        of_gke("nvidia-a100-80gb", "14"),
        of_gke("nvidia-tesla-a100", "8"),
    ] {
        let said = of_items(&[node.clone(), plain("a")], &[]).json();
        assert_eq!(counts(&said), [Some(2.0), Some(1.0), Some(1.0)], "{node}");
    }
    is_unknown(&of_items(&[labelled("NVIDIA-Unheard", "14"), plain("a")], &[]).json());
}

#[test]
fn a_pod_of_hami_without_an_amount_of_memory_has_whole_gpus() {
    let device = json!({ "id": "GPU-1", "count": 10, "devmem": 81920, "type": "NVIDIA-NVIDIA A100-SXM4-80GB" });
    let mut node = bare_node("n1", json!({}), "20");
    let register = json!([device, device]).to_string();
    node["metadata"]["annotations"] = json!({ "hami.io/node-nvidia-register": register });
    let said = |node: &Value| of_items(&[node.clone(), plain("a"), plain("b")], &[]).json();
    let by_register = said(&node);
    assert_eq!(counts(&by_register), [Some(2.0); 3]);
    assert_eq!(figure(&by_register, "lower bound"), Some(2.0));
    assert_eq!(workload(&by_register, "n/a")["ownGpu"], "kept");
    // Labels beside the register make no difference.
    node["metadata"]["labels"] = gfd("2");
    node["metadata"]["labels"]["nvidia.com/gpu.product"] = json!("NVIDIA-A100-SXM4-80GB");
    assert_eq!(counts(&said(&node)), [Some(2.0); 3]);
}

#[test]
fn whoever_requests_gpus_of_a_device_plugin_has_them_whatever_its_annotations_say() {
    let whole = node(gfd("8"), json!({ "nvidia.com/gpu": "8" }));
    for metadata in [
        json!({ "annotations": { "gpu-memory": "8000" } }),
        json!({ "annotations": { "gpu-fraction": "0.5" }, "labels": { "runai-gpu-group": "g" } }),
    ] {
        let all = pod("a", metadata, json!({ "nvidia.com/gpu": "8" }));
        let said = of_items(&[whole.clone(), all], &[]).json();
        assert_eq!(counts(&said), [Some(8.0); 3]);
        assert_eq!(workload(&said, "n/a")["ownGpu"], "unknown");
    }
}

#[test]
fn gpus_of_a_node_with_two_models_are_counted_and_stay() {
    let mut labels = gfd("4");
    labels["nvidia.com/gpu.replicas"] = json!("1");
    labels["nvidia.com/gpu.sharing-strategy"] = json!("none");
    let two = node(labels, json!({ "nvidia.com/gpu": "8" }));
    let said = of_items(&[two.clone(), plain("a"), plain("b")], &[]).json();
    assert_eq!(counts(&said), [Some(8.0), Some(2.0), Some(2.0)]);
    let why = "the memory of its GPU is not known";
    assert_eq!(workload(&said, "n/a")["why"], why);
    // Nor is it known of two models that a DRA driver publishes.
    let device = |at: usize, product: &str| json!({ "name": format!("gpu-{at}"), "attributes": { "type": { "string": "gpu" }, "uuid": { "string": format!("GPU-{at}") }, "productName": { "string": product } } });
    let result = json!({ "driver": "gpu.nvidia.com", "device": "gpu-1" });
    let devices = [device(0, "NVIDIA A100-SXM4-80GB"), device(1, "NVIDIA L4")];
    let said = on_devices(&devices, &[vec![result]], 1);
    assert_eq!(counts(&said), [Some(2.0), Some(1.0), Some(1.0)]);
    assert_eq!(workload(&said, "n/a")["why"], why);
    // Without a word of sharing eight may be four twice.
    let two = node(gfd("4"), json!({ "nvidia.com/gpu": "8" }));
    is_unknown(&of_items(&[two, plain("a")], &[]).json());
}

/// What is said of pod `a`, which has these claims, each of devices with such results, on a node with two GPUs.
fn claiming(claims: &[Vec<Value>], named: usize) -> Value {
    let device = |at: usize| json!({ "name": format!("gpu-{at}"), "attributes": { "type": { "string": "gpu" }, "uuid": { "string": format!("GPU-{at}") }, "productName": { "string": "NVIDIA A100-SXM4-80GB" } } });
    on_devices(&[device(0), device(1)], claims, named)
}

fn on_devices(devices: &[Value], claims: &[Vec<Value>], named: usize) -> Value {
    let slice = json!({ "kind": "ResourceSlice", "metadata": { "name": "s" }, "spec": { "driver": "gpu.nvidia.com", "nodeName": "n1", "devices": devices } });
    let claim =
        |at: usize| json!({ "name": format!("c{at}"), "resourceClaimName": format!("c{at}") });
    let mut claiming = pod("a", json!({}), json!({}));
    claiming["spec"]["resourceClaims"] = (0..named).map(claim).collect();
    let claims = claims.iter().enumerate().map(|(at, results)| {
        json!({ "kind": "ResourceClaim", "metadata": { "name": format!("c{at}"), "namespace": "n" }, "status": { "allocation": { "devices": { "results": results } }, "reservedFor": [{ "name": "a" }] } })
    });
    let items = [node(json!({}), json!({})), slice, claiming];
    let items: Vec<Value> = items.into_iter().chain(claims).collect();
    of_items(&items, &[]).json()
}

#[test]
fn a_claim_of_an_administrator_takes_no_gpu() {
    let of = |driver: &str, device: &str, admin: Value| json!({ "driver": driver, "device": device, "pool": "n1", "request": "r", "adminAccess": admin });
    let gpu = |device: &str, admin: Value| of("gpu.nvidia.com", device, admin);
    let watched = ["gpu-0", "gpu-1"].map(|device| gpu(device, json!(true)));
    let said = claiming(&[watched.to_vec()], 1);
    assert_eq!(counts(&said), [Some(2.0), Some(0.0), Some(0.0)]);
    assert_eq!(said["workloads"], json!([]));
    // One that watches and computes has what it computes on.
    let own = [json!(false), Value::Null].map(|admin| vec![gpu("gpu-0", admin)]);
    for own in own {
        let said = claiming(&[watched.to_vec(), own], 2);
        assert_eq!(counts(&said), [Some(2.0), Some(1.0), Some(1.0)]);
    }
    // Nor does a claim of network cards.
    let card = of("dra.net", "eth0", Value::Null);
    assert_eq!(counts(&claiming(&[vec![card]], 1))[1], Some(0.0));
    // Of one claim of two nobody knows what it has.
    is_unknown(&claiming(&[watched.to_vec()], 2));
}

#[test]
fn how_large_a_share_by_capacity_is_nobody_reads() {
    let share = |id: &str| json!({ "driver": "gpu.nvidia.com", "device": "gpu-0", "shareID": id });
    is_unknown(&claiming(&[vec![share("1"), share("2")]], 1));
    let consumed = json!({ "driver": "gpu.nvidia.com", "device": "gpu-0", "consumedCapacity": { "memory": "10Gi" } });
    is_unknown(&claiming(&[vec![consumed]], 1));
}

#[test]
fn a_claim_counts_once_and_a_pending_pod_only_if_it_may_have_gpus() {
    let claim = |driver: &str, pods: &[&str]| {
        let reserved: Vec<Value> = pods.iter().map(|name| json!({ "name": name })).collect();
        json!({ "kind": "ResourceClaim", "metadata": { "name": "c", "namespace": "n" }, "status": { "allocation": { "devices": { "results": [{ "driver": driver, "device": "gpu-0" }] } }, "reservedFor": reserved } })
    };
    let claiming = |name: &str| {
        let mut pod = pod(name, json!({}), json!({}));
        pod["spec"]["resourceClaims"] = json!([{ "name": "one", "resourceClaimName": "c" }]);
        pod
    };
    let whole = || node(gfd(FOUR), json!({ "nvidia.com/gpu": "4" }));
    let mut twice = claiming("a");
    twice["spec"]["resourceClaims"] = json!([{ "name": "one", "resourceClaimName": "c" }, { "name": "two", "resourceClaimTemplateName": "t" }]);
    twice["status"]["resourceClaimStatuses"] = json!([{ "name": "two", "resourceClaimName": "c" }]);
    let gpu = claim("gpu.nvidia.com", &["a"]);
    let said = of_items(&[whole(), gpu, twice], &[]).json();
    assert_eq!(counts(&said), [Some(4.0), Some(1.0), Some(1.0)]);
    let shared = claim("gpu.nvidia.com", &["a", "b"]);
    let said = of_items(&[whole(), shared, claiming("a"), claiming("b")], &[]).json();
    assert_eq!(counts(&said), [Some(4.0), Some(1.0), Some(2.0)]);
    assert_eq!(workload(&said, "n/a")["ownGpu"], "kept");
    let mut pending = claiming("a");
    pending["spec"].as_object_mut().unwrap().remove("nodeName");
    let is_listed = |claims: &[Value]| {
        let said = of_items(&[&[whole(), pending.clone()], claims].concat(), &[]).json();
        said["cautions"]
            .to_string()
            .contains("they have no node: 1 pod")
    };
    assert!(!is_listed(&[claim("dra.net", &[])]));
    assert!(is_listed(&[claim("gpu.nvidia.com", &[])]));
    assert!(is_listed(&[]));
}

#[test]
fn slices_of_a_dra_driver_are_parts_of_the_gpu_that_they_are_cut_from() {
    let device = |profile: &str, at: usize| json!({ "name": format!("gpu-0-mig-{}-19-{at}", profile.replace('.', "")), "attributes": { "type": { "string": "mig" }, "uuid": { "string": format!("MIG-{at}") }, "parentUUID": { "string": "GPU-0" }, "profile": { "string": profile }, "productName": { "string": "NVIDIA A100 80GB PCIe" } } });
    let of = |profiles: &[&str]| {
        let devices = profiles.iter().zip(0..);
        let devices: Vec<Value> = devices.map(|(profile, at)| device(profile, at)).collect();
        let result =
            |device: &Value| json!({ "driver": "gpu.nvidia.com", "device": device["name"] });
        let results = devices.iter().map(result).collect();
        on_devices(&devices, &[results], 1)
    };
    for profiles in [&["1g.10gb"; 7][..], &["3g.40gb", "2g.20gb", "1g.10gb"]] {
        let said = of(profiles);
        assert_eq!(counts(&said), [Some(1.0); 3], "{profiles:?}");
        assert_eq!(workload(&said, "n/a")["ownGpu"], "kept");
    }
    is_unknown(&of(&["8g.90gb"]));
}

/// Forty nodes, each another as `change` makes it, and a pod on each of them as `select` makes it.
fn forty(change: impl Fn(&mut Value, String), select: impl Fn(&mut Value, String)) -> Value {
    let whole = |at: usize| {
        let mut node = node(gfd(FOUR), json!({ "nvidia.com/gpu": "4" }));
        node["metadata"]["name"] = json!(format!("n{at}"));
        change(&mut node, format!("v{at}"));
        node
    };
    let on = |at: usize| {
        let mut pod = plain(&format!("p{at}"));
        pod["spec"]["nodeName"] = json!(format!("n{at}"));
        select(&mut pod, format!("v{at}"));
        pod
    };
    let items: Vec<Value> = (0..40).map(whole).chain((0..40).map(on)).collect();
    of_items(&items, &[]).json()
}

#[test]
fn forty_kinds_of_nodes_get_an_answer() {
    let team = |node: &mut Value, value: String| node["metadata"]["labels"]["team"] = json!(value);
    let select =
        |pod: &mut Value, value: String| pod["spec"]["nodeSelector"]["team"] = json!(value);
    let each = [Some(160.0), Some(40.0), Some(40.0)];
    assert_eq!(counts(&forty(team, select)), each);
    let taint = |node: &mut Value, value: String| {
        node["spec"]["taints"] = json!([{ "key": "team", "value": value, "effect": "NoSchedule" }]);
    };
    let tolerate = |pod: &mut Value, value: String| {
        pod["spec"]["tolerations"] = json!([{ "key": "team", "value": value }]);
    };
    assert_eq!(counts(&forty(taint, tolerate)), each);
    let size = |node: &mut Value, value: String| {
        let cpus = 100 + 10 * value[1..].parse::<u32>().unwrap();
        node["status"]["allocatable"]["cpu"] = json!(cpus.to_string());
    };
    assert_eq!(counts(&forty(size, |_, _| {})), each);
}
