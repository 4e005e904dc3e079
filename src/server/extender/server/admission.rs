//! Admission of connections at an address: which ones are admitted, and which one is closed in favor of a newer one.
//!
//! An address is never filled by connections that send nothing. Where a source's limit or the total limit is reached, a new
//! connection displaces one of the source with the most connections: the oldest that had its time to send a request and has
//! sent none, or else the one that has been idle for longest. Only if all are in the middle of a request is the new one
//! rejected. A client that sends its request as soon as it is connected is therefore served, however many connect and send
//! nothing.

use super::peer::{CloseCause, DisplacementOrder, Peer};
use parking_lot::Mutex;
use std::cmp::Reverse;
use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::Arc;

#[derive(Debug)]
pub(crate) struct ConnectionAdmission {
    max_per_source: usize,
    max_total: usize,
    slots: Mutex<ConnectionSlots>,
}

#[derive(Debug, Default)]
struct ConnectionSlots {
    peers: Vec<Arc<Peer>>,
    by_source: HashMap<IpAddr, usize>,
}

/// A connection's slot, held as long as this exists.
#[derive(Debug)]
pub(crate) struct ConnectionSlot {
    admission: Arc<ConnectionAdmission>,
    pub peer: Arc<Peer>,
}

impl ConnectionAdmission {
    pub fn new(max_per_source: usize, max_total: usize) -> Arc<Self> {
        Arc::new(Self {
            max_per_source: max_per_source.max(1),
            max_total: max_total.max(1),
            slots: Mutex::default(),
        })
    }

    /// A slot for a connection from that source, or why there is none.
    pub fn admit(self: &Arc<Self>, source: IpAddr) -> Result<ConnectionSlot, CloseCause> {
        let peer = Peer::new(source);
        let mut slots = self.slots.lock();
        if slots.count_of(source) >= self.max_per_source {
            slots
                .displace(|peer| peer.source == source)
                .ok_or(CloseCause::SourceFull)?;
        } else if slots.peers.len() >= self.max_total {
            slots.displace(|_| true).ok_or(CloseCause::AddressFull)?;
        }
        *slots.by_source.entry(source).or_default() += 1;
        slots.peers.push(peer.clone());
        Ok(ConnectionSlot {
            admission: self.clone(),
            peer,
        })
    }

    #[cfg(test)]
    fn open_connections(&self) -> usize {
        self.slots.lock().peers.len()
    }
}

impl ConnectionSlots {
    fn count_of(&self, source: IpAddr) -> usize {
        self.by_source.get(&source).copied().unwrap_or(0)
    }

    /// Displaces the most expendable connection; `None` if each is in the middle of a request.
    fn displace(&mut self, may: impl Fn(&Peer) -> bool) -> Option<()> {
        let candidates = self
            .peers
            .iter()
            .enumerate()
            .filter(|(_, peer)| may(peer))
            .map(|(index, peer)| {
                let (order, since) = peer.displacement_order();
                (
                    order == DisplacementOrder::Busy,
                    Reverse(self.count_of(peer.source)),
                    order,
                    since,
                    index,
                )
            });
        let (is_busy, .., index) = candidates.min()?;
        if is_busy {
            return None;
        }
        let peer = self.peers.swap_remove(index);
        peer.displaced.cancel();
        self.record_closed(peer.source);
        Some(())
    }

    fn record_closed(&mut self, source: IpAddr) {
        if let Some(count) = self.by_source.get_mut(&source) {
            *count -= 1;
            if *count == 0 {
                self.by_source.remove(&source);
            }
        }
    }
}

impl Drop for ConnectionSlot {
    fn drop(&mut self) {
        let mut slots = self.admission.slots.lock();
        // A displaced connection has no slot any more.
        if let Some(index) = slots
            .peers
            .iter()
            .position(|peer| Arc::ptr_eq(peer, &self.peer))
        {
            slots.peers.swap_remove(index);
            slots.record_closed(self.peer.source);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::Ipv4Addr;

    fn source(n: u8) -> IpAddr {
        Ipv4Addr::new(127, 0, 0, n).into()
    }

    #[test]
    fn a_new_connection_displaces_the_oldest_silent_one() {
        let admission = ConnectionAdmission::new(2, 8);
        let slots: Vec<ConnectionSlot> = (0..2)
            .map(|_| admission.admit(source(1)).unwrap())
            .collect();
        let newcomer = admission.admit(source(1)).unwrap();
        assert!(slots[0].peer.displaced.is_cancelled() && !slots[1].peer.displaced.is_cancelled());
        drop(slots);
        assert_eq!(
            admission.open_connections(),
            1,
            "who was displaced gives up no second place"
        );
        drop(newcomer);
        assert_eq!(
            (
                admission.open_connections(),
                admission.slots.lock().by_source.len()
            ),
            (0, 0)
        );
    }

    #[test]
    fn the_source_with_the_most_connections_is_displaced_first() {
        let admission = ConnectionAdmission::new(8, 4);
        let few = admission.admit(source(1)).unwrap();
        let many: Vec<ConnectionSlot> = (0..3)
            .map(|_| admission.admit(source(2)).unwrap())
            .collect();
        let _newcomer = admission.admit(source(3)).unwrap();
        assert!(!few.peer.displaced.is_cancelled() && many[0].peer.displaced.is_cancelled());
    }

    #[test]
    fn an_idle_connection_outlives_silent_ones_and_a_busy_one_all() {
        let admission = ConnectionAdmission::new(3, 3);
        let [busy, idle, silent] = [(); 3].map(|()| admission.admit(source(1)).unwrap());
        let under_way = busy.peer.begin_request();
        drop(idle.peer.begin_request());
        let second = admission.admit(source(1)).unwrap();
        assert!(silent.peer.displaced.is_cancelled() && !idle.peer.displaced.is_cancelled());
        let _second_under_way = second.peer.begin_request();
        let third = admission.admit(source(1)).unwrap();
        assert!(idle.peer.displaced.is_cancelled());
        let _third_under_way = third.peer.begin_request();
        assert_eq!(
            admission.admit(source(1)).err(),
            Some(CloseCause::SourceFull)
        );
        assert!(!busy.peer.displaced.is_cancelled());
        drop(under_way);
        assert!(admission.admit(source(1)).is_ok(), "it is idle now");
    }

    #[test]
    fn idle_connections_are_displaced_before_a_new_one() {
        let admission = ConnectionAdmission::new(8, 4);
        let silent: Vec<ConnectionSlot> = (0..3)
            .map(|_| admission.admit(source(2)).unwrap())
            .collect();
        silent
            .iter()
            .for_each(|slot| drop(slot.peer.begin_request()));
        let newcomer = admission.admit(source(1)).unwrap();
        let _another = admission.admit(source(2)).unwrap();
        assert!(!newcomer.peer.displaced.is_cancelled(), "of another source");
        assert!(silent[0].peer.displaced.is_cancelled());

        let admission = ConnectionAdmission::new(8, 2);
        let silent = admission.admit(source(1)).unwrap();
        drop(silent.peer.begin_request());
        let newcomer = admission.admit(source(1)).unwrap();
        let _another = admission.admit(source(1)).unwrap();
        assert!(
            !newcomer.peer.displaced.is_cancelled(),
            "of the same source: it has had no time to ask"
        );
        assert!(silent.peer.displaced.is_cancelled());
    }

    #[test]
    fn an_address_admits_no_more_than_its_total_limit() {
        let admission = ConnectionAdmission::new(1, 2);
        let busy: Vec<_> = (1..=2)
            .map(|n| admission.admit(source(n)).unwrap())
            .map(|slot| (slot.peer.begin_request(), slot))
            .collect();
        assert_eq!(
            admission.admit(source(3)).err(),
            Some(CloseCause::AddressFull)
        );
        drop(busy);
        assert!(admission.admit(source(3)).is_ok());
    }
}
