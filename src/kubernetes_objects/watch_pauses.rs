//! Pauses of a watch that fails.

use futures::{Stream, StreamExt};
use kube::runtime::WatchStreamExt;
use kube::runtime::utils::Backoff;
use kube::runtime::watcher::{DefaultBackoff, Event, Result};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// An API server that is back is found within this time.
const LONGEST_PAUSE: Duration = Duration::from_secs(10);

/// The watch with a pause after each failure, longer each time until an object or the end of a list comes. kube's own pauses begin
/// anew with each attempt to list, because it announces one with an event.
pub fn with_growing_pauses<K: Send + 'static>(
    events: impl Stream<Item = Result<Event<K>>> + Send + 'static,
) -> impl Stream<Item = Result<Event<K>>> + Send {
    let has_shown = Arc::new(AtomicBool::new(false));
    let pauses = GrowingPauses {
        pauses: DefaultBackoff::default(),
        has_shown: has_shown.clone(),
    };
    let events = events.inspect(move |event| {
        if matches!(event, Ok(event) if !matches!(event, Event::Init)) {
            has_shown.store(true, Ordering::Relaxed);
        }
    });
    events.backoff(pauses)
}

struct GrowingPauses {
    pauses: DefaultBackoff,
    /// Whether anything came since the last failure.
    has_shown: Arc<AtomicBool>,
}

impl Iterator for GrowingPauses {
    type Item = Duration;

    fn next(&mut self) -> Option<Duration> {
        self.pauses.next().map(|pause| pause.min(LONGEST_PAUSE))
    }
}

impl Backoff for GrowingPauses {
    fn reset(&mut self) {
        if self.has_shown.swap(false, Ordering::Relaxed) {
            self.pauses.reset();
        }
    }
}
