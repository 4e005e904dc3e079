//! What happens to the replicas and their connections, drawn by the seed.

use super::*;

impl HandoverCluster {
    /// The next change of leadership.
    ///
    /// The writes in flight when leadership ends are what matters, so pods end shortly before, and others are bound in their
    /// place.
    pub(super) async fn happen(&mut self) {
        let bound: Vec<Arc<Value>> =
            self.api.list("pods").into_iter().filter(|pod| pod["spec"]["nodeName"].is_string()).collect();
        for pod in bound.iter().filter(|_| self.dice.below(2) == 0) {
            self.api.delete_now(&format!("pods/default/{}", name(pod))).unwrap();
        }
        self.step().await;
        self.schedule(16);
        let moment = between(&mut self.dice, Duration::from_millis(1), Duration::from_secs(3));
        tokio::time::sleep(moment).await;
        self.next_event =
            Instant::now() + between(&mut self.dice, Duration::from_secs(20), Duration::from_secs(60));
        let acting = self.acting().unwrap_or_else(|| self.dice.below(2));
        let host = if self.dice.below(5) == 0 { 1 - acting } else { acting };
        match self.dice.below(8) {
            0..2 => self.kill(host),
            2 => self.restart(host),
            3..5 => self.stop(host),
            5..7 => self.cut_off(host),
            _ => {
                self.api.compact();
                self.tally.note("compacted");
                self.say("the API server compacts its log".into());
            }
        }
    }

    /// The pod is gone, with the scheduler in it.
    pub(super) fn kill(&mut self, host: usize) {
        let Some(replica) = self.replicas[host].take() else { return };
        self.say(format!("{} is killed", replica.client));
        self.tally.note("killed");
        self.note_audit(&replica);
        die(&self.api, replica);
        self.returns[host] =
            Some(Instant::now() + between(&mut self.dice, Duration::from_secs(1), Duration::from_secs(30)));
    }

    /// Stowage's container ends and starts again; its scheduler is not affected.
    pub(super) fn restart(&mut self, host: usize) {
        let Some(replica) = self.replicas[host].take() else { return };
        self.say(format!("{} dies, and its container starts again", replica.client));
        self.tally.note("restarted");
        self.note_audit(&replica);
        die(&self.api, replica);
        self.start(host);
    }

    /// It ends in order, and gives its Lease up.
    pub(super) fn stop(&mut self, host: usize) {
        let Some(mut replica) = self.replicas[host].take() else { return };
        self.say(format!("{} is told to stop", replica.client));
        self.tally.note("stopped");
        self.note_audit(&replica);
        replica.shutdown.cancel();
        tokio::spawn(async move { while replica.tasks.join_next().await.is_some() {} });
        if let Some(schedulers) = &mut self.schedulers {
            schedulers.give_up(&self.api, host);
        }
        self.returns[host] =
            Some(Instant::now() + between(&mut self.dice, Duration::from_secs(1), Duration::from_secs(20)));
    }

    pub(super) fn cut_off(&mut self, host: usize) {
        let Some(replica) = &self.replicas[host] else { return };
        let client = replica.client.clone();
        let lasts = between(&mut self.dice, Duration::from_secs(2), Duration::from_secs(40));
        self.say(format!("{client} is cut off for {lasts:?}"));
        self.tally.note("cut off");
        self.api.connections().cut_off(&client);
        self.reconnects.push((Instant::now() + lasts, client));
    }

    pub(super) fn disturb_watches(&mut self) {
        if self.dice.below(40) > 0 {
            return;
        }
        let Some(replica) = &self.replicas[self.dice.below(2)] else { return };
        let client = replica.client.clone();
        let kind = ["pods", "pods", "nodes"][self.dice.below(3)];
        let connections = self.api.connections();
        let what = match self.dice.below(3) {
            0 => {
                connections.hold_watches_back(&client, kind);
                let lasts = between(&mut self.dice, Duration::from_secs(1), Duration::from_secs(30));
                self.resumes.push((Instant::now() + lasts, client.clone(), kind));
                "watch held back"
            }
            // It is noticed when the server would have ended it, which is a minute at most.
            1 => {
                connections.silence_watches(&client, kind);
                "watch silent"
            }
            _ => {
                connections.end_watches(&client, kind);
                "watch ended"
            }
        };
        self.tally.note(what);
        self.say(format!("{what}: {kind} of {client}"));
    }

    pub(super) fn bring_back(&mut self) {
        let now = Instant::now();
        for (_, client) in self.reconnects.extract_if(.., |(at, _)| *at <= now) {
            self.api.connections().reconnect(&client);
        }
        for (_, client, kind) in self.resumes.extract_if(.., |(at, ..)| *at <= now) {
            self.api.connections().resume_watches(&client, kind);
        }
        for host in 0..2 {
            if self.returns[host].is_some_and(|at| at <= now) {
                self.returns[host] = None;
                self.start(host);
            }
        }
    }

    pub(super) fn start(&mut self, host: usize) {
        self.processes += 1;
        let client = format!("{}-{}", HOSTS[host], self.processes);
        let mut policy = without_engines();
        policy.conflicts = ConflictRule::EvictUnstarted;
        let service = Service::timed_by(time(), policy);
        let lead_with = match self.mode {
            LeadershipMode::KubeScheduler => {
                let lease = LeaseName::of_kube_scheduler();
                LeadWith::KubeScheduler { lease, hostname: HOSTS[host].into() }
            }
            LeadershipMode::OwnLease => {
                LeadWith::Lease { lease: LeaseName::own("stowage"), identity: HOSTS[host].into() }
            }
        };
        let options = ClusterOptions { times: self.times, ..ClusterOptions::new(lead_with, client.clone()) };
        let shutdown = CancellationToken::new();
        let connection = self.api.client_in_process(&client, self.times);
        let (control_plane, tasks) =
            kubernetes::start(connection, service.clone(), options, shutdown.clone());
        let extender = Extender::new(service.clone(), control_plane, RequestLimits::default());
        self.say(format!("{client} starts"));
        self.replicas[host] = Some(RacingReplica { client, service, extender, tasks, shutdown });
    }
}
