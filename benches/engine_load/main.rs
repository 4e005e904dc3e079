//! What counting KV caches by degrees is worth, and what it costs: `cargo bench --bench engine_load [-- SEEDS]`.
//!
//! - [`placements`]: the same pods beside the same engines, placed by degrees and by the three steps of earlier versions: how full
//!   are the KV caches that pods join?
//! - [`jitter`]: `filter` over 1,000 nodes that report every second, with steady and with jittering figures. The ratio is
//!   comparable between machines.

mod fleet;
#[path = "../common/gpu.rs"]
mod gpu;
mod jitter;
mod placements;

fn main() {
    let seeds = std::env::args()
        .skip(1)
        .find_map(|arg| arg.parse().ok())
        .unwrap_or(5);
    placements::print(seeds);
    jitter::print();
}
