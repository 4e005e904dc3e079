//! Simulated engines that serve no requests: each serves vLLM's pages on a port of its own, with the load that the story sets.
//!
//! Their pages are all that is known of them. Figures reach Stowage only through an agent that reads the pages. How long they take for
//! a token is set from outside, for that depends on their neighbors.

use super::api_server::ApiServer;
use super::sleeping;
use axum::Router;
use axum::routing::get;
use http::StatusCode;
use parking_lot::Mutex;
use std::io;
use std::net::Ipv4Addr;
use std::sync::Arc;
use std::time::Instant;
use tokio_util::sync::{CancellationToken, DropGuard};

/// The load of an engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FakeEngineLoad {
    pub kv_percent: u8,
    pub waiting: u64,
    pub running: u64,
}

/// A running engine; dropping this stops it.
pub struct FakeEngine {
    port: u16,
    work: Arc<Mutex<FakeEngineWork>>,
    _stop: DropGuard,
}

/// What an engine does, and has done.
struct FakeEngineWork {
    load: FakeEngineLoad,
    /// Seconds that it takes for a token of each of its requests.
    step_s: f64,
    done: TokenCounts,
    counted_at: Instant,
}

/// What it generated until then.
#[derive(Debug, Clone, Copy, Default)]
struct TokenCounts {
    tokens: f64,
    /// Seconds that its requests waited for them.
    waited_s: f64,
    /// Tokens that took no longer than each of [`LATENCY_BOUNDS`].
    within: [f64; LATENCY_BOUNDS.len()],
}

/// Seconds: some of vLLM's.
const LATENCY_BOUNDS: [f64; 6] = [0.01, 0.025, 0.05, 0.1, 0.5, 1.0];

/// Seconds that a token takes before it is set: what an 8B model comes to on an H100 that serves several requests.
const STEP_S: f64 = 0.025;

impl FakeEngineWork {
    fn new(load: FakeEngineLoad) -> Self {
        Self {
            load,
            step_s: STEP_S,
            done: TokenCounts::default(),
            counted_at: Instant::now(),
        }
    }

    /// Counts what was generated since it was last counted; nothing while the engine sleeps.
    fn count_tokens(&mut self, is_asleep: bool) -> TokenCounts {
        let running = if is_asleep { 0 } else { self.load.running };
        let waited_s = running as f64 * self.counted_at.elapsed().as_secs_f64();
        let tokens = waited_s / self.step_s;
        self.done.tokens += tokens;
        self.done.waited_s += waited_s;
        for (within, bound) in self.done.within.iter_mut().zip(LATENCY_BOUNDS) {
            *within += if self.step_s <= bound { tokens } else { 0.0 };
        }
        self.counted_at = Instant::now();
        self.done
    }
}

/// Blocks of 16 tokens that the KV cache of every engine here has: some 8 GiB of an 8B model's.
const KV_CACHE_BLOCKS: u32 = 4096;

impl FakeEngine {
    /// The engine of a pod in the namespace `default`. Its port is open at once; it serves from when the pod runs.
    pub async fn start(
        api: Arc<ApiServer>,
        pod: &str,
        model: &str,
        load: FakeEngineLoad,
    ) -> io::Result<Self> {
        let listener = tokio::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
        let port = listener.local_addr()?.port();
        let (stop, work) = (
            CancellationToken::new(),
            Arc::new(Mutex::new(FakeEngineWork::new(load))),
        );
        let (pod, model, metrics_work) = (
            format!("pods/default/{pod}"),
            model.to_owned(),
            work.clone(),
        );
        let router = Router::new()
            .route("/metrics", {
                let (api, pod) = (api.clone(), pod.clone());
                get(async move || {
                    let is_asleep = api
                        .get(&pod)
                        .is_some_and(|pod| sleeping::reports_asleep(&pod));
                    let mut work = metrics_work.lock();
                    let done = work.count_tokens(is_asleep);
                    metrics_page(&model, work.load, &done, is_asleep)
                })
            })
            .route("/health", get(async move || health(&api, &pod)));
        let stopped = stop.clone().cancelled_owned();
        tokio::spawn(async move {
            axum::serve(listener, router)
                .with_graceful_shutdown(stopped)
                .await
        });
        Ok(Self {
            port,
            work,
            _stop: stop.drop_guard(),
        })
    }

    pub fn port(&self) -> u16 {
        self.port
    }

    /// Sets the load that its metrics page shows. Returns the previous one.
    pub fn set_load(&self, load: FakeEngineLoad) -> FakeEngineLoad {
        let mut work = self.work.lock();
        work.count_tokens(false);
        std::mem::replace(&mut work.load, load)
    }

    /// Whether it has requests, asleep or awake.
    pub(super) fn has_requests(&self) -> bool {
        self.work.lock().load.running > 0
    }

    /// Seconds that it takes for a token of each of its requests.
    pub(super) fn step_s(&self) -> f64 {
        self.work.lock().step_s
    }

    /// Sets how long it takes for a token of each of its requests, in seconds above 0.
    pub(super) fn set_step(&self, step_s: f64) {
        let mut work = self.work.lock();
        if work.step_s != step_s {
            work.count_tokens(false);
            work.step_s = step_s;
        }
    }
}

fn health(api: &ApiServer, pod: &str) -> StatusCode {
    let runs = api
        .get(pod)
        .is_some_and(|pod| pod["status"]["phase"] == "Running");
    if runs {
        StatusCode::OK
    } else {
        StatusCode::SERVICE_UNAVAILABLE
    }
}

/// The metrics of vLLM 0.12 or later, as far as they are read here.
fn metrics_page(model: &str, load: FakeEngineLoad, done: &TokenCounts, is_asleep: bool) -> String {
    // A sleeping engine has no requests, and its KV cache is gone.
    let idle = FakeEngineLoad {
        kv_percent: 0,
        waiting: 0,
        running: 0,
    };
    let FakeEngineLoad {
        kv_percent,
        waiting,
        running,
    } = if is_asleep { idle } else { load };
    let (awake, offloaded) = (u8::from(!is_asleep), u8::from(is_asleep));
    let kv = f64::from(kv_percent) / 100.0;
    let series = format!("engine=\"0\",model_name=\"{model}\"");
    let (tokens, waited_s) = (done.tokens as u64, done.waited_s);
    let within = LATENCY_BOUNDS.iter().zip(done.within);
    let buckets: String = within
        .map(|(bound, within)| {
            let within = within as u64;
            format!("vllm:inter_token_latency_seconds_bucket{{{series},le=\"{bound}\"}} {within}\n")
        })
        .collect();
    format!(
        "# TYPE vllm:num_requests_running gauge\n\
         vllm:num_requests_running{{{series}}} {running}\n\
         # TYPE vllm:num_requests_waiting gauge\n\
         vllm:num_requests_waiting{{{series}}} {waiting}\n\
         # TYPE vllm:kv_cache_usage_perc gauge\n\
         vllm:kv_cache_usage_perc{{{series}}} {kv}\n\
         # TYPE vllm:generation_tokens_total counter\n\
         vllm:generation_tokens_total{{{series}}} {tokens}\n\
         # TYPE vllm:inter_token_latency_seconds histogram\n\
         {buckets}\
         vllm:inter_token_latency_seconds_bucket{{{series},le=\"+Inf\"}} {tokens}\n\
         vllm:inter_token_latency_seconds_count{{{series}}} {tokens}\n\
         vllm:inter_token_latency_seconds_sum{{{series}}} {waited_s}\n\
         # TYPE vllm:cache_config_info gauge\n\
         vllm:cache_config_info{{block_size=\"16\",engine=\"0\",num_gpu_blocks=\"{KV_CACHE_BLOCKS}\"}} 1\n\
         # TYPE vllm:engine_sleep_state gauge\n\
         vllm:engine_sleep_state{{engine=\"0\",sleep_state=\"awake\"}} {awake}\n\
         vllm:engine_sleep_state{{engine=\"0\",sleep_state=\"weights_offloaded\"}} {offloaded}\n\
         vllm:engine_sleep_state{{engine=\"0\",sleep_state=\"discard_all\"}} 0\n"
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use stowage_report::engine_metrics::{Engine, parse_page};

    /// 1,234 tokens, of which each took 20 ms.
    const DONE: TokenCounts = TokenCounts {
        tokens: 1234.0,
        waited_s: 24.68,
        within: [0.0, 1234.0, 1234.0, 1234.0, 1234.0, 1234.0],
    };

    #[test]
    fn the_metrics_page_shows_the_load_that_was_set() {
        let page = metrics_page(
            "llama-8b",
            FakeEngineLoad {
                kv_percent: 97,
                waiting: 40,
                running: 12,
            },
            &DONE,
            false,
        );
        let figures = parse_page(page.as_bytes(), None).unwrap();
        assert_eq!(
            (figures.engine, figures.problems.as_slice()),
            (Engine::Vllm, &[][..])
        );
        assert_eq!(figures.kv_cache_usage, Some(0.97));
        assert_eq!((figures.waiting, figures.running), (Some(40), Some(12)));
        assert_eq!(
            (figures.kv_cache_tokens, figures.generated_tokens),
            (Some(65_536), Some(1234))
        );
        let latencies = figures.time_per_token.unwrap();
        assert_eq!((latencies.count, latencies.sum), (1234.0, 24.68));
        assert_eq!(
            (figures.sleep_level, figures.model.unwrap().as_str()),
            (None, "llama-8b")
        );
        let asleep = super::metrics_page(
            "llama-8b",
            FakeEngineLoad {
                kv_percent: 97,
                waiting: 40,
                running: 12,
            },
            &DONE,
            true,
        );
        let figures = parse_page(asleep.as_bytes(), None).unwrap();
        assert_eq!((figures.sleep_level, figures.running), (Some(1), Some(0)));
    }
}
