//! `stowage models [MODEL]`: asks a running service where models are, and prints the answer.
//!
//! Exit codes: 0 if the model (without one: any model) is somewhere, 1 if it is nowhere, 2 if the service cannot be reached.
//! [`table`] formats the answer. Nothing is decided here.

mod table;

use super::access::{Access, ContextAccessArgs};
use super::is_broken_pipe;
use super::operators_client::{self, OperatorsClientError, escape_query_value};
use super::output::OutputArgs;
use crate::cli::print_to_stderr;
use anyhow::{Context, Result};
use clap::Args;
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::io::Write;
use std::process::ExitCode;
use stowage_scheduling::explaining::models::{ModelList, ModelLocations};
use stowage_scheduling::ids::ModelId;

const EXIT_CODES: &str = "Exit codes: 0 if the model (without one: any model) is somewhere, 1 if it is nowhere, 2 if nothing \
                          answers or the arguments are invalid.";

#[derive(Debug, Args)]
#[command(after_help = EXIT_CODES)]
pub struct ModelsArgs {
    /// The model, such as meta-llama/Llama-3.1-8B; without it all models and in how many places each is
    #[arg(value_name = "MODEL")]
    model: Option<String>,

    #[command(flatten)]
    access: ContextAccessArgs,

    /// Entries at most, 1 to 10000
    #[arg(long, value_name = "NUMBER", value_parser = clap::value_parser!(u32).range(1..=10_000))]
    limit: Option<u32>,

    /// Entries after this one, as the end of the output before names it
    #[arg(long, value_name = "NAME")]
    after: Option<String>,

    #[command(flatten)]
    output: OutputArgs,
}

/// The service cannot be reached.
const NO_ANSWER: u8 = 2;
const NOWHERE: u8 = 1;

impl ModelsArgs {
    /// Whatever goes wrong before there is an answer is no answer: a script shall not take it for a model that is nowhere.
    pub async fn run(self) -> Result<ExitCode> {
        self.try_run().await.or_else(|error| {
            if is_broken_pipe(&error) {
                return Err(error);
            }
            print_to_stderr(format_args!("error: {error:#}"));
            Ok(NO_ANSWER.into())
        })
    }

    async fn try_run(self) -> Result<ExitCode> {
        if let Some(model) = &self.model {
            ModelId::parse(model).context("MODEL")?;
        }
        let access = self.access.read().await?;
        let printed = match &self.model {
            Some(_) => {
                let is_anywhere = |located: &ModelLocations| located.counts.is_anywhere();
                self.fetch_and_format(
                    &access,
                    "list of a model's places",
                    table::model_table,
                    is_anywhere,
                )
                .await
            }
            None => {
                let is_anywhere = |list: &ModelList| !list.models.is_empty();
                self.fetch_and_format(&access, "list of models", table::models_table, is_anywhere)
                    .await
            }
        };
        let (text, is_anywhere) = printed?;
        // The reader of the pipe, such as `head`, has read enough.
        match std::io::stdout().write_all(text.as_bytes()) {
            Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => Err(error.into()),
            _ => Ok(if is_anywhere {
                ExitCode::SUCCESS
            } else {
                NOWHERE.into()
            }),
        }
    }

    /// What to print, and whether there is any model.
    async fn fetch_and_format<T: DeserializeOwned + Serialize>(
        &self,
        access: &Access,
        what: &'static str,
        table: impl FnOnce(&T) -> String,
        is_anywhere: impl FnOnce(&T) -> bool,
    ) -> Result<(String, bool), OperatorsClientError> {
        let answer: T = operators_client::get(access, &self.request_path(), what).await?;
        let data = self
            .output
            .data(&answer)
            .expect("what was read can be written");
        let text = data.unwrap_or_else(|| table(&answer));
        Ok((text, is_anywhere(&answer)))
    }

    fn request_path(&self) -> String {
        let model = self
            .model
            .as_deref()
            .map(|model| format!("model={}", escape_query_value(model)));
        let limit = self.limit.map(|limit| format!("limit={limit}"));
        let after = self
            .after
            .as_deref()
            .map(|after| format!("after={}", escape_query_value(after)));
        let query: Vec<String> = [model, limit, after].into_iter().flatten().collect();
        if query.is_empty() {
            "/v1/models".into()
        } else {
            format!("/v1/models?{}", query.join("&"))
        }
    }
}

#[cfg(test)]
mod tests;
