//! Runs a blocking source on a thread of its own, so that a driver or network disk that hangs delays nothing else.

use std::sync::mpsc::{SyncSender, TrySendError, sync_channel};
use std::time::Duration;
use tokio::sync::mpsc;

/// Calls a source that may block, one call at a time.
pub(crate) struct Blocking<T> {
    questions: SyncSender<()>,
    answers: mpsc::Receiver<T>,
    /// A call is in progress.
    is_asked: bool,
}

/// The result of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum BlockingResult<T> {
    Answer(T),
    /// Still in progress.
    Hangs,
    /// Its thread has ended.
    Gone,
}

impl<T: Send + 'static> Blocking<T> {
    /// Starts the thread that calls the source. It ends after its current call once this is dropped.
    pub fn start(
        name: &str,
        mut answer: impl FnMut() -> T + Send + 'static,
    ) -> std::io::Result<Self> {
        let (questions, asked) = sync_channel::<()>(1);
        let (answers, answered) = mpsc::channel(1);
        std::thread::Builder::new()
            .name(name.into())
            .spawn(move || {
                while asked.recv().is_ok() {
                    if answers.blocking_send(answer()).is_err() {
                        return;
                    }
                }
            })?;
        Ok(Self {
            questions,
            answers: answered,
            is_asked: false,
        })
    }

    /// Calls the source, and waits at most this long. A later answer is returned by the next call.
    pub async fn ask(&mut self, patience: Duration) -> BlockingResult<T> {
        if !self.is_asked {
            match self.questions.try_send(()) {
                Ok(()) => self.is_asked = true,
                Err(TrySendError::Full(())) | Err(TrySendError::Disconnected(())) => {
                    return BlockingResult::Gone;
                }
            }
        }
        match tokio::time::timeout(patience, self.answers.recv()).await {
            Ok(Some(answer)) => {
                self.is_asked = false;
                BlockingResult::Answer(answer)
            }
            Ok(None) => BlockingResult::Gone,
            Err(_) => BlockingResult::Hangs,
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
    async fn a_source_that_hangs_is_given_up_for_now_and_heard_later() {
        let (release, released) = channel::<u32>();
        let mut source = Blocking::start("test", move || released.recv().unwrap()).unwrap();
        assert_eq!(source.ask(SHORT).await, BlockingResult::Hangs);
        assert_eq!(
            source.ask(SHORT).await,
            BlockingResult::Hangs,
            "it is not asked twice"
        );
        release.send(7).unwrap();
        assert_eq!(source.ask(LONG).await, BlockingResult::Answer(7));
        release.send(8).unwrap();
        assert_eq!(source.ask(LONG).await, BlockingResult::Answer(8));
    }

    #[tokio::test]
    async fn a_source_that_panics_is_gone() {
        let mut source = Blocking::<u32>::start("test", || panic!("on purpose")).unwrap();
        assert_eq!(source.ask(LONG).await, BlockingResult::Gone);
        assert_eq!(source.ask(LONG).await, BlockingResult::Gone);
    }
}
