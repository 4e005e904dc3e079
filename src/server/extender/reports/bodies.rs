//! Limits on bytes of report bodies in progress, in all and per agent.
//!
//! A body is read only once its announced size fits within the limit; until then it stays with its sender. Agents that all send
//! as much as they may at once thus cost no more memory than is set aside here. A body that takes its time gives its room to one
//! that waits for it. Bodies are not parsed here.

use super::Sender;
use crate::extender::request::BadRequest;
use axum::body::HttpBody;
use parking_lot::Mutex;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;
use stowage_scheduling::ids::NodeName;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};

/// Two thousand ordinary reports at a time, or sixteen of the largest. Each is read in a fraction of a millisecond, so agents
/// of a cluster of any size reach this limit only if some send far more than any agent needs to.
const MAX_BYTES_IN_PROGRESS: usize = 12 << 20;
/// An agent sends one report after the other; the previous one may be broken off without the server knowing yet.
const PER_AGENT: usize = 2;
/// Longer than it takes to read everything that may be in progress, and shorter than an agent waits for its answer.
const ACQUIRE_TIMEOUT: Duration = Duration::from_secs(2);
/// The time of a body while others wait for room: enough for the largest over a slow link, and half of what they wait.
const CROWDED_BODY_TIMEOUT: Duration = Duration::from_secs(1);

#[derive(Debug)]
pub struct ReportBodies {
    bytes: Arc<Semaphore>,
    /// How many bodies wait for room.
    waiting: watch::Sender<usize>,
    /// Bytes in progress of each agent that has any.
    by_agent: Mutex<HashMap<AgentId, usize>>,
}

/// The node's name, and the UID that its Node object had when the agent's token was issued.
type AgentId = (NodeName, Option<Arc<str>>);

/// The permit for one body; dropping it frees its bytes.
#[derive(Debug)]
pub struct BodyPermit {
    _bytes: OwnedSemaphorePermit,
    _agent_slot: AgentSlot,
}

#[derive(Debug)]
struct AgentSlot(Option<(Arc<ReportBodies>, AgentId)>);

impl Default for ReportBodies {
    fn default() -> Self {
        Self {
            bytes: Arc::new(Semaphore::new(MAX_BYTES_IN_PROGRESS)),
            waiting: watch::Sender::default(),
            by_agent: Mutex::default(),
        }
    }
}

impl ReportBodies {
    /// Waits a little until this many bytes of that sender fit within the limits.
    pub async fn acquire(
        self: &Arc<Self>,
        sender: &Sender,
        bytes: usize,
    ) -> Result<BodyPermit, BadRequest> {
        let agent_slot = self.take_agent_slot(sender)?;
        let room = self
            .bytes
            .clone()
            .acquire_many_owned(bytes.min(MAX_BYTES_IN_PROGRESS) as u32);
        let _waits = WaitingGuard::new(&self.waiting);
        match tokio::time::timeout(ACQUIRE_TIMEOUT, room).await {
            Ok(room) => Ok(BodyPermit {
                _bytes: room.expect("the semaphore is never closed"),
                _agent_slot: agent_slot,
            }),
            Err(_) => Err(BadRequest::Crowded {
                code: "bodies-at-limit",
                message: "too many large reports are under way; send it again in a second".into(),
            }),
        }
    }

    /// Waits until a body that has room must give it up: it has had its time, and another waits.
    pub(crate) async fn time_is_up(&self) -> BadRequest {
        tokio::time::sleep(CROWDED_BODY_TIMEOUT).await;
        // The sender lives as long as this.
        let _ = self
            .waiting
            .subscribe()
            .wait_for(|waiting| *waiting > 0)
            .await;
        BadRequest::TooSlow {
            within: CROWDED_BODY_TIMEOUT,
        }
    }

    fn take_agent_slot(self: &Arc<Self>, sender: &Sender) -> Result<AgentSlot, BadRequest> {
        let Sender::AgentOn(node) = sender else {
            return Ok(AgentSlot(None));
        };
        let agent = (node.name.clone(), node.uid.clone());
        let mut by_agent = self.by_agent.lock();
        let under_way = by_agent.entry(agent.clone()).or_default();
        if *under_way >= PER_AGENT {
            return Err(BadRequest::Crowded {
                code: "reports-at-once",
                message: format!(
                    "{PER_AGENT} reports of this agent are under way; wait for their answers"
                ),
            });
        }
        *under_way += 1;
        Ok(AgentSlot(Some((self.clone(), agent))))
    }
}

/// Counts a body as waiting for room until it is dropped.
struct WaitingGuard<'a>(&'a watch::Sender<usize>);

impl<'a> WaitingGuard<'a> {
    fn new(waiting: &'a watch::Sender<usize>) -> Self {
        waiting.send_modify(|waiting| *waiting += 1);
        Self(waiting)
    }
}

impl Drop for WaitingGuard<'_> {
    fn drop(&mut self) {
        self.0.send_modify(|waiting| *waiting -= 1);
    }
}

/// The announced length of a body; one without a length may be `largest`.
pub fn announced_bytes(body: &impl HttpBody, largest: usize) -> usize {
    let announced = body
        .size_hint()
        .upper()
        .and_then(|bytes| usize::try_from(bytes).ok());
    announced.unwrap_or(largest).min(largest)
}

impl Drop for AgentSlot {
    fn drop(&mut self) {
        let Some((bodies, agent)) = self.0.take() else {
            return;
        };
        let mut by_agent = bodies.by_agent.lock();
        if let Some(under_way) = by_agent.get_mut(&agent) {
            *under_way -= 1;
            if *under_way == 0 {
                by_agent.remove(&agent);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::body::Body;
    use stowage_kubernetes_objects::port::AgentNode;

    fn code<T>(outcome: Result<T, BadRequest>) -> &'static str {
        outcome.err().map_or("room", |error| error.code())
    }

    #[tokio::test]
    async fn an_agent_has_two_bodies_under_way_at_the_most() {
        let bodies = Arc::<ReportBodies>::default();
        let agent = |node: &str| {
            let name = NodeName::parse(node).unwrap();
            Sender::AgentOn(AgentNode {
                name,
                uid: None,
                issued: None,
            })
        };
        let first = bodies.acquire(&agent("a"), 100).await.unwrap();
        let _second = bodies.acquire(&agent("a"), 100).await.unwrap();
        assert_eq!(
            code(bodies.acquire(&agent("a"), 100).await),
            "reports-at-once"
        );
        assert_eq!(code(bodies.acquire(&agent("b"), 100).await), "room");
        drop(first);
        assert_eq!(code(bodies.acquire(&agent("a"), 100).await), "room");
        assert_eq!(bodies.by_agent.lock().len(), 1);
    }

    /// The token of a machine that had the name before may still be valid.
    #[tokio::test]
    async fn an_agent_of_an_earlier_node_takes_no_place_of_the_present_ones() {
        let bodies = Arc::<ReportBodies>::default();
        let agent = |uid: &str| {
            let name = NodeName::parse("a").unwrap();
            Sender::AgentOn(AgentNode {
                name,
                uid: Some(uid.into()),
                issued: None,
            })
        };
        let _first = bodies.acquire(&agent("earlier"), 100).await.unwrap();
        let _second = bodies.acquire(&agent("earlier"), 100).await.unwrap();
        assert_eq!(
            code(bodies.acquire(&agent("earlier"), 100).await),
            "reports-at-once"
        );
        assert_eq!(code(bodies.acquire(&agent("present"), 100).await), "room");
    }

    /// Six tokens announce all that there is, and send a byte at a time.
    #[tokio::test(start_paused = true)]
    async fn slow_bodies_keep_no_other_out() {
        let bodies = Arc::<ReportBodies>::default();
        let agent = |node: usize| {
            let name = NodeName::parse(&format!("node-{node}")).unwrap();
            Sender::AgentOn(AgentNode {
                name,
                uid: None,
                issued: None,
            })
        };
        let mut slow = tokio::task::JoinSet::new();
        for n in 0..12 {
            let (bodies, sender) = (bodies.clone(), agent(n / 2));
            slow.spawn(async move {
                loop {
                    let Ok(_room) = bodies.acquire(&sender, 1 << 20).await else {
                        continue;
                    };
                    bodies.time_is_up().await;
                }
            });
        }
        for _ in 0..50 {
            for size in [1 << 10, 1 << 20] {
                assert_eq!(code(bodies.acquire(&agent(100), size).await), "room");
            }
            tokio::time::sleep(Duration::from_millis(777)).await;
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_slow_body_is_not_cut_off_while_no_other_waits() {
        let bodies = Arc::<ReportBodies>::default();
        let _room = bodies
            .acquire(&Sender::Anyone, MAX_BYTES_IN_PROGRESS)
            .await
            .unwrap();
        let alone = tokio::time::timeout(Duration::from_secs(9), bodies.time_is_up()).await;
        assert!(alone.is_err());
        let (ended, waits) = tokio::join!(bodies.time_is_up(), bodies.acquire(&Sender::Anyone, 1));
        assert_eq!((ended.code(), code(waits)), ("too-slow", "bodies-at-limit"));
    }

    #[tokio::test]
    async fn a_body_without_a_length_takes_the_largest_size() {
        let bodies = Arc::<ReportBodies>::default();
        assert_eq!(announced_bytes(&Body::from("1234"), 100), 4);
        let endless = Body::from_stream(futures::stream::pending::<
            Result<bytes::Bytes, std::io::Error>,
        >());
        assert_eq!(announced_bytes(&endless, 100), 100);
        let _room = bodies.acquire(&Sender::Anyone, 100).await.unwrap();
        assert_eq!(
            bodies.bytes.available_permits(),
            MAX_BYTES_IN_PROGRESS - 100
        );
    }
}
