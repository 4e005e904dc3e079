//! When an engine would answer on a node: the policy's speeds, corrected by what was learned of engines that started before.
//!
//! A [`StartModel`] is what was learned in the whole cluster: a pair of factors for each engine, GPU model and way of loading, and
//! the sizes of images. What was learned on one node is in the [`Node`] and goes before it. The ledger learns; nothing here does.

use crate::engines::Engine;
use crate::ids::GpuModel;
use crate::units::{Bytes, Millis};
use crate::vocabulary::demand::Demand;
use crate::vocabulary::image::{ImageId, NodeImage};
use crate::vocabulary::model_tier::{LoadingSpeeds, NodeModel, engine_start_time};
use crate::vocabulary::node::Node;
use crate::vocabulary::start_time::{LoadPath, StartFactors, StartKind, StartTime};
use rustc_hash::FxHashMap;
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// Images whose sizes are known at most. The size of one that comes when there are so many is unknown until others are gone.
pub(crate) const MAX_IMAGES: usize = 32_768;

/// The start times that the whole cluster has learned. Cheap to clone.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StartModel {
    pull: LearnedFactors<()>,
    /// By engine, in the order of [`Engine`](crate::engines::Engine); shorter if the last ones
    /// have started nowhere.
    engines: Vec<LearnedFactors<(LoadPath, GpuModel)>>,
    images: Arc<ImageSizes>,
}

/// Factors of one engine. Their generation rises with each change, so that scores of other engines' pods stay valid.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct LearnedFactors<K> {
    generation: u64,
    /// In order.
    factors: Vec<(K, StartFactors)>,
}

/// How large each image is that some node has.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageSizes {
    sizes: FxHashMap<ImageId, ImageOnNodes>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
struct ImageOnNodes {
    /// The largest that any node has said that had it.
    bytes: Bytes,
    nodes: u32,
}

/// All of the model that a demand's start times follow from.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct StartModelKey {
    pull: u64,
    engine: u64,
    image_sizes: Vec<Option<Bytes>>,
}

/// When an engine would answer on a node, and what that follows from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct StartEstimate {
    /// The time by the policy's speeds alone.
    pub prior: StartTime,
    /// The time corrected by what was learned.
    pub time: StartTime,
    /// The images that the node lacks.
    pub missing: MissingImages,
    /// How the engine loads; `None` for a pod that names no model: of it only the pull is known.
    pub kind: Option<StartKind>,
    pub pull_factors: FactorsAndSource,
    pub engine_factors: FactorsAndSource,
}

/// The images of a pod that a node lacks.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MissingImages {
    pub count: u32,
    pub bytes: Bytes,
    /// No node lists some of them: the policy's size counts, once.
    pub is_assumed: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct FactorsAndSource {
    pub factors: StartFactors,
    pub source: FactorSource,
}

/// Where factors were learned.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FactorSource {
    /// Nowhere: the policy's speeds are taken as they are.
    Policy,
    /// On all nodes with such GPUs.
    Cluster,
    /// On the node itself.
    Node,
}

/// When the pod would answer on the node; `None` if it names no model and the node has its images, as far as that is known.
pub fn estimate_start(
    node: &Node,
    demand: &Demand,
    starts: &StartModel,
    speeds: &LoadingSpeeds,
) -> Option<StartEstimate> {
    let missing = starts.missing_images(node, demand, speeds);
    let mut prior = StartTime::default();
    let mut engine_factors = FactorsAndSource::PRIOR;
    let mut kind = None;
    if let Some(model) = &demand.model {
        let holding = node.holding(model);
        prior = engine_start_time(holding, demand.weights(), speeds);
        let start_kind = engine_kind(demand.engine, holding);
        engine_factors = starts.factors(node, start_kind);
        kind = Some(start_kind);
    } else if missing.count == 0 {
        return None;
    }
    let mut pull_factors = FactorsAndSource::PRIOR;
    if missing.count > 0 {
        prior.pull = missing.bytes.transfer_time(speeds.image_pull);
        pull_factors = starts.factors(node, StartKind::Pull);
    }
    let time = prior.corrected(&pull_factors.factors, &engine_factors.factors);
    Some(StartEstimate {
        prior,
        time,
        missing,
        kind,
        pull_factors,
        engine_factors,
    })
}

impl StartEstimate {
    pub fn total(&self) -> Millis {
        self.time.total()
    }
}

impl FactorsAndSource {
    pub(crate) const PRIOR: Self = Self {
        factors: StartFactors::PRIOR,
        source: FactorSource::Policy,
    };
}

impl StartModel {
    /// The key of all that a demand's start times follow from, beside the nodes.
    pub fn key_of(&self, demand: &Demand) -> StartModelKey {
        let engine = self
            .engines
            .get(demand.engine as usize)
            .filter(|_| demand.model.is_some());
        StartModelKey {
            pull: if demand.images.is_empty() {
                0
            } else {
                self.pull.generation
            },
            engine: engine.map_or(0, |engine| engine.generation),
            image_sizes: demand
                .images
                .iter()
                .map(|image| self.images.size_of(*image))
                .collect(),
        }
    }

    /// Takes in what was learned in the whole cluster of one kind of start, on one kind of GPU; `None` if that is forgotten.
    pub(crate) fn set_factors(
        &mut self,
        kind: StartKind,
        gpu: Option<&GpuModel>,
        factors: Option<StartFactors>,
    ) {
        match (kind, gpu) {
            (StartKind::Pull, _) => self.pull.set((), factors),
            // On GPUs of which nothing is known, the policy's speeds count.
            (StartKind::Engine(..), None) => {}
            (StartKind::Engine(engine, path), Some(gpu)) => {
                let index = engine as usize;
                if self.engines.len() <= index {
                    self.engines.resize(index + 1, LearnedFactors::default());
                }
                self.engines[index].set((path, gpu.clone()), factors);
            }
        }
    }

    /// Forgets all factors: the policy's speeds are others now.
    pub(crate) fn forget_factors(&mut self) {
        self.pull.clear();
        self.engines.iter_mut().for_each(LearnedFactors::clear);
    }

    /// The factors learned in the whole cluster for one kind of start, on one kind of GPU.
    pub(crate) fn cluster_factors(
        &self,
        kind: StartKind,
        gpu: Option<&GpuModel>,
    ) -> Option<StartFactors> {
        let learned = match kind {
            StartKind::Pull => self.pull.factors.first().map(|(_, factors)| factors),
            StartKind::Engine(engine, path) => {
                let (gpu, engine) = (gpu?, self.engines.get(engine as usize)?);
                let mut of_gpu = engine
                    .factors
                    .iter()
                    .filter(|((learned_path, model), _)| *learned_path == path && model == gpu);
                of_gpu.next().map(|(_, factors)| factors)
            }
        };
        learned.copied()
    }

    /// How long an engine takes to start on a node that has `holding` of its model, without a pull; `weights` is what the model
    /// weighs where the node cannot tell.
    pub(crate) fn engine_start(
        &self,
        node: &Node,
        engine: Engine,
        holding: Option<&NodeModel>,
        weights: Bytes,
        speeds: &LoadingSpeeds,
    ) -> StartTime {
        let learned = self.factors(node, engine_kind(engine, holding)).factors;
        engine_start_time(holding, weights, speeds).corrected(&StartFactors::PRIOR, &learned)
    }

    /// How long an engine takes to start on GPUs of that model, as far as the cluster has learned, on a node that is not known
    /// yet.
    pub(crate) fn cluster_engine_start(
        &self,
        gpu: Option<&GpuModel>,
        engine: Engine,
        holding: Option<&NodeModel>,
        weights: Bytes,
        speeds: &LoadingSpeeds,
    ) -> StartTime {
        let learned = self
            .cluster_factors(engine_kind(engine, holding), gpu)
            .unwrap_or(StartFactors::PRIOR);
        engine_start_time(holding, weights, speeds).corrected(&StartFactors::PRIOR, &learned)
    }

    /// The sizes of images, to be changed.
    pub(crate) fn images_mut(&mut self) -> &mut ImageSizes {
        Arc::make_mut(&mut self.images)
    }

    pub fn images(&self) -> &ImageSizes {
        &self.images
    }

    /// The factors of one kind of start: learned on the node itself, or else on all nodes.
    fn factors(&self, node: &Node, kind: StartKind) -> FactorsAndSource {
        if let Some(factors) = node.start_factors_of(kind) {
            return FactorsAndSource {
                factors: *factors,
                source: FactorSource::Node,
            };
        }
        match self.cluster_factors(kind, node.gpu_model()) {
            Some(factors) => FactorsAndSource {
                factors,
                source: FactorSource::Cluster,
            },
            None => FactorsAndSource::PRIOR,
        }
    }

    fn missing_images(
        &self,
        node: &Node,
        demand: &Demand,
        speeds: &LoadingSpeeds,
    ) -> MissingImages {
        let mut missing = MissingImages::default();
        if !node.images.is_known() {
            return missing;
        }
        for image in demand
            .images
            .iter()
            .filter(|image| !node.images.contains(**image))
        {
            missing.count += 1;
            match self.images.size_of(*image) {
                Some(bytes) => missing.bytes += bytes,
                // Once: an engine's image is large, and those beside it are small.
                None if missing.is_assumed => {}
                None => {
                    missing.bytes += speeds.image_size;
                    missing.is_assumed = true;
                }
            }
        }
        missing
    }
}

impl<K> Default for LearnedFactors<K> {
    fn default() -> Self {
        Self {
            generation: 0,
            factors: Vec::new(),
        }
    }
}

impl<K: Ord> LearnedFactors<K> {
    fn set(&mut self, key: K, factors: Option<StartFactors>) {
        let position = self
            .factors
            .binary_search_by(|(existing, _)| existing.cmp(&key));
        match (position, factors) {
            (Ok(index), Some(factors)) if self.factors[index].1 == factors => return,
            (Ok(index), Some(factors)) => self.factors[index].1 = factors,
            (Ok(index), None) => drop(self.factors.remove(index)),
            (Err(index), Some(factors)) => self.factors.insert(index, (key, factors)),
            (Err(_), None) => return,
        }
        self.generation += 1;
    }

    fn clear(&mut self) {
        if !self.factors.is_empty() {
            self.factors.clear();
            self.generation += 1;
        }
    }
}

impl ImageSizes {
    pub fn size_of(&self, image: ImageId) -> Option<Bytes> {
        self.sizes.get(&image).map(|on_nodes| on_nodes.bytes)
    }

    pub fn len(&self) -> usize {
        self.sizes.len()
    }

    pub fn is_empty(&self) -> bool {
        self.sizes.is_empty()
    }

    /// Whether [`Self::replace`] would change anything. One that found no room stays without until the node's list changes.
    pub(crate) fn would_change(
        &self,
        before: impl Iterator<Item = ImageId>,
        now: &[NodeImage],
    ) -> bool {
        let is_larger = |image: &NodeImage| {
            self.size_of(image.image)
                .is_some_and(|recorded| recorded < image.bytes)
        };
        !before.eq(now.iter().map(|image| image.image)) || now.iter().any(is_larger)
    }

    /// A node that had `before` has `now`. Each image is in each list at most once. Where nodes do not agree on a size, the
    /// largest counts: one that followed the latest word would change with every word, and all start times with it.
    pub fn replace(&mut self, before: impl Iterator<Item = ImageId>, now: &[NodeImage]) {
        // What it has now comes first, so that what it keeps is never without a node.
        for NodeImage { image, bytes } in now {
            let is_full = self.sizes.len() >= MAX_IMAGES;
            match self.sizes.get_mut(image) {
                Some(on_nodes) => {
                    on_nodes.nodes += 1;
                    on_nodes.bytes = on_nodes.bytes.max(*bytes);
                }
                None if is_full => {}
                None => drop(self.sizes.insert(
                    *image,
                    ImageOnNodes {
                        bytes: *bytes,
                        nodes: 1,
                    },
                )),
            }
        }
        for image in before {
            let Some(on_nodes) = self.sizes.get_mut(&image) else {
                continue;
            };
            on_nodes.nodes = on_nodes.nodes.saturating_sub(1);
            if on_nodes.nodes == 0 {
                self.sizes.remove(&image);
            }
        }
    }
}

/// The kind of start of an engine on a node that has `holding` of its model.
fn engine_kind(engine: Engine, holding: Option<&NodeModel>) -> StartKind {
    StartKind::Engine(
        engine,
        LoadPath::from_tier(holding.map(|holding| holding.tier)),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engines::Engine;
    use crate::ids::ModelId;
    use crate::testkit::{demand_of, h100, node};
    use crate::vocabulary::demand::Sharing;
    use crate::vocabulary::image::NodeImageSet;
    use crate::vocabulary::start_time::TimeFactor;

    fn image(reference: &str) -> ImageId {
        ImageId::from_reference(reference).unwrap()
    }

    fn with_images(images: Option<&[&str]>) -> Node {
        let images = images.map(|images| images.iter().map(|reference| image(reference)).collect());
        Node {
            images: NodeImageSet::from(images),
            devices: [h100("n", 0)].into(),
            ..Node::from_name(node("n"))
        }
    }

    /// The demand of an engine with 20 GB of weights.
    fn demand(images: &[&str]) -> Demand {
        Demand {
            model: ModelId::parse("m").ok(),
            weights: Some(Bytes(20_000_000_000)),
            images: images.iter().map(|reference| image(reference)).collect(),
            engine: Engine::Vllm,
            ..demand_of(40 << 30, 1, Sharing::Shared, 0)
        }
    }

    fn starts(sizes: &[(&str, u64)]) -> StartModel {
        let mut starts = StartModel::default();
        let listed: Vec<NodeImage> = sizes
            .iter()
            .map(|(reference, bytes)| NodeImage {
                image: image(reference),
                bytes: Bytes(*bytes),
            })
            .collect();
        starts.images_mut().replace(std::iter::empty(), &listed);
        starts
    }

    fn pull(node: &Node, demand: &Demand, starts: &StartModel) -> Millis {
        estimate_start(node, demand, starts, &LoadingSpeeds::default())
            .unwrap()
            .time
            .pull
    }

    #[test]
    fn an_image_that_the_node_lacks_is_pulled_first() {
        let starts = starts(&[("engine", 10_000_000_000), ("side", 1_000_000_000)]);
        let demand = demand(&["engine", "side"]);
        let time = |images: Option<&[&str]>| pull(&with_images(images), &demand, &starts);
        assert_eq!(time(Some(&["engine", "side"])), Millis(0));
        assert_eq!(time(Some(&["engine"])), Millis::seconds(5));
        assert_eq!(time(Some(&[])), Millis::seconds(55));
        assert_eq!(
            time(None),
            Millis(0),
            "a node that lists no image says nothing"
        );
    }

    #[test]
    fn images_that_no_node_lists_count_once_with_the_policys_size() {
        let demand = demand(&["engine", "side", "third"]);
        let starts = starts(&[("side", 1_000_000_000)]);
        let found = estimate_start(
            &with_images(Some(&[])),
            &demand,
            &starts,
            &LoadingSpeeds::default(),
        )
        .unwrap();
        let MissingImages {
            count,
            bytes,
            is_assumed,
        } = found.missing;
        assert_eq!((count, is_assumed), (3, true));
        assert_eq!(
            bytes,
            Bytes(1_000_000_000) + LoadingSpeeds::default().image_size
        );
    }

    #[test]
    fn of_a_pod_without_a_model_only_the_pull_is_known() {
        let starts = starts(&[("engine", 10_000_000_000)]);
        let demand = Demand {
            model: None,
            ..demand(&["engine"])
        };
        let at = |node: &Node| {
            estimate_start(node, &demand, &starts, &LoadingSpeeds::default()).map(|e| e.total())
        };
        assert_eq!(at(&with_images(Some(&["engine"]))), None);
        assert_eq!(at(&with_images(Some(&[]))), Some(Millis::seconds(50)));
    }

    #[test]
    fn what_a_node_has_taught_goes_before_what_the_cluster_has() {
        let factors = |transfer| StartFactors {
            transfer: TimeFactor(transfer),
            init: TimeFactor::PRIOR,
            samples: 5,
        };
        let (mut starts, demand) = (StartModel::default(), demand(&[]));
        let kind = StartKind::Engine(Engine::Vllm, LoadPath::Network);
        starts.set_factors(kind, Some(&h100("n", 0).model), Some(factors(2000)));
        let plain = with_images(None);
        let learned = Node {
            start_factors: [(kind, factors(500))].into(),
            ..plain.clone()
        };
        let of = |node: &Node, demand: &Demand| {
            let found = estimate_start(node, demand, &starts, &LoadingSpeeds::default()).unwrap();
            assert_eq!(found.prior.fetch, Millis::seconds(20));
            (found.time.fetch, found.engine_factors.source)
        };
        assert_eq!(
            of(&plain, &demand),
            (Millis::seconds(40), FactorSource::Cluster)
        );
        assert_eq!(
            of(&learned, &demand),
            (Millis::seconds(10), FactorSource::Node)
        );
        let other = Demand {
            engine: Engine::Sglang,
            ..demand.clone()
        };
        assert_eq!(
            of(&learned, &other),
            (Millis::seconds(20), FactorSource::Policy)
        );
    }

    #[test]
    fn a_key_changes_only_for_demands_whose_times_change() {
        let mut starts = starts(&[("engine", 10)]);
        let (vllm, sglang) = (
            demand(&["engine"]),
            Demand {
                engine: Engine::Sglang,
                ..demand(&[])
            },
        );
        let keys = |starts: &StartModel| [starts.key_of(&vllm), starts.key_of(&sglang)];
        let before = keys(&starts);
        let factors = StartFactors {
            samples: 3,
            ..StartFactors::PRIOR
        };
        let kind = StartKind::Engine(Engine::Sglang, LoadPath::Disk);
        starts.set_factors(kind, Some(&h100("n", 0).model), Some(factors));
        let learned = keys(&starts);
        assert_eq!(learned[0], before[0]);
        assert_ne!(learned[1], before[1]);
        let listed = [NodeImage {
            image: image("engine"),
            bytes: Bytes(11),
        }];
        starts.images_mut().replace(std::iter::empty(), &listed);
        assert_ne!(keys(&starts)[0], learned[0]);
        assert_eq!(keys(&starts)[1], learned[1]);
    }

    #[test]
    fn an_images_size_is_known_as_long_as_a_node_has_it() {
        let listed = |bytes| {
            [NodeImage {
                image: image("engine"),
                bytes: Bytes(bytes),
            }]
        };
        let mut sizes = ImageSizes::default();
        sizes.replace(std::iter::empty(), &listed(10));
        sizes.replace(std::iter::empty(), &listed(10));
        sizes.replace([image("engine")].into_iter(), &[]);
        assert_eq!(sizes.size_of(image("engine")), Some(Bytes(10)));
        assert!(sizes.would_change([image("engine")].into_iter(), &listed(11)));
        assert!(!sizes.would_change([image("engine")].into_iter(), &listed(10)));
        assert!(
            !sizes.would_change([image("engine")].into_iter(), &listed(9)),
            "another node says more"
        );
        sizes.replace([image("engine")].into_iter(), &[]);
        assert!(sizes.is_empty());
    }
}
