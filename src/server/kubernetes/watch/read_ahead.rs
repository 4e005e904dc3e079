//! Reads a watch ahead: while objects are applied, the next ones are read. A list of a million pods takes tens of seconds, half of
//! them to read JSON and half to apply what it says.

use futures::{FutureExt, Stream, StreamExt};
use kube::runtime::watcher::{Event, Result};
use tokio::sync::{mpsc, oneshot};
use tokio_util::task::AbortOnDropHandle;

/// Events in one batch, as many as objects in a page of a list: one batch is applied, one waits, one is read.
const BATCH_SIZE: usize = super::LIST_PAGE_SIZE as usize;

/// Events that were available at once: notifying the consumer of each would take longer than reading it. `Init` is a batch of its
/// own, with a channel that signals when it was handled; nothing is read ahead of that.
type Batch<K> = (Vec<Result<Event<K>>>, Option<oneshot::Sender<()>>);

/// Stream of the given events, read in a separate task. The consumer handles `Init` before the list is requested: pods that came
/// between the two would otherwise be taken for pods absent from the list.
pub(crate) fn read_ahead<K: Send + 'static>(
    events: impl Stream<Item = Result<Event<K>>> + Unpin + Send + 'static,
) -> impl Stream<Item = Result<Event<K>>> + Unpin {
    let (batch_sender, batches) = mpsc::channel(1);
    let reader = AbortOnDropHandle::new(tokio::spawn(read(events, batch_sender)));
    let state = ReadAhead {
        batches,
        batch: Vec::new().into_iter(),
        last_handled: None,
        _reader: reader,
    };
    futures::stream::unfold(state, ReadAhead::next).boxed()
}

async fn read<K>(
    mut events: impl Stream<Item = Result<Event<K>>> + Unpin,
    batch_sender: mpsc::Sender<Batch<K>>,
) {
    let mut next = events.next().await;
    while let Some(event) = next {
        if matches!(event, Ok(Event::Init)) {
            let (handled_sender, handled) = oneshot::channel();
            if batch_sender
                .send((vec![event], Some(handled_sender)))
                .await
                .is_err()
                || handled.await.is_err()
            {
                return;
            }
            next = events.next().await;
            continue;
        }
        let mut batch = vec![event];
        let following = loop {
            match events.next().now_or_never() {
                Some(Some(event))
                    if batch.len() < BATCH_SIZE && !matches!(event, Ok(Event::Init)) =>
                {
                    batch.push(event)
                }
                following => break following,
            }
        };
        if batch_sender.send((batch, None)).await.is_err() {
            return;
        }
        next = match following {
            Some(following) => following,
            None => events.next().await,
        };
    }
}

struct ReadAhead<K> {
    batches: mpsc::Receiver<Batch<K>>,
    batch: std::vec::IntoIter<Result<Event<K>>>,
    /// Signals the reader that the event returned last, an `Init`, was handled.
    last_handled: Option<oneshot::Sender<()>>,
    _reader: AbortOnDropHandle<()>,
}

impl<K> ReadAhead<K> {
    /// A caller that asks for the next event has handled the last one.
    async fn next(mut self) -> Option<(Result<Event<K>>, Self)> {
        if let Some(last) = self.last_handled.take() {
            // A task that ended reads nothing.
            let _ = last.send(());
        }
        loop {
            if let Some(event) = self.batch.next() {
                // Thousands of events may be there, and other tasks have their turns between them.
                tokio::task::consume_budget().await;
                return Some((event, self));
            }
            let (batch, handled_sender) = self.batches.recv().await?;
            (self.batch, self.last_handled) = (batch.into_iter(), handled_sender);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    /// What was read of these events, and the events, read ahead.
    fn counted(
        events: Vec<Event<usize>>,
    ) -> (
        Arc<AtomicUsize>,
        impl Stream<Item = Result<Event<usize>>> + Unpin,
    ) {
        let read = Arc::new(AtomicUsize::default());
        let counts = read.clone();
        let counted = futures::stream::iter(events).map(move |event| {
            counts.fetch_add(1, Ordering::Relaxed);
            Ok(event)
        });
        (read, read_ahead(counted))
    }

    async fn let_others_run() {
        for _ in 0..2 * BATCH_SIZE {
            tokio::task::yield_now().await;
        }
    }

    #[tokio::test]
    async fn a_page_is_read_while_the_one_before_is_applied() {
        let all = 5 * BATCH_SIZE;
        let (read, mut events) = counted((0..all).map(Event::InitApply).collect());
        let mut applied = 0;
        while let Some(event) = events.next().await {
            assert!(
                matches!(event, Ok(Event::InitApply(n)) if n == applied),
                "in their order"
            );
            applied += 1;
            let_others_run().await;
            let ahead = read.load(Ordering::Relaxed) - applied;
            assert!(ahead <= 3 * BATCH_SIZE, "{ahead} are read and not applied");
            assert!(
                ahead >= BATCH_SIZE.min(all - applied),
                "{ahead} are read ahead"
            );
        }
        assert_eq!(applied, all);
    }

    /// A change that is alone is not kept back until others come.
    #[tokio::test]
    async fn a_single_event_is_delivered_without_waiting_for_more() {
        let (send, changes) = futures::channel::mpsc::unbounded();
        let mut events = read_ahead(changes.map(|n| Ok(Event::Apply(n))));
        for n in 0..3 {
            send.unbounded_send(n).unwrap();
            assert!(matches!(events.next().await, Some(Ok(Event::Apply(got))) if got == n));
        }
    }

    #[tokio::test]
    async fn a_list_is_requested_only_after_its_init_event_is_handled() {
        let list = [Event::Init, Event::InitApply(1), Event::InitDone];
        let (read, mut events) = counted(list.clone().into_iter().chain(list).collect());
        for begun in [1, 4] {
            let_others_run().await;
            assert!(matches!(events.next().await, Some(Ok(Event::Init))));
            let_others_run().await;
            assert_eq!(
                read.load(Ordering::Relaxed),
                begun,
                "the beginning is being dealt with"
            );
            assert!(matches!(events.next().await, Some(Ok(Event::InitApply(1)))));
            assert!(matches!(events.next().await, Some(Ok(Event::InitDone))));
        }
        assert!(events.next().await.is_none());
    }

    #[tokio::test]
    async fn dropping_the_stream_stops_the_reader() {
        let (read, events) = counted(vec![Event::Init, Event::InitDone]);
        drop(events);
        let_others_run().await;
        assert!(read.load(Ordering::Relaxed) <= 1);
    }
}
