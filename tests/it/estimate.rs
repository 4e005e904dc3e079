//! `stowage estimate`: its numbers against what others have published, the page that shows both, and the command as a user runs
//! it.

mod checkpoints;
mod command;
mod configs;
mod published;
