//! What the log says of leadership.

use super::*;
use std::io::Write;
use std::panic::{AssertUnwindSafe, catch_unwind};
use stowage_scheduling::ids::{NodeName, PodUid};
use stowage_scheduling::policy::Policy;
use stowage_scheduling::verbs::binding::SettlingAsked;
use stowage_scheduling::vocabulary::placement::Placement;

#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl Write for Log {
    fn write(&mut self, text: &[u8]) -> std::io::Result<usize> {
        self.0.lock().write(text)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

impl Log {
    /// The lines of what is logged meanwhile.
    fn of(logs: impl FnOnce()) -> Vec<String> {
        let log = Self::default();
        let writer = log.clone();
        let subscriber = tracing_subscriber::fmt()
            .with_ansi(false)
            .with_writer(move || writer.clone())
            .finish();
        tracing::subscriber::with_default(subscriber, logs);
        let text = String::from_utf8(log.0.lock().clone()).unwrap();
        text.lines().map(String::from).collect()
    }
}

#[test]
fn a_replica_that_succeeds_itself_says_that_it_waits_and_not_that_it_acts() {
    let state = ServerState::with_stopped_clock(Policy::default());
    state.lead_from_the_start();
    let lines = Log::of(|| {
        let result = catch_unwind(AssertUnwindSafe(|| {
            let mut cluster = state.cluster();
            let placement = Placement::from_plugin(NodeName::parse("n").unwrap());
            cluster.apply(SettlingAsked {
                uid: PodUid::parse("x").unwrap(),
                placement,
            });
            panic!("while a Binding may land");
        }));
        assert!(result.is_err());
        // It holds its Lease all the time.
        (0..3).for_each(|_| set_tenure(&state, Tenure::without_end()));
    });
    assert!(!state.leadership.is_leading());
    let count = |text: &str| lines.iter().filter(|line| line.contains(text)).count();
    assert_eq!(
        (
            count("leads from now on"),
            count("no earlier write can take effect")
        ),
        (0, 1),
        "{lines:#?}"
    );
}

#[test]
fn each_change_of_tenure_is_logged_once() {
    let state = ServerState::with_stopped_clock(Policy::default());
    let from = state.now() + Millis::seconds(16);
    let lines = Log::of(|| {
        for tenure in [
            Tenure::AwaitingEarlierWrites { from },
            Tenure::without_end(),
            Tenure::Standby,
        ] {
            (0..2).for_each(|_| set_tenure(&state, tenure.clone()));
        }
    });
    let texts = ["seconds=16", "leads from now on", "stops acting"];
    assert_eq!(lines.len(), texts.len(), "{lines:#?}");
    lines
        .iter()
        .zip(texts)
        .for_each(|(line, text)| assert!(line.contains(text), "{line}"));
}
