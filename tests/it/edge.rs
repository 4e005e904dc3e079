//! The HTTP edge under hostile peers: connections, tokens, bodies and pages, each bounded, counted, and without harm to other
//! clients.
//!
//! Each test is named after the finding of issue 15 that it shows.

mod bodies;
mod certificates;
mod connections;
mod contact;
mod pages;
mod source;
mod tokens;
