//! Runs a blocking source on a thread of its own, so that a driver or network disk that hangs delays nothing else.

use std::sync::mpsc::{SyncSender, TrySendError, sync_channel};
use std::time::Duration;
use tokio::sync::mpsc;

/// Calls a source that may block, one call at a time.
pub(crate) struct BlockingSource<T> {
    requests: SyncSender<()>,
    answers: mpsc::Receiver<T>,
    /// A call is in progress.
    is_pending: bool,
}

/// The result of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum BlockingResult<T> {
    Answer(T),
    /// Still in progress.
    TimedOut,
    /// Its thread has ended.
    ThreadEnded,
}

impl<T: Send + 'static> BlockingSource<T> {
    /// Starts the thread that calls the source. It ends after its current call once this is dropped.
    pub fn start(
        name: &str,
        mut source: impl FnMut() -> T + Send + 'static,
    ) -> std::io::Result<Self> {
        let (requests, request_receiver) = sync_channel::<()>(1);
        let (answers, answer_receiver) = mpsc::channel(1);
        std::thread::Builder::new()
            .name(name.into())
            .spawn(move || {
                while request_receiver.recv().is_ok() {
                    if answers.blocking_send(source()).is_err() {
                        return;
                    }
                }
            })?;
        Ok(Self {
            requests,
            answers: answer_receiver,
            is_pending: false,
        })
    }

    /// Calls the source, and waits at most this long. A later answer is returned by the next call.
    pub async fn call(&mut self, limit: Duration) -> BlockingResult<T> {
        if !self.is_pending {
            match self.requests.try_send(()) {
                Ok(()) => self.is_pending = true,
                Err(TrySendError::Full(())) | Err(TrySendError::Disconnected(())) => {
                    return BlockingResult::ThreadEnded;
                }
            }
        }
        match tokio::time::timeout(limit, self.answers.recv()).await {
            Ok(Some(answer)) => {
                self.is_pending = false;
                BlockingResult::Answer(answer)
            }
            Ok(None) => BlockingResult::ThreadEnded,
            Err(_) => BlockingResult::TimedOut,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::channel;

    const SHORT: Duration = Duration::from_millis(1);
    const LONG: Duration = Duration::from_secs(60);

    #[tokio::test]
    async fn a_source_that_times_out_answers_a_later_call() {
        let (release, released) = channel::<u32>();
        let mut source = BlockingSource::start("test", move || released.recv().unwrap()).unwrap();
        assert_eq!(source.call(SHORT).await, BlockingResult::TimedOut);
        assert_eq!(
            source.call(SHORT).await,
            BlockingResult::TimedOut,
            "it is not asked twice"
        );
        release.send(7).unwrap();
        assert_eq!(source.call(LONG).await, BlockingResult::Answer(7));
        release.send(8).unwrap();
        assert_eq!(source.call(LONG).await, BlockingResult::Answer(8));
    }

    #[tokio::test]
    async fn a_source_that_panics_is_gone() {
        let mut source = BlockingSource::<u32>::start("test", || panic!("on purpose")).unwrap();
        assert_eq!(source.call(LONG).await, BlockingResult::ThreadEnded);
        assert_eq!(source.call(LONG).await, BlockingResult::ThreadEnded);
    }
}
