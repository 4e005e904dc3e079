//! An address that is served on a thread of its own, which steps back for the others.
//!
//! On one core, five thousand reports a second are hundreds that are ready whenever a filter comes, and one runtime would
//! take its turn with each of them. Here the kernel decides: a filter interrupts them at once. Nothing here knows HTTP.

use axum_server::Handle;
use rustix::process::{getpriority_process, setpriority_process};
use std::future::Future;
use std::io;
use std::net::SocketAddr;
use tokio::runtime::Builder;
use tokio::sync::oneshot;

/// How much nicer the thread is to the others: it gets a tenth of a core they all want, and a core that is idle as before.
const NICER: i32 = 10;

/// Serves on a thread of its own. It ends with `serving`, which is told to stop if this is dropped.
pub async fn apart(
    name: &str,
    handle: Handle<SocketAddr>,
    serving: impl Future<Output = io::Result<()>> + Send + 'static,
) -> io::Result<()> {
    let _stop = StopOnDrop(handle);
    let (end, ended) = oneshot::channel();
    std::thread::Builder::new().name(name.into()).spawn(move || {
        step_back();
        let runtime = Builder::new_current_thread().enable_all().build();
        // Nobody hears it if this future was dropped.
        let _ = end.send(runtime.and_then(|runtime| runtime.block_on(serving)));
    })?;
    ended.await.unwrap_or_else(|_| Err(io::Error::other(format!("the thread for {name} has failed"))))
}

/// On Linux a thread has a niceness of its own. Without it reports are taken all the same.
fn step_back() {
    let now = getpriority_process(None);
    if let Err(error) = now.and_then(|now| setpriority_process(None, now + NICER)) {
        tracing::warn!("reports may hold up the scheduler: the agents' thread cannot step back: {error}");
    }
}

/// To be called there between two pieces of work: who waits for this core has it now, and not when the kernel next looks.
pub fn give_way() {
    std::thread::yield_now();
}

struct StopOnDrop(Handle<SocketAddr>);

impl Drop for StopOnDrop {
    fn drop(&mut self) {
        self.0.shutdown();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[tokio::test]
    async fn what_is_served_apart_is_nicer_and_ends_with_its_outcome() {
        let here = getpriority_process(None).unwrap();
        let (tell, told) = oneshot::channel();
        let serving = async move {
            tell.send(getpriority_process(None).unwrap()).unwrap();
            Err(io::Error::other("on purpose"))
        };
        let outcome = apart("test", Handle::new(), serving).await;
        assert_eq!(outcome.unwrap_err().to_string(), "on purpose");
        assert_eq!(told.await.unwrap(), (here + NICER).min(19));
        assert_eq!(getpriority_process(None).unwrap(), here);
    }

    #[tokio::test]
    async fn a_thread_that_panics_is_an_error_and_no_silence() {
        let outcome = apart("test", Handle::new(), async { panic!("on purpose") }).await;
        assert!(outcome.unwrap_err().to_string().contains("has failed"));
    }

    #[tokio::test]
    async fn whoever_gives_up_waiting_ends_it() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        let handle = Handle::new();
        let (ended, end) = oneshot::channel();
        let server = handle.clone();
        let serving = async move {
            let served = axum_server::from_tcp(listener)?
                .handle(server)
                .serve(axum::Router::new().into_make_service());
            let outcome = served.await;
            ended.send(()).unwrap();
            outcome
        };
        let apart = tokio::spawn(apart("test", handle.clone(), serving));
        handle.listening().await.unwrap();
        apart.abort();
        tokio::time::timeout(Duration::from_secs(30), end).await.expect("it ends").unwrap();
    }
}
