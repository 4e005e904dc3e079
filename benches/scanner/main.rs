//! The scanner on a large vLLM page beside a naive line split: `cargo bench --bench scanner`.
//!
//! Both read the same page and must give the same figures before either is timed. They take turns in one run, so that other load
//! on the machine affects both; the ratio is comparable between machines.

#[path = "../common/page.rs"]
mod page;

use page::METRICS_PAGE_LINES;
use std::collections::HashMap;
use std::hint::black_box;
use std::time::{Duration, Instant};
use stowage_report::engine_metrics::{Engine, parse_page};

/// Turns of each parser; the fastest counts, as the machine disturbed it least.
const TURNS: usize = 200;
/// Readings in one turn: enough that the clock's own cost is lost in it.
const READINGS: u32 = 10;

fn main() {
    let page = page::metrics_page();
    assert_eq!(page.lines().count(), METRICS_PAGE_LINES);
    let figures = parse_page(page.as_bytes(), None).expect("a page of vLLM");
    assert_eq!(
        (figures.engine, figures.kv_cache_usage),
        (Engine::Vllm, Some(0.75))
    );
    assert_eq!((figures.waiting, figures.running), (Some(5), Some(36)));
    assert_eq!(figures.kv_cache_tokens, Some(2 * 438_608));
    assert_eq!(figures.problems, []);
    let naive = naive_figures(&page);
    assert_eq!(naive, (0.75, 5.0, 36.0));

    let (mut ours, mut theirs) = (Duration::MAX, Duration::MAX);
    for _ in 0..TURNS {
        ours = ours.min(timed(|| {
            drop(black_box(parse_page(black_box(page.as_bytes()), None)))
        }));
        theirs = theirs.min(timed(|| {
            black_box(naive_figures(black_box(&page)));
        }));
    }
    let speed = |time: Duration| page.len() as f64 / time.as_secs_f64() / 1e6;
    println!(
        "a vLLM page of {METRICS_PAGE_LINES} lines, {} bytes, to figures",
        page.len()
    );
    println!(
        "{:<24}{:>9.1} µs{:>9.0} MB/s",
        "the scanner",
        ours.as_secs_f64() * 1e6,
        speed(ours)
    );
    println!(
        "{:<24}{:>9.1} µs{:>9.0} MB/s",
        "a naive line split",
        theirs.as_secs_f64() * 1e6,
        speed(theirs)
    );
    println!(
        "{:<24}{:>9.1} ×",
        "ratio",
        theirs.as_secs_f64() / ours.as_secs_f64()
    );
}

/// The time of one reading.
fn timed(mut read: impl FnMut()) -> Duration {
    let start = Instant::now();
    (0..READINGS).for_each(|_| read());
    start.elapsed() / READINGS
}

/// What one would write first: every line split and parsed into a map. KV usage, waiting, running.
fn naive_figures(page: &str) -> (f64, f64, f64) {
    let mut samples: HashMap<&str, Vec<f64>> = HashMap::new();
    for line in page.lines().filter(|line| !line.starts_with('#')) {
        let Some((series, value)) = line.rsplit_once(' ') else {
            continue;
        };
        let name = series.split('{').next().unwrap_or(series);
        if let Ok(value) = value.parse::<f64>() {
            samples.entry(name).or_default().push(value);
        }
    }
    let of = |name: &str| samples.get(name).map_or(&[][..], |values| values);
    (
        of("vllm:kv_cache_usage_perc")
            .iter()
            .copied()
            .fold(0.0, f64::max),
        of("vllm:num_requests_waiting").iter().sum(),
        of("vllm:num_requests_running").iter().sum(),
    )
}
