//! Preemption on a large cluster: `cargo bench --bench planner`.
//!
//! The time to find victims, or that no eviction helps; and the cost of the answer beside simpler ways to one: the first node
//! where it works, and on each GPU the cheapest pods first. Each answer is checked by the ledger before it is timed. `-- copies`
//! times only the copy of the ledger that each plan begins with, `-- limits` pods under eviction limits and how long a run takes
//! while fifty thousand wait, `-- beside` filter while they do, `-- preempt` the verb, `-- large` plans and the verb at 65,000
//! nodes.

mod beside;
mod cluster;
#[path = "../common/gpu.rs"]
mod gpu;
mod limits;
mod preempt;
mod queues;
#[path = "../common/samples.rs"]
#[expect(dead_code, reason = "one thread takes these times")]
mod samples;

use cluster::FullCluster;
use samples::Samples;
use std::hint::black_box;
use std::time::Instant;
use stowage_scheduling::evicting::{
    BudgetRules, EvictionCost, PreemptionCandidate, SearchEffort, VictimSet, cheapest,
    cheapest_among, examined,
};
use stowage_scheduling::ids::{NodeName, PodUid};
use stowage_scheduling::ledger::{PotentialVictim, discharge};
use stowage_scheduling::testkit::random::Random;
use stowage_scheduling::units::{Bytes, Millis};
use stowage_scheduling::verbs::wait::{ReleaseReservation, Reserve};
use stowage_scheduling::vocabulary::demand::Demand;
use stowage_scheduling::vocabulary::placement::Reservation;

const DECISIONS: usize = 400;
const COMPARISONS: usize = 100;
/// Number of the first pending pod, beyond those of resident pods.
const FIRST_PENDING_POD: usize = 10_000_000;

/// What is timed under one name on the command line.
type BenchGroup = (&'static str, &'static [fn()]);

/// Group with a million pods, which takes gigabytes: it runs only on request.
const LARGE: BenchGroup = (
    "large",
    &[limits::time_large, queues::time_large, preempt::time_large],
);

fn main() {
    let parts: &[BenchGroup] = &[
        ("copies", &[queues::time_copies]),
        ("limits", &[limits::time_limits]),
        ("beside", &[beside::time_filter_beside_planner]),
        ("preempt", &[preempt::time_preempt]),
        (
            "plans",
            &[time_decisions, compare_prices, queues::time_plans],
        ),
    ];
    let is_asked = |name: &str| std::env::args().any(|argument| argument == name);
    let asks_for_all = !parts.iter().any(|(name, _)| is_asked(name));
    if is_asked(LARGE.0) {
        return LARGE.1.iter().for_each(|time| time());
    }
    for (_, part) in parts
        .iter()
        .filter(|(name, _)| asks_for_all || is_asked(name))
    {
        part.iter().for_each(|time| time());
    }
}

fn time_decisions() {
    // Eight pods per node: 4,000 in all, and not enough free for most pending pods.
    let mut cluster = FullCluster::new(500, 100, (40, 60), 42);
    println!(
        "{} nodes of 8 GPUs, {} residents",
        cluster.nodes.len(),
        cluster.residents
    );
    let (mut whole, mut claims, mut prospects_only, mut searches) = (
        Samples::default(),
        Samples::default(),
        Samples::default(),
        Samples::default(),
    );
    let (mut found, mut hopeless) = (0, Samples::default());
    let mut dice = Random::seeded(7, 0);
    for n in 0..DECISIONS {
        let vram = Bytes::gib(20 + dice.below(50) as u64);
        let gpus = 1 << dice.below(3);
        let uid = cluster.add_pending_pod(
            FIRST_PENDING_POD + n,
            vram.times(u64::from(gpus)),
            gpus,
            100,
        );
        let demand = cluster
            .ledger
            .ledger()
            .pod_state(&uid)
            .expect("it waits")
            .demand
            .clone();
        let start = Instant::now();
        let preemptor = cluster.ledger.ledger().preemptor(&uid);
        let claimed = start.elapsed();
        let cost_bounds = cluster.ledger.ledger().cost_bounds(&preemptor, &demand);
        let gathered = start.elapsed();
        let mut survey = cluster.ledger.ledger().survey(&preemptor, &demand);
        let set = cheapest_among(
            cost_bounds,
            &demand,
            BudgetRules::Keep,
            SearchEffort::default(),
            |node: &NodeName| examined(survey.candidate(node)?, &demand),
        );
        let took = start.elapsed();
        if let Some(set) = &set {
            assert!(can_be_reserved(&mut cluster, &uid, set), "{set:?}");
            found += 1;
        }
        whole.add(took);
        claims.add(claimed);
        prospects_only.add(gathered - claimed);
        searches.add(took - gathered);
        // No pod has a lower priority.
        let low =
            cluster.add_pending_pod(FIRST_PENDING_POD + n, vram.max(Bytes::gib(40)), 1, -1000);
        let start = Instant::now();
        assert_eq!(black_box(decide(&cluster, &low)), None);
        hopeless.add(start.elapsed());
    }
    println!("{found} of {DECISIONS} pods of 1, 2 or 4 GPUs fit");
    for (what, samples) in [
        ("who leaves, on any node", &whole),
        ("  of it: the claim", &claims),
        ("  of it: on which nodes", &prospects_only),
        ("  of it: the search", &searches),
        ("nobody can leave", &hopeless),
    ] {
        println!(
            "{what:<28}{:>10.0} µs p50{:>10.0} µs p99{:>10.0} µs most",
            samples.percentile(50),
            samples.percentile(99),
            samples.percentile(100).max(samples.percentile(99))
        );
    }
}

fn decide(cluster: &FullCluster, uid: &PodUid) -> Option<VictimSet> {
    let demand = &cluster.ledger.ledger().pod_state(uid)?.demand;
    let preemptor = cluster.ledger.ledger().preemptor(uid);
    let mut survey = cluster.ledger.ledger().survey(&preemptor, demand);
    let cost_bounds = cluster.ledger.ledger().cost_bounds(&preemptor, demand);
    cheapest_among(
        cost_bounds,
        demand,
        BudgetRules::Keep,
        SearchEffort::default(),
        |node: &NodeName| examined(survey.candidate(node)?, demand),
    )
}

fn can_be_reserved(cluster: &mut FullCluster, uid: &PodUid, set: &VictimSet) -> bool {
    let devices = &cluster
        .ledger
        .ledger()
        .node(&set.node)
        .expect("it is there")
        .devices;
    let reservation = Reservation {
        node: set.node.clone(),
        devices: set
            .gpus
            .iter()
            .map(|place| devices[place].uuid.clone())
            .collect(),
        victims: set.all_victims().into(),
        deadline: cluster.ledger.ledger().now() + Millis::seconds(60),
    };
    let is_held = cluster
        .ledger
        .apply(Reserve {
            uid: uid.clone(),
            reservation,
        })
        .is_ok();
    cluster.ledger.apply(ReleaseReservation(uid.clone()));
    is_held
}

/// Lost GPU-seconds of the same hundred pods by four ways, on 200 nodes filled to nine tenths with small jobs.
fn compare_prices() {
    let mut cluster = FullCluster::new(200, 90, (2, 30), 43);
    println!(
        "{} nodes of 8 GPUs at 90 %, {} residents",
        cluster.nodes.len(),
        cluster.residents
    );
    let mut dice = Random::seeded(8, 0);
    let (mut sums, mut inexact) = ([0u64; 4], 0);
    for n in 0..COMPARISONS {
        let vram = Bytes::gib(30 + dice.below(40) as u64);
        let uid = cluster.add_pending_pod(FIRST_PENDING_POD + n, vram, 1, 100);
        let demand = cluster
            .ledger
            .ledger()
            .pod_state(&uid)
            .expect("it waits")
            .demand
            .clone();
        let candidates = cluster
            .ledger
            .ledger()
            .candidates_for(&cluster.ledger.ledger().preemptor(&uid), &cluster.nodes);
        let ours = cheapest(
            &candidates,
            &demand,
            BudgetRules::Keep,
            SearchEffort::default(),
        );
        let Some(ours) = ours else { continue };
        let long = cheapest(
            &candidates,
            &demand,
            BudgetRules::Keep,
            SearchEffort::UNLIMITED,
        )
        .expect("one was found");
        let greedy: Vec<EvictionCost> = candidates
            .iter()
            .filter_map(|candidate| greedy(candidate, &demand))
            .collect();
        let least = |prices: &[EvictionCost]| prices.iter().min().map_or(0, |price| price.cost);
        inexact += usize::from(!ours.exact);
        assert!(long.exact && long.eviction_cost <= ours.eviction_cost);
        assert!(greedy.iter().all(|price| long.eviction_cost <= *price));
        let costs = [
            long.eviction_cost.cost,
            ours.eviction_cost.cost,
            least(&greedy),
            least(&greedy[..1.min(greedy.len())]),
        ];
        sums.iter_mut()
            .zip(costs)
            .for_each(|(sum, cost)| *sum += cost);
    }
    let names = [
        "a search without end",
        "the search",
        "cheapest first, any node",
        "cheapest first, first node",
    ];
    for (name, sum) in names.iter().zip(sums) {
        let times = sum as f64 / sums[0].max(1) as f64;
        println!(
            "{name:<28}{:>12.0} GPU-s lost{times:>10.2} ×",
            sum as f64 / 1000.0
        );
    }
    println!("{inexact} of {COMPARISONS} answers were cut short");
}

/// On the best single GPU, pods without a group are evicted, the cheapest first, until the pod fits.
fn greedy(candidate: &PreemptionCandidate, demand: &Demand) -> Option<EvictionCost> {
    let on = |gpu: usize| {
        let mut there: Vec<&PotentialVictim> = candidate
            .potential_victims
            .iter()
            .filter(|one| one.gang.is_none() && one.budgets.is_empty() && one.gpus.contains(gpu))
            .collect();
        there.sort_by_key(|one| (one.priority, one.eviction_cost.total()));
        let mut state = candidate.gpus.clone();
        let mut price = EvictionCost::default();
        for one in there {
            if state[gpu].can_take(demand) {
                break;
            }
            discharge(&mut state, one);
            price = price.plus(one);
        }
        state[gpu].can_take(demand).then_some(price)
    };
    (0..candidate.gpus.len()).filter_map(on).min()
}
