//! The production path through nvml-wrapper, against a library that plays a script; and against the real one if there is a GPU.

use super::*;
use crate::needs;
use mock_nvml::{GpuProcess, Mock, NvmlScript, ScriptedGpu, Slice, Xid, codes};
use std::process::Command;
use stowage_report::{ProcessReport, ReportPart};
use stowage_scheduling::ids::GpuUuid;
use stowage_scheduling::units::Percent;
use stowage_scheduling::vocabulary::health::{ComputeMode, Health};
use stowage_scheduling::vocabulary::node_reading::GpuActivity;
use tempfile::TempDir;

struct NvmlFixture {
    nvml: Nvml,
    mock: Mock,
    folder: TempDir,
}

impl NvmlFixture {
    fn new(script: &NvmlScript) -> Self {
        Self::with(script, NvmlOptions::default())
    }

    fn with(script: &NvmlScript, options: NvmlOptions) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let mock = Mock::install(folder.path(), script).unwrap();
        let library = Some(mock.library().to_owned());
        let nvml = Nvml::new(NvmlOptions {
            library,
            sys: folder.path().to_owned(),
            ..options
        });
        Self { nvml, mock, folder }
    }

    fn sample(&mut self) -> GpuSample {
        self.nvml.sample().unwrap()
    }

    fn after(&mut self, script: &NvmlScript) -> GpuSample {
        self.mock.play(script).unwrap();
        self.sample()
    }

    /// Samples until the events that were played have been read.
    fn until(&mut self, mut is_seen: impl FnMut(&GpuSample) -> bool) -> GpuSample {
        let given_up = Instant::now() + Duration::from_secs(60);
        loop {
            let sample = self.sample();
            if is_seen(&sample) {
                return sample;
            }
            assert!(
                Instant::now() < given_up,
                "it never came to this; last: {sample:?}"
            );
            std::thread::yield_now();
        }
    }
}

fn gpu(letter: &str) -> ScriptedGpu {
    ScriptedGpu {
        uuid: format!("GPU-{letter}"),
        ..ScriptedGpu::default()
    }
}

fn script(gpus: impl IntoIterator<Item = ScriptedGpu>) -> NvmlScript {
    NvmlScript {
        gpus: gpus.into_iter().collect(),
        ..NvmlScript::default()
    }
}

fn process(pid: u32, used: u64) -> GpuProcess {
    GpuProcess {
        pid,
        used: Some(used),
        ..GpuProcess::default()
    }
}

fn refusing(letter: &str, function: &str, code: u32) -> ScriptedGpu {
    ScriptedGpu {
        refuse: [(function.to_string(), code)].into(),
        ..gpu(letter)
    }
}

fn uuids(sample: &GpuSample) -> Vec<&str> {
    sample.gpus.iter().map(|gpu| gpu.uuid.as_str()).collect()
}

#[test]
fn every_figure_of_a_gpu_is_read() {
    let processes = vec![
        process(10, 1 << 30),
        GpuProcess {
            pid: 11,
            used: None,
            ..GpuProcess::default()
        },
    ];
    let (total, reserved, used) = (80 << 30, 600 << 20, 9 << 30);
    let scripted = ScriptedGpu {
        total,
        reserved,
        used,
        utilization: 73,
        processes,
        ..gpu("a")
    };
    let mut node = NvmlFixture::new(&script([ScriptedGpu {
        pci_bus_id: "00000000:3B:00.0".into(),
        ..scripted
    }]));
    let device = node.folder.path().join("bus/pci/devices/0000:3b:00.0");
    std::fs::create_dir_all(&device).unwrap();
    std::fs::write(device.join("numa_node"), "1\n").unwrap();

    let sample = node.sample();

    assert_eq!(sample.missing, []);
    let [gpu] = &sample.gpus[..] else {
        panic!("{sample:?}")
    };
    assert_eq!(
        (gpu.uuid.as_str(), gpu.index, gpu.parent.as_ref()),
        ("GPU-a", 0, None)
    );
    assert_eq!(gpu.model.as_str(), "NVIDIA-H100-80GB-HBM3");
    assert_eq!(
        (gpu.total_bytes, gpu.reserved_bytes, gpu.used_bytes),
        (Bytes(total), Bytes(reserved), Some(Bytes(used)))
    );
    assert_eq!(
        (gpu.utilization_percent, gpu.numa_node, gpu.nvlink_island),
        (Some(73), Some(1), None)
    );
    assert_eq!(
        (gpu.health, gpu.health_reason.as_ref()),
        (Health::Healthy, None)
    );
    let known = ProcessReport {
        pid: 10,
        used_bytes: Some(Bytes::gib(1)),
        pod: None,
        container: None,
    };
    let unknown = ProcessReport {
        pid: 11,
        used_bytes: None,
        pod: None,
        container: None,
    };
    assert_eq!(gpu.processes.as_deref(), Some(&[known, unknown][..]));
}

#[test]
fn a_process_in_several_lists_is_one_process() {
    let mps = GpuProcess {
        mps: true,
        ..process(10, 3 << 30)
    };
    let both = GpuProcess {
        graphics: true,
        both: true,
        ..process(11, 1 << 30)
    };
    let draws = GpuProcess {
        graphics: true,
        ..process(12, 1 << 20)
    };
    let lists = vec![process(10, 1 << 30), mps, both, draws];
    let sample = NvmlFixture::new(&script([ScriptedGpu {
        processes: lists,
        ..gpu("a")
    }]))
    .sample();
    let found: Vec<_> = sample.gpus[0]
        .processes
        .iter()
        .flatten()
        .map(|p| (p.pid, p.used_bytes))
        .collect();
    assert_eq!(
        found,
        [
            (10, Some(Bytes::gib(3))),
            (11, Some(Bytes::gib(1))),
            (12, Some(Bytes::mib(1)))
        ]
    );
}

#[test]
fn slices_follow_the_gpu_they_are_cut_from() {
    let slice = |letter: &str, pid| Slice {
        uuid: format!("MIG-{letter}"),
        used: 1 << 30,
        processes: vec![process(pid, 1 << 30)],
        ..Slice::default()
    };
    // The places between are empty, as they are when slices come and go.
    let slices = [(0, slice("x", 10)), (5, slice("y", 11))].into();
    let cut = ScriptedGpu {
        mig_enabled: true,
        slices,
        ecc_errors: Some(2),
        ..gpu("a")
    };
    let mut node = NvmlFixture::new(&script([cut, gpu("b")]));

    let sample = node.sample();

    assert_eq!(uuids(&sample), ["GPU-a", "MIG-x", "MIG-y", "GPU-b"]);
    let slice = &sample.gpus[2];
    assert_eq!(
        (slice.parent.as_ref().unwrap().as_str(), slice.index),
        ("GPU-a", 0)
    );
    assert_eq!(
        (slice.total_bytes, slice.used_bytes),
        (Bytes::gib(10), Some(Bytes::gib(1)))
    );
    assert_eq!(slice.processes.as_deref().unwrap()[0].pid, 11);
    assert_eq!(slice.model.as_str(), "NVIDIA-H100-80GB-HBM3-MIG-1g.10gb");
    assert_eq!(slice.health, Health::Draining, "its GPU has memory errors");
    assert_eq!(
        sample.gpus[0].processes,
        Some(vec![]),
        "all that runs runs on slices"
    );
    assert_eq!(sample.missing, []);
}

#[test]
fn a_gpu_in_mig_mode_without_slices_takes_nothing() {
    let sample = NvmlFixture::new(&script([ScriptedGpu {
        mig_enabled: true,
        ..gpu("a")
    }]))
    .sample();
    assert_eq!(sample.gpus[0].health, Health::Draining);
    assert!(
        sample.gpus[0]
            .health_reason
            .as_ref()
            .unwrap()
            .contains("MIG mode is on")
    );
}

#[test]
fn gpus_that_reach_each_other_share_an_island() {
    let linked = |letter, nvlink| ScriptedGpu {
        nvlink,
        ..gpu(letter)
    };
    let gpus = [
        linked("a", Some(1)),
        linked("b", Some(2)),
        linked("c", Some(1)),
        linked("d", None),
    ];
    let sample = NvmlFixture::new(&script(gpus)).sample();
    let islands: Vec<_> = sample.gpus.iter().map(|gpu| gpu.nvlink_island).collect();
    assert_eq!(islands, [Some(0), None, Some(0), None]);
}

#[test]
fn a_lost_gpu_keeps_its_place_and_its_size() {
    let slices = [(
        1,
        Slice {
            uuid: "MIG-x".into(),
            ..Slice::default()
        },
    )]
    .into();
    let before = ScriptedGpu {
        mig_enabled: true,
        slices,
        ..gpu("a")
    };
    let mut node = NvmlFixture::new(&script([before.clone(), gpu("b")]));
    node.sample();

    let sample = node.after(&script([
        ScriptedGpu {
            lost: true,
            ..before.clone()
        },
        gpu("b"),
    ]));

    assert_eq!(uuids(&sample), ["GPU-a", "MIG-x", "GPU-b"]);
    for lost in &sample.gpus[..2] {
        assert_eq!(
            (lost.health, lost.used_bytes, lost.processes.as_ref()),
            (Health::Lost, None, None)
        );
        assert!(
            lost.health_reason
                .as_ref()
                .unwrap()
                .contains("fell off the bus"),
            "{lost:?}"
        );
    }
    assert_eq!(
        (sample.gpus[0].total_bytes, sample.gpus[1].total_bytes),
        (Bytes::gib(80), Bytes::gib(10))
    );
    assert_eq!(sample.gpus[2].health, Health::Healthy);
    assert!(
        sample.missing[0].reason.contains("GPU 0 (GPU-a)"),
        "{:?}",
        sample.missing
    );

    let sample = node.after(&script([before, gpu("b")]));
    assert_eq!(
        sample.gpus[0].health,
        Health::Healthy,
        "after a reset it is there again"
    );
}

#[test]
fn a_gpu_without_a_handle_keeps_its_index_and_drains() {
    let mut node = NvmlFixture::new(&script([gpu("a"), gpu("b")]));
    node.sample();
    let refused = refusing("a", "nvmlDeviceGetHandleByIndex_v2", codes::UNKNOWN);
    let sample = node.after(&script([refused, gpu("b")]));
    assert_eq!(uuids(&sample), ["GPU-a", "GPU-b"]);
    assert_eq!(
        (sample.gpus[0].health, sample.gpus[0].used_bytes),
        (Health::Draining, None)
    );
    assert_eq!(sample.gpus[1].health, Health::Healthy);
    assert_eq!(sample.missing.len(), 1);
}

/// Calls without which it is unknown which GPU this is, what its size is, or what runs on it.
const REQUIRED: [&str; 6] = [
    "nvmlDeviceGetHandleByIndex_v2",
    "nvmlDeviceGetUUID",
    "nvmlDeviceGetMemoryInfo_v2",
    "nvmlDeviceGetComputeRunningProcesses_v3",
    "nvmlDeviceGetGraphicsRunningProcesses_v3",
    "nvmlDeviceGetMigMode",
];

#[test]
fn an_unknown_error_drains_its_gpu_at_once() {
    for function in REQUIRED {
        for code in [codes::UNKNOWN, codes::TIMEOUT, 14, 4242] {
            let mut node = NvmlFixture::new(&script([gpu("a")]));
            node.sample();
            let sample = node.after(&script([refusing("a", function, code)]));
            let [report] = &sample.gpus[..] else {
                panic!("{function} {code}: {sample:?}")
            };
            assert_eq!(report.health, Health::Draining, "{function} {code}");
            assert!(
                report.health_reason.is_some() && !sample.missing.is_empty(),
                "{function} {code}"
            );
            let lost = node.after(&script([refusing("a", function, codes::GPU_IS_LOST)]));
            assert_eq!(lost.gpus[0].health, Health::Lost, "{function}");
            assert_eq!(
                node.after(&script([gpu("a")])).gpus[0].health,
                Health::Healthy,
                "{function}"
            );
        }
    }
}

#[test]
fn an_optional_figure_is_left_out_on_any_error() {
    let optional = [
        "nvmlDeviceGetUtilizationRates",
        "nvmlDeviceGetName",
        "nvmlDeviceGetTotalEccErrors",
        "nvmlDeviceGetRetiredPagesPendingStatus",
        "nvmlDeviceGetFieldValues",
        "nvmlDeviceGetPciInfo_v3",
        "nvmlGpmQueryDeviceSupport",
        "nvmlGpmSampleGet",
    ];
    for function in optional {
        for code in [codes::NOT_SUPPORTED, codes::UNKNOWN, 4242] {
            let mut node = NvmlFixture::new(&script([gpu("a")]));
            node.sample();
            let sample = node.after(&script([refusing("a", function, code)]));
            assert_eq!(sample.gpus[0].health, Health::Healthy, "{function} {code}");
            assert_eq!(
                sample.gpus[0].model.as_str(),
                "NVIDIA-H100-80GB-HBM3",
                "{function} {code}"
            );
        }
    }
}

/// With GPM, and these figures.
fn measured(letter: &str, sm: &str, bandwidth: &str) -> ScriptedGpu {
    ScriptedGpu {
        gpm: Some([sm.into(), bandwidth.into()]),
        ..gpu(letter)
    }
}

fn activities(sample: &GpuSample) -> Vec<Option<[Option<u8>; 2]>> {
    let percents = |activity: GpuActivity| activity.percents().map(|one| one.map(Percent::get));
    let gpus = sample.gpus.iter();
    gpus.map(|gpu| gpu.activity.map(percents)).collect()
}

#[test]
fn how_busy_a_gpu_is_is_read_where_the_driver_says_it() {
    let mut node = NvmlFixture::new(&script([
        measured("a", "41.5", "70"),
        measured("b", "0", "NaN"),
        measured("c", "150", "-3"),
        measured("d", "12", "-"),
        gpu("e"),
    ]));
    let first = node.sample();
    assert_eq!(activities(&first), [None; 5], "one sample says nothing");
    let sample = node.until(|sample| sample.gpus[0].activity.is_some());
    let expected = [
        Some([Some(42), Some(70)]),
        Some([Some(0), None]),
        None,
        Some([Some(12), None]),
        None,
    ];
    assert_eq!(activities(&sample), expected);
    assert_eq!(sample.missing, []);
}

#[test]
fn how_busy_a_gpu_was_is_unknown_once_it_does_not_say_it() {
    for function in [
        "nvmlGpmQueryDeviceSupport",
        "nvmlGpmSampleGet",
        "nvmlGpmMetricsGet",
        "lost",
    ] {
        let mut node = NvmlFixture::new(&script([
            measured("a", "40", "70"),
            measured("b", "5", "6"),
        ]));
        node.until(|sample| sample.gpus.iter().all(|gpu| gpu.activity.is_some()));
        let silent = ScriptedGpu {
            lost: function == "lost",
            refuse: [(function.to_string(), codes::UNKNOWN)].into(),
            ..measured("a", "40", "70")
        };
        node.mock
            .play(&script([silent, measured("b", "7", "8")]))
            .unwrap();
        let sample = node.until(|sample| {
            sample.gpus[1].activity == GpuActivity::new(Percent::new(7), Percent::new(8))
        });
        assert_eq!(sample.gpus[0].activity, None, "{function}");
        if function != "lost" {
            assert_eq!(sample.gpus[0].health, Health::Healthy, "{function}");
        }
    }
}

#[test]
fn a_driver_without_gpm_says_all_else() {
    for function in [
        "nvmlGpmQueryDeviceSupport",
        "nvmlGpmSampleAlloc",
        "nvmlGpmSampleFree",
        "nvmlGpmSampleGet",
        "nvmlGpmMetricsGet",
    ] {
        let gpus = script([measured("a", "40", "70")]);
        let (mut old, mut new) = (NvmlFixture::new(&gpus), NvmlFixture::new(&gpus));
        old.mock.remove_function(function).unwrap();
        let sample = new.until(|sample| {
            let of_old = old.sample();
            assert_eq!(activities(&of_old), [None], "{function}");
            assert_eq!(of_old.gpus[0].health, Health::Healthy, "{function}");
            sample.gpus[0].activity.is_some()
        });
        assert_eq!(activities(&sample), [Some([Some(40), Some(70)])]);
    }
}

#[test]
fn a_slice_that_does_not_answer_keeps_its_place_and_takes_no_pods() {
    let slice = |letter: &str| Slice {
        uuid: format!("MIG-{letter}"),
        ..Slice::default()
    };
    let cut = |slices| ScriptedGpu {
        mig_enabled: true,
        slices,
        ..gpu("a")
    };
    let well = script([cut([(0, slice("x")), (1, slice("y"))].into())]);
    for function in [
        "nvmlDeviceGetUUID",
        "nvmlDeviceGetMemoryInfo_v2",
        "nvmlDeviceGetComputeRunningProcesses_v3",
    ] {
        let mut node = NvmlFixture::new(&well);
        node.sample();
        let silent = Slice {
            refuse: [(function.to_string(), codes::UNKNOWN)].into(),
            ..slice("x")
        };
        let sample = node.after(&script([cut([(0, silent), (1, slice("y"))].into())]));
        let health: BTreeMap<_, _> = sample
            .gpus
            .iter()
            .map(|gpu| (gpu.uuid.as_str(), gpu.health))
            .collect();
        let expected = [
            ("GPU-a", Health::Healthy),
            ("MIG-x", Health::Draining),
            ("MIG-y", Health::Healthy),
        ];
        assert_eq!(health, expected.into(), "{function}");
    }
}

#[test]
fn a_compute_mode_says_which_pods_a_gpu_takes() {
    let read = |gpu: ScriptedGpu| {
        let report = NvmlFixture::new(&script([gpu])).sample().gpus.remove(0);
        (
            report.compute_mode,
            report.health,
            report.health_reason.unwrap_or_default(),
        )
    };
    let mode = |compute_mode| {
        read(ScriptedGpu {
            compute_mode,
            ..gpu("a")
        })
    };
    let refused = |code| read(refusing("a", "nvmlDeviceGetComputeMode", code));
    let healthy = |mode| (mode, Health::Healthy, String::new());
    assert_eq!(mode(0), healthy(Some(ComputeMode::Default)));
    assert_eq!(
        mode(1),
        healthy(Some(ComputeMode::ExclusiveProcess)),
        "of old drivers, by thread"
    );
    assert_eq!(mode(3), healthy(Some(ComputeMode::ExclusiveProcess)));
    let script = script([ScriptedGpu {
        compute_mode: 3,
        ..gpu("a")
    }]);
    let options = NvmlOptions {
        mps: true,
        ..NvmlOptions::default()
    };
    let shared = NvmlFixture::with(&script, options).sample().gpus.remove(0);
    assert_eq!(
        shared.compute_mode,
        Some(ComputeMode::Default),
        "the daemon is the one process"
    );
    assert_eq!(refused(codes::NOT_SUPPORTED), healthy(None));
    let (prohibited, health, reason) = mode(2);
    assert_eq!(
        (prohibited, health),
        (Some(ComputeMode::Prohibited), Health::Draining)
    );
    assert!(reason.contains("Prohibited"), "{reason}");
    for (unknown, health, reason) in [mode(9), refused(codes::UNKNOWN)] {
        assert_eq!(
            (unknown, health),
            (Some(ComputeMode::Unknown), Health::Draining)
        );
        assert!(reason.contains("compute mode"), "{reason}");
    }
}

#[test]
fn compute_instances_of_one_gpu_instance_share_its_memory() {
    let slice = |letter: &str, name: &str, used: u64, pids: &[u32]| Slice {
        uuid: format!("MIG-{letter}"),
        name: format!("NVIDIA H100 80GB HBM3 MIG {name}"),
        total: 40 << 30,
        used,
        processes: pids.iter().map(|pid| process(*pid, 9 << 30)).collect(),
        ..Slice::default()
    };
    let sizes = |slices: Vec<Slice>| -> Vec<(u64, u64)> {
        let slices = (0..).zip(slices).collect();
        let sample = NvmlFixture::new(&script([ScriptedGpu {
            mig_enabled: true,
            slices,
            ..gpu("a")
        }]))
        .sample();
        let gib = |bytes: Bytes| bytes.0 >> 30;
        sample.gpus[1..]
            .iter()
            .map(|gpu| (gib(gpu.total_bytes), gib(gpu.used_bytes.unwrap())))
            .collect()
    };
    let shared = |used, pids: &[u32]| slice("x", "1c.3g.40gb", used, pids);
    assert_eq!(sizes(vec![shared(0, &[])]), [(13, 0)]);
    assert_eq!(
        sizes(vec![shared(9 << 30, &[7])]),
        [(13, 9)],
        "its own process"
    );
    assert_eq!(
        sizes(vec![shared(30 << 30, &[])]),
        [(13, 3)],
        "no more is left than its instance has"
    );
    assert_eq!(sizes(vec![shared(40 << 30, &[])]), [(13, 13)]);
    assert_eq!(sizes(vec![slice("x", "2c.3g.40gb+me", 0, &[])]), [(26, 0)]);
    assert_eq!(
        sizes(vec![slice("x", "3g.40gb", 30 << 30, &[])]),
        [(40, 30)]
    );
}

#[test]
fn a_gpu_that_was_never_read_is_named_and_left_out() {
    let sample = NvmlFixture::new(&script([
        ScriptedGpu {
            lost: true,
            ..gpu("a")
        },
        gpu("b"),
    ]))
    .sample();
    assert_eq!(uuids(&sample), ["GPU-b"]);
    assert!(
        sample.missing[0]
            .reason
            .contains("GPU 0 (it was never read"),
        "{:?}",
        sample.missing
    );
}

#[test]
fn a_gpu_that_nvml_no_longer_counts_is_gone() {
    let mut node = NvmlFixture::new(&script([gpu("a"), gpu("b")]));
    node.sample();
    assert_eq!(uuids(&node.after(&script([gpu("a")]))), ["GPU-a"]);
}

#[test]
fn a_failed_nvml_call_leaves_out_one_figure() {
    type IsOut = fn(&GpuReport) -> bool;
    let figures: [(&str, IsOut); 5] = [
        ("nvmlDeviceGetUtilizationRates", |gpu| {
            gpu.utilization_percent.is_none()
        }),
        ("nvmlDeviceGetComputeRunningProcesses_v3", |gpu| {
            gpu.processes.is_none()
        }),
        ("nvmlDeviceGetMPSComputeRunningProcesses_v3", |gpu| {
            gpu.processes == Some(vec![])
        }),
        ("nvmlDeviceGetName", |gpu| gpu.model.as_str() == "unknown"),
        ("nvmlDeviceGetMigMode", |gpu| gpu.parent.is_none()),
    ];
    for (function, is_out) in figures {
        let sample = NvmlFixture::new(&script([refusing(
            "a",
            function,
            codes::FUNCTION_NOT_FOUND,
        )]))
        .sample();
        let [gpu] = &sample.gpus[..] else {
            panic!("{function}: {sample:?}")
        };
        assert!(is_out(gpu), "{function}: {gpu:?}");
        assert_eq!(
            (gpu.used_bytes, gpu.health),
            (Some(Bytes::ZERO), Health::Healthy),
            "{function}"
        );
    }
}

#[test]
fn a_gpu_without_memory_of_its_own_has_the_configured_size_or_is_named() {
    let shared = script([refusing(
        "a",
        "nvmlDeviceGetMemoryInfo_v2",
        codes::NOT_SUPPORTED,
    )]);
    let gpu_memory = Some(Bytes::gib(120));
    let sample = NvmlFixture::with(
        &shared,
        NvmlOptions {
            gpu_memory,
            ..NvmlOptions::default()
        },
    )
    .sample();
    assert_eq!(
        (sample.gpus[0].total_bytes, sample.gpus[0].used_bytes),
        (Bytes::gib(120), None)
    );

    let sample = NvmlFixture::new(&shared).sample();
    assert_eq!(sample.gpus, []);
    assert!(
        sample.missing[0].reason.contains("--gpu-memory"),
        "{:?}",
        sample.missing
    );
}

#[test]
fn memory_that_cannot_be_read_for_once_keeps_its_size_and_has_no_use() {
    let mut node = NvmlFixture::new(&script([gpu("a")]));
    node.sample();
    let sample = node.after(&script([refusing(
        "a",
        "nvmlDeviceGetMemoryInfo_v2",
        codes::UNKNOWN,
    )]));
    assert_eq!(
        (sample.gpus[0].total_bytes, sample.gpus[0].used_bytes),
        (Bytes::gib(80), None)
    );
    assert_eq!(sample.missing[0].part, ReportPart::Gpus);
}

#[test]
fn figures_above_the_total_are_not_reported() {
    let sample = NvmlFixture::new(&script([ScriptedGpu {
        total: 1 << 30,
        reserved: 2 << 30,
        used: 3 << 30,
        ..gpu("a")
    }]))
    .sample();
    assert_eq!(
        (sample.gpus[0].reserved_bytes, sample.gpus[0].used_bytes),
        (Bytes::ZERO, None)
    );
}

#[test]
fn a_uuid_that_appears_twice_is_reported_once() {
    let sample = NvmlFixture::new(&script([gpu("a"), gpu("a")])).sample();
    assert_eq!(uuids(&sample), ["GPU-a"]);
    assert!(
        sample.missing[0].reason.contains("twice"),
        "{:?}",
        sample.missing
    );
}

#[test]
fn memory_errors_decide_the_health_of_a_gpu() {
    let health = |gpu: ScriptedGpu| NvmlFixture::new(&script([gpu])).sample().gpus[0].health;
    assert_eq!(health(gpu("a")), Health::Healthy);
    assert_eq!(
        health(ScriptedGpu {
            ecc_errors: Some(1),
            ..gpu("a")
        }),
        Health::Draining
    );
    assert_eq!(
        health(ScriptedGpu {
            remap_pending: Some(true),
            ..gpu("a")
        }),
        Health::Draining
    );
    assert_eq!(
        health(ScriptedGpu {
            retirement_pending: Some(true),
            ..gpu("a")
        }),
        Health::Draining
    );
    let failed = ScriptedGpu {
        remap_failed: Some(true),
        remap_pending: Some(true),
        ..gpu("a")
    };
    assert_eq!(health(failed), Health::Lost);
    let silent = ScriptedGpu {
        ecc_errors: None,
        remap_pending: None,
        remap_failed: None,
        ..gpu("a")
    };
    assert_eq!(health(silent), Health::Healthy);
}

#[test]
fn an_error_event_takes_out_its_gpu_and_a_programs_own_does_not() {
    let calm = script([gpu("a"), gpu("b"), gpu("c")]);
    let mut node = NvmlFixture::new(&calm);
    node.sample();
    // They are delivered in this order: once the last one has its effect, all have been read.
    let xids = vec![
        Xid { gpu: 0, xid: 31 },
        Xid { gpu: 1, xid: 74 },
        Xid { gpu: 2, xid: 119 },
    ];
    node.mock.play(&NvmlScript { xids, ..calm }).unwrap();

    let sample = node.until(|sample| sample.gpus[2].health == Health::Lost);

    assert_eq!(sample.gpus[0].health, Health::Healthy);
    assert_eq!(sample.gpus[1].health, Health::Draining);
    assert!(
        sample.gpus[1]
            .health_reason
            .as_ref()
            .unwrap()
            .contains("XID 74: NVLink error")
    );
    assert_eq!(
        sample.gpus[2].used_bytes,
        Some(Bytes::ZERO),
        "it still answers"
    );
}

#[test]
fn a_gpu_without_events_does_not_silence_the_others() {
    let mute = refusing("a", "nvmlDeviceRegisterEvents", codes::NOT_SUPPORTED);
    let calm = script([gpu("b"), mute, gpu("c")]);
    let mut node = NvmlFixture::new(&calm);
    node.sample();
    node.mock
        .play(&NvmlScript {
            xids: vec![Xid { gpu: 2, xid: 79 }],
            ..calm
        })
        .unwrap();
    node.until(|sample| sample.gpus[2].health == Health::Lost);
}

#[test]
fn events_of_a_gpu_that_came_later_are_read_too() {
    let mut node = NvmlFixture::new(&script([gpu("a")]));
    node.sample();
    let both = script([gpu("a"), gpu("b")]);
    node.after(&both);
    node.mock
        .play(&NvmlScript {
            xids: vec![Xid { gpu: 1, xid: 79 }],
            ..both
        })
        .unwrap();
    node.until(|sample| sample.gpus[1].health == Health::Lost);
}

#[test]
fn a_missing_driver_is_reported_with_the_remedy() {
    let library = Some("/nowhere/libnvidia-ml.so.1".into());
    let reason = Nvml::new(NvmlOptions {
        library,
        ..NvmlOptions::default()
    })
    .sample()
    .unwrap_err();
    assert!(
        reason.starts_with("no NVIDIA driver: /nowhere/libnvidia-ml.so.1: cannot open"),
        "{reason}"
    );
    assert!(reason.contains("--nvml-lib"), "{reason}");
}

#[test]
fn a_library_that_is_no_nvml_is_named_as_such() {
    let Some(other) = [
        "/lib/x86_64-linux-gnu/libc.so.6",
        "/lib64/libc.so.6",
        "/lib/aarch64-linux-gnu/libc.so.6",
    ]
    .into_iter()
    .find(|path| std::path::Path::new(path).exists()) else {
        return needs::report_skipped("no C library at the usual places to take for NVML");
    };
    let options = NvmlOptions {
        library: Some(other.into()),
        ..NvmlOptions::default()
    };
    let reason = Nvml::new(options).sample().unwrap_err();
    assert!(reason.contains("is no NVML"), "{reason}");
}

#[test]
fn a_driver_that_goes_away_is_opened_again_when_it_is_back() {
    let there = script([gpu("a")]);
    let mut node = NvmlFixture::new(&there);
    let start = Instant::now();
    node.nvml.sample_at(start).unwrap();
    let away = NvmlScript {
        init_error: Some(codes::DRIVER_NOT_LOADED),
        count_error: Some(codes::DRIVER_NOT_LOADED),
        ..there.clone()
    };
    node.mock.play(&away).unwrap();

    let reason = node.nvml.sample_at(start).unwrap_err();
    assert!(reason.contains("kernel module is not loaded"), "{reason}");
    // The attempt a second later fails, and the next one is two seconds after it.
    assert!(node.nvml.sample_at(start + INITIAL_REOPEN_BACKOFF).is_err());
    node.mock.play(&there).unwrap();
    assert_eq!(
        node.nvml
            .sample_at(start + INITIAL_REOPEN_BACKOFF * 2)
            .unwrap_err(),
        reason
    );
    assert_eq!(
        uuids(
            &node
                .nvml
                .sample_at(start + INITIAL_REOPEN_BACKOFF * 3)
                .unwrap()
        ),
        ["GPU-a"]
    );
}

#[test]
fn a_driver_upgraded_under_the_agent_is_reported() {
    let init_error = Some(codes::LIB_RM_VERSION_MISMATCH);
    let reason = NvmlFixture::new(&NvmlScript {
        init_error,
        ..script([gpu("a")])
    })
    .nvml
    .sample()
    .unwrap_err();
    assert!(reason.contains("different versions"), "{reason}");
}

/// What nvidia-smi prints of each GPU, or why that is not known.
fn nvidia_smi() -> Result<Vec<Vec<String>>, String> {
    let query = "--query-gpu=uuid,memory.total,memory.reserved,memory.used,mig.mode.current";
    let output = Command::new("nvidia-smi")
        .args([query, "--format=csv,noheader,nounits"])
        .output();
    let output = output.map_err(|error| format!("nvidia-smi: {error}"))?;
    if !output.status.success() {
        return Err(format!(
            "nvidia-smi: {}",
            String::from_utf8_lossy(&output.stdout).trim()
        ));
    }
    let text = String::from_utf8_lossy(&output.stdout);
    Ok(text
        .lines()
        .map(|line| {
            line.split(',')
                .map(|field| field.trim().to_string())
                .collect()
        })
        .collect())
}

#[test]
fn the_figures_of_a_real_gpu_are_those_of_nvidia_smi() {
    let rows = match nvidia_smi() {
        Ok(rows) => rows,
        Err(reason) => return needs::report_skipped(reason),
    };
    let sample = Nvml::new(NvmlOptions::default()).sample().unwrap();
    for row in rows {
        let [uuid, total, reserved, used, mig] = &row[..] else {
            panic!("{row:?}")
        };
        let uuid = GpuUuid::parse(uuid).unwrap();
        let gpu = sample
            .gpus
            .iter()
            .find(|gpu| gpu.uuid == uuid)
            .unwrap_or_else(|| panic!("{uuid} of {sample:?}"));
        let mib = |bytes: Bytes| bytes.0 >> 20;
        println!("{uuid}: nvidia-smi {total}/{reserved}/{used} MiB, MIG {mig}; here {gpu:?}");
        assert_eq!(mib(gpu.total_bytes).to_string(), *total);
        assert_eq!(
            mib(gpu.reserved_bytes).abs_diff(reserved.parse().unwrap()),
            0
        );
        // Another program may allocate between the two readings.
        assert!(mib(gpu.used_bytes.unwrap()).abs_diff(used.parse().unwrap()) <= 512);
        let has_slices = sample
            .gpus
            .iter()
            .any(|slice| slice.parent.as_ref() == Some(&uuid));
        assert!(mig == "Enabled" || !has_slices);
    }
}
