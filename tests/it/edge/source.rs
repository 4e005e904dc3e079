//! Connections from another loopback address than 127.0.0.1: a separate source for the limits by source.

use crate::client::{Client, TEST_TIMEOUT};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use tokio::net::TcpSocket;
use tokio::runtime::Runtime;

/// Loopback has 2^24 addresses.
pub const ATTACKER: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 2);

pub struct ClientAddress {
    at: Ipv4Addr,
    runtime: Runtime,
}

impl ClientAddress {
    pub fn at(at: Ipv4Addr) -> Self {
        Self {
            at,
            runtime: tokio::runtime::Builder::new_current_thread()
                .enable_io()
                .build()
                .unwrap(),
        }
    }

    pub fn connect(&self, address: SocketAddr) -> std::io::Result<TcpStream> {
        let stream = self.runtime.block_on(async {
            let socket = TcpSocket::new_v4()?;
            socket.bind((self.at, 0).into())?;
            socket.connect(address).await?.into_std()
        })?;
        stream.set_nonblocking(false)?;
        stream.set_read_timeout(Some(TEST_TIMEOUT))?;
        Ok(stream)
    }

    pub fn client(&self, address: SocketAddr) -> Client<TcpStream> {
        Client::over(self.connect(address).unwrap())
    }
}
