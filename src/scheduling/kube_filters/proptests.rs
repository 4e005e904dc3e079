//! The view against an oracle that keeps plain lists and reads all of them again for each verdict: after any changes, in any
//! order, both agree.

use super::node::{NodeTerm, ObjectLabels, Taint, TaintEffect, Toleration, TolerationRule};
use super::resources::AmountsByResource;
use super::resources::HostPort;
use super::*;
use crate::vocabulary::label_selector::{Requirement, Rule, Selector};
use proptest::collection::vec;
use proptest::option::{of, weighted};
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::TestRunner;

const KEYS: [&str; 3] = ["host", "zone", "disk"];
const VALUES: [&str; 4] = ["a", "b", "7", "9"];
const RESOURCES: [&str; 4] = ["cpu", "memory", "ephemeral-storage", "example.com/nic"];
const NAMESPACES: [&str; 2] = ["x", "y"];

#[derive(Debug, Clone)]
enum FilterEvent {
    Machine(FilterNode),
    MachineGone(NodeName),
    Bound(PodUid, NodeFootprint),
    Waits(PodUid, Requirements),
    Gone(PodUid),
}

#[derive(Debug, Clone)]
struct FilterCase {
    events: Vec<FilterEvent>,
    pod: PodUid,
    wants: Requirements,
    node: NodeName,
    leaving: Vec<PodUid>,
    coming: Vec<PodUid>,
}

// ---- what may happen ----

fn text(from: &'static [&'static str]) -> impl Strategy<Value = String> {
    proptest::sample::select(from).prop_map(str::to_owned)
}

fn node() -> impl Strategy<Value = NodeName> {
    text(&["n1", "n2", "n3"]).prop_map(|name| NodeName::parse(&name).unwrap())
}

fn uid() -> impl Strategy<Value = PodUid> {
    (0..8u8).prop_map(|number| PodUid::parse(&format!("pod-{number}")).unwrap())
}

fn labels() -> impl Strategy<Value = ObjectLabels> {
    proptest::collection::btree_map(text(&KEYS), text(&VALUES), 0..3)
}

fn amounts(most: u64) -> impl Strategy<Value = ResourceList> {
    vec(0..=most, RESOURCES.len()).prop_map(|amounts| {
        let named = RESOURCES
            .into_iter()
            .zip(amounts)
            .filter(|(_, amount)| *amount > 0);
        ResourceList::from_amounts(&named.collect::<AmountsByResource<'_>>())
    })
}

fn port() -> impl Strategy<Value = HostPort> {
    (
        text(&["0.0.0.0", "10.0.0.1", "10.0.0.2"]),
        text(&["TCP", "UDP"]),
        80..82u32,
    )
        .prop_map(|(ip, protocol, port)| HostPort { ip, protocol, port })
}

fn effect() -> impl Strategy<Value = TaintEffect> {
    prop_oneof![Just(TaintEffect::NoSchedule), Just(TaintEffect::NoExecute)]
}

fn taint() -> impl Strategy<Value = Taint> {
    (text(&KEYS), text(&VALUES), effect()).prop_map(|(key, value, effect)| Taint {
        key,
        value,
        effect,
    })
}

fn toleration() -> impl Strategy<Value = Toleration> {
    let rule = prop_oneof![
        Just(TolerationRule::Exists),
        text(&VALUES).prop_map(TolerationRule::Equal)
    ];
    let key = prop_oneof![4 => text(&KEYS), 1 => Just(String::new())];
    (key, rule, of(effect())).prop_map(|(key, rule, effect)| Toleration { key, rule, effect })
}

fn requirement() -> impl Strategy<Value = Requirement> {
    let set = || proptest::collection::btree_set(text(&VALUES), 1..3);
    let rule = prop_oneof![
        set().prop_map(Rule::In),
        set().prop_map(Rule::NotIn),
        Just(Rule::Exists),
        Just(Rule::DoesNotExist),
        (6..10i64).prop_map(Rule::Above),
        (6..10i64).prop_map(Rule::Below),
    ];
    (text(&KEYS), rule).prop_map(|(key, rule)| Requirement { key, rule })
}

fn term() -> impl Strategy<Value = NodeTerm> {
    let name = (node(), any::<bool>()).prop_map(|(name, is_in)| {
        let names = BTreeSet::from([name.to_string()]);
        if is_in {
            Rule::In(names)
        } else {
            Rule::NotIn(names)
        }
    });
    (vec(requirement(), 0..3), vec(name, 0..2)).prop_map(|(labels, name)| NodeTerm { labels, name })
}

fn repels() -> impl Strategy<Value = Arc<[Arc<AntiAffinity>]>> {
    let scope = prop_oneof![
        4 => proptest::collection::btree_set(text(&NAMESPACES), 1..3).prop_map(NamespaceScope::Of),
        1 => Just(NamespaceScope::Selected),
    ];
    let selector = prop_oneof![
        4 => vec(requirement(), 1..3).prop_map(Selector::All),
        1 => Just(Selector::Nothing),
    ];
    let repulsion = (scope, selector, text(&KEYS)).prop_map(|(scope, selector, topology)| {
        Arc::new(AntiAffinity {
            scope,
            selector,
            topology,
        })
    });
    vec(repulsion, 0..2).prop_map(|repels| repels.into())
}

fn few<T: std::fmt::Debug + Clone + 'static>(
    one: impl Strategy<Value = T> + 'static,
) -> impl Strategy<Value = Vec<T>> {
    prop_oneof![3 => Just(Vec::new()), 1 => vec(one, 1..3)]
}

prop_compose! {
    fn machine()(
        name in node(), labels in labels(), taints in few(taint()), allocatable in amounts(100), pods in 1..8u64,
    ) -> FilterNode {
        FilterNode { name, labels: Arc::new(labels), taints: taints.into(), allocatable, pods }
    }
}

prop_compose! {
    fn footprint()(node in node(), amounts in amounts(12), ports in few(port()), repels in repels()) -> NodeFootprint {
        NodeFootprint { node, amounts, ports: ports.into(), repels, volumes: 0, claims_devices: false }
    }
}

prop_compose! {
    fn requirements()(
        namespace in text(&NAMESPACES),
        labels in labels(),
        amounts in amounts(15),
        ports in few(port()),
        node_selector in proptest::collection::btree_map(text(&KEYS), text(&VALUES), 0..2),
        node_affinity in weighted(0.3, vec(term(), 0..3)),
        tolerations in vec(toleration(), 0..4),
        repels in repels(),
        unsupported in weighted(0.1, Just(UnsupportedRule::Volumes)),
    ) -> Requirements {
        Requirements { namespace, labels, amounts, ports, node_selector, node_affinity, tolerations, repels, claims: Arc::default(), unsupported }
    }
}

fn event() -> impl Strategy<Value = FilterEvent> {
    prop_oneof![
        4 => machine().prop_map(FilterEvent::Machine),
        1 => node().prop_map(FilterEvent::MachineGone),
        6 => (uid(), footprint()).prop_map(|(uid, footprint)| FilterEvent::Bound(uid, footprint)),
        4 => (uid(), requirements()).prop_map(|(uid, wants)| FilterEvent::Waits(uid, wants)),
        2 => uid().prop_map(FilterEvent::Gone),
    ]
}

prop_compose! {
    fn case()(
        events in vec(event(), 0..30),
        pod in uid(),
        wants in requirements(),
        node in node(),
        leaving in proptest::collection::btree_set(uid(), 0..4),
        coming in proptest::collection::btree_set(uid(), 0..3),
    ) -> FilterCase {
        let coming = coming.difference(&leaving).cloned().collect();
        FilterCase { events, pod, wants, node, leaving: leaving.into_iter().collect(), coming }
    }
}

// ---- the oracle ----

/// The whole state, in plain lists.
#[derive(Default)]
struct FilterCluster {
    machines: Vec<FilterNode>,
    bound: Vec<(PodUid, NodeFootprint)>,
    waiting: Vec<(PodUid, Requirements)>,
}

impl FilterCluster {
    fn apply(&mut self, event: &FilterEvent) {
        match event.clone() {
            FilterEvent::Machine(machine) => {
                self.machines
                    .retain(|existing| existing.name != machine.name);
                self.machines.push(machine);
            }
            FilterEvent::MachineGone(name) => {
                self.machines.retain(|existing| existing.name != name)
            }
            FilterEvent::Bound(uid, footprint) => {
                self.forget(&uid);
                self.bound.push((uid, footprint));
            }
            FilterEvent::Waits(uid, wants) => {
                self.forget(&uid);
                self.waiting.push((uid, wants));
            }
            FilterEvent::Gone(uid) => self.forget(&uid),
        }
    }

    fn forget(&mut self, uid: &PodUid) {
        self.bound.retain(|(existing, _)| existing != uid);
        self.waiting.retain(|(existing, _)| existing != uid);
    }

    fn machine(&self, name: &NodeName) -> Option<&FilterNode> {
        self.machines.iter().find(|machine| machine.name == *name)
    }

    /// Codes of all filters that refuse, and whether the verdict is unknown.
    fn classify(&self, case: &FilterCase) -> (Vec<&'static str>, bool) {
        let Some(machine) = self.machine(&case.node) else {
            return (vec!["unknown-node"], false);
        };
        let FilterCase {
            wants,
            leaving,
            coming,
            ..
        } = case;
        let is_here = |uid: &PodUid| {
            self.bound
                .iter()
                .any(|(bound_uid, pod)| bound_uid == uid && pod.node == case.node)
        };
        let here: Vec<&NodeFootprint> = (self.bound.iter())
            .filter(|(uid, pod)| pod.node == case.node && !leaving.contains(uid))
            .map(|(_, pod)| pod)
            .collect();
        let absent: Vec<&PodUid> = coming
            .iter()
            .filter(|uid| **uid != case.pod && !is_here(uid))
            .collect();
        let comers: Vec<&Requirements> = self
            .waiting
            .iter()
            .filter(|(uid, _)| absent.contains(&uid))
            .map(|(_, wants)| wants)
            .collect();

        let mut refusals = Vec::new();
        let mut refuse = |code, refuses: bool| refusals.extend(refuses.then_some(code));
        refuse(
            "tainted",
            !machine
                .taints
                .iter()
                .all(|taint| tolerates(&wants.tolerations, taint)),
        );
        refuse("not-selected", !is_selected(wants, machine));
        refuse(
            "too-many-pods",
            (here.len() + comers.len()) as u64 + 1 > machine.pods,
        );
        for resource in RESOURCES {
            let asked = i128::from(wants.amounts.get(resource));
            let has = i128::from(machine.allocatable.get(resource));
            let taken = here
                .iter()
                .map(|pod| &pod.amounts)
                .chain(comers.iter().map(|pod| &pod.amounts));
            let taken: i128 = taken.map(|amounts| i128::from(amounts.get(resource))).sum();
            refuse("insufficient-allocatable", asked > 0 && asked > has);
            refuse("insufficient-free", asked > 0 && asked > has - taken);
        }
        let mut ports = here
            .iter()
            .flat_map(|pod| pod.ports.iter())
            .chain(comers.iter().flat_map(|pod| &pod.ports));
        refuse(
            "host-port-in-use",
            ports.any(|port| wants.ports.iter().any(|other| clashes(port, other))),
        );

        let kept_away = self
            .bound
            .iter()
            .any(|(_, pod)| self.excludes(pod, wants, machine));
        let by_comer = comers
            .iter()
            .flat_map(|pod| pod.repels.iter())
            .any(|repulsion| may_exclude(repulsion, wants));
        (
            refusals,
            kept_away || by_comer || comers.len() < absent.len() || wants.unsupported.is_some(),
        )
    }

    fn excludes(&self, pod: &NodeFootprint, wants: &Requirements, machine: &FilterNode) -> bool {
        let Some(home) = self.machine(&pod.node) else {
            return false;
        };
        pod.repels.iter().any(|repulsion| {
            let (there, here) = (
                home.labels.get(&repulsion.topology),
                machine.labels.get(&repulsion.topology),
            );
            may_exclude(repulsion, wants) && there.is_some() && there == here
        })
    }
}

fn tolerates(tolerations: &[Toleration], taint: &Taint) -> bool {
    tolerations.iter().any(|toleration| {
        let right_effect = match toleration.effect {
            None => true,
            Some(effect) => effect == taint.effect,
        };
        let right_key = toleration.key == taint.key || toleration.key.is_empty();
        let right_value = match &toleration.rule {
            TolerationRule::Exists => true,
            TolerationRule::Equal(value) => value == &taint.value,
        };
        right_effect && right_key && right_value
    })
}

fn is_selected(wants: &Requirements, machine: &FilterNode) -> bool {
    for (key, value) in &wants.node_selector {
        if machine.labels.get(key) != Some(value) {
            return false;
        }
    }
    let Some(terms) = &wants.node_affinity else {
        return true;
    };
    terms.iter().any(|term| {
        let of_labels = term
            .labels
            .iter()
            .all(|asked| rule_holds(&asked.rule, machine.labels.get(&asked.key)));
        let of_name = term
            .name
            .iter()
            .all(|rule| rule_holds(rule, Some(&machine.name.to_string())));
        (term.labels.len() + term.name.len() > 0) && of_labels && of_name
    })
}

fn rule_holds(rule: &Rule, value: Option<&String>) -> bool {
    let Some(value) = value else {
        return matches!(rule, Rule::NotIn(_) | Rule::DoesNotExist);
    };
    match rule {
        Rule::In(set) => set.iter().any(|one| one == value),
        Rule::NotIn(set) => set.iter().all(|one| one != value),
        Rule::Exists => true,
        Rule::DoesNotExist => false,
        Rule::Above(bound) => value.parse::<i64>().is_ok_and(|number| number > *bound),
        Rule::Below(bound) => value.parse::<i64>().is_ok_and(|number| number < *bound),
    }
}

fn clashes(a: &HostPort, b: &HostPort) -> bool {
    let ips = [a.ip.as_str(), b.ip.as_str()];
    (a.port, &a.protocol) == (b.port, &b.protocol) && (ips[0] == ips[1] || ips.contains(&"0.0.0.0"))
}

fn may_exclude(repulsion: &AntiAffinity, pod: &Requirements) -> bool {
    let right_namespace = match &repulsion.scope {
        NamespaceScope::Of(namespaces) => namespaces
            .iter()
            .any(|namespace| *namespace == pod.namespace),
        NamespaceScope::Selected => true,
    };
    let right_labels = match &repulsion.selector {
        Selector::Nothing => false,
        Selector::All(all) => all
            .iter()
            .all(|asked| rule_holds(&asked.rule, pod.labels.get(&asked.key))),
    };
    right_namespace && right_labels
}

// ---- both ----

fn run(case: &FilterCase) -> (FilterVerdict, Vec<&'static str>, bool) {
    let (mut view, mut world) = (ClusterFilters::default(), FilterCluster::default());
    for event in &case.events {
        world.apply(event);
        match event.clone() {
            FilterEvent::Machine(machine) => view.set_node(machine),
            FilterEvent::MachineGone(name) => view.remove_node(&name),
            FilterEvent::Bound(uid, footprint) => view.set_pod(uid, footprint),
            FilterEvent::Waits(uid, wants) => view.set_pending(uid, wants),
            FilterEvent::Gone(uid) => view.remove_pod(&uid),
        }
    }
    let pods_in_view: BTreeSet<_> = view.pods().collect();
    let expected = world
        .bound
        .iter()
        .map(|(uid, _)| uid)
        .chain(world.waiting.iter().map(|(uid, _)| uid));
    assert_eq!(pods_in_view, expected.collect());
    let beside = AssumedNodeChange {
        leaving: &case.leaving,
        coming: &case.coming,
    };
    let verdict = view
        .snapshot()
        .verdict(&case.pod, &case.wants, &case.node, &beside);
    let (refusals, unsupported) = world.classify(case);
    (verdict, refusals, unsupported)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1500))]

    #[test]
    fn the_incremental_view_equals_one_built_from_all_pods(case in case()) {
        let (verdict, refusals, unsupported) = run(&case);
        match verdict {
            FilterVerdict::Accepts => prop_assert!(refusals.is_empty() && !unsupported, "{refusals:?} {unsupported}"),
            FilterVerdict::Rejects(reason) => prop_assert!(refusals.contains(&reason.code()), "{reason:?} {refusals:?}"),
            FilterVerdict::Unsupported(why) => prop_assert!(refusals.is_empty() && unsupported, "{why:?} {refusals:?}"),
        }
    }

    #[test]
    fn a_query_over_all_nodes_equals_single_node_verdicts(case in case()) {
        let mut view = ClusterFilters::default();
        for event in &case.events {
            match event.clone() {
                FilterEvent::Machine(machine) => view.set_node(machine),
                FilterEvent::Bound(uid, footprint) => view.set_pod(uid, footprint),
                _ => {}
            }
        }
        let snapshot = view.snapshot();
        let question = snapshot.query(Some(&case.pod), &case.wants);
        for name in ["n1", "n2", "n3", "n4"] {
            let node = NodeName::parse(name).unwrap();
            let beside = AssumedNodeChange { leaving: &case.leaving, coming: &case.coming };
            let alone = view.snapshot().verdict(&case.pod, &case.wants, &node, &beside);
            prop_assert_eq!(question.verdict(&node, &beside), alone);
        }
    }
}

#[test]
fn the_generated_cases_reach_every_verdict() {
    let mut runner = TestRunner::deterministic();
    let mut counts = BTreeMap::<&str, u32>::new();
    for _ in 0..1500 {
        let (verdict, ..) = run(&case().new_tree(&mut runner).unwrap().current());
        let code = match verdict {
            FilterVerdict::Accepts => "accepts",
            FilterVerdict::Rejects(reason) => reason.code(),
            FilterVerdict::Unsupported(unsupported) => unsupported.code(),
        };
        *counts.entry(code).or_default() += 1;
    }
    for code in [
        "accepts",
        "unknown-node",
        "tainted",
        "not-selected",
        "insufficient-allocatable",
        "too-many-pods",
        "insufficient-free",
        "host-port-in-use",
        "anti-affinity-of-another-pod",
        "unknown-neighbor",
        "volumes",
    ] {
        assert!(
            counts.get(code).is_some_and(|count| *count >= 3),
            "{code}: {counts:?}"
        );
    }
}
