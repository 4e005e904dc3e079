//! Metrics of the addresses: connections and how they ended, certificate reloads, rejected tokens and limited pages.

use super::family::{Families, known, open};
use super::reports::review_outcomes;
use prometheus::{IntCounterVec, IntGaugeVec};

/// Shared with the code that serves an address.
#[derive(Clone)]
pub struct EdgeMetrics {
    connections: IntGaugeVec,
    dropped: IntCounterVec,
    /// Certificate reloads, by address and outcome.
    pub tls_reloads: IntCounterVec,
    /// 1 while an address uses old certificates because its new files cannot be loaded.
    pub tls_refused: IntGaugeVec,
    certificate_ends: IntGaugeVec,
    /// Requests rejected because a limit was reached, by address and limit.
    pub limited_requests: IntCounterVec,
    /// Access decisions for pages, by outcome.
    pub page_reviews: IntCounterVec,
}

/// The labels of the three addresses.
pub(crate) const ADDRESSES: [&str; 4] = ["scheduler", "agents", "operators", "webhook"];

impl EdgeMetrics {
    pub(super) fn new(families: &mut Families) -> Self {
        let address = || known("address", ADDRESSES);
        let metrics = Self {
            connections: families.gauges("stowage_connections", "Open connections, by address.", [address()]),
            dropped: families.counters(
                "stowage_connections_dropped_total",
                "Connections that Stowage rejected or closed, by address and reason.",
                [address(), open("reason", "the reasons of the source, some fifteen, each from the start")],
            ),
            tls_reloads: families.counters(
                "stowage_tls_reloads_total",
                "Certificate reloads, by address and outcome.",
                [address(), known("outcome", ["applied", "rejected"])],
            ),
            tls_refused: families.gauges(
                "stowage_tls_reload_failed",
                "1 while an address serves an old certificate because its new one cannot be used.",
                [address()],
            ),
            certificate_ends: families.gauges(
                "stowage_certificate_expiry_timestamp_seconds",
                "When the certificate that Stowage keeps in a Secret expires, in Unix time: the one it serves, and its CA; absent if \
                 it keeps none.",
                // No zero: it would be a certificate that ended in 1970.
                [open("certificate", "serving and ca")],
            ),
            limited_requests: families.counters(
                "stowage_requests_limited_total",
                "Requests rejected because a limit was reached, by address and limit.",
                [address(), open("limit", "four limits")],
            ),
            page_reviews: families.counters(
                "stowage_page_access_reviews_total",
                "Access reviews for operators' pages, by outcome.",
                [review_outcomes()],
            ),
        };
        for address in ["agents", "operators"] {
            for limit in ["reviews", "reviews-per-source"] {
                metrics
                    .limited_requests
                    .with_label_values(&[address, limit]);
            }
        }
        metrics
            .limited_requests
            .with_label_values(&["operators", "pages"]);
        metrics
    }

    /// Exports the reasons of an address at zero before anything is dropped for one.
    pub fn export_drop_reasons(
        &self,
        address: &str,
        reasons: impl IntoIterator<Item = &'static str>,
    ) {
        for reason in reasons {
            self.dropped.with_label_values(&[address, reason]);
        }
    }

    /// Sets when a certificate ends: `serving` or `ca`.
    pub fn set_certificate_end(&self, certificate: &str, seconds: i64) {
        self.certificate_ends
            .with_label_values(&[certificate])
            .set(seconds);
    }

    pub fn count_dropped(&self, address: &str, reason: &str) {
        self.dropped.with_label_values(&[address, reason]).inc();
    }

    /// A connection is open until this is dropped.
    pub fn count_open(&self, address: &str) -> OpenConnection {
        let gauge = self.connections.with_label_values(&[address]);
        gauge.inc();
        OpenConnection(gauge)
    }
}

pub struct OpenConnection(prometheus::IntGauge);

impl Drop for OpenConnection {
    fn drop(&mut self) {
        self.0.dec();
    }
}
