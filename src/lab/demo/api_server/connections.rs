//! Faults of a client's connections, for tests: watches that lag, die silently or end, and clients that are cut off.
//!
//! Orders only; `watch` and `routes` check them before they send.

use parking_lot::Mutex;
use std::collections::{BTreeMap, BTreeSet};
use stowage_server::service::{ChangeCount, ChangeReceiver};

/// One client's watches of one kind, such as `pods`.
type WatchKey = (String, String);

#[derive(Debug, Default)]
pub struct ConnectionFaults {
    state: Mutex<ConnectionState>,
    changed: ChangeCount,
}

#[derive(Debug, Default)]
struct ConnectionState {
    watches_begun: u64,
    paused: BTreeSet<WatchKey>,
    /// Watches that began no later than this one send nothing more.
    silenced: BTreeMap<WatchKey, u64>,
    /// Watches that began no later than this one end.
    ended: BTreeMap<WatchKey, u64>,
    cut_off: BTreeSet<String>,
}

/// What a watch may do now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum WatchFlow {
    Open,
    Stalled,
    Ended,
}

impl ConnectionFaults {
    /// Pauses events of this kind to the client, in open and new watches, until [`Self::resume_watches`].
    pub fn pause_watches(&self, client: &str, kind: &str) {
        self.change(|state| _ = state.paused.insert(watch_key(client, kind)));
    }

    pub fn resume_watches(&self, client: &str, kind: &str) {
        self.change(|state| _ = state.paused.remove(&watch_key(client, kind)));
    }

    /// The client's open watches of this kind send nothing more and never end, as on a connection that died silently. New
    /// watches are not affected.
    pub fn silence_watches(&self, client: &str, kind: &str) {
        self.change(|state| {
            _ = state
                .silenced
                .insert(watch_key(client, kind), state.watches_begun)
        });
    }

    /// The client's open watches of this kind end in order. New watches are not affected.
    pub fn end_watches(&self, client: &str, kind: &str) {
        self.change(|state| {
            _ = state
                .ended
                .insert(watch_key(client, kind), state.watches_begun)
        });
    }

    /// Nothing passes between the client and the server, in either direction, until it is reconnected. Answers that the client
    /// no longer waits for by then never arrive.
    pub fn cut_off(&self, client: &str) {
        self.change(|state| _ = state.cut_off.insert(client.to_owned()));
    }

    pub fn reconnect(&self, client: &str) {
        self.change(|state| _ = state.cut_off.remove(client));
    }

    /// Waits while the client is cut off.
    pub(super) async fn until_connected(&self, client: &str) {
        let mut changes = self.changes();
        while self.state.lock().cut_off.contains(client) {
            changes.changed().await;
        }
    }

    /// A number for a watch that begins now.
    pub(super) fn begin_watch(&self) -> u64 {
        let mut state = self.state.lock();
        state.watches_begun += 1;
        state.watches_begun
    }

    pub(super) fn flow(&self, client: &str, kind: &str, number: u64) -> WatchFlow {
        let (state, watches) = (self.state.lock(), watch_key(client, kind));
        let concerns = |until: &BTreeMap<WatchKey, u64>| {
            until.get(&watches).is_some_and(|last| number <= *last)
        };
        if concerns(&state.silenced)
            || state.paused.contains(&watches)
            || state.cut_off.contains(client)
        {
            WatchFlow::Stalled
        } else if concerns(&state.ended) {
            WatchFlow::Ended
        } else {
            WatchFlow::Open
        }
    }

    /// Changes whenever an order does.
    pub(super) fn changes(&self) -> ChangeReceiver {
        self.changed.subscribe()
    }

    fn change(&self, change: impl FnOnce(&mut ConnectionState)) {
        change(&mut self.state.lock());
        self.changed.increment();
    }
}

fn watch_key(client: &str, kind: &str) -> WatchKey {
    (client.to_owned(), kind.to_owned())
}
