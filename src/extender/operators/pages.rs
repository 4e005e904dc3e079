//! Contents of the large pages: rendered from a copy of the ledger and written item by item as they are read.

use crate::extender::Extender;
use crate::extender::reports::tidy;
use crate::ids::{NodeName, PodUid};
use crate::report::NodeReport;
use crate::scheduling::audit::ledger::{Violation, audit};
use crate::scheduling::ledger::{Ledger, PodState};
use crate::scheduling::placing::snapshot::Snapshot;
use crate::scheduling::policy::Digest;
use crate::units::Millis;
use serde::ser::SerializeMap;
use serde::{Serialize, Serializer};
use std::collections::BTreeMap;
use std::io::Write;

/// Every pod, every GPU, and every inconsistency.
pub fn snapshot(mut books: Ledger, out: &mut dyn Write) -> serde_json::Result<()> {
    #[derive(Serialize)]
    #[serde(rename_all = "camelCase")]
    struct Shape<'a> {
        policy: Digest,
        snapshot: &'a Snapshot,
        pods: BTreeMap<&'a PodUid, &'a PodState>,
        violations: Vec<Violation>,
    }
    let snapshot = books.snapshot();
    let shape = Shape {
        policy: books.policy().digest,
        snapshot: &snapshot,
        pods: books.pod_states(),
        violations: audit(&books),
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
    // A statement of its own, so that the lock is released with it.
    let books = extender.service.cluster().clone();
    tidy(&extender.board, &books);
    let mut names = extender.board.names();
    names.sort_unstable();
    let mut json = serde_json::Serializer::new(out);
    let mut map = json.serialize_map(None)?;
    for name in names {
        // The node may have been deleted meanwhile.
        let Some(latest) = extender.board.latest(&name) else { continue };
        let received_millis_ago = latest.age(extender.service.now());
        map.serialize_entry::<NodeName, _>(&name, &Shape { received_millis_ago, report: latest.report })?;
    }
    SerializeMap::end(map)
}
