//! One visit to a pod: at most two requests, and what came of them.
//!
//! A visit knows where to ask, not why, and keeps nothing. What its answer means for the engine is `watched`'s.

use super::address::{Address, METRICS_PATH, METRICS_PORT, properties};
use super::fetch::{FetchError, Fetcher};
use crate::engine_metrics::{Engine, Figures, UnknownPage, read};
use serde::Deserialize;
use std::net::IpAddr;
use tokio::time::Instant;

/// What to ask of a pod.
#[derive(Debug, Clone, PartialEq)]
pub struct Visit {
    pub ip: IpAddr,
    pub engine: Option<Engine>,
    pub errand: Errand,
}

#[derive(Debug, Clone, PartialEq)]
pub enum Errand {
    /// The metrics at the first of these addresses that has any.
    Search(Vec<Address>),
    /// The metrics here, and something beside them.
    Metrics(Address, Beside),
}

#[derive(Debug, Clone, PartialEq)]
pub enum Beside {
    Nothing,
    Health(Address),
    /// How large llama.cpp's KV cache is.
    Properties,
}

#[derive(Debug)]
pub struct Answer {
    /// When the first request went out: no figure of this visit is older.
    pub asked: Instant,
    pub page: Result<Found, NoPage>,
    /// Only if it was asked for.
    pub health: Option<Health>,
    /// Only if they were asked for, and are there.
    pub properties: Option<Properties>,
}

#[derive(Debug)]
pub struct Found {
    pub at: Address,
    pub figures: Figures,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Health {
    Ready,
    NotReady,
    /// It answers something else, or nothing.
    Unclear,
}

#[derive(Debug, thiserror::Error)]
pub enum NoPage {
    #[error(transparent)]
    Fetch(#[from] FetchError),
    #[error("port {port}, {path}: {error}; say where its metrics are with {METRICS_PORT} and {METRICS_PATH}", port = .0.port, path = .0.path, error = .1)]
    Unknown(Address, UnknownPage),
}

impl NoPage {
    /// How much it tells about the pod: the more, the rather is it remembered.
    fn weight(&self) -> u8 {
        match self {
            Self::Fetch(FetchError::Refused(_)) => 0,
            Self::Fetch(FetchError::Unreachable(..)) => 1,
            Self::Fetch(_) => 2,
            Self::Unknown(..) => 3,
        }
    }
}

/// The part of llama.cpp's `/props` that says how large its KV cache is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
pub struct Properties {
    total_slots: u64,
    default_generation_settings: SlotSettings,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
struct SlotSettings {
    /// Of one slot.
    n_ctx: u64,
}

impl Properties {
    /// Tokens its KV cache holds, over all slots.
    pub fn kv_cache_tokens(&self) -> Option<u64> {
        self.total_slots.checked_mul(self.default_generation_settings.n_ctx).filter(|&tokens| tokens > 0)
    }
}

impl Visit {
    pub async fn make(self, fetcher: &Fetcher) -> Answer {
        let asked = Instant::now();
        let answer = |page| Answer { asked, page, health: None, properties: None };
        match &self.errand {
            Errand::Search(addresses) => answer(self.search(fetcher, addresses).await),
            Errand::Metrics(metrics, Beside::Nothing) => answer(self.metrics(fetcher, metrics).await),
            Errand::Metrics(metrics, Beside::Health(health)) => {
                let (page, health) =
                    tokio::join!(self.metrics(fetcher, metrics), self.health(fetcher, health));
                Answer { health: Some(health), ..answer(page) }
            }
            Errand::Metrics(metrics, Beside::Properties) => {
                let (page, properties) =
                    tokio::join!(self.metrics(fetcher, metrics), self.properties(fetcher, metrics));
                Answer { properties, ..answer(page) }
            }
        }
    }

    /// The first page of an engine, or what told the most about why there is none.
    async fn search(&self, fetcher: &Fetcher, addresses: &[Address]) -> Result<Found, NoPage> {
        let mut nothing: Option<NoPage> = None;
        for address in addresses {
            match self.metrics(fetcher, address).await {
                Ok(found) => return Ok(found),
                Err(error) if nothing.as_ref().is_none_or(|known| error.weight() > known.weight()) => {
                    nothing = Some(error);
                }
                Err(_) => {}
            }
        }
        Err(nothing.expect("a search has an address at least"))
    }

    async fn metrics(&self, fetcher: &Fetcher, address: &Address) -> Result<Found, NoPage> {
        let page = fetcher.get(self.ip, address).await?;
        match read(&page, self.engine) {
            Ok(figures) => Ok(Found { at: address.clone(), figures }),
            Err(error) => Err(NoPage::Unknown(address.clone(), error)),
        }
    }

    async fn health(&self, fetcher: &Fetcher, address: &Address) -> Health {
        match fetcher.get(self.ip, address).await {
            Ok(_) => Health::Ready,
            Err(error) if error.is_not_ready() => Health::NotReady,
            Err(_) => Health::Unclear,
        }
    }

    async fn properties(&self, fetcher: &Fetcher, metrics: &Address) -> Option<Properties> {
        let text = fetcher.get(self.ip, &properties(metrics)).await.ok()?;
        serde_json::from_slice(&text).ok()
    }
}
