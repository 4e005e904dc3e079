//! Models on this node.

use crate::report::{EngineReport, ModelReport};

/// Who can tell which models are on the node. It may block for as long as a disk does.
pub trait ModelSource: Send {
    fn models(&mut self) -> ModelScan;
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ModelScan {
    pub models: Vec<ModelReport>,
    pub problems: Vec<String>,
}

pub fn held_by_engines(_: &[EngineReport]) -> Vec<ModelReport> {
    Vec::new()
}

pub fn merge(scanned: &[ModelReport], held: Vec<ModelReport>) -> Vec<ModelReport> {
    [scanned, &held].concat()
}
