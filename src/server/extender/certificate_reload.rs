//! Reloads certificates and client CAs when their files change: they are renewed long before they expire, and a renewal should
//! not require a restart.
//!
//! Files that cannot be loaded are not used: the last good ones stay in use, and the log and two metrics report it.

use super::tls::{self, ServerFiles, Tls, TlsError, TlsFiles};
use sha2::{Digest, Sha256};
use std::path::PathBuf;
use std::time::Duration;
use stowage_telemetry::EdgeMetrics;
use tracing::{error, info};

/// Time between two reads of the files: three small files are cheap, and a kubelet brings a renewed Secret within a minute or two.
pub const CHECK_INTERVAL: Duration = Duration::from_secs(5);

/// The certificate files of one address.
#[derive(Debug, Clone)]
pub(crate) enum CertificateFiles {
    Mutual(TlsFiles),
    Server(ServerFiles),
}

/// An address whose files are watched.
#[derive(Debug)]
pub(crate) struct CertificateReload {
    /// The address' label in metrics.
    pub address: &'static str,
    /// The option that names the certificate.
    pub flag: &'static str,
    files: CertificateFiles,
    tls: Tls,
    digest: [u8; 32],
}

impl CertificateReload {
    /// Loads the files for the first time.
    pub fn load(
        address: &'static str,
        flag: &'static str,
        files: CertificateFiles,
    ) -> Result<(Self, Tls), TlsError> {
        let digest = files.digest();
        let tls = files.load()?;
        Ok((
            Self {
                address,
                flag,
                files,
                tls: tls.clone(),
                digest,
            },
            tls,
        ))
    }

    /// Checks the files again and again. Never ends.
    pub async fn run(mut self, metrics: EdgeMetrics) {
        let mut ticks = tokio::time::interval(CHECK_INTERVAL);
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            let (files, loaded_digest) = (self.files.clone(), self.digest);
            let changed = move || {
                let digest = files.digest();
                (digest != loaded_digest).then(|| (digest, files.load()))
            };
            // A file system that hangs has a thread of its own: this one answers requests.
            if let Ok(Some((digest, loaded))) = tokio::task::spawn_blocking(changed).await {
                self.digest = digest;
                self.apply(loaded, &metrics);
            }
        }
    }

    /// Puts files that have changed into use if they are valid.
    fn apply(&self, loaded: Result<Tls, TlsError>, metrics: &EdgeMetrics) {
        let (address, flag) = (self.address, self.flag);
        let (outcome, refused) = match loaded {
            Ok(renewed) => {
                self.tls.replace(&renewed);
                info!(address, "{flag}: the renewed certificate is in force");
                ("applied", 0)
            }
            Err(error) => {
                error!(
                    address,
                    "{flag}: {error}; the previous certificate stays in use until it expires"
                );
                ("rejected", 1)
            }
        };
        metrics
            .tls_reloads
            .with_label_values(&[address, outcome])
            .inc();
        metrics
            .tls_refused
            .with_label_values(&[address])
            .set(refused);
    }
}

impl CertificateFiles {
    fn load(&self) -> Result<Tls, TlsError> {
        match self {
            Self::Mutual(files) => tls::load_mutual(files),
            Self::Server(files) => tls::load_server(files),
        }
    }

    fn paths(&self) -> Vec<&PathBuf> {
        match self {
            Self::Mutual(TlsFiles {
                cert,
                key,
                client_ca,
            }) => vec![cert, key, client_ca],
            Self::Server(ServerFiles { cert, key }) => vec![cert, key],
        }
    }

    /// A digest of the files; a file that cannot be read counts as well.
    fn digest(&self) -> [u8; 32] {
        let mut digest = Sha256::new();
        for path in self.paths() {
            match std::fs::read(path) {
                Ok(bytes) => digest.update(Sha256::digest(bytes)),
                Err(error) => digest.update(error.to_string()),
            }
        }
        digest.finalize().into()
    }
}
