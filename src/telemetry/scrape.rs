//! One scrape: the kept families, then the sampled ones, in Prometheus' text format 0.0.4.
//!
//! Families are written one by one, so that a page of a large cluster takes the memory of its largest family and not of all. The
//! `prometheus` crate's encoder writes every line, and escapes what users have named.

use super::family::{Families, Family, Sampled};
use prometheus::proto::{Gauge, LabelPair, Metric, MetricFamily, MetricType};
use prometheus::{Encoder, TextEncoder};
use std::io::{self, Write};

/// The type of such a page.
pub const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// A page that is being written.
pub struct Scrape<'o> {
    out: &'o mut dyn Write,
}

impl<'o> Scrape<'o> {
    pub fn new(out: &'o mut dyn Write) -> Self {
        Self { out }
    }

    /// Writes all kept families that have a series.
    pub fn write_registered(&mut self, families: &Families) -> io::Result<()> {
        let gathered = families.registry().gather();
        debug_assert_eq!(
            undeclared_series(families, &gathered),
            Vec::<String>::new(),
            "declare what a label may be"
        );
        self.encode(&gathered)
    }

    /// Writes a sampled family; nothing of one without a sample.
    pub fn write_samples<const N: usize, L: AsRef<str>>(
        &mut self,
        Sampled(family): &Sampled,
        samples: impl IntoIterator<Item = ([L; N], f64)>,
    ) -> io::Result<()> {
        debug_assert_eq!(family.labels.len(), N, "{}", family.name);
        let metrics: Vec<Metric> = samples
            .into_iter()
            .map(|(values, value)| metric(family, &values, value))
            .collect();
        if metrics.is_empty() {
            return Ok(());
        }
        let mut encoded = MetricFamily::default();
        encoded.set_name(family.name.clone());
        encoded.set_help(family.help.clone());
        encoded.set_field_type(MetricType::GAUGE);
        encoded.set_metric(metrics);
        self.encode(&[encoded])
    }

    /// Writes a sampled family without labels.
    pub fn write_value(&mut self, family: &Sampled, value: f64) -> io::Result<()> {
        self.write_samples::<0, &str>(family, [([], value)])
    }

    fn encode(&mut self, families: &[MetricFamily]) -> io::Result<()> {
        TextEncoder::new()
            .encode(families, &mut self.out)
            .map_err(|error| match error {
                prometheus::Error::Io(error) => error,
                other => io::Error::other(other.to_string()),
            })
    }
}

fn metric<const N: usize, L: AsRef<str>>(family: &Family, values: &[L; N], value: f64) -> Metric {
    let labels = family.labels.iter().zip(values).map(|(label, value)| {
        let mut pair = LabelPair::default();
        pair.set_name(label.name.into());
        pair.set_value(value.as_ref().into());
        pair
    });
    let mut gauge = Gauge::default();
    gauge.set_value(value);
    let mut metric = Metric::from_label(labels.collect());
    metric.set_gauge(gauge);
    metric
}

/// Series that no declaration knows of.
fn undeclared_series(families: &Families, gathered: &[MetricFamily]) -> Vec<String> {
    let mut undeclared = Vec::new();
    for found in gathered {
        let declared = families
            .all()
            .iter()
            .find(|family| family.name == found.name());
        for metric in found.get_metric() {
            let labels = || {
                metric
                    .get_label()
                    .iter()
                    .map(|pair| (pair.name(), pair.value()))
            };
            if !declared.is_some_and(|family| family.allows_labels(labels())) {
                undeclared.push(format!(
                    "{}{:?}",
                    found.name(),
                    labels().collect::<Vec<_>>()
                ));
            }
        }
    }
    undeclared
}

#[cfg(test)]
mod tests {
    use super::super::family::open;
    use super::*;

    #[test]
    fn names_that_users_choose_cannot_break_a_line() {
        let mut families = Families::new();
        let family = families.sampled("x", "What \\ it\nis.", [open("model", "few")]);
        let mut text = Vec::new();
        let hostile = "a\"} 1\nstowage_leader 1\n\\é";
        Scrape::new(&mut text)
            .write_samples(&family, [([hostile], 0.5)])
            .unwrap();
        let text = String::from_utf8(text).unwrap();
        let expected = "# HELP x What \\\\ it\\nis.\n# TYPE x gauge\nx{model=\"a\\\"} 1\\nstowage_leader 1\\n\\\\é\"} 0.5\n";
        assert_eq!(text, expected);
    }

    #[test]
    fn a_family_without_samples_is_not_written() {
        let mut families = Families::new();
        let family = families.sampled("x", "Nothing.", [open("node", "nodes")]);
        let mut text = Vec::new();
        Scrape::new(&mut text)
            .write_samples::<1, &str>(&family, [])
            .unwrap();
        assert_eq!(text, b"");
    }
}
