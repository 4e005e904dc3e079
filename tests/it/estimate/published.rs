//! Every published figure in `tests/fixtures/estimate/published.json`, with its source, against the estimate; and the tables of
//! `published.md` beside it, which are made of both. `STOWAGE_BLESS=1` writes them again.

use serde::Deserialize;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use stowage_scheduling::units::Bytes;
use stowage_sizing::estimate::shipped::{MODELS, ShippedModel};
use stowage_sizing::estimate::{Estimate, PartName, Workload, with_thousands_separators};

#[derive(Deserialize)]
struct Published {
    sources: BTreeMap<String, Source>,
    figures: Vec<Figure>,
}

#[derive(Deserialize)]
struct Source {
    title: String,
    url: String,
}

/// One number that somebody else has counted or measured.
#[derive(Deserialize)]
struct Figure {
    model: String,
    figure: Kind,
    /// As it is published.
    shown: String,
    /// Parameters, or bytes.
    value: u64,
    source: String,
    #[serde(default)]
    setting: Setting,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Kind {
    Parameters,
    KvCachePerToken,
    KvCache,
    Weights,
    Activations,
    /// Weights, activations and the engine's buffers, as vLLM measures them before it takes its KV cache.
    WithoutKvCache,
    /// The same with the KV cache that it took: the share of the GPU that it was told, and no measurement.
    Total,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Setting {
    context: Option<u64>,
    sequences: Option<u64>,
    tensor_parallel: Option<u64>,
    max_num_seqs: Option<u64>,
    max_num_batched_tokens: Option<u64>,
    kv_cache_bytes: Option<u64>,
}

impl Kind {
    const ALL: [Self; 7] = [
        Self::Parameters,
        Self::KvCachePerToken,
        Self::KvCache,
        Self::Weights,
        Self::Activations,
        Self::WithoutKvCache,
        Self::Total,
    ];

    fn title(self) -> &'static str {
        match self {
            Self::Parameters => "Parameters",
            Self::KvCachePerToken => "KV cache of a token",
            Self::KvCache => "KV cache",
            Self::Weights => "Weights",
            Self::Activations => "Activations",
            Self::WithoutKvCache => "All but the KV cache",
            Self::Total => "vLLM's budget, against all parts with the measured KV cache",
        }
    }

    /// How far an estimate may be off, in per cent.
    fn tolerance(self) -> f64 {
        match self {
            Self::Parameters | Self::KvCachePerToken | Self::KvCache => 5.0,
            Self::Weights | Self::Activations | Self::WithoutKvCache | Self::Total => 10.0,
        }
    }

    /// Whether it is VRAM as a whole, or all of it beside the KV cache.
    fn is_of_all(self) -> bool {
        matches!(self, Self::WithoutKvCache | Self::Total)
    }
}

/// The measurements that the constants of `overhead` were chosen by.
const FITTED_TO: &str = "planner";

impl Figure {
    fn workload(&self) -> Workload {
        let (set, usual) = (&self.setting, Workload::default());
        Workload {
            context: set.context.unwrap_or(usual.context),
            sequences: set.sequences.unwrap_or(1),
            tensor_parallel: set.tensor_parallel.unwrap_or(1),
            max_num_seqs: set.max_num_seqs.unwrap_or(usual.max_num_seqs),
            max_num_batched_tokens: set
                .max_num_batched_tokens
                .unwrap_or(usual.max_num_batched_tokens),
            ..usual
        }
    }

    fn estimated(&self) -> u64 {
        let model = ShippedModel::find(&self.model).unwrap().read().unwrap();
        let estimate = Estimate::for_model(&model, &self.workload()).unwrap();
        let sum = |parts: &[PartName]| {
            parts
                .iter()
                .map(|part| estimate.bytes_of(*part))
                .sum::<Bytes>()
                .0
        };
        match self.figure {
            Kind::Parameters => estimate.parameters,
            Kind::KvCachePerToken => estimate.kv_cache.bytes_per_token.0,
            Kind::KvCache => estimate.kv_cache.bytes.0,
            Kind::Weights => sum(&[PartName::Weights]),
            Kind::Activations => sum(&[PartName::Activations]),
            Kind::WithoutKvCache => sum(&[
                PartName::Weights,
                PartName::Activations,
                PartName::EngineBuffers,
            ]),
            Kind::Total => estimate.fixed_bytes().0 + self.setting.kv_cache_bytes.unwrap(),
        }
    }

    /// Whether a constant of the estimate was chosen by this very figure.
    fn is_fitted(&self) -> bool {
        let has_constants = matches!(
            self.figure,
            Kind::Activations | Kind::WithoutKvCache | Kind::Total
        );
        has_constants && self.source == FITTED_TO
    }

    /// In per cent of the published figure.
    fn difference(&self) -> f64 {
        (self.estimated() as f64 / self.value as f64 - 1.0) * 100.0
    }

    fn setting_text(&self) -> String {
        let set = &self.setting;
        let context = set.context.filter(|_| self.figure == Kind::KvCache);
        let tokens = context.map(|context| match set.sequences {
            Some(sequences) => format!(
                "{sequences} × {} tokens",
                with_thousands_separators(context.into())
            ),
            None => format!("{} tokens", with_thousands_separators(context.into())),
        });
        let gpus = set
            .tensor_parallel
            .map(|gpus| format!("on each of {gpus} GPUs"));
        let sequences = set
            .max_num_seqs
            .filter(|_| self.figure == Kind::Activations);
        let sequences = sequences
            .map(|sequences| format!("{} sequences", with_thousands_separators(sequences.into())));
        [tokens, sequences, gpus]
            .into_iter()
            .flatten()
            .collect::<Vec<_>>()
            .join(", ")
    }

    fn estimated_text(&self) -> String {
        let estimated = self.estimated();
        match self.figure {
            Kind::Parameters => format!("{:.2}B", estimated as f64 / 1e9),
            Kind::KvCachePerToken => format!("{} B", with_thousands_separators(estimated.into())),
            _ if estimated < 1 << 30 => {
                format!("{:.0} MiB", estimated as f64 / (1u64 << 20) as f64)
            }
            _ => format!("{:.2} GiB", estimated as f64 / (1u64 << 30) as f64),
        }
    }
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn published() -> Published {
    let file = root().join("tests/fixtures/estimate/published.json");
    serde_json::from_str(&std::fs::read_to_string(file).unwrap()).unwrap()
}

#[test]
fn every_published_figure_is_met() {
    let published = published();
    assert!(published.figures.len() > 60, "{}", published.figures.len());
    let mut far = Vec::new();
    for figure in &published.figures {
        let difference = figure.difference();
        if difference.abs() > figure.figure.tolerance() {
            far.push(format!(
                "{} {:?} {}: published {}, estimated {} ({difference:+.1} %)",
                figure.model,
                figure.figure,
                figure.setting_text(),
                figure.shown,
                figure.estimated_text(),
            ));
        }
    }
    assert!(far.is_empty(), "{}", far.join("\n"));
}

#[test]
fn every_built_in_model_has_published_parameters_and_every_source_is_used() {
    let published = published();
    for model in MODELS.iter().filter(|model| !model.name.ends_with("-fp8")) {
        let has = |kind| {
            published
                .figures
                .iter()
                .any(|one| one.model == model.name && one.figure == kind)
        };
        assert!(has(Kind::Parameters), "{}", model.name);
    }
    for (name, source) in &published.sources {
        assert!(
            published
                .figures
                .iter()
                .any(|figure| figure.source == *name),
            "{name} is cited by nothing"
        );
        assert!(source.url.starts_with("https://"), "{name}");
    }
    let cited = |figure: &Figure| published.sources.contains_key(&figure.source);
    assert!(published.figures.iter().all(cited));
}

/// The part of a page between two comments.
fn replaced(page: &str, name: &str, with: &str) -> String {
    let (begin, end) = (
        format!("<!-- {name} -->\n"),
        format!("<!-- end of {name} -->"),
    );
    let (before, rest) = page
        .split_once(&begin)
        .unwrap_or_else(|| panic!("{begin} is missing"));
    let (_, after) = rest
        .split_once(&end)
        .unwrap_or_else(|| panic!("{end} is missing"));
    format!("{before}{begin}{with}{end}{after}")
}

fn comparison(published: &Published) -> String {
    let mut text = String::new();
    for kind in Kind::ALL {
        let figures: Vec<&Figure> = published
            .figures
            .iter()
            .filter(|one| one.figure == kind)
            .collect();
        text += &format!(
            "\n### {}\n\n| model | setting | published | estimated | off by | source |\n",
            kind.title()
        );
        text += "|---|---|---|---|---|---|\n";
        for figure in figures {
            let source = &published.sources[&figure.source];
            text += &format!(
                "| `{}` | {} | {} | {} | {:+.1} %{} | [{}][{}] |\n",
                figure.model,
                figure.setting_text(),
                figure.shown,
                figure.estimated_text(),
                // A minus before a zero says nothing.
                figure.difference() + 0.0,
                if figure.is_fitted() { ", fitted" } else { "" },
                source.title,
                figure.source,
            );
        }
    }
    let without: Vec<String> = MODELS
        .iter()
        .map(|model| model.name)
        .filter(|name| {
            !published
                .figures
                .iter()
                .any(|one| one.model == *name && one.figure.is_of_all())
        })
        .map(|name| format!("`{name}`"))
        .collect();
    let links = published
        .sources
        .iter()
        .map(|(name, source)| format!("[{name}]: {}\n", source.url));
    text + &links.fold("\n".to_owned(), |links, link| links + &link)
        + &format!(
            "\nNo published figure of their VRAM beyond weights was found for {}.\n",
            without.join(", ")
        )
}

#[test]
fn the_tables_show_every_published_figure_beside_the_estimate() {
    let file: PathBuf = root().join("tests/fixtures/estimate/published.md");
    let page = std::fs::read_to_string(&file).unwrap_or_default();
    let generated =
        replaced(&page, "published figures", &comparison(&published())).replace("-0.0 %", "+0.0 %");
    if std::env::var_os("STOWAGE_BLESS").is_some() {
        std::fs::write(&file, &generated).unwrap();
    }
    let committed = std::fs::read_to_string(&file).unwrap();
    assert!(
        committed == generated,
        "STOWAGE_BLESS=1 writes the tables of tests/fixtures/estimate/published.md again"
    );
}

#[test]
fn the_page_names_every_known_gpu() {
    let page = std::fs::read_to_string(root().join("docs/use/estimate.md")).unwrap();
    for gpu in stowage_sizing::estimate::gpus::known_gpus() {
        let row = format!(
            "| {} | {} |",
            gpu.name,
            with_thousands_separators(u128::from(gpu.memory_bytes.0 >> 20))
        );
        assert!(page.contains(&row), "{row} is not on the page");
    }
}
