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

/// The watch with a pause after each failure, longer each time until a change or the end of a list comes. kube's own pauses begin
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
        if let Ok(Event::InitDone | Event::Apply(_) | Event::Delete(_)) = event {
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

#[cfg(test)]
mod tests {
    use super::*;
    use futures::stream;
    use k8s_openapi::api::core::v1::Pod;
    use kube::runtime::watcher::Error;
    use tokio::time::Instant;

    /// The time that each failure of these events comes after the one before it.
    async fn gaps(events: Vec<fn() -> Result<Event<Pod>>>) -> Vec<Duration> {
        let events = stream::iter(events).map(|event| event());
        let mut paused = std::pin::pin!(with_growing_pauses(events));
        let (mut gaps, mut last) = (Vec::new(), Instant::now());
        while let Some(event) = paused.next().await {
            if event.is_err() {
                gaps.push(last.elapsed());
                last = Instant::now();
            }
        }
        gaps
    }

    fn failure() -> Result<Event<Pod>> {
        Err(Error::NoResourceVersion)
    }

    #[tokio::test(start_paused = true)]
    async fn pauses_grow_until_a_list_ends_or_something_changes() {
        let begins: fn() -> Result<Event<Pod>> = || Ok(Event::Init);
        let page: fn() -> Result<Event<Pod>> = || Ok(Event::InitApply(Pod::default()));
        let end: fn() -> Result<Event<Pod>> = || Ok(Event::InitDone);
        let change: fn() -> Result<Event<Pod>> = || Ok(Event::Apply(Pod::default()));
        // Nothing, or a first page only, comes before each failure.
        for before in [vec![begins], vec![begins, page, page]] {
            let attempt = before.into_iter().chain([failure as fn() -> _]);
            let attempt: Vec<_> = attempt.collect();
            let gaps = gaps(attempt.repeat(6)).await;
            assert!(
                gaps[5] > 4 * gaps[1] && gaps[5] <= LONGEST_PAUSE,
                "{gaps:?}"
            );
        }
        for recovered in [vec![begins, page, end], vec![change]] {
            let attempt = recovered.into_iter().chain([failure as fn() -> _]);
            let attempt: Vec<_> = attempt.collect();
            let gaps = gaps(attempt.repeat(6)).await;
            assert!(gaps[5] < 3 * gaps[1], "{gaps:?}");
        }
    }
}
