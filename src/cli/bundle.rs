//! `stowage bundle`: fetches what a running service has recorded of the last minutes, into a file for `stowage replay`.

use super::access::AccessArgs;
use super::operators_client;
use crate::policy_file::format;
use anyhow::{Context, Result, bail};
use clap::Args;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

#[derive(Debug, Args)]
pub struct BundleArgs {
    /// Where to write it; `-` is standard output
    #[arg(short = 'f', long, value_name = "FILE", default_value = "stowage.bundle")]
    file: PathBuf,

    /// How much of the past
    #[arg(long, value_name = "TIME", default_value = "15m", value_parser = minutes)]
    last: u64,

    /// The operators' address of a running `stowage serve` (--admin there)
    #[arg(long, value_name = "URL", default_value = "http://127.0.0.1:9445")]
    server: String,

    #[command(flatten)]
    access: AccessArgs,
}

impl BundleArgs {
    pub async fn run(self) -> Result<ExitCode> {
        let access = self.access.read(&self.server).await?;
        let page = format!("/v1/bundle?minutes={}", self.last);
        if self.file == Path::new("-") {
            operators_client::download(&self.server, &access, &page, &mut std::io::stdout().lock()).await?;
            return Ok(ExitCode::SUCCESS);
        }
        let unwritten = || format!("the bundle {} cannot be written", self.file.display());
        // It comes under its name when it is whole.
        let part = self.file.with_extension("part");
        let mut out = BufWriter::new(File::create(&part).with_context(unwritten)?);
        let fetched = operators_client::download(&self.server, &access, &page, &mut out).await;
        let bytes = match fetched.map_err(anyhow::Error::from).and_then(|bytes| {
            out.flush().with_context(unwritten)?;
            Ok(bytes)
        }) {
            Ok(0) => {
                let _ = std::fs::remove_file(&part);
                bail!("nothing was recorded in the last {} min: ask for more with --last", self.last);
            }
            Ok(bytes) => bytes,
            Err(error) => {
                let _ = std::fs::remove_file(&part);
                return Err(error);
            }
        };
        std::fs::rename(&part, &self.file).with_context(unwritten)?;
        let file = self.file.display();
        writeln!(std::io::stdout(), "{file}: {bytes} bytes. Decide it again with `stowage replay {file}`")?;
        Ok(ExitCode::SUCCESS)
    }
}

/// Whole minutes, rounded up.
fn minutes(text: &str) -> Result<u64, String> {
    let millis =
        format::duration(text).map_err(|malformed| format!("{}: {}", malformed.is, malformed.help))?;
    match millis.0.div_ceil(60_000) {
        minutes @ 1..=10_080 => Ok(minutes),
        _ => Err("write a duration from 1m to a week, such as 15m".into()),
    }
}
