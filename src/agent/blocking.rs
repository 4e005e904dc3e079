//! A source that blocks, on a thread of its own: a driver or a network disk that hangs holds up nobody.

use std::sync::mpsc::{SyncSender, TrySendError, sync_channel};
use std::time::Duration;
use tokio::sync::mpsc;

/// Asks something that may block, one question at a time.
pub struct Blocking<T> {
    questions: SyncSender<()>,
    answers: mpsc::Receiver<T>,
    /// A question is asked that is not answered yet.
    is_asked: bool,
}

/// What came of asking.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BlockingResult<T> {
    Answer(T),
    /// It is still at it.
    Hangs,
    /// Its thread is gone.
    Gone,
}

impl<T: Send + 'static> Blocking<T> {
    /// The thread ends with its next answer after this is dropped.
    pub fn start(name: &str, mut answer: impl FnMut() -> T + Send + 'static) -> std::io::Result<Self> {
        let (questions, asked) = sync_channel::<()>(1);
        let (answers, answered) = mpsc::channel(1);
        std::thread::Builder::new().name(name.into()).spawn(move || {
            while asked.recv().is_ok() {
                if answers.blocking_send(answer()).is_err() {
                    return;
                }
            }
        })?;
        Ok(Self { questions, answers: answered, is_asked: false })
    }

    /// Asks, and waits this long at most. An answer that comes later is taken by the next call.
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
    const LONG: Duration = Duration::from_secs(30);

    #[tokio::test]
    async fn a_source_that_hangs_is_given_up_for_now_and_heard_later() {
        let (release, released) = channel::<u32>();
        let mut source = Blocking::start("test", move || released.recv().unwrap()).unwrap();
        assert_eq!(source.ask(SHORT).await, BlockingResult::Hangs);
        assert_eq!(source.ask(SHORT).await, BlockingResult::Hangs, "it is not asked twice");
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
