//! Requests that are held up until a test releases them.
//!
//! Whether a write or its answer is held up is decided in `delivery`.

use super::faults::Operation;
use parking_lot::Mutex;
use tokio::sync::{oneshot, watch};

#[derive(Debug, Default)]
pub struct HeldRequests {
    waiting: Mutex<Vec<HeldRequest>>,
    /// How many have been held up so far.
    held_so_far: watch::Sender<u64>,
}

#[derive(Debug)]
struct HeldRequest {
    client: String,
    operation: Operation,
    /// The name of what the request is about; empty for a list.
    object: String,
    release_sender: oneshot::Sender<()>,
}

impl HeldRequests {
    /// Names of the objects of a client's held requests: one for each request.
    pub fn object_names(&self, client: &str, operation: Operation) -> Vec<String> {
        let mut waiting = self.waiting.lock();
        waiting.retain(|one| !one.release_sender.is_closed());
        let of_client = waiting
            .iter()
            .filter(|one| one.client == client && one.operation == operation);
        of_client.map(|one| one.object.clone()).collect()
    }

    /// Waits until a request of the client about this object is held up.
    pub async fn until_held(&self, client: &str, operation: Operation, object: &str) {
        let mut arrived = self.held_so_far.subscribe();
        while !self
            .object_names(client, operation)
            .iter()
            .any(|held| held == object)
        {
            arrived
                .changed()
                .await
                .expect("the sender lives as long as this");
        }
    }

    /// Releases all held requests of a client, and returns how many there were.
    pub fn release(&self, client: &str, operation: Operation) -> usize {
        self.release_where(|one| one.client == client && one.operation == operation)
    }

    pub fn release_all(&self) -> usize {
        self.release_where(|_| true)
    }

    fn release_where(&self, is_released: impl Fn(&HeldRequest) -> bool) -> usize {
        let mut waiting = self.waiting.lock();
        let (released, remaining): (Vec<_>, Vec<_>) = std::mem::take(&mut *waiting)
            .into_iter()
            .partition(is_released);
        *waiting = remaining;
        released
            .into_iter()
            .filter_map(|one| one.release_sender.send(()).ok())
            .count()
    }

    pub(super) async fn hold(&self, client: &str, operation: Operation, object: &str) {
        let (go_on, released) = oneshot::channel();
        let (client, object) = (client.to_owned(), object.to_owned());
        self.waiting.lock().push(HeldRequest {
            client,
            operation,
            object,
            release_sender: go_on,
        });
        self.held_so_far.send_modify(|arrived| *arrived += 1);
        // An error means that the server is dropped: then nothing is held up any more.
        let _ = released.await;
    }
}
