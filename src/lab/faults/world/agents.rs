//! The nodes' agents: each reports its machine to every replica about once a second, and may be dead, late, or wrong.

use super::super::machines::TOTAL;
use super::*;
use axum::body::Body;
use http::{Request, header};
use tower::ServiceExt;

/// The audience of agents' tokens.
pub const AUDIENCE: &str = "stowage.dev/reports";
/// How long a Node is so young that a report may be of an earlier machine, whatever a replica's clock is off by.
const DOUBTED: Duration = Duration::from_secs(200);
/// How often an agent reports.
const EVERY: Duration = Duration::from_secs(1);

/// One node's agent.
pub(crate) struct NodeAgent {
    node: usize,
    dice: Random,
    /// Its pod's token, which names the Node object that there was when its first report was due.
    token: Option<String>,
    boots: u64,
    sequence: u64,
    reports_at: Duration,
    /// What is wrong with it, until when.
    trouble: Option<(FaultKind, Duration)>,
    sound_since: Duration,
    /// The GPU that is missing, of a lost one.
    missing: usize,
    /// Figures that it repeats.
    stale: Option<Value>,
    /// It is down at present, of one that flaps.
    is_down: bool,
}

impl NodeAgent {
    pub fn new(node: usize, seed: u64) -> Self {
        Self {
            node,
            dice: Random::seeded(seed, 1000 * purpose::AGENTS + node as u64),
            token: None,
            boots: 1,
            sequence: 0,
            reports_at: Duration::ZERO,
            trouble: None,
            sound_since: Duration::ZERO,
            missing: 0,
            stale: None,
            is_down: false,
        }
    }

    /// Whether it has reported what is true, and in time, since then.
    pub(crate) fn is_sound_since(&self, then: Duration) -> bool {
        self.trouble.is_none() && self.sound_since <= then
    }

    fn has(&self, kind: FaultKind) -> bool {
        self.trouble.is_some_and(|(trouble, _)| trouble == kind)
    }

    /// Whether it runs at present.
    fn is_dead(&self) -> bool {
        self.has(FaultKind::DeadAgent) || self.is_down
    }

    /// When a report reaches a replica, from now on: once, not at all, or twice.
    fn arrivals(&mut self) -> Vec<Duration> {
        let mut late = |least, most| {
            between(
                &mut self.dice,
                Duration::from_millis(least),
                Duration::from_millis(most),
            )
        };
        match self.trouble {
            Some((FaultKind::LateAgent, _)) => vec![late(1000, 9000)],
            Some((FaultKind::LostReport, _)) => match late(0, 3).as_millis() {
                0 => vec![],
                1 => vec![Duration::ZERO, late(500, 6000)],
                2 => vec![late(500, 3000)],
                _ => vec![Duration::ZERO],
            },
            _ => vec![Duration::ZERO],
        }
    }

    /// One that flaps ends, or begins a new boot.
    fn flap(&mut self) {
        if self.has(FaultKind::FlappingAgent) && self.dice.below(4) == 0 {
            self.is_down = !self.is_down;
            if !self.is_down {
                self.boot();
            }
        }
    }

    fn boot(&mut self) {
        self.boots += 1;
        self.sequence = 0;
    }

    /// The GPUs and processes that it reads on its machine.
    fn gpus(&self, machines: &Machines) -> Value {
        let node = node_name(self.node);
        let gpu = |index: usize| {
            let process = |(pod, process): (&String, &super::super::machines::Process)| json!({ "pid": process.pid, "usedBytes": process.used, "pod": pod });
            let processes: Vec<Value> = machines.on(&node, index).map(process).collect();
            json!({
                "uuid": machines.uuid(&node, index), "index": index, "model": "NVIDIA-H100-80GB-HBM3", "totalBytes": TOTAL,
                "usedBytes": machines.used_on(&node, index).min(TOTAL), "processes": processes,
            })
        };
        let is_seen = |index: &usize| !self.has(FaultKind::LostGpu) || *index != self.missing;
        Value::Array((0..GPUS).filter(is_seen).map(gpu).collect())
    }

    /// The agent of a machine that goes on for so long without its Node; `None` if none was running.
    pub(crate) fn left_behind(&self, machines: &Machines, lasts: Duration) -> Option<Self> {
        if self.token.is_none() || self.is_dead() {
            return None;
        }
        let figures = self.gpus(machines);
        let ends = clock::elapsed() + lasts;
        Some(Self {
            token: self.token.clone(),
            boots: self.boots,
            sequence: self.sequence,
            reports_at: self.reports_at,
            trouble: Some((FaultKind::StaleAgent, ends)),
            stale: Some(figures),
            ..Self::new(self.node, 0)
        })
    }

    /// The next report, if one is due.
    fn report(&mut self, machines: &Machines) -> Option<Value> {
        let now = clock::elapsed();
        if now < self.reports_at || self.is_dead() {
            return None;
        }
        self.reports_at = now + EVERY;
        self.sequence += 1;
        let gpus = match (&self.stale, self.has(FaultKind::UnreadGpus)) {
            (_, true) => Value::Null,
            (Some(stale), _) => stale.clone(),
            (None, _) => self.gpus(machines),
        };
        let missing = if gpus.is_null() {
            json!([{ "part": "gpus", "reason": "a fault was drawn" }])
        } else {
            json!([])
        };
        Some(json!({
            "node": node_name(self.node), "bootId": format!("boot-{}", self.boots), "sequence": self.sequence,
            "ageMillis": 0, "gpus": gpus, "missing": missing,
        }))
    }
}

impl FaultyCluster {
    pub(super) fn disturb_agents(&mut self) {
        const TROUBLES: [FaultKind; 8] = [
            FaultKind::ExpiredToken,
            FaultKind::DeadAgent,
            FaultKind::LateAgent,
            FaultKind::FlappingAgent,
            FaultKind::LostReport,
            FaultKind::StaleAgent,
            FaultKind::LostGpu,
            FaultKind::UnreadGpus,
        ];
        let now = clock::elapsed();
        if self.has_agents && self.dice.below(60) == 0 {
            let linger = between(
                &mut self.dice,
                Duration::from_secs(1),
                Duration::from_secs(90),
            );
            if self.happens(FaultKind::LingeringProcess) {
                self.machines.next_linger = linger;
            }
        }
        for place in 0..self.agents.len() {
            let agent = &mut self.agents[place];
            if let Some((kind, until)) = agent.trouble {
                agent.flap();
                if until <= now {
                    agent.recover(kind);
                }
                continue;
            }
            if !self.has_agents || agent.dice.below(120) > 0 {
                continue;
            }
            let kind = TROUBLES[agent.dice.below(TROUBLES.len())];
            let lasts = between(
                &mut agent.dice,
                Duration::from_secs(2),
                Duration::from_secs(50),
            );
            let missing = agent.dice.below(GPUS);
            if self.happens(kind) {
                self.say(format!("{kind} on {} for {lasts:?}", node_name(place)));
                let figures = self.agents[place].gpus(&self.machines);
                let agent = &mut self.agents[place];
                if let Some(token) = agent
                    .token
                    .as_ref()
                    .filter(|_| kind == FaultKind::ExpiredToken)
                {
                    self.api.revoke_token(token);
                }
                agent.trouble = Some((kind, now + lasts));
                agent.missing = missing;
                agent.stale = (kind == FaultKind::StaleAgent).then_some(figures);
            }
        }
    }

    /// Ends the faults of all agents.
    pub(super) fn mend_agents(&mut self) {
        for agent in &mut self.agents {
            agent.reports_at = agent.reports_at.min(clock::elapsed() + EVERY);
            if let Some((kind, _)) = agent.trouble {
                agent.recover(kind);
            }
        }
    }

    /// Agents report to every replica.
    pub(super) fn report(&mut self) {
        if !self.has_agents {
            return;
        }
        let now = clock::elapsed();
        self.agents_left
            .retain(|agent| agent.trouble.is_some_and(|(_, ends)| now < ends));
        let agents = self
            .agents
            .iter_mut()
            .filter(|agent| self.node_returns[agent.node].is_none());
        for agent in agents.chain(&mut self.agents_left) {
            let Some(report) = agent.report(&self.machines) else {
                continue;
            };
            let issue = || {
                self.api.issue_token(
                    "kube-system/stowage-agent",
                    Some(&node_name(agent.node)),
                    AUDIENCE,
                )
            };
            let token = agent.token.get_or_insert_with(issue).clone();
            for replica in self.replicas.iter().flatten() {
                for arrives in agent.arrivals() {
                    let (reports, task_notes) = (replica.reports.clone(), self.task_notes.clone());
                    let request = Request::post("/v1/reports")
                        .header(header::CONTENT_TYPE, "application/json")
                        .header(header::AUTHORIZATION, format!("Bearer {token}"))
                        .body(Body::from(report.to_string()))
                        .expect("a request of fixed parts");
                    tokio::spawn(async move {
                        tokio::time::sleep(arrives).await;
                        let Ok(answer) = reports.oneshot(request).await;
                        let outcome = if answer.status().is_success() {
                            "report"
                        } else {
                            "report refused"
                        };
                        *task_notes.lock().answers.entry(outcome).or_default() += 1;
                    });
                }
            }
        }
    }
}

impl NodeAgent {
    /// Its node has come back. If the machine has registered again, the agent's token names the Node before, and a replica that
    /// starts may for so long not count its reports at once.
    pub(crate) fn see_node_again(&mut self) {
        if self.token.is_some() {
            self.sound_since = self.sound_since.max(clock::elapsed() + DOUBTED);
        }
    }

    /// Another machine starts, and its agent after so long.
    pub(crate) fn begin_anew(&mut self, after: Duration) {
        self.recover(FaultKind::DeadAgent);
        self.token = None;
        self.reports_at = clock::elapsed() + after;
        self.sound_since = self.reports_at;
    }

    /// One that died begins a new boot.
    fn recover(&mut self, from: FaultKind) {
        if from == FaultKind::DeadAgent || self.is_down {
            self.boot();
        }
        self.is_down = false;
        if from == FaultKind::ExpiredToken {
            self.token = None;
        }
        self.trouble = None;
        // One that has not begun yet is not sound before it does.
        self.sound_since = self.sound_since.max(clock::elapsed());
        self.stale = None;
    }
}
