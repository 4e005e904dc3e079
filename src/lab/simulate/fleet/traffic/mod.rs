//! What asks a fleet's engines: traces of serving, and generated traffic for runs without a trace.
//!
//! [`minutes`] reads a day by minute, [`week`] a week by steps, [`single_requests`] a trace of single requests; [`built_in`]
//! generates a day and [`catalog`] a list of models. All of them end in a [`DayOfTraffic`]. Traces come as text: nothing here reads a file.

pub mod built_in;
pub mod catalog;
mod day;
mod error;
pub mod minutes;
pub mod single_requests;
pub mod week;

#[cfg(test)]
mod tests;
#[cfg(test)]
mod traces_tests;

/// A trace of serving comes as one text.
pub use crate::simulate::table::TraceText as TrafficText;
pub(crate) use catalog::{CatalogModel, ZipfCatalog};
pub use day::MINUTES;
pub(crate) use day::{DayOfTraffic, Minute};
pub(crate) use error::TrafficError;
pub use single_requests::TracedRequest;

use crate::simulate::table::{Column, TableRow};

/// The services of the Azure traces.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Service {
    /// It completes code: long prompts, short outputs, a quiet night.
    Code,
    /// It chats: outputs of some hundred tokens, and hardly a night.
    Conversation,
}

impl Service {
    /// As the traces call it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Code => "code",
            Self::Conversation => "conv",
        }
    }

    fn from_row(row: &TableRow<'_>, column: Column) -> Result<Self, TrafficError> {
        let all = [Self::Code, Self::Conversation];
        let (file, line, text) = (row.file, row.line, row.text(column));
        let found = all.into_iter().find(|service| service.name() == text);
        found.ok_or_else(|| TrafficError::UnknownService {
            file: file.into(),
            line,
            text: text.into(),
        })
    }
}

/// What to do about minutes that a day lacks. A gap is refused unless filling is asked for: a minute without a row
/// may be a minute without a request, or a lost one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Gaps {
    Refuse,
    /// With what lies between the rows beside the gap.
    Fill,
}

/// Tokens of a request, on average.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct RequestSize {
    pub prompt: f64,
    pub output: f64,
}

impl RequestSize {
    /// The means of Azure's code service in 2023.
    pub(crate) const CODE: Self = Self {
        prompt: 2048.0,
        output: 27.9,
    };
    /// The means of Azure's conversation service in 2023.
    pub(crate) const CONVERSATION: Self = Self {
        prompt: 1155.0,
        output: 211.0,
    };
}
