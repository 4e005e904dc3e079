//! `stowage models [MODEL]`: asks a running service where models are, and prints the answer.
//!
//! Exit codes: 0 if the model (without one: any model) is somewhere, 1 if it is nowhere, 2 if the service cannot be reached.
//! [`table`] formats the answer. Nothing is decided here.

mod table;

use super::access::ContextAccessArgs;
use super::exit_without_answer;
use super::operators_client::{self, escape_query_value};
use super::output::OutputArgs;
use anyhow::{Context, Result};
use clap::Args;
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

const NOWHERE: u8 = 1;

impl ModelsArgs {
    /// Whatever goes wrong before there is an answer is no answer: a script shall not take it for a model that is nowhere.
    pub async fn run(self) -> Result<ExitCode> {
        self.try_run().await.or_else(exit_without_answer)
    }

    async fn try_run(self) -> Result<ExitCode> {
        if let Some(model) = &self.model {
            ModelId::parse(model).context("MODEL")?;
        }
        let access = self.access.read().await?;
        let path = self.request_path();
        let is_anywhere = if self.model.is_some() {
            let located: ModelLocations =
                operators_client::get(&access, &path, "list of a model's places").await?;
            self.output.print(&located, table::model_table)?;
            located.counts.is_anywhere()
        } else {
            let list: ModelList = operators_client::get(&access, &path, "list of models").await?;
            self.output.print(&list, table::models_table)?;
            !list.models.is_empty()
        };
        Ok(if is_anywhere {
            ExitCode::SUCCESS
        } else {
            NOWHERE.into()
        })
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
