//! Host ports: ports that pods use on their node's own addresses.

use serde::{Deserialize, Serialize};
use std::fmt;

/// The address that stands for every address of the node.
pub const EVERY_ADDRESS: &str = "0.0.0.0";

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct HostPort {
    pub ip: String,
    pub protocol: String,
    pub port: u32,
}

impl HostPort {
    /// Whether two pods cannot both listen: same port, same protocol, and the same address or one of them on every address.
    pub fn conflicts_with(&self, other: &Self) -> bool {
        let is_everywhere = |port: &Self| port.ip == EVERY_ADDRESS;
        self.port == other.port
            && self.protocol == other.protocol
            && (self.ip == other.ip || is_everywhere(self) || is_everywhere(other))
    }
}

impl fmt::Display for HostPort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{} on {}", self.port, self.protocol, self.ip)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn port(ip: &str, protocol: &str, port: u32) -> HostPort {
        HostPort {
            ip: ip.into(),
            protocol: protocol.into(),
            port,
        }
    }

    #[test]
    fn two_pods_share_a_host_port_only_with_different_protocols_or_addresses() {
        let everywhere = port("0.0.0.0", "TCP", 80);
        assert!(everywhere.conflicts_with(&port("10.0.0.1", "TCP", 80)));
        assert!(port("10.0.0.1", "TCP", 80).conflicts_with(&everywhere));
        assert!(port("10.0.0.1", "TCP", 80).conflicts_with(&port("10.0.0.1", "TCP", 80)));
        assert!(!port("10.0.0.1", "TCP", 80).conflicts_with(&port("10.0.0.2", "TCP", 80)));
        assert!(!everywhere.conflicts_with(&port("0.0.0.0", "UDP", 80)));
        assert!(!everywhere.conflicts_with(&port("0.0.0.0", "TCP", 81)));
    }
}
