//! Panics of a history. Most are caught on their way: by the runtime, by the router, by the planner, which leaves a pod out on
//! which planning fails. The service goes on, so nothing else here would tell of them.

use std::cell::RefCell;
use std::panic::PanicHookInfo;
use std::sync::Once;

thread_local! {
    /// The first of this thread's history.
    static FIRST: RefCell<Option<String>> = const { RefCell::new(None) };
}

static WATCH: Once = Once::new();

/// Forgets the panics of this thread; the first call installs the hook that records them.
pub fn reset() {
    WATCH.call_once(|| {
        let previous_hook = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            record(panic);
            previous_hook(panic);
        }));
    });
    FIRST.take();
}

/// The first panic since this was asked last.
pub fn take_first() -> Option<String> {
    FIRST.take()
}

fn record(panic: &PanicHookInfo<'_>) {
    let message = panic.payload_as_str().unwrap_or("without a message");
    let location = panic
        .location()
        .map(ToString::to_string)
        .unwrap_or_default();
    FIRST.with_borrow_mut(|first| {
        first.get_or_insert_with(|| format!("{location}: {message}"));
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_caught_panic_is_recorded_once_for_its_thread() {
        reset();
        assert_eq!(take_first(), None);
        let caught = std::panic::catch_unwind(|| panic!("planted, {}", 7));
        assert!(caught.is_err());
        let other = std::thread::spawn(|| (reset(), take_first()).1).join();
        assert_eq!(other.expect("it does not panic"), None);
        let seen = take_first().expect("a panic was caught");
        assert!(
            seen.starts_with(file!()) && seen.ends_with(": planted, 7"),
            "{seen}"
        );
        assert_eq!(take_first(), None);
    }
}
