//! What may be wrong with a trace of serving.

use crate::simulate::table::TableError;

/// What is wrong with a trace of serving, and the way out.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum TrafficError {
    #[error(transparent)]
    Table(#[from] TableError),
    #[error("{file} has no row whose service is {service}; it has {found}")]
    NoService {
        file: String,
        service: &'static str,
        found: String,
    },
    #[error("{file}, line {line}: service is {text:?}; write code or conv")]
    UnknownService {
        file: String,
        line: usize,
        text: String,
    },
    #[error(
        "{file}, line {line}: {column} {at} of {service} is there before, at line {first}; keep one of the two"
    )]
    Twice {
        file: String,
        line: usize,
        first: usize,
        column: &'static str,
        at: u64,
        service: &'static str,
    },
    #[error(
        "{file}: {column} {at} of {service} is missing, the first of {missing}; add the rows, or ask for gaps to be filled from the \
         rows beside them"
    )]
    Gap {
        file: String,
        column: &'static str,
        at: u64,
        missing: usize,
        service: &'static str,
    },
    #[error(
        "{file}, line {line}: offset_ms is {at}, after {before} in the row above; sort the rows of a service by time"
    )]
    Backwards {
        file: String,
        line: usize,
        at: u64,
        before: u64,
    },
    #[error(
        "{file}, line {line}: {requests} requests with {prompt} prompt and {output} output tokens; a request has at least one of each, \
         and no request has none"
    )]
    Tokens {
        file: String,
        line: usize,
        requests: f64,
        prompt: f64,
        output: f64,
    },
    #[error(
        "{file}: the requests of {service} have {tokens:.0} tokens on average; this plays services with requests, of {most} tokens at most"
    )]
    Unplayable {
        file: String,
        service: &'static str,
        tokens: f64,
        most: f64,
    },
}
