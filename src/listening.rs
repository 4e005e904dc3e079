//! Listeners for the addresses of the command line.

use std::io::{self, ErrorKind};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener};

/// A listener that does not block. `[::]` takes IPv4, too, and nothing else on a machine without IPv6.
pub fn listen(address: SocketAddr) -> io::Result<TcpListener> {
    let listener = match TcpListener::bind(address) {
        Err(error) if address.ip() == IpAddr::V6(Ipv6Addr::UNSPECIFIED) && is_of_family(&error) => {
            TcpListener::bind((Ipv4Addr::UNSPECIFIED, address.port()))
        }
        outcome => outcome,
    }?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

/// Not of the port.
fn is_of_family(error: &io::Error) -> bool {
    !matches!(error.kind(), ErrorKind::AddrInUse | ErrorKind::PermissionDenied)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpStream;

    #[test]
    fn every_address_means_those_of_ipv4_too() {
        let listener = listen("[::]:0".parse().unwrap()).unwrap();
        let port = listener.local_addr().unwrap().port();
        assert!(TcpStream::connect((Ipv4Addr::LOCALHOST, port)).is_ok());
        if listener.local_addr().unwrap().is_ipv6() {
            assert!(TcpStream::connect((Ipv6Addr::LOCALHOST, port)).is_ok());
            let taken = listen(SocketAddr::from((Ipv6Addr::UNSPECIFIED, port))).unwrap_err();
            assert_eq!(taken.kind(), ErrorKind::AddrInUse);
        }
    }
}
