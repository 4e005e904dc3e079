//! As little HTTP as a fair comparison needs: one kept-alive connection, blocking.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;

/// The request header that says how large an answer the floor's server writes.
pub const ANSWER_SIZE: &str = "x-answer-size";

pub struct KeepAliveConnection {
    stream: BufReader<TcpStream>,
}

impl KeepAliveConnection {
    pub fn connect(address: &str) -> Self {
        let stream = TcpStream::connect(address).expect("the server listens");
        stream.set_nodelay(true).expect("TCP has no delay");
        Self {
            stream: BufReader::new(stream),
        }
    }

    /// Sends what kube-scheduler sends and returns the body of a 200.
    pub fn post(&mut self, path: &str, body: &[u8], answer_size: Option<usize>) -> Vec<u8> {
        let size = answer_size
            .map(|size| format!("{ANSWER_SIZE}: {size}\r\n"))
            .unwrap_or_default();
        let mut request = format!(
            "POST {path} HTTP/1.1\r\nHost: localhost\r\nUser-Agent: Go-http-client/1.1\r\nContent-Length: {}\r\n\
             Content-Type: application/json\r\n{size}\r\n",
            body.len()
        )
        .into_bytes();
        request.extend_from_slice(body);
        self.stream
            .get_mut()
            .write_all(&request)
            .expect("the request is sent");
        let (mut length, mut line) = (0, String::new());
        self.stream.read_line(&mut line).expect("a status line");
        assert!(line.starts_with("HTTP/1.1 200"), "{line}");
        while line.trim() != "" {
            line.clear();
            self.stream.read_line(&mut line).expect("a header");
            if let Some((_, value)) = line
                .split_once(':')
                .filter(|(name, _)| name.eq_ignore_ascii_case("content-length"))
            {
                length = value.trim().parse().expect("a length");
            }
        }
        let mut answer = vec![0; length];
        self.stream.read_exact(&mut answer).expect("the answer");
        answer
    }
}
