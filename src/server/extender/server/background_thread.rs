//! Serves an address on a thread of its own with a lower scheduling priority.
//!
//! On one core, five thousand reports a second are hundreds that are ready whenever a filter request arrives, and one runtime
//! would take its turn with each of them; a page with every pod takes a good part of a second. Here the kernel decides: a
//! filter request preempts them at once. Nothing here knows HTTP.

use crate::service::niceness::lower_thread_priority;
use std::future::Future;
use std::io;
use tokio::runtime::Builder;
use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;

/// More than the number of pages that are rendered at one time.
const MAX_BLOCKING_THREADS: usize = 16;

/// Serves on a thread of its own, and so do the threads that it hands blocking work to. Ends with the result of `serve`, which
/// is told to stop if this is dropped.
pub async fn serve_on_background_thread<F>(
    name: &str,
    stop: CancellationToken,
    serve: impl FnOnce(CancellationToken) -> F,
) -> io::Result<()>
where
    F: Future<Output = io::Result<()>> + Send + 'static,
{
    let _stop = stop.clone().drop_guard();
    let serving = serve(stop);
    let (end, ended) = oneshot::channel();
    std::thread::Builder::new()
        .name(name.into())
        .spawn(move || {
            lower_thread_priority();
            let mut runtime = Builder::new_current_thread();
            let runtime = runtime
                .enable_all()
                .max_blocking_threads(MAX_BLOCKING_THREADS)
                .on_thread_start(lower_thread_priority)
                .build();
            // The receiver is gone if this future was dropped.
            let _ = end.send(runtime.and_then(|runtime| runtime.block_on(serving)));
        })?;
    ended.await.unwrap_or_else(|_| {
        Err(io::Error::other(format!(
            "the thread for {name} has failed"
        )))
    })
}

/// Call it on such a thread between two pieces of work: threads that wait for this core run now, and not at the kernel's next
/// tick.
pub(crate) fn yield_core() {
    std::thread::yield_now();
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::service::niceness::{lowered_niceness, thread_niceness};
    use std::time::Duration;
    use tokio::runtime::Handle;
    use tokio::task::spawn_blocking;

    #[tokio::test]
    async fn what_is_served_apart_is_nicer_and_ends_with_its_outcome() {
        let here = thread_niceness();
        let (tell, told) = oneshot::channel();
        let serving = async move {
            tell.send(thread_niceness()).unwrap();
            Err(io::Error::other("on purpose"))
        };
        let outcome =
            serve_on_background_thread("test", CancellationToken::new(), |_| serving).await;
        assert_eq!(outcome.unwrap_err().to_string(), "on purpose");
        assert_eq!(told.await.unwrap(), lowered_niceness());
        assert_eq!(thread_niceness(), here);
    }

    #[tokio::test]
    async fn the_threads_that_it_hands_blocking_work_to_are_as_nice_as_it_is() {
        let (tell, told) = oneshot::channel();
        let serving = async move {
            let niceness = || thread_niceness();
            // The second is started by the first, and the third reuses one of them.
            let nested = move || {
                (
                    niceness(),
                    Handle::current()
                        .block_on(spawn_blocking(niceness))
                        .unwrap(),
                )
            };
            let (first, second) = spawn_blocking(nested).await.unwrap();
            tell.send([first, second, spawn_blocking(niceness).await.unwrap()])
                .unwrap();
            Ok(())
        };
        serve_on_background_thread("test", CancellationToken::new(), |_| serving)
            .await
            .unwrap();
        assert_eq!(told.await.unwrap(), [lowered_niceness(); 3]);
    }

    #[tokio::test]
    async fn a_thread_that_panics_is_an_error_and_no_silence() {
        let outcome = serve_on_background_thread("test", CancellationToken::new(), |_| async {
            panic!("on purpose")
        })
        .await;
        assert!(outcome.unwrap_err().to_string().contains("has failed"));
    }

    #[tokio::test]
    async fn dropping_the_future_stops_the_thread() {
        let (begun, begin) = oneshot::channel();
        let (ended, end) = oneshot::channel();
        let serve = |stop: CancellationToken| async move {
            begun.send(()).unwrap();
            stop.cancelled().await;
            ended.send(()).unwrap();
            Ok(())
        };
        let apart = tokio::spawn(serve_on_background_thread(
            "test",
            CancellationToken::new(),
            serve,
        ));
        begin.await.unwrap();
        apart.abort();
        tokio::time::timeout(Duration::from_secs(60), end)
            .await
            .expect("it ends")
            .unwrap();
    }
}
