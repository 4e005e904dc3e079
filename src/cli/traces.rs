//! The part of `stowage serve`'s command line about OpenTelemetry: where spans go, by flags or by the variables that OpenTelemetry
//! names.

use anyhow::{Result, anyhow, bail, ensure};
use clap::Args;
use http::Uri;
use std::path::PathBuf;
use stowage_server::serve::TraceOptions;

#[derive(Debug, Args)]
#[command(next_help_heading = "Traces")]
pub struct TraceArgs {
    /// Send spans to this OTLP collector over HTTP, such as http://otel-collector.monitoring:4318, which stands for its path
    /// /v1/traces [default: OTEL_EXPORTER_OTLP_TRACES_ENDPOINT, then OTEL_EXPORTER_OTLP_ENDPOINT, else none]
    #[arg(long, value_name = "URL")]
    otlp_endpoint: Option<String>,

    /// CA certificates to trust for an https:// collector, PEM [default: OTEL_EXPORTER_OTLP_CERTIFICATE]
    #[arg(long, value_name = "FILE")]
    otlp_ca: Option<PathBuf>,
}

/// The path of a collector for traces.
const TRACES: &str = "/v1/traces";

impl TraceArgs {
    /// `None` without a collector. `variable` reads the environment.
    pub fn validate(
        self,
        instance: &str,
        variable: impl Fn(&str) -> Option<String>,
    ) -> Result<Option<TraceOptions>> {
        let set = |name: &str| {
            variable(name)
                .map(|text| text.trim().to_owned())
                .filter(|text| !text.is_empty())
        };
        let is_set_to = |name: &str, value: &str| {
            set(name).is_some_and(|text| text.eq_ignore_ascii_case(value))
        };
        let from_environment = || {
            if is_set_to("OTEL_SDK_DISABLED", "true") || is_set_to("OTEL_TRACES_EXPORTER", "none") {
                return Ok(None);
            }
            let (own, all) = (
                "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
                "OTEL_EXPORTER_OTLP_ENDPOINT",
            );
            match (set(own), set(all)) {
                // As it is: OpenTelemetry's rule for the variable of one signal.
                (Some(url), _) => endpoint(own, &url, EndpointPath::Verbatim).map(Some),
                (None, Some(url)) => endpoint(all, &url, EndpointPath::Base).map(Some),
                (None, None) => Ok(None),
            }
        };
        let endpoint = match &self.otlp_endpoint {
            Some(url) => Some(endpoint("--otlp-endpoint", url, EndpointPath::Base)?),
            None => from_environment()?,
        };
        let Some(endpoint) = endpoint else {
            return Ok(None);
        };
        let ca = self
            .otlp_ca
            .or_else(|| set("OTEL_EXPORTER_OTLP_CERTIFICATE").map(PathBuf::from));
        if endpoint.scheme_str() == Some("https") && ca.is_none() {
            bail!(
                "the OTLP collector {endpoint} has TLS, and no CA is trusted without one: give --otlp-ca FILE"
            );
        }
        Ok(Some(TraceOptions {
            endpoint,
            ca,
            instance: instance.to_owned(),
        }))
    }
}

enum EndpointPath {
    /// The URL is a base: the path for traces is added to it.
    Base,
    Verbatim,
}

fn endpoint(from: &str, url: &str, path: EndpointPath) -> Result<Uri> {
    let form = "write http://HOST:PORT or https://HOST:PORT, such as http://localhost:4318";
    let whole = match path {
        EndpointPath::Base if !url.trim_end_matches('/').ends_with(TRACES) => {
            format!("{}{TRACES}", url.trim_end_matches('/'))
        }
        _ => url.to_owned(),
    };
    let uri: Uri = whole
        .parse()
        .map_err(|error| anyhow!("{from} {url:?}: {error}; {form}"))?;
    let is_http = matches!(uri.scheme_str(), Some("http" | "https"));
    ensure!(is_http && uri.host().is_some(), "{from} {url:?}: {form}");
    Ok(uri)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(flag: Option<&str>, variables: &[(&str, &str)]) -> Result<Option<String>> {
        let args = TraceArgs {
            otlp_endpoint: flag.map(str::to_owned),
            otlp_ca: None,
        };
        let variable = |name: &str| {
            variables
                .iter()
                .find(|(variable_name, _)| *variable_name == name)
                .map(|(_, value)| (*value).to_owned())
        };
        Ok(args
            .validate("stowage-0", variable)?
            .map(|options| options.endpoint.to_string()))
    }

    #[test]
    fn the_flag_counts_for_more_than_opentelemetrys_variables() {
        let all = ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://all:4318/");
        let own = (
            "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
            "http://own:4318/custom",
        );
        let is = |flag, variables: &[_]| options(flag, variables).unwrap();
        assert_eq!(is(None, &[]), None);
        assert_eq!(is(None, &[("OTEL_EXPORTER_OTLP_ENDPOINT", " ")]), None);
        assert_eq!(is(None, &[all]).unwrap(), "http://all:4318/v1/traces");
        assert_eq!(is(None, &[all, own]).unwrap(), "http://own:4318/custom");
        assert_eq!(
            is(Some("http://flag:1"), &[all, own]).unwrap(),
            "http://flag:1/v1/traces"
        );
        assert_eq!(
            is(Some("http://flag:1/v1/traces"), &[]).unwrap(),
            "http://flag:1/v1/traces"
        );
        assert_eq!(
            is(Some("http://flag:1/otlp"), &[]).unwrap(),
            "http://flag:1/otlp/v1/traces"
        );
        for off in [
            ("OTEL_SDK_DISABLED", "true"),
            ("OTEL_TRACES_EXPORTER", "none"),
        ] {
            assert_eq!(is(None, &[all, off]), None);
            assert!(
                is(Some("http://flag:1"), &[off]).is_some(),
                "the flag was written by hand"
            );
        }
    }

    #[test]
    fn a_url_that_is_none_says_what_to_write_and_from_where_it_came() {
        for wrong in ["collector:4317", "grpc://collector:4317", "", "http://"] {
            let error = format!("{:#}", options(Some(wrong), &[]).unwrap_err());
            assert!(
                error.contains("--otlp-endpoint") && error.contains("http://HOST:PORT"),
                "{error}"
            );
        }
        let error = options(None, &[("OTEL_EXPORTER_OTLP_ENDPOINT", "collector")])
            .unwrap_err()
            .to_string();
        assert!(error.contains("OTEL_EXPORTER_OTLP_ENDPOINT"), "{error}");
        let error = options(Some("https://collector:4318"), &[])
            .unwrap_err()
            .to_string();
        assert!(error.contains("--otlp-ca"), "{error}");
    }
}
