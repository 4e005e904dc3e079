//! A bare HTTP/1.1 client: what goes over the wire is what the test says, down to the chunk.
//!
//! Every answer it reads must carry `Content-Length` and must not be chunked: no test has to say so again. Pages that grow with
//! the cluster are the exception ([`Client::get_page`]).

use serde_json::Value;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

/// Longer than any answer takes on a busy machine; a test that meets it has failed.
pub const TEST_TIMEOUT: Duration = Duration::from_secs(60);
/// A port on which nothing listens: it needs a privilege, and no service has it.
pub const NOBODYS: u16 = 1;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HttpAnswer {
    pub status: u16,
    pub content_type: String,
    pub body: Vec<u8>,
}

impl HttpAnswer {
    pub fn text(&self) -> &str {
        std::str::from_utf8(&self.body).unwrap()
    }

    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|e| panic!("{e}: {}", self.text()))
    }
}

/// One connection, kept alive.
pub struct Client<S: Read + Write> {
    stream: BufReader<S>,
}

impl Client<TcpStream> {
    pub fn connect(address: SocketAddr) -> Self {
        let stream = TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(TEST_TIMEOUT)).unwrap();
        stream.set_nodelay(true).unwrap();
        Self::over(stream)
    }

    pub fn stream(&mut self) -> &mut TcpStream {
        self.stream.get_mut()
    }
}

impl<S: Read + Write> Client<S> {
    pub fn over(stream: S) -> Self {
        Self {
            stream: BufReader::new(stream),
        }
    }

    pub fn post(&mut self, path: &str, body: impl AsRef<[u8]>) -> HttpAnswer {
        self.try_post(path, body.as_ref()).unwrap()
    }

    /// With an additional header line, such as `Authorization: Bearer …`.
    pub fn post_with(&mut self, path: &str, line: &str, body: impl AsRef<[u8]>) -> HttpAnswer {
        self.try_post_with(path, line, body.as_ref()).unwrap()
    }

    pub fn try_post_with(&mut self, path: &str, line: &str, body: &[u8]) -> io::Result<HttpAnswer> {
        let length = format!("Content-Length: {}\r\n{line}", body.len());
        self.write(&[post_head(path, &length).as_bytes(), body].concat())?;
        self.read_answer()
    }

    pub fn get(&mut self, path: &str) -> HttpAnswer {
        self.write(format!("GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n").as_bytes())
            .unwrap();
        self.read_answer().unwrap()
    }

    pub fn try_get(&mut self, path: &str) -> io::Result<HttpAnswer> {
        self.write(format!("GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n").as_bytes())?;
        self.read_answer()
    }

    /// A page that may come in chunks.
    pub fn get_page(&mut self, path: &str) -> HttpAnswer {
        self.try_get_page(path).unwrap()
    }

    pub fn try_get_page(&mut self, path: &str) -> io::Result<HttpAnswer> {
        self.write(format!("GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n").as_bytes())?;
        self.read_page()
    }

    pub fn read_page(&mut self) -> io::Result<HttpAnswer> {
        self.read(true)
    }

    pub fn try_post(&mut self, path: &str, body: &[u8]) -> io::Result<HttpAnswer> {
        self.write(
            &[
                post_head(path, &format!("Content-Length: {}", body.len())).as_bytes(),
                body,
            ]
            .concat(),
        )?;
        self.read_answer()
    }

    pub fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.stream.get_mut().write_all(bytes)?;
        self.stream.get_mut().flush()
    }

    /// Whether an answer has begun to come in, without waiting longer than the stream's read timeout.
    pub fn has_answer(&mut self) -> bool {
        self.stream.fill_buf().is_ok_and(|bytes| !bytes.is_empty())
    }

    /// An interim answer: this line, and an empty one.
    pub fn skip_line_and_blank(&mut self, expected: &str) {
        for expected in [expected, ""] {
            let mut line = String::new();
            self.stream.read_line(&mut line).unwrap();
            assert_eq!(line.trim_end(), expected);
        }
    }

    pub fn read_answer(&mut self) -> io::Result<HttpAnswer> {
        self.read(false)
    }

    fn read(&mut self, may_be_chunked: bool) -> io::Result<HttpAnswer> {
        let mut answer = HttpAnswer {
            status: 0,
            content_type: String::new(),
            body: Vec::new(),
        };
        let mut length = None;
        for place in 0.. {
            let mut line = String::new();
            if self.stream.read_line(&mut line)? == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            let line = line.trim_end();
            if place == 0 {
                let status = line
                    .strip_prefix("HTTP/1.1 ")
                    .and_then(|rest| rest.get(..3)?.parse().ok());
                answer.status = status.ok_or(io::ErrorKind::InvalidData)?;
                continue;
            }
            let Some((name, value)) = line.split_once(": ") else {
                break;
            };
            match name.to_ascii_lowercase().as_str() {
                "content-length" => length = Some(value.parse().unwrap()),
                "content-type" => answer.content_type = value.into(),
                "transfer-encoding" if may_be_chunked => {}
                "transfer-encoding" => {
                    panic!("the answer is {value}: it costs the scheduler a connection")
                }
                _ => {}
            }
        }
        match length {
            Some(length) => {
                answer.body = vec![0; length];
                self.stream.read_exact(&mut answer.body)?;
            }
            None if may_be_chunked => self.read_chunks(&mut answer.body)?,
            None => panic!("every answer has a Content-Length"),
        }
        Ok(answer)
    }

    fn read_chunks(&mut self, body: &mut Vec<u8>) -> io::Result<()> {
        loop {
            let mut line = String::new();
            self.stream.read_line(&mut line)?;
            let size =
                usize::from_str_radix(line.trim(), 16).map_err(|_| io::ErrorKind::InvalidData)?;
            let mut chunk = vec![0; size + 2];
            self.stream.read_exact(&mut chunk)?;
            body.extend_from_slice(&chunk[..size]);
            if size == 0 {
                return Ok(());
            }
        }
    }
}

/// A request's head up to its body; `length` is the header that says how long that is.
pub fn post_head(path: &str, length: &str) -> String {
    format!(
        "POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n{length}\r\n\r\n"
    )
}
