//! Policy test cases: run a policy's cases through the core that decides in production, before the policy is used.
//!
//! [`cluster`] builds the small cluster of a case, [`pod_shorthand`] builds pods from their shorthand, and here the case's pod is
//! placed and the result is compared with the expectation. [`mod@compare`] asks two policies about every pod of one cluster.
//! Pure: a case has its own clock, and no network. It changes nothing and does not know where cases are read from.

mod cluster;
mod compare;
mod pod_shorthand;
mod victims;

pub(crate) use cluster::TestClusterError;
pub use compare::{DecisionChange, NodeChange, PodDecision, PolicyComparison, compare};

use crate::file::{Expectation, PolicyTest, TestCase};
use crate::format::parse_timestamp;
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
struct CaseDecision<'a> {
    policy: &'a Policy,
    demand: Demand,
    /// In order of name.
    nodes: Vec<NodeName>,
    shortlist: Shortlist,
    /// GPUs of the best node, by index.
    gpus: Vec<u32>,
    /// In order of name.
    victims: Vec<String>,
    /// The victim set that the names in `victims` are from.
    victim_set: Option<VictimSet>,
}

/// The UID of a case's pod; no other pod has it.
const CASE_POD: &str = "the case's pod";

/// Runs all cases of a test, each on a fresh copy of its cluster.
pub fn run(policy: &Policy, test: &PolicyTest) -> Result<Vec<CaseOutcome>, TestClusterError> {
    let nothing = Default::default();
    let cluster = test.cluster.as_ref().unwrap_or(&nothing);
    let mut outcomes = Vec::new();
    for case in test.cases.iter().flatten() {
        let cluster = cluster::build(cluster, &policy_for_case(policy, case))?;
        outcomes.push(CaseOutcome {
            case: case.name.clone(),
            differences: differences(cluster, case),
        });
    }
    Ok(outcomes)
}

/// The policy at the case's time. Without one no window is open: a case holds at every hour of the day, or at none.
fn policy_for_case(policy: &Policy, case: &TestCase) -> Policy {
    let time = case.at.as_ref().and_then(|at| parse_timestamp(&at.0).ok());
    match time {
        Some(time) => policy_windows::policy_at(policy.clone(), time),
        None => policy.clone().with_open_windows(Default::default()),
    }
}

fn differences(mut cluster: Cluster, case: &TestCase) -> Vec<Difference> {
    let policy = cluster.ledger().policy().clone();
    let demand = match pod_shorthand::demand_from_shorthand(&case.pod, &policy) {
        Ok(demand) => demand,
        Err(error) => return invalid_request_difference(&case.expect, &error),
    };
    let answer = decide(&mut cluster, &policy, demand);
    let expected = &case.expect;
    let parts = [
        answer.class_difference(expected),
        answer.tenant_difference(expected),
        answer.nodes_difference(expected),
        answer.gpus_difference(expected),
    ];
    let mut differences: Vec<Difference> = parts.into_iter().flatten().collect();
    differences.extend(answer.refused_differences(expected));
    differences.extend(answer.victims_difference(expected, cluster.ledger()));
    differences
}

/// A pod with an invalid request fits nowhere; its code may be expected of every node.
fn invalid_request_difference(expected: &Expectation, error: &RequestError) -> Vec<Difference> {
    let is_expected = |code: &String| code == error.code();
    if expected
        .refused
        .as_ref()
        .is_some_and(|refused| refused.values().all(is_expected))
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

fn decide<'a>(cluster: &mut Cluster, policy: &'a Policy, demand: Demand) -> CaseDecision<'a> {
    let uid = cluster::uid_from_name(CASE_POD);
    cluster::add_pending_pod(cluster, &uid, &demand);
    let request = cluster::verb_request(uid.clone(), demand);
    let view = DecisionView::take(cluster, request);
    let (snapshot, demand) = (view.snapshot.clone(), view.request.demand.clone());
    let nodes: Vec<NodeName> = snapshot
        .nodes()
        .iter()
        .map(|node| node.name.clone())
        .collect();
    let shortlist = prioritize(&view, nodes.iter().map(NodeName::as_str));
    let gpus = shortlist.best.first().map_or_else(Vec::new, |best| {
        let devices = &snapshot.nodes()[best.node_index].devices;
        best.gpus.iter().map(|index| devices[index].index).collect()
    });
    let is_refused = shortlist.best.is_empty();
    let victim_set = is_refused
        .then(|| cheapest_victims(cluster.ledger(), &uid, &nodes, &demand))
        .flatten();
    let victims = victim_set
        .as_ref()
        .map_or_else(Vec::new, |set| victim_names(cluster.ledger(), set));
    CaseDecision {
        policy,
        demand,
        nodes,
        shortlist,
        gpus,
        victims,
        victim_set,
    }
}

/// The cheapest victim set over all nodes; of equal ones, that of the first node by name.
fn cheapest_victims(
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

fn victim_names(ledger: &Ledger, set: &VictimSet) -> Vec<String> {
    let name = |uid: &PodUid| {
        ledger
            .pod_state(uid)
            .map(|entry| entry.key.name.to_string())
    };
    let mut names: Vec<String> = set.victims.iter().filter_map(name).collect();
    names.sort_unstable();
    names
}

impl CaseDecision<'_> {
    fn class_difference(&self, expected: &Expectation) -> Option<Difference> {
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
                .unmet_condition(class, &ExpressionPod::new(&self.demand.traits))
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

    fn tenant_difference(&self, expected: &Expectation) -> Option<Difference> {
        let wanted = expected.tenant.as_ref()?.0.as_str();
        let tenant = self.demand.tenant.and_then(|id| self.policy.tenant(id));
        let found = tenant.map_or("none", |tenant| tenant.name.as_str());
        let because = vec![format!(
            "the pod's namespace is {}",
            self.demand.traits.namespace
        )];
        (found != wanted).then(|| difference("tenant", wanted, found, because))
    }

    fn nodes_difference(&self, expected: &Expectation) -> Option<Difference> {
        let wanted: Vec<&str> = expected
            .nodes
            .as_ref()?
            .iter()
            .map(|name| name.0.as_str())
            .collect();
        let found: Vec<&str> = self
            .shortlist
            .best
            .iter()
            .map(|candidate| self.nodes[candidate.query_index].as_str())
            .collect();
        let because = || {
            let refused = self.shortlist.rejected.iter();
            refused
                .map(|(index, misfit)| format!("{}: {misfit}", self.nodes[*index]))
                .collect()
        };
        (found != wanted).then(|| {
            difference(
                "nodes",
                bracketed_list(&wanted),
                bracketed_list(&found),
                because(),
            )
        })
    }

    fn gpus_difference(&self, expected: &Expectation) -> Option<Difference> {
        let wanted = expected.gpus.as_ref()?;
        (*wanted != self.gpus).then(|| {
            difference(
                "gpus",
                bracketed_list(wanted),
                bracketed_list(&self.gpus),
                Vec::new(),
            )
        })
    }

    fn refused_differences(&self, expected: &Expectation) -> Vec<Difference> {
        let refused: BTreeMap<&str, Misfit> = self
            .shortlist
            .rejected
            .iter()
            .map(|(index, misfit)| (self.nodes[*index].as_str(), *misfit))
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

    fn victims_difference(&self, expected: &Expectation, ledger: &Ledger) -> Option<Difference> {
        let mut wanted: Vec<&str> = expected
            .victims
            .as_ref()?
            .iter()
            .map(|name| name.0.as_str())
            .collect();
        wanted.sort_unstable();
        let because = || match self.shortlist.best.is_empty() {
            true => {
                victims::explain_victims(ledger, &cluster::uid_from_name(CASE_POD), self, &wanted)
            }
            false => vec!["the pod fits without anyone leaving".into()],
        };
        (self.victims != wanted).then(|| {
            difference(
                "victims",
                bracketed_list(&wanted),
                bracketed_list(&self.victims),
                because(),
            )
        })
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
fn bracketed_list<T: ToString>(names: &[T]) -> String {
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
