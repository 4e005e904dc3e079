//! One probe of a pod: at most two requests, and their results.
//!
//! A probe knows which addresses to ask, and keeps no state. `watched` interprets its answer.

use super::address::{METRICS_PATH, METRICS_PORT, MetricsAddress, properties_address};
use super::fetch::{FetchError, Fetcher};
use http::StatusCode;
use serde::Deserialize;
use std::net::IpAddr;
use stowage_report::engine_metrics::{Figures, UnknownPage, parse_page};
use stowage_scheduling::engines::Engine;
use tokio::time::Instant;

/// The requests of a probe.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct EngineProbe {
    pub ip: IpAddr,
    pub engine: Option<Engine>,
    pub probe_kind: ProbeKind,
}

#[derive(Debug, Clone, PartialEq)]
pub(crate) enum ProbeKind {
    /// The metrics at the first of these addresses that has any.
    Search(Vec<MetricsAddress>),
    /// The metrics at this address, and one more endpoint.
    Metrics(MetricsAddress, SecondProbe),
}

#[derive(Debug, Clone, PartialEq)]
pub(crate) enum SecondProbe {
    Nothing,
    Health(MetricsAddress),
    /// The size of llama.cpp's KV cache.
    Properties,
}

#[derive(Debug)]
pub(crate) struct ProbeResult {
    /// When the first request was sent: no figure of this probe is older.
    pub sent_at: Instant,
    pub figures: Result<EngineFigures, MetricsError>,
    /// The engine's health; `None` if it was not requested.
    pub health: Option<EngineHealth>,
    /// llama.cpp's properties; `None` if they were not requested or do not exist.
    pub properties: Option<Properties>,
}

#[derive(Debug)]
pub struct EngineFigures {
    pub address: MetricsAddress,
    pub figures: Figures,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum EngineHealth {
    Ready,
    NotReady,
    /// Something else answers, or nothing does.
    Unclear,
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum MetricsError {
    #[error(transparent)]
    Fetch(#[from] FetchError),
    #[error("port {port}, {path}: {error}; say where its metrics are with {METRICS_PORT} and {METRICS_PATH}", port = .0.port, path = .0.path, error = .1)]
    Unknown(MetricsAddress, UnknownPage),
}

impl MetricsError {
    /// How informative a failed answer is; the most informative one is kept.
    pub fn informativeness(&self) -> u8 {
        match self {
            Self::Fetch(FetchError::Refused(_)) => 0,
            Self::Fetch(FetchError::Unreachable(..)) => 1,
            // At another path there may be one.
            Self::Fetch(FetchError::Status(_, StatusCode::NOT_FOUND)) => 2,
            Self::Fetch(_) => 3,
            Self::Unknown(..) => 4,
        }
    }
}

/// The part of llama.cpp's `/props` with the size of its KV cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
pub(crate) struct Properties {
    total_slots: u64,
    default_generation_settings: SlotSettings,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
struct SlotSettings {
    n_ctx: u64,
}

impl Properties {
    /// Tokens its KV cache holds. With several slots it is unknown: `n_ctx` is what one of them may use, and whether each has its
    /// own or all share one (`--kv-unified`, the default) the endpoint does not say.
    pub fn kv_cache_tokens(&self) -> Option<u64> {
        let tokens = self.default_generation_settings.n_ctx;
        Some(tokens).filter(|&tokens| self.total_slots == 1 && tokens > 0)
    }
}

impl EngineProbe {
    pub async fn run(self, fetcher: &Fetcher) -> ProbeResult {
        let sent_at = Instant::now();
        let answer = |figures| ProbeResult {
            sent_at,
            figures,
            health: None,
            properties: None,
        };
        match &self.probe_kind {
            ProbeKind::Search(addresses) => answer(self.search(fetcher, addresses).await),
            ProbeKind::Metrics(metrics, SecondProbe::Nothing) => {
                answer(self.metrics(fetcher, metrics).await)
            }
            ProbeKind::Metrics(metrics, SecondProbe::Health(health)) => {
                let (figures, health) =
                    tokio::join!(self.metrics(fetcher, metrics), self.health(fetcher, health));
                ProbeResult {
                    health: Some(health),
                    ..answer(figures)
                }
            }
            ProbeKind::Metrics(metrics, SecondProbe::Properties) => {
                let (figures, properties) = tokio::join!(
                    self.metrics(fetcher, metrics),
                    self.properties(fetcher, metrics)
                );
                ProbeResult {
                    properties,
                    ..answer(figures)
                }
            }
        }
    }

    /// The first page of an engine, or the most informative reason why there is none.
    async fn search(
        &self,
        fetcher: &Fetcher,
        addresses: &[MetricsAddress],
    ) -> Result<EngineFigures, MetricsError> {
        let mut best_error: Option<MetricsError> = None;
        for address in addresses {
            match self.metrics(fetcher, address).await {
                Ok(found) => return Ok(found),
                Err(error)
                    if best_error
                        .as_ref()
                        .is_none_or(|best| error.informativeness() > best.informativeness()) =>
                {
                    best_error = Some(error);
                }
                Err(_) => {}
            }
        }
        Err(best_error.expect("a search has an address at least"))
    }

    async fn metrics(
        &self,
        fetcher: &Fetcher,
        address: &MetricsAddress,
    ) -> Result<EngineFigures, MetricsError> {
        let (metrics_page, scheme) = fetcher.get(self.ip, address).await?;
        match parse_page(&metrics_page, self.engine) {
            Ok(figures) => Ok(EngineFigures {
                address: MetricsAddress {
                    scheme,
                    ..address.clone()
                },
                figures,
            }),
            Err(error) => Err(MetricsError::Unknown(address.clone(), error)),
        }
    }

    async fn health(&self, fetcher: &Fetcher, address: &MetricsAddress) -> EngineHealth {
        match fetcher.get(self.ip, address).await {
            Ok(_) => EngineHealth::Ready,
            Err(error) if error.is_not_ready() => EngineHealth::NotReady,
            Err(_) => EngineHealth::Unclear,
        }
    }

    async fn properties(&self, fetcher: &Fetcher, metrics: &MetricsAddress) -> Option<Properties> {
        let (text, _) = fetcher
            .get(self.ip, &properties_address(metrics))
            .await
            .ok()?;
        serde_json::from_slice(&text).ok()
    }
}
