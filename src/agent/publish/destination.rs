//! Destinations of reports: `--extender`, parsed once.
//!
//! A name is kept as it was given; the publisher resolves it again and again.

use http::Uri;
use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;

/// The default port of `stowage serve --agents`.
const DEFAULT_PORT: u16 = 9446;

/// `https://stowage-agents.kube-system.svc:9446`: a name with a replica of Stowage behind each of its addresses.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Destination {
    pub scheme: Scheme,
    /// A name or an address; one of IPv6 without its brackets.
    pub host: Box<str>,
    pub port: u16,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Scheme {
    Http,
    Https,
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{text:?} {why}; write https://HOST:PORT, such as https://stowage-agents.kube-system.svc:9446"
)]
pub struct DestinationError {
    text: String,
    why: &'static str,
}

impl FromStr for Destination {
    type Err = DestinationError;

    fn from_str(text: &str) -> Result<Self, DestinationError> {
        let error = |why| DestinationError {
            text: text.into(),
            why,
        };
        let uri: Uri = text.parse().map_err(|_| error("is no URL"))?;
        let scheme = match uri.scheme_str() {
            Some("https") => Scheme::Https,
            Some("http") => Scheme::Http,
            _ => return Err(error("begins with neither https:// nor http://")),
        };
        let authority = uri.authority().ok_or_else(|| error("has no host"))?;
        if authority.as_str().contains('@')
            || !matches!(uri.path(), "" | "/")
            || uri.query().is_some()
        {
            return Err(error("has more than a host and a port"));
        }
        let host = authority.host().trim_matches(['[', ']']);
        let port = match authority.as_str().len() - authority.host().len() {
            0 => DEFAULT_PORT,
            _ => authority
                .port_u16()
                .filter(|port| *port != 0)
                .ok_or_else(|| error("has no such port"))?,
        };
        match host {
            "" => Err(error("has no host")),
            host => Ok(Self {
                scheme,
                host: host.into(),
                port,
            }),
        }
    }
}

impl Destination {
    /// Whether the network cannot read the reports.
    pub fn is_loopback(&self) -> bool {
        &*self.host == "localhost"
            || self
                .host
                .parse()
                .is_ok_and(|address: IpAddr| address.is_loopback())
    }

    /// The URL for one report, whichever replica it goes to.
    pub fn uri(&self) -> Uri {
        format!("{self}/v1/reports")
            .parse()
            .expect("what was read as a URL is one with a path")
    }
}

impl fmt::Display for Destination {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scheme = match self.scheme {
            Scheme::Http => "http",
            Scheme::Https => "https",
        };
        match self.host.contains(':') {
            true => write!(f, "{scheme}://[{}]:{}", self.host, self.port),
            false => write!(f, "{scheme}://{}:{}", self.host, self.port),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_destination_is_a_scheme_a_host_and_a_port() {
        for (text, shown) in [
            (
                "https://stowage-agents.kube-system.svc:9446",
                "https://stowage-agents.kube-system.svc:9446",
            ),
            ("https://stowage", "https://stowage:9446"),
            ("http://127.0.0.1:80/", "http://127.0.0.1:80"),
            ("https://[fd00::1]:9446", "https://[fd00::1]:9446"),
            ("https://[fd00::1]", "https://[fd00::1]:9446"),
        ] {
            let destination: Destination = text.parse().unwrap();
            assert_eq!(destination.to_string(), shown);
            assert_eq!(destination.uri().to_string(), format!("{shown}/v1/reports"));
        }
    }

    #[test]
    fn an_invalid_destination_is_refused_with_the_reason_and_the_format() {
        for (text, why) in [
            ("stowage:9446", "neither https:// nor http://"),
            ("ftp://stowage", "neither https:// nor http://"),
            ("https://", "is no URL"),
            ("https://me@stowage", "more than a host"),
            ("https://stowage/v1/reports", "more than a host"),
            ("https://stowage?x", "more than a host"),
            ("https://stowage:0", "no such port"),
            ("https://stowage:99999", "no such port"),
            ("https://a b", "is no URL"),
        ] {
            let error = text.parse::<Destination>().unwrap_err().to_string();
            assert!(
                error.contains(why) && error.contains("such as https://"),
                "{text}: {error}"
            );
        }
    }

    #[test]
    fn only_this_machine_is_loopback() {
        let is_loopback = |text: &str| text.parse::<Destination>().unwrap().is_loopback();
        assert!(
            ["http://127.0.0.1", "http://[::1]", "http://localhost"]
                .into_iter()
                .all(is_loopback)
        );
        assert!(
            !["http://10.0.0.1", "http://localhost.example.com"]
                .into_iter()
                .any(is_loopback)
        );
    }
}
