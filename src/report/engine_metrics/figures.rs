//! Turns a metrics page into figures. An impossible value gives no figure and a problem that names it, never a wrong figure.
//!
//! One engine may have several data-parallel ranks, each with a KV cache and a queue of its own: the fullest cache counts;
//! queues and capacities add up. [`stowage_scheduling::engines`] has the names.

use super::histogram::{CollectedHistogram, Histogram, MAX_BUCKETS, Series};
use super::scan::{Label, MetricLine, Sample, Scan, WantedMetrics};
use std::borrow::Cow;
use std::sync::LazyLock;
use stowage_scheduling::engines::{
    DECLARATIONS, Dialect, Engine, GATEWAYS, MeasuredLatency, MetricQuantity, MetricReading,
};
use stowage_scheduling::ids::ModelId;

/// One page's figures of its engine; by default of one that reports nothing yet.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Figures {
    pub engine: Engine,
    /// The model it serves, by its own name.
    pub model: Option<ModelId>,
    /// 0 to 1, of the fullest rank.
    pub kv_cache_usage: Option<f64>,
    /// Tokens its KV cache holds, over all ranks.
    pub kv_cache_tokens: Option<u64>,
    /// Requests, over all ranks. Of an engine that says what they wait for, those that wait for capacity.
    pub waiting: Option<u64>,
    pub running: Option<u64>,
    /// How often it has interrupted its own requests since it started, over all ranks.
    pub preemptions: Option<u64>,
    /// Tokens that it has generated since it started, over all ranks.
    pub generated_tokens: Option<u64>,
    /// Tokens of prompts that it has processed since it started, over all ranks.
    pub prompt_tokens: Option<u64>,
    pub time_per_token: Option<Histogram>,
    pub time_to_first_token: Option<Histogram>,
    /// 1: its weights are in host memory; 2: they are discarded. `None` if it is awake, or does not report it.
    pub sleep_level: Option<u8>,
    /// Why figures are missing.
    pub problems: Vec<MetricsProblem>,
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum MetricsProblem {
    #[error("{metric} is {value}, which cannot be")]
    Impossible { metric: &'static str, value: String },
    #[error("a line of {metric} cannot be read")]
    Garbled { metric: &'static str },
    #[error("{metric} has more than {MAX_RANKS} ranks")]
    TooManyRanks { metric: &'static str },
    #[error("{metric} has more than {} bounds", MAX_BUCKETS)]
    TooManyBuckets { metric: &'static str },
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum UnknownPage {
    #[error("the page is empty")]
    Empty,
    #[error("the page of {name}, which is no engine")]
    Gateway { name: &'static str },
    #[error("no metric of a known engine; first line: {first_line:?}")]
    NotAnEngine { first_line: String },
}

/// More ranks than run on one node. Limits the cost of a hostile page.
const MAX_RANKS: usize = 256;
/// No queue and no KV cache is this large; a greater count is an error of the engine.
pub(super) const MAX_COUNT: f64 = 1e12;
/// Shares are quotients of rounded numbers: an excess below this counts as 1.
const SHARE_TOLERANCE: f64 = 0.001;
/// Enough characters to recognize a text.
const MAX_SHOWN_CHARS: usize = 60;

/// Labels that distinguish units with a KV cache and a queue of their own: data-parallel ranks (`engine`, `dp_rank`), workers
/// (`WorkerId` is Ray's), models of one Triton; and the requests that SGLang counts apart. Samples that differ only in other labels are
/// views of the same, such as those of each tensor-parallel rank.
const RANK_LABELS: [&str; 7] = [
    "engine",
    "dp_rank",
    "worker_id",
    "WorkerId",
    "model",
    "version",
    "is_streaming",
];

/// The values that a quantity may have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ValueRange {
    Share,
    Count,
    Flag,
}

fn range(quantity: MetricQuantity) -> ValueRange {
    match quantity {
        MetricQuantity::KvUsage | MetricQuantity::KvUsageOldName => ValueRange::Share,
        MetricQuantity::Awake | MetricQuantity::WeightsOffloaded | MetricQuantity::AllDiscarded => {
            ValueRange::Flag
        }
        _ => ValueRange::Count,
    }
}

/// The name in a problem of a quantity that was computed.
fn derived_name(quantity: MetricQuantity) -> &'static str {
    match quantity {
        MetricQuantity::KvTokens => "the KV cache's blocks times the tokens of one",
        _ => "the KV cache's usage",
    }
}

const QUANTITIES: usize = MetricQuantity::AllDiscarded as usize + 1;

/// Parses a page. `hint` is the engine that the pod declares; without one, or if the page is not that engine's, the page
/// identifies it.
pub fn parse_page(metrics_page: &[u8], hint: Option<Engine>) -> Result<Figures, UnknownPage> {
    let mut values_by_dialect: Vec<DialectValues<'_>> =
        dialects().map(DialectValues::new).collect();
    for line in Scan::new(metrics_page, &WANTED) {
        let (wanted, sample) = match &line {
            MetricLine::Sample(sample) => (sample.tag, Some(sample)),
            MetricLine::Garbled(is) => (*is, None),
        };
        match (wanted, sample) {
            (Wanted::Gateway(name), _) => return Err(UnknownPage::Gateway { name }),
            (Wanted::Metric(metric), Some(sample)) => {
                values_by_dialect[metric.dialect].add_sample(metric, sample)
            }
            (Wanted::Metric(metric), None) => {
                values_by_dialect[metric.dialect].record_garbled(metric)
            }
        }
    }
    // The hinted engine first; the others in their order.
    values_by_dialect.sort_by_key(|collected| Some(collected.engine) != hint);
    values_by_dialect
        .into_iter()
        .filter(DialectValues::is_present)
        .map(DialectValues::figures)
        .reduce(Figures::filled_from)
        .or_else(|| {
            engine_by_prefix(metrics_page).map(|engine| Figures {
                engine,
                ..Figures::default()
            })
        })
        .ok_or_else(|| unknown(metrics_page))
}

/// A name that means something on a page.
#[derive(Debug, Clone, Copy)]
enum Wanted {
    Metric(&'static Metric),
    Gateway(&'static str),
}

/// A metric: its dialect's place among all, its whole name, and how it is read.
#[derive(Debug)]
struct Metric {
    dialect: usize,
    name: String,
    reading: MetricReading,
    /// Which series it is, if it is one of a histogram.
    series: Option<Series>,
}

/// The series of a metric, and what is added to its name for each.
fn series_of(reading: &MetricReading) -> &'static [(Option<Series>, &'static str)] {
    match reading {
        MetricReading::Histogram(_) => &[
            (Some(Series::Sum), "_sum"),
            (Some(Series::Count), "_count"),
            (Some(Series::Buckets), "_bucket"),
        ],
        _ => &[(None, "")],
    }
}

fn dialects() -> impl Iterator<Item = (Engine, &'static Dialect)> {
    DECLARATIONS
        .iter()
        .flat_map(|one| one.dialects.iter().map(|dialect| (one.engine, dialect)))
}

static METRICS: LazyLock<Vec<Metric>> = LazyLock::new(|| {
    let rows = dialects().enumerate().flat_map(|(dialect, (_, row))| {
        row.metrics.iter().flat_map(move |&(name, reading)| {
            let series = series_of(&reading).iter();
            series.map(move |&(series, suffix)| Metric {
                dialect,
                name: format!("{}{name}{suffix}", row.prefix),
                reading,
                series,
            })
        })
    });
    rows.collect()
});

static WANTED: LazyLock<WantedMetrics<Wanted>> = LazyLock::new(|| {
    let metrics = METRICS
        .iter()
        .map(|metric| (&*metric.name, Wanted::Metric(metric)));
    let gateways = GATEWAYS.iter();
    let gateways = gateways.flat_map(|one| {
        one.metrics
            .iter()
            .map(|name| (*name, Wanted::Gateway(one.name)))
    });
    WantedMetrics::new(&metrics.chain(gateways).collect::<Vec<_>>())
});

/// A page's values in one dialect.
struct DialectValues<'p> {
    engine: Engine,
    dialect: &'static Dialect,
    /// Whether the page has a line of this dialect.
    has_lines: bool,
    model: Option<Label<'p>>,
    ranks: Vec<Rank<'p>>,
    /// For each quantity, why it is not reliable.
    unreliable: [Option<MetricsProblem>; QUANTITIES],
    /// By [`MeasuredLatency`].
    histograms: [CollectedHistogram; LATENCIES],
}

const LATENCIES: usize = MeasuredLatency::ToFirstToken as usize + 1;

struct Rank<'p> {
    /// The values of [`RANK_LABELS`], as written; empty where one is missing.
    key: [&'p [u8]; RANK_LABELS.len()],
    values: [Option<f64>; QUANTITIES],
}

impl<'p> DialectValues<'p> {
    fn new((engine, dialect): (Engine, &'static Dialect)) -> Self {
        const FINE: Option<MetricsProblem> = None;
        Self {
            engine,
            dialect,
            has_lines: false,
            model: None,
            ranks: Vec::new(),
            unreliable: [FINE; QUANTITIES],
            histograms: Default::default(),
        }
    }

    /// Whether the page is in this dialect.
    fn is_present(&self) -> bool {
        let is_reported = |quantity: &MetricQuantity| {
            let quantity_index = *quantity as usize;
            self.unreliable[quantity_index].is_some()
                || self
                    .ranks
                    .iter()
                    .any(|rank| rank.values[quantity_index].is_some())
        };
        self.has_lines && self.dialect.required.iter().all(is_reported)
    }

    fn add_sample(&mut self, metric: &'static Metric, sample: &Sample<'p, Wanted>) {
        self.has_lines = true;
        if self.model.is_none() {
            let mut names = self.dialect.model_labels.iter();
            self.model = names.find_map(|name| sample.labels.get(name));
        }
        match metric.reading {
            MetricReading::Histogram(latency) => {
                let series = metric.series.expect("a histogram's metrics are its series");
                self.histograms[latency as usize].add(&metric.name, series, sample);
            }
            MetricReading::Value(quantity) => self.record(metric, sample, quantity, sample.value),
            MetricReading::ByLabel(label, quantities) => {
                let Some(label) = sample.labels.get(label) else {
                    return;
                };
                let quantity = quantities
                    .iter()
                    .find(|(text, _)| label.raw == text.as_bytes());
                quantity
                    .into_iter()
                    .for_each(|&(_, quantity)| self.record(metric, sample, quantity, sample.value));
            }
            MetricReading::Labels(quantities) => {
                for (name, quantity) in quantities {
                    let Some(label) = sample.labels.get(name).filter(|label| is_set(label)) else {
                        continue;
                    };
                    match label.value().parse() {
                        Ok(value) => self.record(metric, sample, *quantity, value),
                        Err(_) => self.record_impossible(&metric.name, *quantity, label.value()),
                    }
                }
            }
        }
    }

    fn record(
        &mut self,
        metric: &'static Metric,
        sample: &Sample<'p, Wanted>,
        quantity: MetricQuantity,
        value: f64,
    ) {
        let Some(value) = accept(range(quantity), value) else {
            return self.record_impossible(&metric.name, quantity, value.to_string().into());
        };
        let key =
            RANK_LABELS.map(|name| sample.labels.get(name).map_or(&b""[..], |label| label.raw));
        let rank_index = match self.ranks.iter().position(|rank| rank.key == key) {
            Some(index) => index,
            None if self.ranks.len() < MAX_RANKS => {
                self.ranks.push(Rank {
                    key,
                    values: [None; QUANTITIES],
                });
                self.ranks.len() - 1
            }
            None => {
                return self.mark_unreliable(
                    quantity,
                    MetricsProblem::TooManyRanks {
                        metric: &metric.name,
                    },
                );
            }
        };
        let current = &mut self.ranks[rank_index].values[quantity as usize];
        *current = Some(current.map_or(value, |largest| largest.max(value)));
    }

    fn record_garbled(&mut self, metric: &'static Metric) {
        self.has_lines = true;
        let problem = MetricsProblem::Garbled {
            metric: &metric.name,
        };
        let mut spoil = |quantity| self.mark_unreliable(quantity, problem.clone());
        match metric.reading {
            MetricReading::Histogram(latency) => {
                let histogram = &mut self.histograms[latency as usize];
                histogram.problem.get_or_insert(problem);
            }
            MetricReading::Value(quantity) => spoil(quantity),
            MetricReading::ByLabel(_, quantities) | MetricReading::Labels(quantities) => {
                quantities.iter().for_each(|&(_, quantity)| spoil(quantity));
            }
        }
    }

    fn record_impossible(
        &mut self,
        metric: &'static str,
        quantity: MetricQuantity,
        value: Cow<'_, str>,
    ) {
        self.mark_unreliable(
            quantity,
            MetricsProblem::Impossible {
                metric,
                value: shortened(&value),
            },
        );
    }

    fn mark_unreliable(&mut self, quantity: MetricQuantity, problem: MetricsProblem) {
        self.unreliable[quantity as usize].get_or_insert(problem);
    }

    /// Fills in quantities that a rank reports under a former name, or as the parts of a ratio or product.
    fn derive(&mut self) {
        for rank_index in 0..self.ranks.len() {
            let rank = &self.ranks[rank_index];
            let usage = self
                .value(rank, MetricQuantity::KvUsageOldName)
                .or_else(|| self.share_of_batch(rank));
            self.set_if_missing(rank_index, MetricQuantity::KvUsage, usage);
            // What waits for anything else would wait beside an empty cache, too.
            let for_capacity =
                self.value(&self.ranks[rank_index], MetricQuantity::WaitingForCapacity);
            let waiting = &mut self.ranks[rank_index].values;
            let before = [
                MetricQuantity::WaitingToDecode,
                MetricQuantity::WaitingToPrefill,
            ]
            .iter()
            .filter_map(|&queue| waiting[queue as usize])
            .reduce(|a, b| a + b);
            let queue = &mut waiting[MetricQuantity::Waiting as usize];
            *queue = for_capacity.or(*queue);
            *queue = (*queue).into_iter().chain(before).reduce(|a, b| a + b);
            let tokens = self.tokens_of_blocks(&self.ranks[rank_index]);
            self.set_if_missing(rank_index, MetricQuantity::KvTokens, tokens);
        }
    }

    fn set_if_missing(&mut self, rank_index: usize, quantity: MetricQuantity, value: Option<f64>) {
        let recorded = &mut self.ranks[rank_index].values[quantity as usize];
        let (None, Some(value)) = (*recorded, value) else {
            return;
        };
        match accept(range(quantity), value) {
            Some(value) => *recorded = Some(value),
            None => {
                self.record_impossible(derived_name(quantity), quantity, value.to_string().into())
            }
        }
    }

    fn share_of_batch(&self, rank: &Rank<'_>) -> Option<f64> {
        let limit = self
            .value(rank, MetricQuantity::BatchTokensLimit)
            .filter(|&limit| limit > 0.0)?;
        Some(self.value(rank, MetricQuantity::BatchTokens)? / limit)
    }

    fn tokens_of_blocks(&self, rank: &Rank<'_>) -> Option<f64> {
        Some(
            self.value(rank, MetricQuantity::KvBlocks)?
                * self.value(rank, MetricQuantity::BlockTokens)?,
        )
    }

    fn figures(mut self) -> Figures {
        // A part of the queue that is not known makes the queue unknown.
        let parts = [
            MetricQuantity::WaitingToDecode,
            MetricQuantity::WaitingToPrefill,
        ];
        if let Some(problem) = parts
            .iter()
            .find_map(|&part| self.unreliable[part as usize].clone())
        {
            self.mark_unreliable(MetricQuantity::Waiting, problem);
        }
        self.derive();
        let mut problems: Vec<MetricsProblem> = Vec::new();
        let of_histograms = self.histograms.iter().map(|one| &one.problem);
        for problem in self.unreliable.iter().chain(of_histograms).flatten() {
            if !problems.contains(problem) {
                problems.push(problem.clone());
            }
        }
        Figures {
            engine: self.engine,
            model: self
                .model
                .and_then(|label| ModelId::parse(&label.value()).ok()),
            kv_cache_usage: self.values(MetricQuantity::KvUsage).reduce(f64::max),
            // A capacity of 0 means that the engine has not measured it yet.
            kv_cache_tokens: self
                .sum(MetricQuantity::KvTokens)
                .filter(|&tokens| tokens > 0),
            waiting: self.sum(MetricQuantity::Waiting),
            running: self.sum(MetricQuantity::Running),
            preemptions: self.sum(MetricQuantity::Preemptions),
            generated_tokens: self.sum(MetricQuantity::GeneratedTokens),
            prompt_tokens: self.sum(MetricQuantity::PromptTokens),
            time_per_token: self
                .histogram(MeasuredLatency::PerToken)
                .or_else(|| self.histogram(MeasuredLatency::PerTokenOldName)),
            time_to_first_token: self.histogram(MeasuredLatency::ToFirstToken),
            sleep_level: self.sleep_level(),
            problems,
        }
    }

    /// A rank's value of a quantity, if the quantity is reliable in all ranks.
    fn value(&self, rank: &Rank<'_>, quantity: MetricQuantity) -> Option<f64> {
        rank.values[quantity as usize].filter(|_| self.unreliable[quantity as usize].is_none())
    }

    /// The value of each rank that reports it.
    fn values(&self, quantity: MetricQuantity) -> impl Iterator<Item = f64> {
        self.ranks
            .iter()
            .filter_map(move |rank| self.value(rank, quantity))
    }

    /// The sum over the ranks; `None` if no rank reports it. [`MAX_RANKS`] of at most [`MAX_COUNT`] fit.
    fn sum(&self, quantity: MetricQuantity) -> Option<u64> {
        self.values(quantity)
            .map(|value| value as u64)
            .reduce(|a, b| a + b)
    }

    fn histogram(&self, latency: MeasuredLatency) -> Option<Histogram> {
        self.histograms[latency as usize].histogram()
    }

    fn sleep_level(&self) -> Option<u8> {
        let flags = [
            MetricQuantity::Awake,
            MetricQuantity::WeightsOffloaded,
            MetricQuantity::AllDiscarded,
        ];
        if flags
            .iter()
            .any(|&flag| self.unreliable[flag as usize].is_some())
        {
            return None;
        }
        // An engine that is not awake but keeps its memory only accepts no requests.
        match flags.map(|flag| self.values(flag).any(|value| value == 1.0)) {
            [false, _, true] => Some(2),
            [false, true, false] => Some(1),
            _ => None,
        }
    }
}

/// Whether a label has a value: vLLM writes unknown ones as Python does.
fn is_set(label: &Label<'_>) -> bool {
    !matches!(label.raw, b"" | b"None")
}

/// The value as a figure, if a quantity of this kind can have it.
fn accept(kind: ValueRange, value: f64) -> Option<f64> {
    let is_possible = match kind {
        ValueRange::Share => (0.0..=1.0 + SHARE_TOLERANCE).contains(&value),
        ValueRange::Count => (0.0..=MAX_COUNT).contains(&value) && value.fract() == 0.0,
        ValueRange::Flag => value == 0.0 || value == 1.0,
    };
    let most = if kind == ValueRange::Share {
        1.0
    } else {
        MAX_COUNT
    };
    // Adding 0 turns a negative zero into a positive one.
    is_possible.then(|| value.min(most) + 0.0)
}

impl Figures {
    /// These figures, filled up from another engine's lines on the same page.
    fn filled_from(mut self, other: Self) -> Self {
        self.model = self.model.or(other.model);
        self.kv_cache_usage = self.kv_cache_usage.or(other.kv_cache_usage);
        self.kv_cache_tokens = self.kv_cache_tokens.or(other.kv_cache_tokens);
        self.waiting = self.waiting.or(other.waiting);
        self.running = self.running.or(other.running);
        self.preemptions = self.preemptions.or(other.preemptions);
        self.generated_tokens = self.generated_tokens.or(other.generated_tokens);
        self.prompt_tokens = self.prompt_tokens.or(other.prompt_tokens);
        self.time_per_token = self.time_per_token.or(other.time_per_token);
        self.time_to_first_token = self.time_to_first_token.or(other.time_to_first_token);
        self.sleep_level = self.sleep_level.or(other.sleep_level);
        self.problems.extend(other.problems);
        self
    }
}

/// The engine of a page that has its metrics, and none of those that are read: it has not served a request yet.
fn engine_by_prefix(metrics_page: &[u8]) -> Option<Engine> {
    let mut lines = metrics_page
        .split(|&byte| byte == b'\n')
        .map(<[u8]>::trim_ascii_start);
    lines.find_map(|line| {
        let is_of =
            |row: &Dialect| !row.prefix.is_empty() && line.starts_with(row.prefix.as_bytes());
        dialects()
            .find(|(_, row)| is_of(row))
            .map(|(engine, _)| engine)
    })
}

fn unknown(metrics_page: &[u8]) -> UnknownPage {
    let mut lines = metrics_page
        .split(|&byte| byte == b'\n')
        .map(<[u8]>::trim_ascii);
    match lines.find(|line| !line.is_empty()) {
        None => UnknownPage::Empty,
        // A character takes four bytes at most.
        Some(line) => {
            let start = String::from_utf8_lossy(&line[..line.len().min(4 * MAX_SHOWN_CHARS)]);
            UnknownPage::NotAnEngine {
                first_line: shortened(&start),
            }
        }
    }
}

pub(super) fn shortened(text: &str) -> String {
    match text.char_indices().nth(MAX_SHOWN_CHARS) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}
