//! As little HTTP as a fair comparison needs: one kept-alive connection here, and the floor's server.

use axum::Router;
use axum::body::Body;
use axum::http::{HeaderMap, StatusCode};
use axum::response::Response;
use axum::routing::post;
use std::hint::black_box;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use stowage::extender::request::{Limits, json, parse, read_body};
use stowage::extender::wire::{BindingArgs, ExtenderArgs};

/// Tells the floor how large an answer to write.
const ANSWER_SIZE: &str = "x-answer-size";

pub struct Connection {
    stream: BufReader<TcpStream>,
}

impl Connection {
    pub fn to(address: &str) -> Self {
        let stream = TcpStream::connect(address).expect("the server listens");
        stream.set_nodelay(true).expect("TCP has no delay");
        Self { stream: BufReader::new(stream) }
    }

    /// Sends what kube-scheduler sends and returns the body of a 200.
    pub fn post(&mut self, path: &str, body: &[u8], answer_size: Option<usize>) -> Vec<u8> {
        let size = answer_size.map(|size| format!("{ANSWER_SIZE}: {size}\r\n")).unwrap_or_default();
        let mut request = format!(
            "POST {path} HTTP/1.1\r\nHost: stowage\r\nUser-Agent: Go-http-client/1.1\r\nContent-Length: {}\r\n\
             Content-Type: application/json\r\n{size}\r\n",
            body.len()
        )
        .into_bytes();
        request.extend_from_slice(body);
        self.stream.get_mut().write_all(&request).expect("the request is sent");
        let (mut length, mut line) = (0, String::new());
        self.stream.read_line(&mut line).expect("a status line");
        assert!(line.starts_with("HTTP/1.1 200"), "{line}");
        while line.trim() != "" {
            line.clear();
            self.stream.read_line(&mut line).expect("a header");
            if let Some((_, value)) =
                line.split_once(':').filter(|(name, _)| name.eq_ignore_ascii_case("content-length"))
            {
                length = value.trim().parse().expect("a length");
            }
        }
        let mut answer = vec![0; length];
        self.stream.read_exact(&mut answer).expect("the answer");
        answer
    }
}

/// Serves the floor until killed, on the same HTTP stack and as many threads as `stowage serve`.
pub fn serve_floor() {
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    runtime.block_on(async {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
        listener.set_nonblocking(true).expect("a socket");
        eprintln!("floor: http://{}", listener.local_addr().expect("an address"));
        let router = Router::new()
            .route("/scheduler/filter", post(args))
            .route("/scheduler/prioritize", post(args))
            .route("/scheduler/bind", post(binding));
        axum_server::from_tcp(listener)
            .expect("a socket")
            .serve(router.into_make_service())
            .await
            .expect("it serves");
    });
}

async fn args(headers: HeaderMap, body: Body) -> Response {
    let body = read_body(&headers, body, Limits::default()).await.expect("a body");
    let args: ExtenderArgs<'_> = parse(&body).expect("a request");
    black_box(&args);
    answer(&headers)
}

async fn binding(headers: HeaderMap, body: Body) -> Response {
    let body = read_body(&headers, body, Limits::default()).await.expect("a body");
    let args: BindingArgs = parse(&body).expect("a request");
    black_box(&args);
    answer(&headers)
}

fn answer(headers: &HeaderMap) -> Response {
    let size = headers[ANSWER_SIZE].to_str().expect("text").parse::<usize>().expect("a size");
    json(StatusCode::OK, &"x".repeat(size.saturating_sub(2)))
}
