//! Hostile peers: they open connections and make no progress. Loopback only, and no more of them than requested.

use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tokio::net::TcpSocket;
use tokio::runtime::Runtime;

/// Requests of the peers that never read the answer, by address.
pub const SCHEDULER_REQUEST: &str = "GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n";
pub const AGENTS_REQUEST: &str = "GET /nothing HTTP/1.1\r\nHost: localhost\r\n\r\n";
pub const OPERATORS_REQUEST: &str = "GET /debug/snapshot HTTP/1.1\r\nHost: localhost\r\n\r\n";

/// Number of source addresses, from 127.0.1.1 on: a single source would only reach its own limit.
const SOURCES: usize = 20;
/// Interval of the checks whether a connection is still open; also the timeout of a new connection.
const POLL_INTERVAL: Duration = Duration::from_secs(1);

pub struct Attack {
    address: SocketAddr,
    request: &'static str,
    connections: usize,
    runtime: Runtime,
    tally: PeerTally,
}

#[derive(Debug, Default, Clone, Copy)]
pub struct PeerTally {
    pub opened: u64,
    /// Connections that the other side closed.
    pub closed: u64,
}

impl PeerTally {
    pub fn plus(self, other: Self) -> Self {
        Self {
            opened: self.opened + other.opened,
            closed: self.closed + other.closed,
        }
    }
}

impl Attack {
    pub fn new(address: SocketAddr, asks: &'static str, connections: usize) -> Self {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .expect("a runtime");
        Self {
            address,
            request: asks,
            connections,
            runtime,
            tally: PeerTally::default(),
        }
    }

    pub fn run(mut self, is_over: &AtomicBool) -> PeerTally {
        let mut peers: Vec<Option<TcpStream>> = (0..self.connections).map(|_| None).collect();
        while !is_over.load(Ordering::Relaxed) {
            for (number, peer) in peers.iter_mut().enumerate() {
                if peer.as_mut().is_some_and(is_closed) {
                    (self.tally.closed, *peer) = (self.tally.closed + 1, None);
                }
                if peer.is_none() {
                    *peer = self.open(number);
                }
            }
            std::thread::sleep(POLL_INTERVAL);
        }
        let closed = peers
            .iter_mut()
            .flatten()
            .filter_map(|peer| is_closed(peer).then_some(()))
            .count();
        self.tally.closed += closed as u64;
        self.tally
    }

    /// Opens a connection: a third send nothing, a third half a request, a third a request whose answer they do not read.
    fn open(&mut self, number: usize) -> Option<TcpStream> {
        let source = Ipv4Addr::new(127, 0, 1, 1 + (number % SOURCES) as u8);
        let connecting = async {
            let socket = TcpSocket::new_v4()?;
            socket.set_recv_buffer_size(4096)?;
            socket.bind((source, 0).into())?;
            tokio::time::timeout(POLL_INTERVAL, socket.connect(self.address)).await?
        };
        let mut stream = self.runtime.block_on(connecting).ok()?.into_std().ok()?;
        self.tally.opened += 1;
        let says = match number % 3 {
            0 => "",
            1 => &self.request[..self.request.len() / 2],
            _ => self.request,
        };
        // It may be closed already; the next check shows it.
        let _ = stream.write_all(says.as_bytes());
        Some(stream)
    }
}

/// Whether the other side has closed it. What it sent stays unread.
fn is_closed(stream: &mut TcpStream) -> bool {
    match stream.peek(&mut [0]) {
        Ok(0) => true,
        // Behind unread bytes only a reset can be seen.
        Ok(_) => stream.take_error().ok().flatten().is_some(),
        Err(error) => error.kind() != ErrorKind::WouldBlock,
    }
}

/// Body of an operators' page.
pub fn get_page(address: &str, path: &str) -> String {
    let mut stream = TcpStream::connect(address).expect("the operators' address answers");
    let asked = format!("GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n");
    stream
        .write_all(asked.as_bytes())
        .expect("the request is sent");
    let mut text = String::new();
    stream.read_to_string(&mut text).expect("the page");
    text
}
