//! The floor's server: the same bytes parsed into the same types, an answer of the same size, no decision.

use crate::connection::ANSWER_SIZE;
use axum::Router;
use axum::body::Body;
use axum::http::{HeaderMap, StatusCode};
use axum::response::Response;
use axum::routing::post;
use std::hint::black_box;
use stowage_server::extender::request::{RequestLimits, json, parse, read_body};
use stowage_server::extender::server::accept::{self, ServedAddress};
use stowage_server::extender::wire::{BindingArgs, ExtenderArgs};
use stowage_telemetry::Metrics;
use tokio_util::sync::CancellationToken;

/// Serves the floor until killed, on the same HTTP stack and as many threads as `stowage serve`.
pub fn serve_floor() {
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    runtime.block_on(async {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
        listener.set_nonblocking(true).expect("a socket");
        eprintln!(
            "floor: http://{}",
            listener.local_addr().expect("an address")
        );
        let router = Router::new()
            .route("/scheduler/filter", post(args))
            .route("/scheduler/prioritize", post(args))
            .route("/scheduler/bind", post(binding));
        let address = ServedAddress::plain("floor", &Metrics::new());
        accept::serve(listener, address, router, CancellationToken::new())
            .await
            .expect("it serves");
    });
}

async fn args(headers: HeaderMap, body: Body) -> Response {
    let body = read_body(&headers, body, RequestLimits::default())
        .await
        .expect("a body");
    let args: ExtenderArgs<'_> = parse(&body).expect("a request");
    black_box(&args);
    answer(&headers)
}

async fn binding(headers: HeaderMap, body: Body) -> Response {
    let body = read_body(&headers, body, RequestLimits::default())
        .await
        .expect("a body");
    let args: BindingArgs = parse(&body).expect("a request");
    black_box(&args);
    answer(&headers)
}

fn answer(headers: &HeaderMap) -> Response {
    let size = headers[ANSWER_SIZE]
        .to_str()
        .expect("text")
        .parse::<usize>()
        .expect("a size");
    json(StatusCode::OK, &"x".repeat(size.saturating_sub(2)))
}
