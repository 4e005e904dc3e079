//! Two replicas, either of which may believe that it leads, two agents whose files lag, and everything that may go wrong between:
//! processes that end between any two writes, writes that land late or never, clocks that jump, objects that somebody empties.
//! At every moment every agent accepts what every replica serves.

use super::change::apply_change;
use super::keys::{CaCertificate, ServingCertificate};
use super::plan::{CertificateInputs, Step, servable_certificate, step};
use super::stored::{SecretContents, read_bundle, write_bundle};
use super::{CertificateSettings, service_names};
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::{ConfigMap, Secret};
use proptest::prelude::*;
use std::collections::BTreeMap;
use std::time::Duration;

const MINUTE: u64 = 60_000;
const DELAY: u64 = 5 * MINUTE;
/// What a kubelet and an agent take at most.
const SYNC: u64 = DELAY - 1;
/// How long a replica may be cut off from the API server here. Agents trust a CA for longer than that after its last certificate
/// was replaced, by whichever clock.
const CUT_OFF: u64 = DELAY / 2;

#[derive(Debug, Clone)]
enum Happening {
    Pass(u64),
    /// A replica begins to look: it reads the Secret.
    Begin(usize),
    /// It reads the ConfigMap, serves, and sends what it decides.
    End(usize),
    /// A write that is under way lands, if it names the present version.
    Lands(usize),
    IsLost(usize),
    Crashes(usize),
    Leads(usize, bool),
    /// A replica's wall clock is off by so many minutes from now on.
    Jumps(usize, i64),
    /// An agent's file is as the ConfigMap is now.
    Syncs(usize),
    EmptySecret,
    EmptyConfigMap,
}

fn happening() -> impl Strategy<Value = Happening> {
    let replica = || 0..2_usize;
    prop_oneof![
        6 => (0..2 * MINUTE).prop_map(Happening::Pass),
        1 => (0..60 * MINUTE).prop_map(Happening::Pass),
        6 => replica().prop_map(Happening::Begin),
        8 => replica().prop_map(Happening::End),
        10 => any::<usize>().prop_map(Happening::Lands),
        1 => any::<usize>().prop_map(Happening::IsLost),
        1 => replica().prop_map(Happening::Crashes),
        2 => (replica(), any::<bool>()).prop_map(|(replica, leads)| Happening::Leads(replica, leads)),
        1 => (replica(), -600..600_i64).prop_map(|(replica, minutes)| Happening::Jumps(replica, minutes)),
        3 => replica().prop_map(Happening::Syncs),
        1 => Just(Happening::EmptySecret),
        1 => Just(Happening::EmptyConfigMap),
    ]
}

#[derive(Default)]
struct Replica {
    is_leading: bool,
    clock_ahead: i64,
    looked: u64,
    read: Option<(Secret, u64)>,
    seen: Option<([Option<String>; 2], u64)>,
    served: Option<ServingCertificate>,
}

struct Agent {
    trusted: Vec<CaCertificate>,
    synced: u64,
}

enum Write {
    Secret(Secret),
    ConfigMap(ConfigMap),
}

struct World {
    settings: CertificateSettings,
    now: u64,
    secret: Secret,
    config_map: ConfigMap,
    version: u64,
    replicas: [Replica; 2],
    agents: [Agent; 2],
    under_way: Vec<Write>,
    /// Verifying takes the time that this test has.
    verified: BTreeMap<(String, String), bool>,
}

impl World {
    fn new() -> Self {
        let minutes = |minutes| Duration::from_millis(minutes * MINUTE);
        let settings = CertificateSettings {
            dns_names: service_names("stowage-agents", "kube-system"),
            lifetime: minutes(40),
            ca_lifetime: minutes(160),
            publication_delay: Duration::from_millis(DELAY),
        };
        let mut world = Self {
            settings,
            now: 0,
            secret: Secret::default(),
            config_map: ConfigMap::default(),
            version: 0,
            replicas: Default::default(),
            agents: [0, 0].map(|synced| Agent {
                trusted: Vec::new(),
                synced,
            }),
            under_way: Vec::new(),
            verified: BTreeMap::new(),
        };
        world.replicas[0].is_leading = true;
        world.secret.metadata.resource_version = Some("a".into());
        world.config_map.metadata.resource_version = Some("b".into());
        world
    }

    fn next_version(&mut self) -> Option<String> {
        self.version += 1;
        Some(self.version.to_string())
    }

    fn happens(&mut self, happening: Happening) {
        match happening {
            Happening::Pass(time) => self.pass(time),
            Happening::Begin(replica) => {
                self.replicas[replica].read = Some((self.secret.clone(), self.now))
            }
            Happening::End(replica) => self.end(replica),
            Happening::Lands(_) | Happening::IsLost(_) if self.under_way.is_empty() => {}
            Happening::Lands(which) => {
                let write = self.under_way.remove(which % self.under_way.len());
                self.lands(write);
            }
            Happening::IsLost(which) => drop(self.under_way.remove(which % self.under_way.len())),
            // It starts again; what it had sent may still land.
            Happening::Crashes(replica) => {
                let Replica {
                    is_leading,
                    clock_ahead,
                    ..
                } = self.replicas[replica];
                self.replicas[replica] = Replica {
                    is_leading,
                    clock_ahead,
                    looked: self.now,
                    ..Replica::default()
                };
            }
            Happening::Leads(replica, leads) => self.replicas[replica].is_leading = leads,
            Happening::Jumps(replica, minutes) => {
                self.replicas[replica].clock_ahead = minutes * MINUTE as i64
            }
            Happening::Syncs(agent) => self.sync(agent),
            // Not both: then nothing says any more what agents trust.
            Happening::EmptySecret if !read_bundle(&self.config_map).is_empty() => {
                let metadata = self.secret.metadata.clone();
                self.secret = Secret {
                    metadata,
                    ..Secret::default()
                };
                self.secret.metadata.annotations = None;
                self.secret.metadata.resource_version = self.next_version();
            }
            Happening::EmptyConfigMap
                if SecretContents::read(&self.secret) != SecretContents::Empty =>
            {
                self.config_map.data = None;
                self.config_map.metadata.resource_version = self.next_version();
            }
            Happening::EmptySecret | Happening::EmptyConfigMap => {}
        }
    }

    /// Kubelets sync and replicas look in time.
    fn pass(&mut self, time: u64) {
        let until = self.now + time;
        loop {
            let due_sync = self
                .agents
                .iter()
                .map(|agent| agent.synced + SYNC)
                .min()
                .unwrap();
            let due_look = self
                .replicas
                .iter()
                .map(|replica| replica.looked + CUT_OFF)
                .min()
                .unwrap();
            self.now = until.min(due_sync).min(due_look).max(self.now);
            for agent in 0..2 {
                if self.agents[agent].synced + SYNC <= self.now {
                    self.sync(agent);
                }
            }
            for replica in 0..2 {
                if self.replicas[replica].looked + CUT_OFF <= self.now {
                    self.happens(Happening::Begin(replica));
                    self.end(replica);
                }
            }
            self.check();
            if self.now >= until {
                return;
            }
        }
    }

    /// A file without a certificate changes nothing.
    fn sync(&mut self, agent: usize) {
        let published = read_bundle(&self.config_map);
        self.agents[agent].synced = self.now;
        if !published.is_empty() {
            self.agents[agent].trusted = published;
        }
    }

    fn end(&mut self, replica: usize) {
        let Some((secret, asked)) = self.replicas[replica].read.take() else {
            return;
        };
        let (state, published) = (SecretContents::read(&secret), read_bundle(&self.config_map));
        let (one, settings) = (&mut self.replicas[replica], &self.settings);
        one.looked = self.now;
        if let Ok(Some(found)) = servable_certificate(&state, Some(&published), &settings.dns_names)
        {
            one.served = Some(found.clone());
        }
        let versions = [
            secret.metadata.resource_version.clone(),
            self.config_map.metadata.resource_version.clone(),
        ];
        let unchanged_for = match &one.seen {
            Some((seen, since)) if *seen == versions => asked.saturating_sub(*since),
            _ => {
                one.seen = Some((versions, self.now));
                0
            }
        };
        let wall = i64::try_from(self.now).unwrap() + one.clock_ahead;
        let now =
            Timestamp::from_second(2_000_000_000).unwrap() + SignedDuration::from_millis(wall);
        let look = CertificateInputs {
            secret: &state,
            published: Some(&published),
            is_leading: one.is_leading,
            now,
            unchanged_for: Duration::from_millis(unchanged_for),
        };
        match step(&look, settings) {
            Step::Nothing => {}
            Step::WriteSecret(change) => {
                let changed = apply_change(&state, &published, change, now, settings).unwrap();
                self.under_way.push(Write::Secret(changed.write(secret)));
            }
            Step::Publish => {
                let SecretContents::Managed(managed) = &state else {
                    panic!("{state:?}")
                };
                let changed = write_bundle(self.config_map.clone(), &managed.bundle());
                self.under_way.push(Write::ConfigMap(changed));
            }
        }
    }

    fn lands(&mut self, write: Write) {
        match write {
            Write::Secret(secret)
                if secret.metadata.resource_version == self.secret.metadata.resource_version =>
            {
                self.secret = secret;
                self.secret.metadata.resource_version = self.next_version();
            }
            Write::ConfigMap(map)
                if map.metadata.resource_version == self.config_map.metadata.resource_version =>
            {
                self.config_map = map;
                self.config_map.metadata.resource_version = self.next_version();
            }
            // 409
            Write::Secret(_) | Write::ConfigMap(_) => {}
        }
    }

    /// Every agent that trusts somebody accepts what every replica serves.
    fn check(&mut self) {
        for served in self
            .replicas
            .iter()
            .filter_map(|replica| replica.served.as_ref())
        {
            for agent in self.agents.iter().filter(|agent| !agent.trusted.is_empty()) {
                let trusted: String = agent.trusted.iter().map(|ca| &*ca.pem).collect();
                let accepts = self
                    .verified
                    .entry((served.chain.clone(), trusted))
                    .or_insert_with(|| {
                        served.is_trusted_by(
                            &agent.trusted.iter().collect::<Vec<_>>(),
                            &self.settings.dns_names,
                        )
                    });
                assert!(
                    *accepts,
                    "an agent refuses what is served, at {} s",
                    self.now / 1000
                );
            }
        }
    }

    /// With one leader and good clocks, everything comes to rest: served, published, and nothing due.
    fn settle(&mut self) {
        for replica in 0..2 {
            self.happens(Happening::Jumps(replica, 0));
            self.happens(Happening::Leads(replica, replica == 0));
        }
        for _ in 0..40 {
            for replica in 0..2 {
                self.happens(Happening::Begin(replica));
                self.happens(Happening::End(replica));
                while !self.under_way.is_empty() {
                    self.happens(Happening::Lands(0));
                    self.check();
                }
            }
            self.pass(MINUTE);
            self.under_way.clear();
        }
        let SecretContents::Managed(managed) = SecretContents::read(&self.secret) else {
            panic!("{:?}", SecretContents::read(&self.secret));
        };
        assert_eq!(managed.problems, [""; 0]);
        let now = Timestamp::from_second(2_000_000_000 + i64::try_from(self.now / 1000).unwrap())
            .unwrap();
        let serving = managed.serving.as_ref().unwrap();
        assert!(
            serving.not_after > now,
            "{} is over at {now}",
            serving.not_after
        );
        for replica in &self.replicas {
            assert!(replica.served.as_ref().unwrap().not_after > now);
        }
        for agent in &self.agents {
            assert!(
                agent
                    .trusted
                    .contains(&managed.signing.as_ref().unwrap().certificate)
            );
        }
    }
}

/// Which shows that the check can fail.
#[test]
#[should_panic(expected = "an agent refuses what is served")]
fn without_the_publication_delay_an_agent_would_refuse_what_is_served() {
    let mut world = World::new();
    world.settings.publication_delay = Duration::ZERO;
    for _ in 0..10 {
        world.settle();
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_agent_accepts_what_every_replica_serves_whatever_happens(
        happenings in proptest::collection::vec(happening(), 0..250),
    ) {
        let mut world = World::new();
        for happening in happenings {
            world.happens(happening);
            world.check();
        }
        world.settle();
    }
}
