//! A catalog of models from 1B to 70B parameters whose traffic has a long tail: rank r is asked for `1 / r^s` as often as rank 1.

use super::RequestSize;
use crate::simulate::fleet::engines::ModelShape;
use stowage_scheduling::ids::ModelId;
use stowage_scheduling::testkit::random::Random;

/// What the numbers drawn here are for; see [`Random::seeded`].
const PURPOSE: u64 = 66;

/// The shapes that a catalog draws from, and how many of 100 models have each: small models are what most teams fine-tune.
const SHAPES: [(ModelShape, usize); 8] = [
    (ModelShape::LLAMA_1B, 14),
    (ModelShape::LLAMA_3B, 18),
    (ModelShape::QWEN_7B, 20),
    (ModelShape::LLAMA_8B, 22),
    (ModelShape::LLAMA_2_13B, 6),
    (ModelShape::QWEN_14B, 10),
    (ModelShape::QWEN_32B, 6),
    (ModelShape::LLAMA_70B, 4),
];

/// One model of a catalog.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct CatalogModel {
    pub id: ModelId,
    pub shape: ModelShape,
    /// Requests a second, on average.
    pub per_s: f64,
    pub size: RequestSize,
}

/// Models by rank: the most asked for first.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct ZipfCatalog {
    pub models: Vec<CatalogModel>,
}

impl ZipfCatalog {
    /// `models` with `per_s` requests a second together; `exponent` is s above, near 1 for what serving pools report. Which
    /// shape a rank has, and how long its requests are, is drawn.
    pub fn generate(seed: u64, models: usize, per_s: f64, exponent: f64) -> Self {
        let mut random = Random::seeded(seed, PURPOSE);
        let weight = |rank: usize| (rank as f64).powf(-exponent);
        let sum: f64 = (1..=models).map(weight).sum();
        let model = |rank: usize| {
            let shape = shape(&mut random);
            // Prompts from 150 to 2,400 tokens and outputs from 30 to 480: each doubling is as likely.
            let (prompt, output) = (
                150.0 * 16f64.powf(random.unit_interval()),
                30.0 * 16f64.powf(random.unit_interval()),
            );
            let name = format!("{}-{rank:03}", shape.name);
            CatalogModel {
                id: ModelId::parse(&name).expect("a shape's name and a number are a model's name"),
                shape,
                per_s: per_s * weight(rank) / sum,
                size: RequestSize { prompt, output },
            }
        };
        Self {
            models: (1..=models).map(model).collect(),
        }
    }

    #[cfg(test)]
    pub(crate) fn per_s(&self) -> f64 {
        self.models.iter().map(|model| model.per_s).sum()
    }
}

fn shape(random: &mut Random) -> ModelShape {
    let all: usize = SHAPES.iter().map(|(_, weight)| weight).sum();
    let mut drawn = random.below(all);
    for (shape, weight) in SHAPES {
        match drawn.checked_sub(weight) {
            Some(rest) => drawn = rest,
            None => return shape,
        }
    }
    SHAPES[0].0
}
