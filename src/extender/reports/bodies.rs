//! Limits on bytes of report bodies in progress, in all and per agent.
//!
//! A body is read only once its announced size fits within the limit; until then it stays with its sender. Agents that all send
//! as much as they may at once thus cost no more memory than is set aside here. Bodies are not parsed here.

use super::Sender;
use crate::extender::request::BadRequest;
use crate::ids::NodeName;
use axum::body::HttpBody;
use parking_lot::Mutex;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Two thousand ordinary reports at a time, or sixteen of the largest. Each is read in a fraction of a millisecond, so agents
/// of a cluster of any size reach this limit only if some send far more than any agent needs to.
const IN_ALL: usize = 12 << 20;
/// An agent sends one report after the other; the previous one may be broken off without the server knowing yet.
const PER_AGENT: usize = 2;
/// Longer than it takes to read everything that may be in progress, and shorter than an agent waits for its answer.
const PATIENCE: Duration = Duration::from_secs(2);

#[derive(Debug)]
pub struct Bodies {
    bytes: Arc<Semaphore>,
    /// Bytes in progress of each agent that has any.
    by_agent: Mutex<HashMap<AgentId, usize>>,
}

/// The node's name, and the UID that its Node object had when the agent's token was issued.
type AgentId = (NodeName, Option<Arc<str>>);

/// The permit for one body; dropping it frees its bytes.
#[derive(Debug)]
pub struct BodyPermit {
    _bytes: OwnedSemaphorePermit,
    _turn: Turn,
}

#[derive(Debug)]
struct Turn(Option<(Arc<Bodies>, AgentId)>);

impl Default for Bodies {
    fn default() -> Self {
        Self { bytes: Arc::new(Semaphore::new(IN_ALL)), by_agent: Mutex::default() }
    }
}

impl Bodies {
    /// Waits a little until this many bytes of that sender fit within the limits.
    pub async fn room(self: &Arc<Self>, sender: &Sender, bytes: usize) -> Result<BodyPermit, BadRequest> {
        let turn = self.turn(sender)?;
        let waiting = self.bytes.clone().acquire_many_owned(bytes.min(IN_ALL) as u32);
        match tokio::time::timeout(PATIENCE, waiting).await {
            Ok(room) => Ok(BodyPermit { _bytes: room.expect("the semaphore is never closed"), _turn: turn }),
            Err(_) => Err(BadRequest::Crowded {
                code: "bodies-at-limit",
                message: "too many large reports are under way; send it again in a second".into(),
            }),
        }
    }

    fn turn(self: &Arc<Self>, sender: &Sender) -> Result<Turn, BadRequest> {
        let Sender::AgentOn(node) = sender else { return Ok(Turn(None)) };
        let agent = (node.name.clone(), node.uid.clone());
        let mut by_agent = self.by_agent.lock();
        let under_way = by_agent.entry(agent.clone()).or_default();
        if *under_way >= PER_AGENT {
            return Err(BadRequest::Crowded {
                code: "reports-at-once",
                message: format!("{PER_AGENT} reports of this agent are under way; wait for their answers"),
            });
        }
        *under_way += 1;
        Ok(Turn(Some((self.clone(), agent))))
    }
}

/// The announced length of a body; one without a length may be `largest`.
pub fn announced(body: &impl HttpBody, largest: usize) -> usize {
    let announced = body.size_hint().upper().and_then(|bytes| usize::try_from(bytes).ok());
    announced.unwrap_or(largest).min(largest)
}

impl Drop for Turn {
    fn drop(&mut self) {
        let Some((bodies, agent)) = self.0.take() else { return };
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
    use crate::kubernetes::port::AgentNode;
    use axum::body::Body;

    fn code<T>(outcome: Result<T, BadRequest>) -> &'static str {
        outcome.err().map_or("room", |error| error.code())
    }

    #[tokio::test]
    async fn an_agent_has_two_bodies_under_way_at_the_most() {
        let bodies = Arc::<Bodies>::default();
        let agent = |node: &str| {
            let name = NodeName::parse(node).unwrap();
            Sender::AgentOn(AgentNode { name, uid: None, issued: None })
        };
        let first = bodies.room(&agent("a"), 100).await.unwrap();
        let _second = bodies.room(&agent("a"), 100).await.unwrap();
        assert_eq!(code(bodies.room(&agent("a"), 100).await), "reports-at-once");
        assert_eq!(code(bodies.room(&agent("b"), 100).await), "room");
        drop(first);
        assert_eq!(code(bodies.room(&agent("a"), 100).await), "room");
        assert_eq!(bodies.by_agent.lock().len(), 1);
    }

    /// The token of a machine that had the name before may still be valid.
    #[tokio::test]
    async fn an_agent_of_an_earlier_node_takes_no_place_of_the_present_ones() {
        let bodies = Arc::<Bodies>::default();
        let agent = |uid: &str| {
            let name = NodeName::parse("a").unwrap();
            Sender::AgentOn(AgentNode { name, uid: Some(uid.into()), issued: None })
        };
        let _first = bodies.room(&agent("earlier"), 100).await.unwrap();
        let _second = bodies.room(&agent("earlier"), 100).await.unwrap();
        assert_eq!(code(bodies.room(&agent("earlier"), 100).await), "reports-at-once");
        assert_eq!(code(bodies.room(&agent("present"), 100).await), "room");
    }

    #[tokio::test]
    async fn a_body_takes_the_room_it_announces_and_one_that_does_not_the_most() {
        let bodies = Arc::<Bodies>::default();
        assert_eq!(announced(&Body::from("1234"), 100), 4);
        let endless = Body::from_stream(futures::stream::pending::<Result<bytes::Bytes, std::io::Error>>());
        assert_eq!(announced(&endless, 100), 100);
        let _room = bodies.room(&Sender::Anyone, 100).await.unwrap();
        assert_eq!(bodies.bytes.available_permits(), IN_ALL - 100);
    }
}
