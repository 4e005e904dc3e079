//! The nodes' agents: each reports its machine to every replica about once a second, and may be dead, late, or wrong.

use super::super::machines::GPU_CAPACITY_BYTES;
use super::*;
use axum::body::Body;
use http::{Request, header};
use tower::ServiceExt;

/// The audience of agents' tokens.
pub const AUDIENCE: &str = "stowage.dev/reports";
/// How long a Node is so young that a report may be of an earlier machine, whatever a replica's clock is off by.
const NEW_NODE_AGE: Duration = Duration::from_secs(200);
/// How often an agent reports.
const REPORT_INTERVAL: Duration = Duration::from_secs(1);

/// One node's agent.
pub(crate) struct NodeAgent {
    node: usize,
    dice: Random,
    /// Its pod's token, which names the Node object that there was when its first report was due.
    token: Option<String>,
    boots: u64,
    sequence: u64,
    next_report_at: Duration,
    /// What is wrong with it, until when.
    fault: Option<(FaultKind, Duration)>,
    healthy_since: Duration,
    /// The GPU that is missing, of a lost one.
    missing_gpu: usize,
    /// Figures that it repeats.
    repeated_figures: Option<Value>,
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
            next_report_at: Duration::ZERO,
            fault: None,
            healthy_since: Duration::ZERO,
            missing_gpu: 0,
            repeated_figures: None,
            is_down: false,
        }
    }

    /// Whether it has reported what is true, and in time, since then.
    pub(crate) fn is_healthy_since(&self, then: Duration) -> bool {
        self.fault.is_none() && self.healthy_since <= then
    }

    fn has_fault(&self, kind: FaultKind) -> bool {
        self.fault.is_some_and(|(trouble, _)| trouble == kind)
    }

    /// Whether it runs at present.
    fn is_dead(&self) -> bool {
        self.has_fault(FaultKind::DeadAgent) || self.is_down
    }

    /// When a report reaches a replica, from now on: once, not at all, or twice.
    fn delivery_delays(&mut self) -> Vec<Duration> {
        let mut late = |least, most| {
            random_duration(
                &mut self.dice,
                Duration::from_millis(least),
                Duration::from_millis(most),
            )
        };
        match self.fault {
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
        if self.has_fault(FaultKind::FlappingAgent) && self.dice.below(4) == 0 {
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
    fn read_gpus(&self, machines: &Machines) -> Value {
        let node = node_name(self.node);
        let gpu = |index: usize| {
            let process = |(pod, process): (&String, &super::super::machines::Process)| json!({ "pid": process.pid, "usedBytes": process.used_per_gpu, "pod": pod });
            let processes: Vec<Value> = machines.processes_on(&node, index).map(process).collect();
            json!({
                "uuid": machines.uuid(&node, index), "index": index, "model": "NVIDIA-H100-80GB-HBM3", "totalBytes": GPU_CAPACITY_BYTES,
                "usedBytes": machines.used_on(&node, index).min(GPU_CAPACITY_BYTES), "processes": processes,
            })
        };
        let is_seen =
            |index: &usize| !self.has_fault(FaultKind::LostGpu) || *index != self.missing_gpu;
        Value::Array((0..GPUS).filter(is_seen).map(gpu).collect())
    }

    /// The agent of a machine that goes on for so long without its Node; `None` if none was running.
    pub(crate) fn orphan(&self, machines: &Machines, lasts: Duration) -> Option<Self> {
        if self.token.is_none() || self.is_dead() {
            return None;
        }
        let figures = self.read_gpus(machines);
        let ends = clock::elapsed() + lasts;
        Some(Self {
            token: self.token.clone(),
            boots: self.boots,
            sequence: self.sequence,
            next_report_at: self.next_report_at,
            fault: Some((FaultKind::StaleAgent, ends)),
            repeated_figures: Some(figures),
            ..Self::new(self.node, 0)
        })
    }

    /// The next report, if one is due.
    fn next_report(&mut self, machines: &Machines) -> Option<Value> {
        let now = clock::elapsed();
        if now < self.next_report_at || self.is_dead() {
            return None;
        }
        self.next_report_at = now + REPORT_INTERVAL;
        self.sequence += 1;
        let gpus = match (
            &self.repeated_figures,
            self.has_fault(FaultKind::UnreadGpus),
        ) {
            (_, true) => Value::Null,
            (Some(stale), _) => stale.clone(),
            (None, _) => self.read_gpus(machines),
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
        const AGENT_FAULTS: [FaultKind; 8] = [
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
            let linger = random_duration(
                &mut self.dice,
                Duration::from_secs(1),
                Duration::from_secs(90),
            );
            if self.try_inject(FaultKind::LingeringProcess) {
                self.machines.next_linger = linger;
            }
        }
        for index in 0..self.agents.len() {
            let agent = &mut self.agents[index];
            if let Some((kind, until)) = agent.fault {
                agent.flap();
                if until <= now {
                    agent.recover(kind);
                }
                continue;
            }
            if !self.has_agents || agent.dice.below(120) > 0 {
                continue;
            }
            let kind = AGENT_FAULTS[agent.dice.below(AGENT_FAULTS.len())];
            let lasts = random_duration(
                &mut agent.dice,
                Duration::from_secs(2),
                Duration::from_secs(50),
            );
            let missing = agent.dice.below(GPUS);
            if self.try_inject(kind) {
                self.log(format!("{kind} on {} for {lasts:?}", node_name(index)));
                let figures = self.agents[index].read_gpus(&self.machines);
                let agent = &mut self.agents[index];
                if let Some(token) = agent
                    .token
                    .as_ref()
                    .filter(|_| kind == FaultKind::ExpiredToken)
                {
                    self.api.revoke_token(token);
                }
                agent.fault = Some((kind, now + lasts));
                agent.missing_gpu = missing;
                agent.repeated_figures = (kind == FaultKind::StaleAgent).then_some(figures);
            }
        }
    }

    /// Ends the faults of all agents.
    pub(super) fn recover_agents(&mut self) {
        for agent in &mut self.agents {
            agent.next_report_at = agent.next_report_at.min(clock::elapsed() + REPORT_INTERVAL);
            if let Some((kind, _)) = agent.fault {
                agent.recover(kind);
            }
        }
    }

    /// Agents report to every replica.
    pub(super) fn send_agent_reports(&mut self) {
        if !self.has_agents {
            return;
        }
        let now = clock::elapsed();
        self.orphaned_agents
            .retain(|agent| agent.fault.is_some_and(|(_, ends)| now < ends));
        let agents = self
            .agents
            .iter_mut()
            .filter(|agent| self.node_returns_at[agent.node].is_none());
        for agent in agents.chain(&mut self.orphaned_agents) {
            let Some(report) = agent.next_report(&self.machines) else {
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
                for delay in agent.delivery_delays() {
                    let (reports, task_notes) =
                        (replica.agent_router.clone(), self.task_reports.clone());
                    let request = Request::post("/v1/reports")
                        .header(header::CONTENT_TYPE, "application/json")
                        .header(header::AUTHORIZATION, format!("Bearer {token}"))
                        .body(Body::from(report.to_string()))
                        .expect("a request of fixed parts");
                    tokio::spawn(async move {
                        tokio::time::sleep(delay).await;
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
    pub(crate) fn handle_node_recreated(&mut self) {
        if self.token.is_some() {
            self.healthy_since = self.healthy_since.max(clock::elapsed() + NEW_NODE_AGE);
        }
    }

    /// Another machine starts, and its agent after so long.
    pub(crate) fn restart_on_new_machine(&mut self, after: Duration) {
        self.recover(FaultKind::DeadAgent);
        self.token = None;
        self.next_report_at = clock::elapsed() + after;
        self.healthy_since = self.next_report_at;
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
        self.fault = None;
        // One that has not begun yet is not sound before it does.
        self.healthy_since = self.healthy_since.max(clock::elapsed());
        self.repeated_figures = None;
    }
}
