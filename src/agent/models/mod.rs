//! The models with files on this node, and how near to a GPU they are.
//!
//! [`images`] reads the Node object. [`hugging_face`] and [`kserve`] find model folders, [`weights`] reads one, [`page_cache`]
//! checks whether it is in memory, [`walk`] limits the cost of a scan. What engines have loaded comes from their reports.
//! Nothing here downloads or removes files.

pub(crate) mod hugging_face;
pub mod images;
pub mod kserve;
pub mod page_cache;
pub mod walk;
pub mod weights;

use hugging_face::HuggingFace;
use kserve::Kserve;
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::PathBuf;
use std::time::{Duration, Instant, SystemTime};
use stowage_report::{EngineReport, EngineState, ModelReport};
use stowage_scheduling::ids::ModelId;
use stowage_scheduling::units::Bytes;
use stowage_scheduling::vocabulary::model_tier::ModelTier;
use walk::Walk;
use weights::{ModelWeights, WeightExtent};

/// A model takes minutes to come or go: half a minute late is early.
const MODEL_SCAN_INTERVAL: Duration = Duration::from_secs(30);

/// The result of a scan.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ModelScan {
    /// In order of model; a model that exists twice is listed twice.
    pub models: Vec<ModelReport>,
    /// What could not be scanned, and why.
    pub problems: Vec<String>,
}

/// A source of the models on the node.
pub trait ModelSource: Send {
    /// Blocks for as long as the disk does.
    fn models(&mut self) -> ModelScan;
}

/// Several sources as one.
pub struct CombinedModelSources(pub Vec<Box<dyn ModelSource>>);

impl ModelSource for CombinedModelSources {
    fn models(&mut self) -> ModelScan {
        let scans = self.0.iter_mut().map(|source| source.models());
        scans.fold(ModelScan::default(), |mut all, scan| {
            all.models.extend(scan.models);
            all.problems.extend(scan.problems);
            all
        })
    }
}

/// A model's folder that was found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct FoundModel {
    pub model: ModelId,
    pub weights: ModelWeights,
}

/// The node's model folders, scanned at most every half minute.
#[derive(Debug)]
pub struct NodeModels {
    hugging_face: Vec<HuggingFace>,
    kserve: Vec<Kserve>,
    last: Option<(Instant, ModelScan)>,
    round: u64,
}

impl NodeModels {
    /// The folders of Hugging Face caches, and the local paths of KServe's volumes.
    pub fn new(hugging_face: Vec<PathBuf>, kserve: Vec<PathBuf>) -> Self {
        Self {
            hugging_face: hugging_face.into_iter().map(HuggingFace::new).collect(),
            kserve: kserve.into_iter().map(Kserve::new).collect(),
            last: None,
            round: 0,
        }
    }

    fn models_at(&mut self, now: Instant, wall_clock: SystemTime) -> ModelScan {
        if let Some((_, scan)) = self
            .last
            .as_ref()
            .filter(|(at, _)| now.saturating_duration_since(*at) < MODEL_SCAN_INTERVAL)
        {
            return scan.clone();
        }
        let scan = self.scan(wall_clock);
        self.last = Some((now, scan.clone()));
        scan
    }

    /// Each folder has its own time budget: one on a disk that hangs uses none of the others'.
    fn scan(&mut self, wall_clock: SystemTime) -> ModelScan {
        self.round += 1;
        let mut scan = ModelScan::default();
        for cache in &mut self.hugging_face {
            let mut walk = Walk::start(Instant::now());
            let found = cache.scan(&mut walk, wall_clock);
            scan.add(&found, "huggingface", self.round, &walk);
        }
        for volume in &self.kserve {
            let mut walk = Walk::start(Instant::now());
            let found = volume.scan(&mut walk);
            scan.add(&found, "kserve", self.round, &walk);
        }
        scan.models.sort_by(|a, b| a.model.cmp(&b.model));
        scan
    }
}

impl ModelSource for NodeModels {
    fn models(&mut self) -> ModelScan {
        self.models_at(Instant::now(), SystemTime::now())
    }
}

impl ModelScan {
    fn add(&mut self, found: &[FoundModel], source: &str, round: u64, walk: &Walk) {
        self.models.extend(found.iter().map(|found| ModelReport {
            model: found.model.clone(),
            tier: tier_of(&found.weights, round),
            bytes: found.weights.bytes,
            source: source.into(),
        }));
        self.problems.extend(walk.reasons());
    }
}

fn tier_of(weights: &ModelWeights, round: u64) -> ModelTier {
    match weights.extent {
        WeightExtent::Part => ModelTier::Partial,
        WeightExtent::Whole if page_cache::is_mostly_cached(&weights.files, round) => {
            ModelTier::PageCache
        }
        WeightExtent::Whole => ModelTier::Disk,
    }
}

/// The default location of the hub client's cache, if it is a folder here. `variable` reads the environment.
pub fn default_hugging_face_caches(variable: impl Fn(&str) -> Option<OsString>) -> Vec<PathBuf> {
    let below = |name: &str, path: &str| Some(PathBuf::from(variable(name)?).join(path));
    let candidates = [
        variable("HF_HUB_CACHE").map(PathBuf::from),
        below("HF_HOME", "hub"),
        below("XDG_CACHE_HOME", "huggingface/hub"),
        below("HOME", ".cache/huggingface/hub"),
    ];
    let mut found: Vec<PathBuf> = candidates
        .into_iter()
        .flatten()
        .filter(|cache| cache.is_dir())
        .collect();
    found.sort();
    found.dedup();
    found
}

/// The models that engines have loaded, in the engines' order. For an engine that sleeps without its weights, is still starting
/// or does not answer, nothing is known to be loaded.
pub(crate) fn loaded_by_engines(engines: &[EngineReport]) -> Vec<ModelReport> {
    let held = |engine: &EngineReport| {
        let tier = match (engine.state, engine.sleep_level) {
            (EngineState::Serving | EngineState::Draining, _) => ModelTier::Resident,
            (EngineState::Loading, _) => ModelTier::Loading,
            (EngineState::Sleeping, Some(1)) => ModelTier::Sleeping,
            (EngineState::Sleeping | EngineState::Starting, _) => return None,
            (EngineState::Unreachable | EngineState::Other, _) => return None,
        };
        let model = engine.model.clone()?;
        Some(ModelReport {
            model,
            tier,
            bytes: Bytes::ZERO,
            source: "engine".into(),
        })
    };
    engines.iter().filter_map(held).collect()
}

/// Each model once, in order: where it is nearest to a GPU, and of equals the most complete copy. An engine does not report the
/// size of its weights; a complete copy on disk does.
pub fn merge_models(models: impl IntoIterator<Item = ModelReport>) -> Vec<ModelReport> {
    let mut by_model: BTreeMap<ModelId, (ModelReport, Bytes)> = BTreeMap::new();
    for report in models {
        let whole = if report.tier == ModelTier::Partial {
            Bytes::ZERO
        } else {
            report.bytes
        };
        match by_model.get_mut(&report.model) {
            Some((best, weight)) => {
                *weight = whole.max(*weight);
                if rank(&report) > rank(best) {
                    *best = report;
                }
            }
            None => drop(by_model.insert(report.model.clone(), (report, whole))),
        }
    }
    let with_size = |(report, weight): (ModelReport, Bytes)| match report.bytes {
        Bytes::ZERO => ModelReport {
            bytes: weight,
            ..report
        },
        _ => report,
    };
    by_model.into_values().map(with_size).collect()
}

fn rank(report: &ModelReport) -> (ModelTier, Bytes, &str) {
    (report.tier, report.bytes, &report.source)
}

#[cfg(test)]
mod tests;
