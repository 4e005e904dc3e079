//! The demo's story, chapter by chapter. Data only: which pods arrive, leave or get busy, and what a new user should notice.

use super::engines::FakeEngineLoad;
use super::machine::{DemoMachine, ModelOnDisk};
use super::termination;
use super::vram;
use anyhow::Result;
use serde_json::{Value, json};
use stowage_kubernetes_objects::PLAN_GATE;
use stowage_policy_file::with_digest;
use stowage_scheduling::policy::{Class, ModelRules, Policy, SleepingRule, UnusedRule};
use stowage_scheduling::units::Millis;
use stowage_scheduling::vocabulary::classification::Isolation;

pub(crate) const MACHINES: [DemoMachine; 3] = [
    DemoMachine {
        node: "node-a",
        model: "NVIDIA-H100-80GB-HBM3",
        gpu_count: 4,
        gib_per_gpu: 80,
        models: &[ModelOnDisk {
            model: "starcoder",
            gib: 9,
        }],
    },
    DemoMachine {
        node: "node-b",
        model: "NVIDIA-A100-SXM4-40GB",
        gpu_count: 4,
        gib_per_gpu: 40,
        models: &[],
    },
    DemoMachine {
        node: "node-c",
        model: "NVIDIA-L40S",
        gpu_count: 2,
        gib_per_gpu: 48,
        models: &[],
    },
];

/// Joins late, and its driver keeps limits.
pub(crate) const LIMITED_MACHINE: DemoMachine = DemoMachine {
    node: "node-d",
    model: "NVIDIA-H100-80GB-HBM3",
    gpu_count: 2,
    gib_per_gpu: 80,
    models: &[],
};

/// Joins last.
const LATENCY_MACHINE: DemoMachine = DemoMachine {
    node: "node-e",
    gpu_count: 1,
    ..LIMITED_MACHINE
};

/// The taint of machines that join late: pods of earlier chapters that wait stay away.
const LATE_TAINT: &str = "demo.stowage.dev/late";
/// By it the pods of late machines find theirs.
const HOST_NAME: &str = "kubernetes.io/hostname";

/// The Node object of a machine that joins late. Where the driver keeps limits, gpu-fractioning is ready.
pub(crate) fn late_node(machine: DemoMachine) -> Value {
    let mut node = machine.node_object();
    node["metadata"]["labels"] = json!({HOST_NAME: machine.node});
    node["spec"]["taints"] =
        json!([{"key": LATE_TAINT, "value": machine.node, "effect": "NoSchedule"}]);
    if machine.node == LIMITED_MACHINE.node {
        node["metadata"]["annotations"] = json!({vram::KEEPS_LIMITS: "true"});
        node["status"]["conditions"] =
            json!([{"type": "gpu-fractioning.nvidia.com/Ready", "status": "True"}]);
    }
    node
}

/// Priorities for preemption: a negative one says "evict me first".
pub(crate) const PRIORITY_CLASSES: [(&str, i64); 3] = [
    ("stowage-opportunistic", -1000),
    ("stowage-serving", 1000),
    (INTERACTIVE, 2000),
];

/// A class, and its PriorityClass: its engines take no longer for a token.
const INTERACTIVE: &str = "interactive";
pub(crate) const TIME_PER_TOKEN_LIMIT: Millis = Millis(15);

/// More requests than an engine can handle: its KV cache is almost full, and requests wait.
pub(crate) const OVERLOAD: FakeEngineLoad = FakeEngineLoad {
    kv_percent: 97,
    waiting: 40,
    running: 256,
};

pub(crate) struct Chapter {
    pub title: &'static str,
    pub text: &'static str,
    pub steps: Vec<StoryStep>,
}

/// One step of the story, and when it ends.
pub(crate) enum StoryStep {
    /// They arrive together; ends when all are bound and their engines are up.
    Arrive(Vec<StoryPod>),
    /// Places a batch twice, without and with the planner; ends when all are bound.
    CompareModes {
        ordinary: Vec<StoryPod>,
        planned: Vec<StoryPod>,
    },
    /// They arrive together; ends when each is bound or has a reason why not.
    Fill(Vec<StoryPod>),
    /// Services end; the step ends when at least this many of the pending pods are bound.
    ScaleDown {
        pods: &'static [&'static str],
        successors: usize,
    },
    /// The engine on the GPU that this pod would get becomes busy; ends when decisions take it into account.
    OverloadEngine(StoryPod),
    /// That engine has finished its requests; ends when decisions take it into account.
    RelieveEngine,
    /// The engine of a pod sleeps until jobs borrow from it, and wakes; ends when it is awake.
    SleepAndWake {
        engine: &'static str,
        jobs: Vec<StoryPod>,
        asks_first: bool,
    },
    /// A machine joins; ends when its agent reports.
    Join(DemoMachine),
    /// An engine allocates more than its grant, starts again with what it needs, and its neighbour allocates all of its grant.
    AllocateBeyondGrant {
        engine: &'static str,
        gib: u64,
        neighbour: &'static str,
    },
    /// An engine that lends grows until a borrower leaves, and then allocates all of its grant at once; ends when no pod borrows
    /// from it.
    TakeBack {
        engine: &'static str,
        first_gib: u64,
    },
    /// An engine gets requests. Its neighbor, whose class limits the time per token, takes longer than that, and then no longer again.
    Crowd {
        busy: &'static str,
        slowed: &'static str,
    },
    /// Prints how long this pod's model would take to answer on each node.
    PredictStart(StoryPod),
}

/// A pod to create.
#[derive(Debug, Clone)]
pub(crate) struct StoryPod {
    pub name: String,
    vram_gib: u64,
    kv_gib: Option<u64>,
    gpu_count: u32,
    is_exclusive: bool,
    priority_class: &'static str,
    /// Whether the pod is created behind the planner's gate.
    is_planned: bool,
    /// Milliseconds that it takes to terminate, and for which its processes then keep their memory; without an
    /// annotation if `None`.
    termination_millis: Option<(u32, u32)>,
    /// The machine that it is for, if that joins late.
    late_machine: Option<&'static str>,
    /// What it has of its VRAM when it starts; all of it if `None`.
    allocated_gib: Option<u64>,
    /// The load of its engine; `None` for a job, which has none.
    pub load: Option<FakeEngineLoad>,
}

/// On the nodes that are there from the start.
pub(crate) fn chapters() -> Vec<Chapter> {
    vec![
        Chapter {
            title: "Mixed models arrive",
            text: "Each asks for VRAM, not for a whole GPU, and gets the GPU it fills best. One engine at a time starts on a GPU.",
            steps: vec![
                StoryStep::Arrive(
                    [
                        serving_replicas("llama-8b", 2, 20, 35),
                        serving_replicas("qwen-14b", 2, 34, 50),
                    ]
                    .concat(),
                ),
                StoryStep::Arrive(vec![serving("mistral-7b-1", 18, 40)]),
                StoryStep::Arrive(vec![serving("mistral-7b-2", 18, 45)]),
                StoryStep::Arrive(vec![serving("embedder-1", 4, 10)]),
                StoryStep::Arrive(vec![serving("embedder-2", 4, 5)]),
            ],
        },
        Chapter {
            title: "A 70B model over two GPUs, and one that wants a GPU to itself",
            text: "llama-70b takes an equal share of two GPUs of one node; no pod may join fraud-detector.",
            steps: vec![StoryStep::Arrive(vec![
                StoryPod {
                    gpu_count: 2,
                    ..serving("llama-70b", 140, 52)
                },
                StoryPod {
                    is_exclusive: true,
                    ..serving("fraud-detector", 24, 20)
                },
            ])],
        },
        Chapter {
            title: "A model goes where its weights lie",
            text: "Its best fit is elsewhere; but from a disk it is ready sooner than over the network.",
            steps: vec![
                StoryStep::PredictStart(starcoder()),
                StoryStep::Arrive(vec![starcoder()]),
            ],
        },
        Chapter {
            title: "A KV cache fills up",
            text: "Its VRAM is as it was: only the engine's own metrics show that another pod would hurt. Others go elsewhere.",
            steps: vec![
                StoryStep::OverloadEngine(serving("gemma-9b", 14, 30)),
                StoryStep::Arrive(vec![serving("gemma-9b", 14, 30)]),
                StoryStep::Arrive(vec![serving("granite-8b", 14, 25)]),
            ],
        },
        Chapter {
            title: "Its requests are worked off",
            text: "The same page says so: the GPU takes serving pods again, and the model needs no more replicas.",
            steps: vec![
                StoryStep::RelieveEngine,
                StoryStep::Arrive(vec![serving("phi-mini", 14, 20)]),
            ],
        },
        Chapter {
            title: "The same jobs twice, once planned",
            text: "Under the gate stowage.dev/plan they are placed before the scheduler has seen them: it asks about one node each.",
            steps: vec![StoryStep::CompareModes {
                ordinary: opportunistic("indexer", 6, 3),
                planned: opportunistic("reranker", 6, 3)
                    .into_iter()
                    .map(|job| StoryPod {
                        is_planned: true,
                        ..job
                    })
                    .collect(),
            }],
        },
        Chapter {
            title: "Free on two GPUs is not free on one",
            text: "The node's sum would do, so kube-scheduler preempts no pod. The planner does: the cheapest pods, on one GPU.",
            steps: vec![
                StoryStep::Arrive(
                    opportunistic("fine-tune", 2, 26)
                        .into_iter()
                        .map(with_slow_termination)
                        .collect(),
                ),
                StoryStep::Arrive(vec![serving("qwen-7b-urgent", 30, 30)]),
            ],
        },
        Chapter {
            title: "Opportunistic jobs fill the rest",
            text: "They run until a serving pod needs their GPU. A pod that fits nowhere gets the reason in its Events.",
            // Each GPU has little left: enough for the small ones, and for none of the others.
            steps: vec![StoryStep::Fill(
                [
                    opportunistic("tokenizer", 4, 2),
                    opportunistic("batch-eval", 8, 8),
                ]
                .concat(),
            )],
        },
        Chapter {
            title: "A serving pod arrives, and the cluster is full",
            text: "The cheapest pods on one GPU are evicted, and their GPU is reserved for the pending pod.",
            steps: vec![StoryStep::Arrive(vec![serving("llama-8b-urgent", 20, 30)])],
        },
        Chapter {
            title: "Two services scale down",
            text: "Jobs that were rejected take the free VRAM without being created again.",
            steps: vec![StoryStep::ScaleDown {
                pods: &["llama-8b-1", "mistral-7b-1"],
                successors: 4,
            }],
        },
        Chapter {
            title: "An engine sleeps, and asks before it wakes",
            text: "Jobs borrow what it does not use. It asks, they are evicted, and it is told when its VRAM is free.",
            steps: vec![StoryStep::SleepAndWake {
                engine: "llama-8b-2",
                jobs: opportunistic("night", 2, 8),
                asks_first: true,
            }],
        },
        Chapter {
            title: "It sleeps again, and wakes without asking",
            text: "Its memory is taken, as vLLM would find it. Stowage counts that, and takes the memory back at once.",
            steps: vec![StoryStep::SleepAndWake {
                engine: "llama-8b-2",
                jobs: opportunistic("dawn", 2, 8),
                asks_first: false,
            }],
        },
    ]
}

/// On the node whose driver keeps limits.
pub(crate) fn chapters_on_limits() -> [Chapter; 2] {
    let limited = |gib, pod: StoryPod| StoryPod {
        late_machine: Some(LIMITED_MACHINE.node),
        allocated_gib: Some(gib),
        ..pod
    };
    let job = |name, count, gib| {
        opportunistic(name, count, gib)
            .into_iter()
            .map(|job| limited(gib, job))
            .collect()
    };
    [
        Chapter {
            title: "An engine with a wrong flag, where the driver keeps limits",
            text: "It allocates more than it was granted. That fails in its container alone; its neighbour gets all of its grant.",
            steps: vec![
                StoryStep::Join(LIMITED_MACHINE),
                StoryStep::Arrive(vec![
                    limited(20, serving("assistant", 30, 40)),
                    limited(20, serving("summarizer", 60, 20)),
                ]),
                StoryStep::Arrive(vec![limited(12, serving("translator", 42, 30))]),
                StoryStep::AllocateBeyondGrant {
                    engine: "translator",
                    gib: 52,
                    neighbour: "assistant",
                },
            ],
        },
        Chapter {
            title: "Jobs live in what engines that are awake do not use",
            text: "An engine that grows gets room ahead. One that needs all at once has it: the driver ends the job in its way.",
            steps: vec![
                StoryStep::Arrive(job("archive", 1, 40)),
                StoryStep::Arrive(job("digest", 2, 14)),
                StoryStep::TakeBack {
                    engine: "translator",
                    first_gib: 14,
                },
            ],
        },
    ]
}

/// On a node of its own: engines share its time.
pub(crate) fn chapter_on_latency() -> Chapter {
    let on_machine = |pod: StoryPod| StoryPod {
        late_machine: Some(LATENCY_MACHINE.node),
        kv_gib: Some(pod.vram_gib / 2),
        ..pod
    };
    let chat = StoryPod {
        priority_class: INTERACTIVE,
        ..serving("chat", 20, 10)
    };
    let jobs = opportunistic("reindex", 1, 24);
    Chapter {
        title: "A neighbor gets busy, and a token takes longer",
        text: "There is room for all in VRAM and KV cache. But chat's class limits its time per token: what can leave, leaves.",
        steps: vec![
            StoryStep::Join(LATENCY_MACHINE),
            StoryStep::Arrive(vec![on_machine(chat)]),
            StoryStep::Arrive(vec![on_machine(serving("code", 24, 0))]),
            StoryStep::Arrive(jobs.into_iter().map(on_machine).collect()),
            StoryStep::Crowd {
                busy: "code",
                slowed: "chat",
            },
        ],
    }
}

/// The default policy, under which serving pods lend while they sleep, all pods have limits where the driver keeps them, serving pods
/// lend there while they are awake, llama-8b keeps two replicas, and interactive pods a time per token, as fast as a short story needs
/// it.
pub fn policy() -> Result<Policy> {
    let mut classes = Policy::default().classes().to_vec();
    for class in &mut classes {
        class.isolation = Isolation::Preferred;
        if class.name == "serving" {
            (class.sleeping, class.unused) = (SleepingRule::Lend, UnusedRule::Lend);
        }
    }
    let mut interactive = Class {
        engine: true,
        max_time_per_token: Some(TIME_PER_TOKEN_LIMIT),
        ..Class::new(INTERACTIVE)
    };
    interactive.matches.priority_classes = vec![INTERACTIVE.into()];
    classes.insert(0, interactive);
    let mut policy = Policy::default().with_classes(classes)?;
    if let Some(pressure) = &mut policy.planning.pressure {
        pressure.evict_after = Millis::seconds(2);
    }
    policy.planning.lending.after = Millis::seconds(1);
    policy.planning.lending.unused_after = Millis::seconds(1);
    policy.autoscaling.scale_down.window = Millis::seconds(1);
    let two = ModelRules {
        min_replicas: Some(2),
        ..ModelRules::default()
    };
    policy.autoscaling.models.insert("llama-8b".into(), two);
    Ok(with_digest(policy))
}

fn serving_replicas(name: &str, count: usize, gib: u64, kv_percent: u8) -> Vec<StoryPod> {
    (1..=count)
        .map(|i| serving(&format!("{name}-{i}"), gib, kv_percent))
        .collect()
}

fn serving(name: &str, gib: u64, kv_percent: u8) -> StoryPod {
    let load = FakeEngineLoad {
        kv_percent,
        waiting: 0,
        running: u64::from(kv_percent) / 2,
    };
    StoryPod {
        name: name.into(),
        vram_gib: gib,
        kv_gib: None,
        gpu_count: 1,
        is_exclusive: false,
        is_planned: false,
        late_machine: None,
        allocated_gib: None,
        termination_millis: None,
        priority_class: "stowage-serving",
        load: Some(load),
    }
}

/// Its weights are 9 GiB: large enough for the network to matter.
fn starcoder() -> StoryPod {
    StoryPod {
        kv_gib: Some(3),
        ..serving("starcoder", 12, 15)
    }
}

fn opportunistic(name: &str, count: usize, gib: u64) -> Vec<StoryPod> {
    let job = |i| StoryPod {
        priority_class: "stowage-opportunistic",
        load: None,
        ..serving(&format!("{name}-{i}"), gib, 0)
    };
    (1..=count).map(job).collect()
}

/// It writes a checkpoint before it ends, and its memory is free a while later.
fn with_slow_termination(job: StoryPod) -> StoryPod {
    StoryPod {
        termination_millis: Some((600, 400)),
        ..job
    }
}

impl StoryPod {
    /// `llama-8b` of `llama-8b-2`: the common name of its replicas.
    pub fn model(&self) -> &str {
        let (stem, last) = self.name.rsplit_once('-').unwrap_or((&self.name, ""));
        if last.parse::<u32>().is_ok() {
            stem
        } else {
            &self.name
        }
    }

    /// Its manifest, as its owner would write it; `port` is the port of its engine's pages.
    pub fn manifest(&self, port: Option<u16>) -> Value {
        let mut annotations = json!({"stowage.dev/model": self.model()});
        if self.gpu_count > 1 {
            annotations["stowage.dev/gpus"] = self.gpu_count.to_string().into();
        }
        if self.is_exclusive {
            annotations["stowage.dev/exclusive"] = "true".into();
        }
        if let Some(gib) = self.kv_gib {
            annotations["stowage.dev/kv-cache"] = format!("{gib}Gi").into();
        }
        if let Some(port) = port {
            annotations["stowage.dev/metrics-port"] = port.to_string().into();
        }
        if let Some(gib) = self.allocated_gib {
            annotations[vram::ALLOCATED] = (gib << 30).to_string().into();
        }
        if let Some((takes, memory_stays)) = self.termination_millis {
            annotations[termination::TERMINATION_MILLIS] = takes.to_string().into();
            annotations[termination::MEMORY_DELAY_MILLIS] = memory_stays.to_string().into();
        }
        let late = json!([{"key": LATE_TAINT, "value": self.late_machine}]);
        let (tolerations, node_selector) = match self.late_machine {
            // A job that can run on one node only is not evicted from it: it would be back at once.
            Some(_) if self.load.is_none() => (late, json!({})),
            Some(node) => (late, json!({HOST_NAME: node})),
            None => (json!([]), json!({})),
        };
        let gates: &[Value] = if self.is_planned {
            &[json!({"name": PLAN_GATE})]
        } else {
            &[]
        };
        json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": {"name": self.name, "namespace": "default", "annotations": annotations},
            "spec": {
                "schedulerName": "stowage",
                "schedulingGates": gates,
                "tolerations": tolerations,
                "nodeSelector": node_selector,
                "priorityClassName": self.priority_class,
                "terminationGracePeriodSeconds": 3,
                "containers": [{
                    "name": "engine", "image": "engine:1",
                    "resources": {"limits": {"stowage.dev/vram": format!("{}Gi", self.vram_gib)}, "requests": {"cpu": "1"}},
                }],
            },
        })
    }
}
