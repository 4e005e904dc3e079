//! Connections from another loopback address than 127.0.0.1: a peer of its own, as far as limits by source go.

use crate::client::{Client, PATIENCE};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use tokio::net::TcpSocket;

/// Loopback has 2^24 addresses.
pub const ATTACKER: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 2);

pub fn connect_from(source: Ipv4Addr, address: SocketAddr) -> std::io::Result<TcpStream> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build()?;
    let stream = runtime.block_on(async {
        let socket = TcpSocket::new_v4()?;
        socket.bind((source, 0).into())?;
        socket.connect(address).await?.into_std()
    })?;
    stream.set_nonblocking(false)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    Ok(stream)
}

pub fn client_from(source: Ipv4Addr, address: SocketAddr) -> Client<TcpStream> {
    Client::over(connect_from(source, address).unwrap())
}
