//! The edge under hostile peers: connections, tokens, bodies and pages, each bounded, counted, and no harm to the others.
//!
//! Each test is named after the finding of issue 15 that it shows.

mod bodies;
mod certificates;
mod connections;
mod contact;
mod pages;
mod source;
mod tokens;
