//! How a family of metrics is declared: its name, its help, its labels with what bounds each, and its zeros stand in one place.
//!
//! To add one, call a method of [`Families`] where the family's subject is declared (one file each in this folder), and run
//! `STOWAGE_BLESS=1 cargo test --test it metrics`, which writes `docs/reference/metrics.md` again. Two sorts:
//!
//! - *kept* families count what happens, where it happens: [`Families::counter`] and its kin return a handle of the
//!   `prometheus` crate;
//! - *sampled* families are gauges that are worked out at a scrape, of a copy of the ledger. Nothing of them is kept between two
//!   scrapes, so two scrapes at once cannot meet half a change, and what is gone leaves no series behind:
//!   [`Families::sampled`] returns a [`Sampled`], which [`Scrape`](super::scrape::Scrape) writes.
//!
//! A label's values are either known (each is exported from the start, because an alert on a rate needs to see zero before the
//! first increase) or open, and then the declaration says what bounds them.

use prometheus::core::Collector;
use prometheus::{
    Gauge, Histogram, HistogramOpts, HistogramVec, IntCounter, IntCounterVec, IntGauge,
    IntGaugeVec, Opts, Registry,
};
use std::sync::Arc;

/// The families of one page.
pub struct Families {
    registry: Registry,
    all: Vec<Arc<Family>>,
}

/// What is known of a family before it has a series.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Family {
    pub name: String,
    pub kind: FamilyKind,
    pub help: String,
    pub labels: Vec<Label>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, strum::IntoStaticStr)]
#[strum(serialize_all = "lowercase", const_into_str)]
pub enum FamilyKind {
    Counter,
    Gauge,
    Histogram,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Label {
    pub name: &'static str,
    pub values: LabelValues,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LabelValues {
    /// These and no others.
    Known(Vec<&'static str>),
    /// Others, as far as this bounds them.
    Open(&'static str),
}

/// A gauge that is worked out at each scrape.
#[derive(Debug, Clone)]
pub struct Sampled(pub(super) Arc<Family>);

/// A label with these values and no others.
pub fn known(name: &'static str, values: impl IntoIterator<Item = &'static str>) -> Label {
    Label {
        name,
        values: LabelValues::Known(values.into_iter().collect()),
    }
}

/// A label whose values are not known in advance; `bound` says how many there can be.
pub fn open(name: &'static str, bound: &'static str) -> Label {
    Label {
        name,
        values: LabelValues::Open(bound),
    }
}

impl Families {
    pub fn new() -> Self {
        Self {
            registry: Registry::new(),
            all: Vec::new(),
        }
    }

    pub fn counter(&mut self, name: &'static str, help: &'static str) -> IntCounter {
        self.declare(FamilyKind::Counter, name, help, &[]);
        self.register(IntCounter::new(name, help).expect("the name is valid"))
    }

    pub fn counters<const N: usize>(
        &mut self,
        name: &'static str,
        help: &'static str,
        labels: [Label; N],
    ) -> IntCounterVec {
        self.declare(FamilyKind::Counter, name, help, &labels);
        let names = labels.each_ref().map(|label| label.name);
        let counters = IntCounterVec::new(Opts::new(name, help), &names)
            .expect("the name and labels are valid");
        export_zeros(&labels, |values| drop(counters.with_label_values(values)));
        self.register(counters)
    }

    pub fn gauge(&mut self, name: &'static str, help: &'static str) -> IntGauge {
        self.declare(FamilyKind::Gauge, name, help, &[]);
        self.register(IntGauge::new(name, help).expect("the name is valid"))
    }

    pub fn gauges<const N: usize>(
        &mut self,
        name: &'static str,
        help: &'static str,
        labels: [Label; N],
    ) -> IntGaugeVec {
        self.declare(FamilyKind::Gauge, name, help, &labels);
        let names = labels.each_ref().map(|label| label.name);
        let gauges =
            IntGaugeVec::new(Opts::new(name, help), &names).expect("the name and labels are valid");
        export_zeros(&labels, |values| drop(gauges.with_label_values(values)));
        self.register(gauges)
    }

    /// A gauge whose value may have a fraction.
    pub fn float_gauge(&mut self, name: &'static str, help: &'static str) -> Gauge {
        self.declare(FamilyKind::Gauge, name, help, &[]);
        self.register(Gauge::new(name, help).expect("the name is valid"))
    }

    pub fn histogram(
        &mut self,
        name: &'static str,
        help: &'static str,
        buckets: &[f64],
    ) -> Histogram {
        self.declare(FamilyKind::Histogram, name, help, &[]);
        let options = HistogramOpts::new(name, help).buckets(buckets.to_vec());
        self.register(Histogram::with_opts(options).expect("the name is valid"))
    }

    pub fn histograms<const N: usize>(
        &mut self,
        name: &'static str,
        help: &'static str,
        labels: [Label; N],
        buckets: &[f64],
    ) -> HistogramVec {
        self.declare(FamilyKind::Histogram, name, help, &labels);
        let names = labels.each_ref().map(|label| label.name);
        let options = HistogramOpts::new(name, help).buckets(buckets.to_vec());
        let histograms = HistogramVec::new(options, &names).expect("the name and labels are valid");
        export_zeros(&labels, |values| drop(histograms.with_label_values(values)));
        self.register(histograms)
    }

    /// A gauge that is worked out at each scrape.
    pub fn sampled<const N: usize>(
        &mut self,
        name: &'static str,
        help: &'static str,
        labels: [Label; N],
    ) -> Sampled {
        Sampled(self.declare(FamilyKind::Gauge, name, help, &labels))
    }

    /// The process' own figures, as every exporter names them: CPU time, memory, file descriptors, start.
    pub fn register_process(&mut self) {
        let process = prometheus::process_collector::ProcessCollector::for_self();
        for desc in process.desc() {
            let is_total = desc.fq_name.ends_with("_total");
            let kind = if is_total {
                FamilyKind::Counter
            } else {
                FamilyKind::Gauge
            };
            self.declare(kind, &desc.fq_name, &desc.help, &[]);
        }
        self.registry
            .register(Box::new(process))
            .expect("each metric is registered once");
    }

    /// The families, in the order of their declaration.
    pub fn all(&self) -> &[Arc<Family>] {
        &self.all
    }

    pub(super) fn registry(&self) -> &Registry {
        &self.registry
    }

    fn declare(
        &mut self,
        kind: FamilyKind,
        name: &str,
        help: &str,
        labels: &[Label],
    ) -> Arc<Family> {
        let family = Family {
            name: name.into(),
            kind,
            help: help.into(),
            labels: labels.to_vec(),
        };
        let family = Arc::new(family);
        self.all.push(family.clone());
        family
    }

    fn register<C: Collector + Clone + 'static>(&self, collector: C) -> C {
        self.registry
            .register(Box::new(collector.clone()))
            .expect("each metric is registered once");
        collector
    }
}

impl Default for Families {
    fn default() -> Self {
        Self::new()
    }
}

/// Calls `make` with every combination of the labels' values, if all of them are known.
fn export_zeros(labels: &[Label], mut make: impl FnMut(&[&str])) {
    let mut combinations: Vec<Vec<&str>> = vec![Vec::new()];
    for label in labels {
        let LabelValues::Known(values) = &label.values else {
            return;
        };
        let longer = combinations.iter().flat_map(|start| {
            values
                .iter()
                .map(|value| [&start[..], &[*value][..]].concat())
        });
        combinations = longer.collect();
    }
    combinations.iter().for_each(|values| make(values));
}

impl Family {
    /// Whether a series with these labels is one that the declaration knows of.
    pub fn allows_labels<'l>(&self, labels: impl IntoIterator<Item = (&'l str, &'l str)>) -> bool {
        labels.into_iter().all(|(name, value)| {
            let label = self.labels.iter().find(|label| label.name == name);
            label.is_some_and(|label| match &label.values {
                LabelValues::Known(values) => values.contains(&value),
                LabelValues::Open(_) => true,
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_combination_of_known_values_is_there_before_the_first_event() {
        let mut families = Families::new();
        families.counters(
            "a_total",
            "Of two labels.",
            [known("x", ["1", "2"]), known("y", ["3", "4"])],
        );
        families.counters(
            "b_total",
            "Of an open one.",
            [known("x", ["1"]), open("y", "a bound")],
        );
        let gathered = families.registry().gather();
        let names: Vec<_> = gathered
            .iter()
            .map(|family| (family.name(), family.get_metric().len()))
            .collect();
        assert_eq!(names, [("a_total", 4)]);
        assert_eq!(families.all().len(), 2, "both are declared");
    }

    #[test]
    fn a_value_that_no_declaration_knows_is_recognized() {
        let mut families = Families::new();
        families.counters("a_total", "help", [known("x", ["1"]), open("y", "a bound")]);
        let family = &families.all()[0];
        assert!(family.allows_labels([("x", "1"), ("y", "anything")]));
        assert!(!family.allows_labels([("x", "2")]) && !family.allows_labels([("z", "1")]));
    }
}
