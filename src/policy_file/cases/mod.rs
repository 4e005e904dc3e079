//! Policy test cases: run a policy's cases through the core that decides in production, before the policy is used.
//!
//! [`cluster`] builds the small cluster of a case, [`pod_shorthand`] builds pods from their shorthand, and here the case's pod is
//! placed and the result is compared with the expectation. [`mod@compare`] asks two policies about every pod of one cluster.
//! Pure: a case has its own clock, and no network. It changes nothing and does not know where cases are read from.

mod cluster;
mod compare;
mod pod_shorthand;
mod victims;

pub(crate) use cluster::BadCluster;
pub use compare::{DecisionChange, NodeChange, PodDecision, PolicyComparison, compare};

use crate::file::{Expectation, PolicyTest, TestCase};
use crate::format::timestamp;
use crate::windows as policy_windows;
use serde::Serialize;
use std::collections::BTreeMap;
use stowage_scheduling::evicting;
use stowage_scheduling::evicting::{BudgetRules, SearchEffort, VictimSet};
use stowage_scheduling::ids::{NodeName, PodUid};
use stowage_scheduling::ledger::Ledger;
use stowage_scheduling::placing::fit::Misfit;
use stowage_scheduling::placing::rank::Shortlist;
use stowage_scheduling::policy::{ExpressionPod, Policy};
use stowage_scheduling::verbs::Cluster;
use stowage_scheduling::verbs::prioritize::prioritize;
use stowage_scheduling::verbs::request::DecisionView;
use stowage_scheduling::vocabulary::demand::{Demand, RequestError};

/// The result of one case.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct CaseOutcome {
    pub case: String,
    /// Unmet expectations; empty if the case passes.
    pub differences: Vec<Difference>,
}

/// One unmet expectation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Difference {
    pub what: &'static str,
    pub expected: String,
    pub found: String,
    /// Why, with figures; may be empty.
    pub because: Vec<String>,
}

/// The core's decision for a case's pod.
struct CaseAnswer<'a> {
    policy: &'a Policy,
    demand: Demand,
    /// In order of name.
    nodes: Vec<NodeName>,
    list: Shortlist,
    /// GPUs of the best node, by index.
    gpus: Vec<u32>,
    /// In order of name.
    victims: Vec<String>,
    /// The victim set that the names in `victims` are from.
    victim_set: Option<VictimSet>,
}

/// The UID of a case's pod; no other pod has it.
const CASE: &str = "the case's pod";

/// Runs all cases of a test, each on a fresh copy of its cluster.
pub fn run(policy: &Policy, test: &PolicyTest) -> Result<Vec<CaseOutcome>, BadCluster> {
    let nothing = Default::default();
    let cluster = test.cluster.as_ref().unwrap_or(&nothing);
    let mut outcomes = Vec::new();
    for case in test.cases.iter().flatten() {
        let ledger = cluster::build(cluster, &at(policy, case))?;
        outcomes.push(CaseOutcome {
            case: case.name.clone(),
            differences: differences(ledger, case),
        });
    }
    Ok(outcomes)
}

/// The policy at the case's time. Without one no window is open: a case holds at every hour of the day, or at none.
fn at(policy: &Policy, case: &TestCase) -> Policy {
    let time = case.at.as_ref().and_then(|at| timestamp(&at.0).ok());
    match time {
        Some(time) => policy_windows::at(policy.clone(), time),
        None => policy.clone().with_open_windows(Default::default()),
    }
}

fn differences(mut ledger: Cluster, case: &TestCase) -> Vec<Difference> {
    let policy = ledger.ledger().policy().clone();
    let demand = match pod_shorthand::demand(&case.pod, &policy) {
        Ok(demand) => demand,
        Err(error) => return not_understood(&case.expect, &error),
    };
    let answer = ask(&mut ledger, &policy, demand);
    let expected = &case.expect;
    let parts = [
        answer.class(expected),
        answer.tenant(expected),
        answer.nodes(expected),
        answer.gpus(expected),
    ];
    let mut differences: Vec<Difference> = parts.into_iter().flatten().collect();
    differences.extend(answer.refused(expected));
    differences.extend(answer.victims(expected, ledger.ledger()));
    differences
}

/// A pod with an invalid request fits nowhere; its code may be expected of every node.
fn not_understood(expected: &Expectation, error: &RequestError) -> Vec<Difference> {
    let meant = |code: &String| code == error.code();
    if expected
        .refused
        .as_ref()
        .is_some_and(|refused| refused.values().all(meant))
    {
        return Vec::new();
    }
    vec![Difference {
        what: "pod",
        expected: "one that can be understood".into(),
        found: error.code().into(),
        because: vec![error.to_string()],
    }]
}

fn ask<'a>(ledger: &mut Cluster, policy: &'a Policy, demand: Demand) -> CaseAnswer<'a> {
    let uid = cluster::uid(CASE);
    cluster::wait(ledger, &uid, &demand);
    let request = cluster::request(uid.clone(), demand);
    let view = DecisionView::take(ledger, request);
    let (snapshot, demand) = (view.snapshot.clone(), view.request.demand.clone());
    let nodes: Vec<NodeName> = snapshot
        .nodes()
        .iter()
        .map(|node| node.name.clone())
        .collect();
    let list = prioritize(&view, nodes.iter().map(NodeName::as_str));
    let gpus = list.best.first().map_or_else(Vec::new, |best| {
        let devices = &snapshot.nodes()[best.node].devices;
        best.gpus.iter().map(|place| devices[place].index).collect()
    });
    let is_refused = list.best.is_empty();
    let victim_set = is_refused
        .then(|| cheapest(ledger.ledger(), &uid, &nodes, &demand))
        .flatten();
    let victims = victim_set
        .as_ref()
        .map_or_else(Vec::new, |set| names(ledger.ledger(), set));
    CaseAnswer {
        policy,
        demand,
        nodes,
        list,
        gpus,
        victims,
        victim_set,
    }
}

/// The cheapest victim set over all nodes; of equal ones, that of the first node by name.
fn cheapest(
    ledger: &Ledger,
    uid: &PodUid,
    nodes: &[NodeName],
    demand: &Demand,
) -> Option<VictimSet> {
    let candidates = ledger.candidates_for(&ledger.preemptor(uid), nodes);
    evicting::cheapest(
        &candidates,
        demand,
        BudgetRules::Keep,
        SearchEffort::default(),
    )
}

fn names(ledger: &Ledger, set: &VictimSet) -> Vec<String> {
    let name = |uid: &PodUid| {
        ledger
            .pod_state(uid)
            .map(|entry| entry.key.name.to_string())
    };
    let mut names: Vec<String> = set.victims.iter().filter_map(name).collect();
    names.sort_unstable();
    names
}

impl CaseAnswer<'_> {
    fn class(&self, expected: &Expectation) -> Option<Difference> {
        let wanted = expected.class.as_ref()?.0.as_str();
        let found = &self.policy.class(self.demand.class).name;
        let because = || {
            let class = self.policy.class_named(wanted);
            let Some(class) = class else {
                return vec![format!("the policy has no class {wanted}")];
            };
            let is_closed = self.policy.is_closed(class);
            match self
                .policy
                .unmet_by(class, &ExpressionPod::new(&self.demand.traits))
            {
                Some(unmet) => vec![format!("{wanted} does not match: {}", unmet.describe())],
                None if is_closed => {
                    vec![format!("no window of {wanted} is open at the case's `at`")]
                }
                None => vec![format!("{found} stands before {wanted} and matches too")],
            }
        };
        (found != wanted).then(|| difference("class", wanted, found, because()))
    }

    fn tenant(&self, expected: &Expectation) -> Option<Difference> {
        let wanted = expected.tenant.as_ref()?.0.as_str();
        let tenant = self.demand.tenant.and_then(|id| self.policy.tenant(id));
        let found = tenant.map_or("none", |tenant| tenant.name.as_str());
        let because = vec![format!(
            "the pod's namespace is {}",
            self.demand.traits.namespace
        )];
        (found != wanted).then(|| difference("tenant", wanted, found, because))
    }

    fn nodes(&self, expected: &Expectation) -> Option<Difference> {
        let wanted: Vec<&str> = expected
            .nodes
            .as_ref()?
            .iter()
            .map(|name| name.0.as_str())
            .collect();
        let found: Vec<&str> = self
            .list
            .best
            .iter()
            .map(|candidate| self.nodes[candidate.asked].as_str())
            .collect();
        let because = || {
            let refused = self.list.refused.iter();
            refused
                .map(|(place, misfit)| format!("{}: {misfit}", self.nodes[*place]))
                .collect()
        };
        (found != wanted).then(|| difference("nodes", listed(&wanted), listed(&found), because()))
    }

    fn gpus(&self, expected: &Expectation) -> Option<Difference> {
        let wanted = expected.gpus.as_ref()?;
        (*wanted != self.gpus)
            .then(|| difference("gpus", listed(wanted), listed(&self.gpus), Vec::new()))
    }

    fn refused(&self, expected: &Expectation) -> Vec<Difference> {
        let refused: BTreeMap<&str, Misfit> = self
            .list
            .refused
            .iter()
            .map(|(place, misfit)| (self.nodes[*place].as_str(), *misfit))
            .collect();
        let check = |(node, code): (&String, &String)| {
            let misfit = refused.get(node.as_str());
            let found = match misfit {
                Some(misfit) => misfit.code(),
                None if self.nodes.iter().any(|name| name.as_str() == node) => "it fits",
                None => "no such node",
            };
            let because = misfit.iter().map(|misfit| misfit.to_string()).collect();
            let (wanted, found) = (format!("{node}: {code}"), format!("{node}: {found}"));
            (wanted != found).then(|| difference("refused", wanted, found, because))
        };
        expected
            .refused
            .iter()
            .flatten()
            .filter_map(check)
            .collect()
    }

    fn victims(&self, expected: &Expectation, ledger: &Ledger) -> Option<Difference> {
        let mut wanted: Vec<&str> = expected
            .victims
            .as_ref()?
            .iter()
            .map(|name| name.0.as_str())
            .collect();
        wanted.sort_unstable();
        let because = || match self.list.best.is_empty() {
            true => victims::reasons(ledger, &cluster::uid(CASE), self, &wanted),
            false => vec!["the pod fits without anyone leaving".into()],
        };
        (self.victims != wanted)
            .then(|| difference("victims", listed(&wanted), listed(&self.victims), because()))
    }
}

fn difference(
    what: &'static str,
    expected: impl ToString,
    found: impl ToString,
    because: Vec<String>,
) -> Difference {
    Difference {
        what,
        expected: expected.to_string(),
        found: found.to_string(),
        because,
    }
}

/// `[a, b]`; `[]` for none.
fn listed<T: ToString>(names: &[T]) -> String {
    format!(
        "[{}]",
        names
            .iter()
            .map(T::to_string)
            .collect::<Vec<_>>()
            .join(", ")
    )
}

#[cfg(test)]
mod tests;
