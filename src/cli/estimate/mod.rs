//! `stowage estimate`: how much VRAM a model needs, and the lines of a pod that asks for it; with `--observe`, what a running
//! engine could ask for instead.
//!
//! [`model`] finds the model, [`observe`] looks at an engine, [`render`] formats the answer. Exit codes: 0 with an estimate, 1 if
//! it fits on none of the GPUs, 2 without one. Nothing is counted here.

mod model;
mod observe;
mod render;

use super::access::AccessArgs;
use super::output::OutputArgs;
use super::{exit_without_answer, standard_input};
use anyhow::{Context, Result, bail};
use clap::{Args, ValueEnum};
use serde::Serialize;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use stowage_policy_file::format;
use stowage_scheduling::units::{Bytes, Percent};
use stowage_sizing::capacity_plan::gpu_types::{GpuType, UnknownGpuType};
use stowage_sizing::estimate::architecture::ModelArchitecture;
use stowage_sizing::estimate::gpus::{GpuFit, GpuSize, known_gpus};
use stowage_sizing::estimate::kv_cache::KvCacheDtype;
use stowage_sizing::estimate::pod::{PodLines, requested_per_gpu};
use stowage_sizing::estimate::quantization::Precision;
use stowage_sizing::estimate::right_size::{Observation, RightSize};
use stowage_sizing::estimate::{Estimate, MAX_GPUS_PER_POD, Workload, WorkloadError};

const EXIT_CODES: &str = "Exit codes: 0 with an estimate, 1 if the model fits on none of the GPUs, 2 if there is no estimate or the \
                          arguments are invalid.";

#[derive(Debug, Args)]
#[command(after_help = EXIT_CODES)]
pub struct EstimateArgs {
    /// The model's folder, or files of it: config.json, safetensors, GGUF; `-` is a config.json on standard input
    #[arg(value_name = "CONFIG", required_unless_present_any = ["model", "list"], conflicts_with_all = ["model", "list"])]
    config: Vec<PathBuf>,

    /// A model whose numbers are built in, such as llama-3.1-8b
    #[arg(long, value_name = "NAME", conflicts_with = "list")]
    model: Option<String>,

    /// List the models that are built in
    #[arg(long)]
    list: bool,

    #[command(flatten)]
    workload: WorkloadArgs,

    /// GPUs to fit on: their memory, such as 80Gi, or names, such as H100-80GB [default: all known ones]
    #[arg(long, value_name = "SIZE", value_delimiter = ',', value_parser = gpu_size)]
    gpu_memory: Vec<GpuSize>,

    #[command(flatten)]
    observe: ObserveArgs,

    #[command(flatten)]
    output: OutputArgs,
}

#[derive(Debug, Args)]
struct WorkloadArgs {
    /// Tokens of one sequence, prompt and answer [default: the model's, at most 8192; all of the model's with --observe]
    #[arg(long, value_name = "TOKENS", alias = "max-model-len", allow_negative_numbers = true, value_parser = clap::value_parser!(u64).range(1..=1 << 30))]
    context: Option<u64>,

    /// Sequences of that length whose KV cache is to be held at once [default: 16; 1 with --observe]
    #[arg(long, value_name = "NUMBER", allow_negative_numbers = true, value_parser = clap::value_parser!(u64).range(1..=1 << 20))]
    sequences: Option<u64>,

    /// GPUs that share each layer
    #[arg(long, value_name = "GPUS", alias = "tensor-parallel-size", default_value_t = 1, allow_negative_numbers = true, value_parser = clap::value_parser!(u64).range(1..=MAX_GPUS_PER_POD))]
    tensor_parallel: u64,

    /// Sequences that the engine may run at once, whatever their length [default: 256, or --sequences if that is more]
    #[arg(long, value_name = "NUMBER", allow_negative_numbers = true, value_parser = clap::value_parser!(u64).range(1..=1 << 20))]
    max_num_seqs: Option<u64>,

    /// Tokens of one of the engine's steps
    #[arg(long, value_name = "TOKENS", default_value_t = Workload::default().max_num_batched_tokens, allow_negative_numbers = true, value_parser = clap::value_parser!(u64).range(1..=1 << 24))]
    max_num_batched_tokens: u64,

    /// How keys and values are stored; auto is what the file says, or 16 bits
    #[arg(long, value_enum, value_name = "DTYPE", default_value_t = KvDtype::Auto)]
    kv_cache_dtype: KvDtype,

    /// How weights are stored [default: what the file says]
    #[arg(long, value_enum, value_name = "KIND")]
    quantization: Option<Weights>,

    /// The engine captures no CUDA graphs
    #[arg(long)]
    enforce_eager: bool,
}

#[derive(Debug, Args)]
struct ObserveArgs {
    /// Compare with a running engine: a pod, the http:// URL of its metrics page, or a file with that page or with agents' reports
    #[arg(long, value_name = "WHAT", conflicts_with = "list")]
    observe: Option<String>,

    /// What the engine's pod has reserved, over all its GPUs, if it is not a pod that is observed
    #[arg(long, value_name = "QUANTITY", requires = "observe", value_parser = quantity)]
    reserved: Option<Bytes>,

    /// The KV-cache usage to assume, such as the peak of a week, instead of the current usage
    #[arg(long, value_name = "PERCENT", requires = "observe", value_parser = percent)]
    peak_usage: Option<Percent>,

    /// The pod's namespace [default: the one in its name, otherwise default]
    #[arg(short, long, value_name = "NAME", requires = "observe")]
    namespace: Option<String>,

    #[command(flatten)]
    access: AccessArgs,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum KvDtype {
    Auto,
    #[value(alias = "bfloat16", alias = "fp16")]
    Bf16,
    #[value(alias = "fp8_e4m3", alias = "fp8_e5m2")]
    Fp8,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Weights {
    #[value(alias = "bf16", alias = "fp16")]
    None,
    Fp8,
    Int8,
    /// AWQ and GPTQ in groups of 128
    Int4,
    Mxfp4,
    Nvfp4,
}

impl Weights {
    fn precision(self) -> Precision {
        match self {
            Self::None => Precision::HALF,
            Self::Fp8 => Precision::FP8,
            Self::Int8 => Precision::INT8,
            Self::Int4 => Precision::INT4,
            Self::Mxfp4 => Precision::MXFP4,
            Self::Nvfp4 => Precision::NVFP4,
        }
    }
}

const FITS_ON_NONE: u8 = 1;
/// What most workloads need, and not the 131,072 tokens that many models were made for.
const DEFAULT_CONTEXT: u64 = 8192;

fn quantity(text: &str) -> Result<Bytes, String> {
    format::parse_quantity(text).map_err(|malformed| malformed.to_string())
}

fn percent(text: &str) -> Result<Percent, String> {
    format::parse_percent(text, 100).map_err(|malformed| malformed.to_string())
}

/// The least memory of a GPU: less is a number whose unit was forgotten.
const MIN_GPU_MEMORY: Bytes = Bytes(1 << 20);

/// An amount of memory, or a known GPU's name.
fn gpu_size(text: &str) -> Result<GpuSize, String> {
    let help = match format::parse_quantity(text) {
        Ok(memory) if memory < MIN_GPU_MEMORY => {
            return Err(format!(
                "{text} is {} bytes: write an amount with its unit, such as 80Gi",
                memory.0
            ));
        }
        Ok(memory_bytes) => {
            return Ok(GpuSize {
                name: text.to_owned(),
                memory_bytes,
            });
        }
        Err(malformed) => malformed.help,
    };
    GpuType::find(text)
        .map(GpuSize::from_type)
        .map_err(|error| match error {
            UnknownGpuType::Unknown { .. } => {
                let names: Vec<String> = known_gpus().map(|gpu| gpu.name).collect();
                format!(
                    "neither a GPU among {} nor memory: {help}",
                    names.join(", ")
                )
            }
            one => one.to_string(),
        })
}

/// Everything that is printed for programs.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct EstimateOutput {
    /// The name or the file that was given.
    model: String,
    model_type: String,
    workload: Workload,
    #[serde(flatten)]
    estimate: Estimate,
    /// Not for a model that fits on none of the GPUs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pod: Option<PodLines>,
    gpus: Vec<GpuFit>,
    /// The fewest GPUs over which it fits, if it does not as it was asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    fits_over: Option<FitsOver>,
    #[serde(skip_serializing_if = "Option::is_none")]
    observed: Option<ObservedEngine>,
}

/// A running engine, compared.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct ObservedEngine {
    /// What was looked at.
    what: String,
    #[serde(flatten)]
    size: RightSize,
}

impl EstimateArgs {
    /// Whatever goes wrong before there is an estimate is none: a script shall not take it for a model that does not fit.
    pub async fn run(self) -> Result<ExitCode> {
        self.try_run().await.or_else(exit_without_answer)
    }

    async fn try_run(self) -> Result<ExitCode> {
        if self.list {
            let models = model::list();
            self.output
                .print(&models, |models, columns| render::list(models, columns))?;
            return Ok(ExitCode::SUCCESS);
        }
        let observed = self.observe.observe.as_deref().map(Path::new);
        let config = self.config.iter().map(|path| ("CONFIG", path.as_path()));
        standard_input::check_named_once(config.chain(observed.map(|path| ("--observe", path))))?;
        let precision = self.workload.quantization.map(Weights::precision);
        let (name, model) = model::find(&self.config, self.model.as_deref(), precision)?;
        let workload = self
            .workload
            .workload(&model, observed.is_some())
            .with_context(|| name.clone())?;
        let mut estimate = Estimate::for_model(&model, &workload).map_err(|error| match error {
            WorkloadError::HeadsNotSplit { .. } => {
                anyhow::Error::new(error).context("--tensor-parallel")
            }
            WorkloadError::TooLarge => anyhow::Error::new(error).context(name.clone()),
        })?;
        estimate.notes.extend(context_warning(&model, &workload));
        let observed = self.observe_engine(&model, &workload, &estimate).await?;
        let has_requested_gpus = !self.gpu_memory.is_empty();
        let sizes: Vec<GpuSize> = if has_requested_gpus {
            self.gpu_memory.clone()
        } else {
            known_gpus().collect()
        };
        let gpus = fits(&estimate, &sizes);
        let fitting = gpus
            .iter()
            .filter(|gpu| has_requested_gpus && gpu.fits)
            .map(|gpu| gpu.vram_per_gpu_bytes);
        let per_gpu = fitting.max().unwrap_or(requested_per_gpu(&estimate));
        let is_placeable = gpus.iter().any(|gpu| gpu.fits);
        let pod = || PodLines::for_estimate(&model, &estimate, &workload, per_gpu);
        let answer = EstimateOutput {
            model: name,
            pod: is_placeable.then(pod),
            fits_over: match is_placeable {
                true => None,
                false => FitsOver::find(&model, &workload, &sizes),
            },
            model_type: model.model_type,
            workload,
            gpus,
            estimate,
            observed,
        };
        self.output.print(&answer, render::text)?;
        let is_running = answer.observed.is_some() && !has_requested_gpus;
        Ok(if is_placeable || is_running {
            ExitCode::SUCCESS
        } else {
            FITS_ON_NONE.into()
        })
    }

    async fn observe_engine(
        &self,
        model: &ModelArchitecture,
        workload: &Workload,
        estimate: &Estimate,
    ) -> Result<Option<ObservedEngine>> {
        let args = &self.observe;
        let Some(what) = &args.observe else {
            return Ok(None);
        };
        let of = || format!("--observe {what}");
        let observation = observe::observe(what, args).await.with_context(of)?;
        let observation = Observation {
            reserved: args.reserved.or(observation.reserved),
            kv_cache_usage: args
                .peak_usage
                .map(|usage| f64::from(usage.get()) / 100.0)
                .or(observation.kv_cache_usage),
            ..observation
        };
        let size = RightSize::new(model, workload, estimate, &observation).with_context(of)?;
        Ok(Some(ObservedEngine {
            what: what.clone(),
            size,
        }))
    }
}

fn fits(estimate: &Estimate, sizes: &[GpuSize]) -> Vec<GpuFit> {
    let sizes = sizes.iter().cloned();
    sizes.map(|size| GpuFit::new(estimate, size)).collect()
}

/// A tensor parallelism with which a model fits, and the GPUs.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct FitsOver {
    tensor_parallel: u64,
    gpus: Vec<String>,
}

impl FitsOver {
    fn find(model: &ModelArchitecture, workload: &Workload, sizes: &[GpuSize]) -> Option<Self> {
        (workload.tensor_parallel + 1..=MAX_GPUS_PER_POD).find_map(|tensor_parallel| {
            let workload = Workload {
                tensor_parallel,
                ..*workload
            };
            let estimate = Estimate::for_model(model, &workload).ok()?;
            let fitting = fits(&estimate, sizes).into_iter().filter(|gpu| gpu.fits);
            let gpus: Vec<String> = fitting.map(|fit| fit.gpu.name).collect();
            (!gpus.is_empty()).then_some(Self {
                tensor_parallel,
                gpus,
            })
        })
    }
}

impl WorkloadArgs {
    /// An engine that runs has room for one sequence of its full length, or has not started: its length is the model's unless it
    /// was told another one.
    fn workload(&self, model: &ModelArchitecture, is_observed: bool) -> Result<Workload> {
        let defaults = Workload::default();
        let context = match (self.context, model.max_context) {
            (Some(context), _) => context,
            (None, Some(most)) if is_observed => most,
            (None, None) if is_observed => bail!(
                "it has no max_position_embeddings: say with --context what the engine has for --max-model-len, for without room \
                 for one such sequence it does not start"
            ),
            (None, most) => most.unwrap_or(DEFAULT_CONTEXT).min(DEFAULT_CONTEXT),
        };
        let sequences = self
            .sequences
            .unwrap_or(if is_observed { 1 } else { defaults.sequences });
        Ok(Workload {
            context,
            sequences,
            tensor_parallel: self.tensor_parallel,
            max_num_seqs: self
                .max_num_seqs
                .unwrap_or(defaults.max_num_seqs.max(sequences)),
            max_num_batched_tokens: self.max_num_batched_tokens,
            kv_cache_dtype: match self.kv_cache_dtype {
                KvDtype::Auto => KvCacheDtype::Auto,
                KvDtype::Bf16 => KvCacheDtype::Bf16,
                KvDtype::Fp8 => KvCacheDtype::Fp8,
            },
            cuda_graphs: !self.enforce_eager,
        })
    }
}

fn context_warning(model: &ModelArchitecture, workload: &Workload) -> Option<String> {
    let most = model.max_context.filter(|most| *most < workload.context)?;
    Some(format!(
        "the model was made for {most} tokens: an engine refuses a longer --max-model-len"
    ))
}
