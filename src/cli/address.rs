//! Addresses to listen on, as HOST:PORT.

use std::net::{SocketAddr, ToSocketAddrs};

/// Names are looked up; of several addresses an IPv4 one is taken, because that is what `127.0.0.1` in a configuration expects.
pub fn address(text: &str) -> Result<SocketAddr, String> {
    if let Ok(address) = text.parse() {
        return Ok(address);
    }
    let form = "write HOST:PORT, such as 127.0.0.1:9444";
    if text.parse::<u16>().is_ok() {
        return Err(format!(
            "it has no host: write HOST:PORT, such as 127.0.0.1:{text}"
        ));
    }
    if !text.contains(':') {
        return Err(format!("it has no port: {form}"));
    }
    let found = text
        .to_socket_addrs()
        .map_err(|error| format!("{error}: {form}"))?;
    let mut found: Vec<SocketAddr> = found.collect();
    found.sort_by_key(SocketAddr::is_ipv6);
    found
        .first()
        .copied()
        .ok_or_else(|| format!("the name has no address: {form}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_looked_up_and_mistakes_say_the_form() {
        assert_eq!(address("0.0.0.0:1"), Ok("0.0.0.0:1".parse().unwrap()));
        assert_eq!(address("[::1]:2").unwrap().port(), 2);
        let local = address("localhost:9444").unwrap();
        assert!(local.ip().is_loopback() && local.port() == 9444);
        assert!(address("9444").unwrap_err().starts_with("it has no host"));
        for mistake in ["9444", "127.0.0.1", "localhost:many", "::"] {
            let error = address(mistake).unwrap_err();
            assert!(error.contains("HOST:PORT"), "{mistake}: {error}");
        }
    }
}
