//! Contents of the large pages: rendered from a copy of the ledger and written item by item as they are read.

use crate::extender::Extender;
use crate::extender::reports::remove_gone_nodes;
use serde::ser::SerializeMap;
use serde::{Serialize, Serializer};
use std::collections::BTreeMap;
use std::io::{self, Write};
use stowage_report::NodeReport;
use stowage_scheduling::audit::ledger::{Violation, audit};
use stowage_scheduling::explaining::fragmentation::fragmented_vram;
use stowage_scheduling::explaining::usage;
use stowage_scheduling::ids::{NodeName, PodUid};
use stowage_scheduling::ledger::{Ledger, PodState};
use stowage_scheduling::placing::snapshot::Snapshot;
use stowage_scheduling::policy::Digest;
use stowage_scheduling::units::Millis;
use stowage_telemetry::UsageSample;
use stowage_telemetry::scrape::Scrape;

/// Every pod, every GPU, and every inconsistency.
pub fn snapshot(mut ledger: Ledger, out: &mut dyn Write) -> serde_json::Result<()> {
    #[derive(Serialize)]
    #[serde(rename_all = "camelCase")]
    struct Shape<'a> {
        policy: Digest,
        snapshot: &'a Snapshot,
        pods: BTreeMap<&'a PodUid, &'a PodState>,
        violations: Vec<Violation>,
    }
    let snapshot = ledger.snapshot();
    let shape = Shape {
        policy: ledger.policy().digest,
        snapshot: &snapshot,
        pods: ledger.pod_states(),
        violations: audit(&ledger),
    };
    serde_json::to_writer(out, &shape)
}

/// Each node's latest report and its age. One report at a time is parsed from its text.
pub fn reports(extender: &Extender, out: &mut dyn Write) -> serde_json::Result<()> {
    #[derive(Serialize)]
    #[serde(rename_all = "camelCase")]
    struct Shape {
        received_millis_ago: Millis,
        report: NodeReport,
    }
    let ledger = extender.state.ledger_copy();
    remove_gone_nodes(&extender.board, &ledger);
    let mut names = extender.board.names();
    names.sort_unstable();
    let mut json = serde_json::Serializer::new(out);
    let mut map = json.serialize_map(None)?;
    for name in names {
        // The node may have been deleted meanwhile.
        let Some(latest) = extender.board.latest(&name) else {
            continue;
        };
        let received_millis_ago = latest.age(extender.state.now());
        map.serialize_entry::<NodeName, _>(
            &name,
            &Shape {
                received_millis_ago,
                report: latest.report,
            },
        )?;
    }
    SerializeMap::end(map)
}

/// All metrics, with sums over a copy of the ledger.
pub fn metrics(extender: &Extender, out: &mut dyn Write) -> io::Result<()> {
    let ledger = extender.state.ledger_copy();
    write_metrics(extender, &ledger, out)
}

/// The ledger is not locked here.
pub(super) fn write_metrics(
    extender: &Extender,
    ledger: &Ledger,
    out: &mut dyn Write,
) -> io::Result<()> {
    let state = &extender.state;
    let (now, metrics) = (state.now(), &state.metrics);
    // A node that is gone would stay the oldest forever.
    remove_gone_nodes(&extender.board, ledger);
    metrics.leading.set(state.leadership.is_leading().into());
    metrics.synced.set(
        (state.leadership.is_synced() && state.api_server_contact.unreachable_for(now).is_none())
            .into(),
    );
    metrics.last_contact_age.set(
        state
            .api_server_contact
            .silence(now)
            .map_or(0.0, |silence| silence.0 as f64 / 1e3),
    );
    for class in ledger.policy().classes() {
        // A rate needs to see the count before its first rise.
        metrics.placement_seconds.with_label_values(&[&class.name]);
    }
    let mut scrape = Scrape::new(out);
    scrape.write_registered(metrics.families())?;
    let sample = UsageSample {
        totals: ledger.totals(),
        usage: usage::usage(ledger),
        fragmented: fragmented_vram(ledger),
        spare: ledger.spare_status().collect(),
    };
    metrics.usage.write(&mut scrape, &sample)?;
    metrics.starts.write(&mut scrape, &ledger.start_errors())?;
    metrics.overuse.write(
        &mut scrape,
        ledger
            .overusing_pods()
            .map(|(key, overuse)| (key, overuse.excess())),
    )?;
    let stale_after = ledger.policy().telemetry.stale;
    metrics
        .models
        .write(&mut scrape, &extender.board.engines(now, stale_after))?;
    metrics.devices.write(
        &mut scrape,
        ledger,
        &extender.board.ages(now),
        extender.gpu_series,
    )
}
