//! Invalid traces and their error messages.

use super::*;

const NODES_HEAD: &str = "sn,cpu_milli,memory_mib,gpu,model";
const PODS_HEAD: &str = "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,qos,pod_phase,creation_time,deletion_time,scheduled_time";

fn read(nodes: &str, pods: &str) -> Result<Trace, TraceError> {
    Trace::read(
        TraceText {
            file: "nodes.csv",
            text: nodes,
        },
        TraceText {
            file: "pods.csv",
            text: pods,
        },
    )
}

fn nodes() -> String {
    format!("{NODES_HEAD}\nn0,64000,262144,2,T4\nn1,96000,393216,8,G2\n")
}

fn pods_error(rows: &str) -> String {
    read(&nodes(), &format!("{PODS_HEAD}\n{rows}\n"))
        .unwrap_err()
        .to_string()
}

#[test]
fn a_sound_trace_is_read_whole() {
    let pods = format!(
        "{PODS_HEAD}\r\np0,4000,8192,1,460,T4|G2,BE,Running,100,400,130\r\n\np1,1000,1024,0,0,,LS,Pending,100,900,\n"
    );
    let trace = read(&nodes(), &pods).unwrap();
    assert_eq!(trace.nodes[1].gpus, 8);
    assert_eq!(
        (
            trace.pods[0].gpus,
            trace.pods[0].milli_per_gpu,
            trace.pods[0].models.len()
        ),
        (1, 460, 2)
    );
    assert_eq!(trace.pods[0].qos, Some(Qos::BestEffort));
    assert_eq!(trace.pods[1].qos, Some(Qos::LatencySensitive));
}

#[test]
fn a_variant_without_history_and_models_is_a_trace_too() {
    let pods = "name,cpu_milli,memory_mib,num_gpu,gpu_milli\np0,4000,8192,8,1000\n";
    let trace = read(&nodes(), pods).unwrap();
    assert_eq!(trace.pods[0].qos, None);
    assert!(trace.pods[0].models.is_empty());
}

#[test]
fn an_empty_file_is_named() {
    let error = read("", "").unwrap_err().to_string();
    assert!(error.starts_with("nodes.csv is empty"), "{error}");
    let error = read(&nodes(), " \n").unwrap_err().to_string();
    assert!(error.starts_with("pods.csv is empty"), "{error}");
    let error = read(&nodes(), PODS_HEAD).unwrap_err().to_string();
    assert!(
        error.starts_with("pods.csv has column names and no rows"),
        "{error}"
    );
}

#[test]
fn a_missing_column_is_named_beside_those_that_are_there() {
    let error = read("sn,cpu_milli,memory_mib,model\nn0,1,1,T4\n", "")
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("nodes.csv, line 1: there is no column \"gpu\" among sn, cpu_milli"),
        "{error}"
    );
}

#[test]
fn the_error_for_an_invalid_field_names_its_line_and_the_remedy() {
    let good = "p0,1,1,1,10,,BE,Running,0,1,0";
    let cases = [
        (
            "p1,1,1,1,-460,,BE,Running,0,1,0",
            "line 3: gpu_milli is -460, less than nothing; write 0 or more",
        ),
        (
            "p1,-0.5,1,1,460,,BE,Running,0,1,0",
            "line 3: cpu_milli is -0.5, less than nothing",
        ),
        (
            "p1,1,many,1,460,,BE,Running,0,1,0",
            "line 3: memory_mib is \"many\"; write a whole number",
        ),
        (
            "p1,1,1,1,,,BE,Running,0,1,0",
            "line 3: gpu_milli is \"\"; write a whole number",
        ),
        (
            "p1,1,1,1,1001,,BE,Running,0,1,0",
            "line 3: gpu_milli is 1001; write at most 1000",
        ),
        (
            "p1,1,1,65,1000,,BE,Running,0,1,0",
            "line 3: num_gpu is 65; write at most 64",
        ),
        (
            "p1,99999999999999999999,1,1,460,,BE,Running,0,1,0",
            "line 3: cpu_milli is 99999999999999999999; write at most 1099511627776",
        ),
        (
            "p1,1,1,2,460,,BE,Running,0,1,0",
            "line 3: the pod asks for 2 GPUs and 460 thousandths of each",
        ),
        (
            "p1,1,1,1,0,,BE,Running,0,1,0",
            "line 3: the pod asks for 1 GPUs and 0 thousandths",
        ),
        (
            "p1,1,1,1,460,,best,Running,0,1,0",
            "line 3: qos is \"best\"; write BE, Burstable, Guaranteed or LS",
        ),
        (
            "p1,1,1,1,460,T 4,BE,Running,0,1,0",
            "line 3: gpu_spec is \"T 4\": the GPU model",
        ),
        ("p1,1,1,1,460,BE", "line 3: 6 fields under 11 columns"),
        (
            "p1,1,1,1,460,V100|P4,BE,Running,0,1,0",
            "line 3: pod p1 wants a GPU of V100 or P4, and no node has one",
        ),
        (
            "p1,1,1,9,1000,T4,BE,Running,0,1,0",
            "line 3: pod p1 wants 9 GPUs, 1 thousandths",
        ),
        (
            "p1,97000,1,8,1000,,BE,Running,0,1,0",
            "line 3: pod p1 wants 8 GPUs, 97000 thousandths of a CPU",
        ),
    ];
    for (row, said) in cases {
        let error = pods_error(&format!("{good}\n{row}"));
        assert!(
            error.starts_with("pods.csv, ") && error.contains(said),
            "{row}: {error}"
        );
    }
}

#[test]
fn a_pod_too_large_for_the_models_it_names_is_read_and_known_never_to_be_placed() {
    let rows = [
        "p0,1,1,1,10,T4,BE,Running,0,1,0",
        "p1,1,1,8,1000,T4|P4,BE,Running,0,1,0",
    ];
    let cpu = "p2,64001,1,1,1000,T4,BE,Running,0,1,0";
    // Without a GPU it may go anywhere, whatever it names.
    let anywhere = "p3,96000,1,0,0,T4,BE,Running,0,1,0";
    let pods = format!("{PODS_HEAD}\n{}\n{cpu}\n{anywhere}\n", rows.join("\n"));
    let trace = read(&nodes(), &pods).unwrap();
    let never: Vec<&str> = trace.never_placed().map(|pod| &*pod.name).collect();
    assert_eq!(never, ["p1", "p2"]);
}

#[test]
fn two_nodes_of_one_name_are_refused() {
    let nodes = format!("{}n0,1,1,1,T4\n", nodes());
    let error = read(&nodes, "").unwrap_err().to_string();
    assert_eq!(
        error,
        "nodes.csv, line 4: two nodes are called \"n0\"; give each a name of its own"
    );
}
