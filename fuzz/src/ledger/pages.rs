//! What operators read of any state: an explanation agrees with what filter answers of the same state, the pages' sums with each
//! other, and the number of replicas with its own parts.

use super::FuzzedControlPlane;
use std::collections::BTreeSet;
use stowage_scheduling::autoscaling::{Autoscaler, EngineFigures, EngineSample, Permille, loads};
use stowage_scheduling::explaining::explanation::PodVerdict;
use stowage_scheduling::explaining::fleet::Fleet;
use stowage_scheduling::explaining::fleet::history::FleetSums;
use stowage_scheduling::explaining::fragmentation::fragmented_vram;
use stowage_scheduling::explaining::models::{self, PageRequest};
use stowage_scheduling::explaining::{ShownNodes, explain, usage};
use stowage_scheduling::ids::{ModelId, PodUid};
use stowage_scheduling::ledger::{Ledger, ObservedWaiting, PodState};
use stowage_scheduling::placing::score_cache::ScoreCache;
use stowage_scheduling::units::Bytes;
use stowage_scheduling::verbs::Cluster;
use stowage_scheduling::verbs::filter::FilterAsked;
use stowage_scheduling::verbs::request::VerbRequest;

impl FuzzedControlPlane {
    /// Checks the pages, without a change: verbs are called on a copy of the cluster.
    pub(super) fn check_pages(&self) {
        for replica in &self.replicas {
            let cluster = &replica.ledger;
            cluster
                .ledger()
                .pod_states()
                .into_iter()
                .for_each(|(uid, pod)| check_explanation(cluster, uid, pod));
            let copy = cluster.copy();
            check_sums(copy.ledger());
            check_models(copy.ledger());
            self.check_replicas(copy.ledger());
        }
    }

    /// Checks that every engine of a bound pod has a load, or is known to have none.
    fn check_replicas(&self, ledger: &Ledger) {
        let pods = ledger.pod_states().into_iter();
        let sample = |(nth, (uid, pod)): (usize, (&PodUid, &PodState))| {
            let kv_cache = Permille::from_share(nth as f64 / 10.0);
            let figures = match nth % 4 {
                0 => EngineFigures::Starting,
                1 => EngineFigures::Asleep,
                _ => EngineFigures::Serving {
                    kv_cache,
                    waiting: Some(nth as u64),
                    running: None,
                },
            };
            let node = pod.node()?.clone();
            Some(EngineSample {
                node,
                is_report_fresh: true,
                pod: uid.clone(),
                model: model(),
                figures,
            })
        };
        let samples: Vec<EngineSample> = pods.enumerate().filter_map(sample).collect();
        let loads = loads(ledger, &samples);
        let rules = &ledger.policy().autoscaling;
        let desired = Autoscaler::default().evaluate(rules, loads.clone(), self.now);
        assert_eq!(
            desired,
            Autoscaler::default().evaluate(rules, loads.clone(), self.now)
        );
        for (model, desired) in desired {
            let load = loads[&model];
            assert_eq!(
                desired.current(),
                load.replicas(),
                "{desired:?} of {load:?}"
            );
            let rules = rules.for_model(&model);
            assert!(
                (rules.min_replicas..=rules.max_replicas).contains(&desired.replicas),
                "{desired:?}"
            );
            assert!(desired.wake <= load.asleep, "{desired:?} of {load:?}");
        }
    }
}

fn model() -> ModelId {
    ModelId::parse("model").expect("a name")
}

/// Checks that the explanation of a waiting pod refuses the nodes that filter refuses.
fn check_explanation(cluster: &Cluster, uid: &PodUid, pod: &PodState) {
    let explanation =
        explain(&mut cluster.copy(), uid, &ShownNodes::All).expect("the ledger has the pod");
    let explained: BTreeSet<&str> = explanation
        .nodes
        .iter()
        .filter(|node| node.misfit.is_some())
        .map(|node| node.name.as_str())
        .collect();
    let counts = explanation.counts;
    assert_eq!(counts.fit + counts.refused, counts.nodes);
    // What has its node, or a reservation there, is shown no others that fit.
    let waits = matches!(
        explanation.verdict,
        PodVerdict::Fits | PodVerdict::DoesNotFit
    );
    if !waits || pod.reservation().is_some() {
        return;
    }
    assert_eq!(
        (counts.nodes, counts.refused),
        (explanation.nodes.len() as u32, explained.len() as u32)
    );
    let mut twin = Cluster::load(cluster.export()).expect("what was exported is sound");
    let view = twin.apply(FilterAsked(VerbRequest {
        uid: uid.clone(),
        key: pod.key.clone(),
        demand: pod.demand.clone(),
        waiting: ObservedWaiting::default(),
        disruption: None,
    }));
    let nodes = view.snapshot.nodes();
    let names = nodes.iter().map(|node| node.name.as_str());
    let list = ScoreCache::default().shortlist(
        &view.snapshot,
        &view.request.demand,
        names,
        view.attempt(),
    );
    let refused: BTreeSet<&str> = list
        .rejected
        .iter()
        .map(|(place, _)| nodes[*place].name.as_str())
        .collect();
    assert_eq!(explained, refused, "{explanation:?}");
    match explanation.verdict {
        PodVerdict::Fits => assert!(refused.len() < nodes.len()),
        PodVerdict::DoesNotFit => {
            assert!(refused.len() == nodes.len() && !explanation.remedies.is_empty())
        }
        _ => {}
    }
}

/// Checks that the page, the stored sums and the gauges agree.
fn check_sums(ledger: &Ledger) {
    let (fleet, usage) = (Fleet::from_ledger(ledger, usize::MAX), usage::usage(ledger));
    assert_eq!(
        FleetSums::from_fleet(&fleet),
        FleetSums::from_ledger(ledger)
    );
    assert_eq!(fleet.pending.len() as u64, fleet.pending_count);
    let pods: u64 = fleet
        .classes
        .iter()
        .map(|class| class.pods + class.pending)
        .sum();
    assert_eq!(pods, ledger.pod_states().len() as u64);
    for (class, of_gauges) in fleet.classes.iter().zip(&usage.classes) {
        assert!(class.name == of_gauges.name && of_gauges.bound <= class.pods);
        assert!(
            class.allocated_bytes <= of_gauges.allocated,
            "{class:?} and {of_gauges:?}"
        );
    }
    let gpus = fleet.nodes.iter().flat_map(|node| &node.gpus);
    let free: Bytes = gpus
        .map(|gpu| gpu.allocatable_bytes.minus(gpu.allocated_bytes))
        .sum();
    assert!(fragmented_vram(ledger) <= free);
}

/// Checks that pages of one entry have together what one page has.
fn check_models(ledger: &Ledger) {
    let whole = models::list_models(
        ledger,
        &PageRequest {
            limit: usize::MAX,
            after: None,
        },
    );
    let mut paged = Vec::new();
    let mut page = PageRequest {
        limit: 1,
        after: None,
    };
    loop {
        let next = models::list_models(ledger, &page);
        paged.extend(next.models);
        match next.next {
            Some(after) => page.after = Some(after),
            None => break,
        }
    }
    assert_eq!(paged, whole.models);
    for summary in paged {
        let located = models::locate(
            ledger,
            &summary.model,
            &PageRequest {
                limit: usize::MAX,
                after: None,
            },
        );
        assert_eq!(located.counts, summary.counts);
    }
}
