//! The nodes, and the Deployments with what is asked of them.

use crate::simulate::fleet::engines::{
    DoesNotFit, EngineSpec, GpuSpeed, ModelShape, max_rate_per_s,
};
use crate::simulate::fleet::pods::PodSpec;
use crate::simulate::fleet::traffic::{
    DayOfTraffic, Minute, RequestSize, Service, TrafficError, TrafficText, week,
};
use stowage_scheduling::contention::EngineWork;
use stowage_scheduling::testkit::random::Random;
use stowage_scheduling::units::{Bytes, Moment};
use stowage_sizing::estimate::shipped::ShippedModel;
use stowage_sizing::estimate::{Estimate, PartName, Workload as EngineArguments};

/// The busiest minute, as a share of what a Deployment's engines keep up with.
const PEAK_SHARE: (f64, f64) = (0.003, 0.3);
const MAX_SHIFT_MINUTES: usize = 180;
/// An engine's `--gpu-memory-utilization`, as it is.
pub const UTILIZATION_PERCENT: u64 = 90;
/// An engine's `--max-model-len`.
pub const CONTEXT: u64 = 16_384;

/// Nodes that are alike.
pub struct NodeKind {
    pub name: &'static str,
    /// As GPU feature discovery names it.
    pub product: &'static str,
    pub gpus: u32,
    pub nodes: u32,
    /// What NVML answers.
    pub vram: Bytes,
}

pub const KINDS: [NodeKind; 2] = [
    NodeKind {
        name: "a100",
        product: "NVIDIA-A100-SXM4-80GB",
        gpus: 8,
        nodes: 6,
        vram: Bytes::mib(81_920),
    },
    NodeKind {
        name: "l40s",
        product: "NVIDIA-L40S",
        gpus: 4,
        nodes: 6,
        vram: Bytes::mib(46_068),
    },
];

#[derive(Clone, Copy)]
pub enum Work {
    /// It serves this model to this service's requests.
    Engine(&'static str, Service),
    /// It has so many GiB, and computes for this share of the time at night, and by day.
    Process(u64, f64, f64),
}

pub struct Deployment {
    /// The index of its nodes' kind.
    pub kind: usize,
    pub namespace: &'static str,
    pub name: &'static str,
    pub pods: u32,
    pub gpus: u32,
    pub work: Work,
}

const fn on_a100(namespace: &'static str, name: &'static str, pods: u32, work: Work) -> Deployment {
    Deployment {
        kind: 0,
        namespace,
        name,
        pods,
        gpus: 1,
        work,
    }
}

const fn on_l40s(namespace: &'static str, name: &'static str, pods: u32, work: Work) -> Deployment {
    Deployment {
        kind: 1,
        ..on_a100(namespace, name, pods, work)
    }
}

const fn on_two(deployment: Deployment) -> Deployment {
    Deployment {
        gpus: 2,
        ..deployment
    }
}

const CODE: Service = Service::Code;
const CHAT: Service = Service::Conversation;

pub static CATALOG: [Deployment; 15] = [
    on_two(on_a100(
        "team-d",
        "chat",
        2,
        Work::Engine("llama-3.1-70b", CHAT),
    )),
    on_two(on_a100(
        "team-d",
        "analysis",
        4,
        Work::Engine("qwen3-32b", CHAT),
    )),
    on_a100("team-a", "assistant", 8, Work::Engine("llama-3.1-8b", CHAT)),
    on_a100("team-a", "summaries", 5, Work::Engine("qwen2.5-7b", CHAT)),
    on_a100("team-b", "review", 3, Work::Engine("qwen3-32b", CODE)),
    on_a100("team-b", "completion", 4, Work::Engine("mistral-7b", CODE)),
    on_a100("team-c", "helpdesk", 4, Work::Engine("phi-4", CHAT)),
    on_a100("team-c", "drafts", 4, Work::Engine("llama-3.1-8b", CHAT)),
    on_a100("team-e", "notebook", 4, Work::Process(6, 0.0, 0.05)),
    on_a100("team-e", "training", 2, Work::Process(60, 0.97, 0.97)),
    on_l40s("team-a", "search", 6, Work::Engine("llama-3.1-8b", CODE)),
    on_l40s("team-b", "translation", 6, Work::Engine("qwen2.5-7b", CHAT)),
    on_l40s("team-c", "rewriting", 4, Work::Engine("mistral-7b", CHAT)),
    on_l40s("team-e", "rendering", 2, Work::Process(12, 0.0, 0.3)),
    on_l40s("team-f", "notebook", 2, Work::Process(4, 0.0, 0.05)),
];

impl Deployment {
    /// As an assessment names it.
    pub fn assessed_name(&self) -> String {
        format!("Deployment {}/{}", self.namespace, self.name)
    }

    pub fn pod_name(&self, replica: u32) -> String {
        format!("{}-7c9d4b5f6-x{replica}", self.name)
    }

    pub fn kind(&self) -> &'static NodeKind {
        &KINDS[self.kind]
    }

    pub fn model(&self) -> Option<&'static ShippedModel> {
        let Work::Engine(model, _) = self.work else {
            return None;
        };
        Some(ShippedModel::find(model).expect("the catalog names models that are shipped"))
    }

    /// VRAM in use on each of its GPUs, as it is.
    pub fn used(&self) -> Bytes {
        match self.work {
            Work::Engine(..) => Bytes(self.kind().vram.0 / 100 * UTILIZATION_PERCENT),
            Work::Process(gib, ..) => Bytes::gib(gib),
        }
    }

    /// Its engine with so much VRAM on each GPU; `None` if it has none.
    pub fn engine(&self, grant: Bytes) -> Option<Result<EngineSpec, DoesNotFit>> {
        let model = self.model()?;
        let architecture = model.read().expect("its file is part of the program");
        let arguments = EngineArguments {
            tensor_parallel: self.gpus.into(),
            ..EngineArguments::default()
        };
        let estimate = Estimate::for_model(&architecture, &arguments);
        let estimate = estimate.expect("the catalog splits models as they can be split");
        let all = u64::from(self.gpus);
        let shape = ModelShape {
            name: model.name,
            parameters: estimate.active_parameters as f64,
            weights: estimate.bytes_of(PartName::Weights).times(all),
            layers: architecture.layers.len() as u32,
            kv_per_token: estimate.kv_cache.bytes_per_token.times(all),
        };
        let speed = GpuSpeed::of(self.kind().product).expect("GPUs of the catalog are known");
        Some(EngineSpec::new(&shape, &speed, self.gpus, grant))
    }
}

/// One Deployment, with its week.
pub struct Workload {
    pub of: &'static Deployment,
    pub pods: u32,
    /// What its engines are asked; `None` if it has none.
    pub traffic: Option<DayOfTraffic>,
    /// By minute, of a process that is no engine: the share of the time for which it computes.
    busy: Vec<f64>,
}

impl Workload {
    pub fn new(
        of: &'static Deployment,
        pods: u32,
        trace: Option<TrafficText<'_>>,
        mut draws: Random,
    ) -> Result<Self, TrafficError> {
        let one = |traffic, busy| Self {
            of,
            pods,
            traffic,
            busy,
        };
        let Work::Engine(_, service) = of.work else {
            let curve = week::built_in(draws.next_u64(), RequestSize::CODE);
            return Ok(one(None, curve));
        };
        let size = match service {
            Service::Code => RequestSize::CODE,
            Service::Conversation => RequestSize::CONVERSATION,
        };
        let (least, most) = PEAK_SHARE;
        let share = least * (most / least).powf(draws.unit_interval());
        let shift = draws.below(2 * MAX_SHIFT_MINUTES + 1);
        let mut curve = match trace {
            Some(trace) => week::read(trace, service, &mut draws)?,
            None => week::built_in(draws.next_u64(), size),
        };
        curve.rotate_left((week::WEEK_MINUTES + shift - MAX_SHIFT_MINUTES) % week::WEEK_MINUTES);
        let engine = of.engine(of.used()).expect("it is an engine");
        let engine = engine.expect("an engine of the catalog has room for a KV cache");
        let per_s = max_rate_per_s(&engine, size.prompt, size.output) * f64::from(pods);
        let busiest = curve.iter().copied().fold(f64::MIN_POSITIVE, f64::max);
        let minutes = curve.into_iter().map(|rate| Minute {
            requests: poisson(&mut draws, 60.0 * share * per_s * rate / busiest),
            prompt: size.prompt,
            output: size.output,
        });
        Ok(one(DayOfTraffic::new(minutes.collect()), Vec::new()))
    }

    /// The pod with so much VRAM on each of its GPUs, or with GPUs of its own.
    pub fn spec(&self, per_gpu: Option<Bytes>) -> PodSpec {
        let vram = per_gpu.unwrap_or(Bytes::gib(1));
        PodSpec {
            gpus: self.of.gpus,
            is_exclusive: per_gpu.is_none(),
            ..PodSpec::plain(self.of.namespace, vram.times(self.of.gpus.into()))
        }
    }

    /// What a pod that is no engine does on its GPU.
    pub fn process(&self, at: Moment) -> EngineWork {
        let minute = self.busy[(at.0 / 60_000) as usize % self.busy.len()];
        let (least, most) = match self.of.work {
            Work::Process(_, least, most) => (least, most),
            Work::Engine(..) => (0.0, 0.0),
        };
        EngineWork {
            busy: least + (most - least) * minute.min(1.0),
            ..EngineWork::job(1.0)
        }
    }
}

/// How many come where so many come on average.
fn poisson(draws: &mut Random, mean: f64) -> f64 {
    let mut left = mean;
    let mut count = 0.0;
    loop {
        left += (1.0 - draws.unit_interval()).ln();
        if left < 0.0 {
            return count;
        }
        count += 1.0;
    }
}
