//! Listeners for the addresses of the command line, and which requests they answer whatever the page: none that a page of
//! another site makes a browser send.

use axum::Router;
use axum::extract::Request;
use axum::http::uri::Authority;
use axum::http::{HeaderMap, HeaderName, Method, StatusCode, header};
use axum::middleware::{Next, from_fn};
use axum::response::IntoResponse;
use std::io::{self, ErrorKind};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener};

/// A listener that does not block. `[::]` takes IPv4, too, and nothing else on a machine without IPv6.
pub fn listen(address: SocketAddr) -> io::Result<TcpListener> {
    let listener = match TcpListener::bind(address) {
        Err(error)
            if address.ip() == IpAddr::V6(Ipv6Addr::UNSPECIFIED)
                && is_address_family_error(&error) =>
        {
            TcpListener::bind((Ipv4Addr::UNSPECIFIED, address.port()))
        }
        outcome => outcome,
    }?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

const FETCH_SITE: HeaderName = HeaderName::from_static("sec-fetch-site");

/// The router with a guard against requests that another site's page makes a browser send to this address.
pub fn with_browser_guard(router: Router, at: IpAddr) -> Router {
    router.layer(from_fn(move |request: Request, next: Next| async move {
        match browser_rejection(at, request.method(), request.headers()) {
            Some(refusal) => refusal.into_response(),
            None => next.run(request).await,
        }
    }))
}

/// Loopback has no token that a browser would lack: whoever makes a name resolve to it would have its pages read by a browser on
/// this machine (DNS rebinding). No name stands for a number or for `localhost`.
fn browser_rejection(
    at: IpAddr,
    method: &Method,
    headers: &HeaderMap,
) -> Option<(StatusCode, &'static str)> {
    let text = |name: HeaderName| {
        headers
            .get(name)
            .map(|value| value.to_str().unwrap_or_default())
    };
    let host = text(header::HOST);
    if at.to_canonical().is_loopback() && host.is_some_and(|host| !is_local(host)) {
        let text = "this address is on loopback: write localhost or an IP address in place of another name\n";
        return Some((StatusCode::MISDIRECTED_REQUEST, text));
    }
    if [Method::GET, Method::HEAD].contains(method) {
        return None;
    }
    let is_other_site =
        text(FETCH_SITE).is_some_and(|site| !["same-origin", "none"].contains(&site));
    let is_of = |origin: &str| {
        origin
            .split_once("://")
            .is_some_and(|(_, from)| host == Some(from))
    };
    let is_other_origin = text(header::ORIGIN).is_some_and(|origin| !is_of(origin));
    (is_other_site || is_other_origin)
        .then_some((StatusCode::FORBIDDEN, "a page of another site asked\n"))
}

fn is_local(host: &str) -> bool {
    let Ok(authority) = host.parse::<Authority>() else {
        return false;
    };
    let name = authority
        .host()
        .trim_start_matches('[')
        .trim_end_matches(']');
    name.parse::<IpAddr>().is_ok() || name.eq_ignore_ascii_case("localhost")
}

/// Whether an error is about the address family, not about the port.
fn is_address_family_error(error: &io::Error) -> bool {
    !matches!(
        error.kind(),
        ErrorKind::AddrInUse | ErrorKind::PermissionDenied
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::http::HeaderValue;
    use std::net::TcpStream;

    fn status(at: &str, method: Method, headers: &[(HeaderName, &str)]) -> Option<u16> {
        let headers = headers
            .iter()
            .map(|(name, value)| (name.clone(), HeaderValue::from_str(value).unwrap()));
        browser_rejection(at.parse().unwrap(), &method, &headers.collect())
            .map(|(status, _)| status.as_u16())
    }

    #[test]
    fn a_name_that_was_made_to_resolve_to_loopback_reads_nothing_there() {
        let at = |at: &str, host: &str| status(at, Method::GET, &[(header::HOST, host)]);
        for host in [
            "localhost:9445",
            "LocalHost",
            "127.0.0.1:9445",
            "[::1]:1",
            "127.1.2.3",
            "10.0.0.7:80",
        ] {
            assert_eq!(at("127.0.0.1", host), None, "{host}");
        }
        for host in [
            "evil.example:9445",
            "localhost.evil.example",
            "127.0.0.1.evil.example",
            "",
            "a@b:c",
            "stowage",
        ] {
            assert_eq!(at("127.0.0.1", host), Some(421), "{host}");
            assert_eq!(at("::ffff:127.0.0.1", host), Some(421), "{host}");
            // Behind tokens or certificates any name may stand: a Service's, an ingress'.
            assert_eq!(at("10.0.0.7", host), None, "{host}");
        }
        assert_eq!(
            status("127.0.0.1", Method::GET, &[]),
            None,
            "a browser always says which host"
        );
    }

    #[test]
    fn nothing_that_acts_answers_a_page_of_another_site() {
        let own = (header::HOST, "localhost:9444");
        let post =
            |other: (HeaderName, &str)| status("127.0.0.1", Method::POST, &[own.clone(), other]);
        assert_eq!(post((FETCH_SITE, "cross-site")), Some(403));
        assert_eq!(post((FETCH_SITE, "same-site")), Some(403));
        assert_eq!(post((header::ORIGIN, "https://evil.example")), Some(403));
        assert_eq!(post((header::ORIGIN, "null")), Some(403));
        assert_eq!(
            post((header::ORIGIN, "http://localhost:8080")),
            Some(403),
            "another port is another page"
        );
        assert_eq!(post((header::ORIGIN, "http://localhost:9444")), None);
        assert_eq!(post((FETCH_SITE, "same-origin")), None);
        assert_eq!(
            status("127.0.0.1", Method::POST, std::slice::from_ref(&own)),
            None,
            "kube-scheduler is no browser"
        );
        assert_eq!(
            status("10.0.0.7", Method::POST, &[own, (FETCH_SITE, "cross-site")]),
            Some(403)
        );
    }

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
