//! One integration binary; a module per edge.

mod cluster;
