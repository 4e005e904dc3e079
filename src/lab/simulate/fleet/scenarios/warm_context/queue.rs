//! Batches of inferences, and the GPUs that take them from one queue.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// A GPU's time for inferences, in seconds since the beginning.
#[derive(Debug, Clone, Copy)]
pub struct Slot {
    pub from_s: f64,
    pub until_s: f64,
    pub inference_s: f64,
    /// Before each batch.
    pub context_s: f64,
}

/// Batches taken from one queue. When the last of them is done, and when each was; what is in progress at a slot's end is lost,
/// and another slot does it again.
pub fn process_batches(slots: &[Slot], batch: u64, total: u64) -> (f64, Vec<f64>) {
    // In microseconds, so that times have an order.
    let micros = |seconds: f64| (seconds * 1e6).round() as u64;
    let mut free: BinaryHeap<Reverse<(u64, usize)>> = slots
        .iter()
        .enumerate()
        .map(|(n, slot)| Reverse((micros(slot.from_s), n)))
        .collect();
    let (mut done, mut left) = (Vec::new(), total.div_ceil(batch));
    while left > 0
        && let Some(Reverse((from, n))) = free.pop()
    {
        let slot = &slots[n];
        let end = from + micros(slot.context_s + slot.inference_s * batch as f64);
        if end as f64 <= slot.until_s * 1e6 {
            left -= 1;
            done.push(end as f64 / 1e6);
            free.push(Reverse((end, n)));
        }
    }
    done.sort_by(f64::total_cmp);
    (done.last().copied().unwrap_or(0.0), done)
}
