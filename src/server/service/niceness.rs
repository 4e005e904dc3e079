//! Lowers the scheduling priority (niceness) of background threads below that of the threads that answer kube-scheduler.
//!
//! Where all cores are busy, the kernel gives a nicer thread a tenth of a core, and takes it away at once when a request comes.
//! Where one is idle, the thread has all of it.

use rustix::process::{getpid, getpriority_process, setpriority_process};

const NICENESS_INCREMENT: i32 = 10;

/// Makes the thread that calls it nicer than the process, from here on. A second call changes nothing. If the kernel refuses it,
/// the thread works all the same.
pub(crate) fn lower_thread_priority() {
    // On Linux each thread has a niceness of its own, and a thread begins with that of the one that starts it. That of the
    // process is its first thread's.
    let process_niceness = getpriority_process(Some(getpid()));
    if let Err(error) = process_niceness
        .and_then(|niceness| setpriority_process(None, niceness + NICENESS_INCREMENT))
    {
        tracing::warn!(
            "background work may delay the scheduler: could not lower the priority of its thread: {error}"
        );
    }
}

/// The niceness of the thread that calls it.
#[cfg(test)]
pub(crate) fn thread_niceness() -> i32 {
    getpriority_process(None).expect("the kernel knows it")
}

/// The niceness of a thread that has stepped back.
#[cfg(test)]
pub(crate) fn lowered_niceness() -> i32 {
    (getpriority_process(Some(getpid())).expect("the kernel knows it") + NICENESS_INCREMENT).min(19)
}
