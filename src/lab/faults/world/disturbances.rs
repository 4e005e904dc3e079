//! What happens to the replicas' connections, clocks and leadership, drawn by the seed.

use super::budgets::is_guarded;
use super::late_reservations::{SILENT_WATCH_TIMEOUT, WATCH_RESTART_TIME};
use super::*;

impl FaultyCluster {
    /// The next change of leadership.
    ///
    /// The writes in flight when leadership ends are what matters, so pods end shortly before, and others are bound in their
    /// place.
    pub(super) async fn change_leadership(&mut self) {
        let bound: Vec<Arc<Value>> = self
            .pods()
            .into_iter()
            .filter(|pod| pod["spec"]["nodeName"].is_string())
            .collect();
        for pod in bound.iter().filter(|pod| !is_guarded(pod)) {
            if self.dice.below(2) == 0 {
                self.delete_now(pod);
            }
        }
        self.wait_step().await;
        self.schedule(16);
        let moment = random_duration(
            &mut self.dice,
            Duration::from_millis(1),
            Duration::from_secs(3),
        );
        tokio::time::sleep(moment).await;
        self.next_leadership_change = Instant::now()
            + random_duration(
                &mut self.dice,
                Duration::from_secs(20),
                Duration::from_secs(60),
            );
        let acting = self.acting_replica().unwrap_or_else(|| self.dice.below(2));
        let host = if self.dice.below(5) == 0 {
            1 - acting
        } else {
            acting
        };
        match self.dice.below(12) {
            0..2 => self.kill(host),
            2..4 => self.restart(host),
            4..7 => self.stop(host).await,
            7..9 => self.cut_off(host),
            9 => {
                if self.try_inject(FaultKind::Compaction) {
                    self.observe_writes();
                    self.api.compact();
                    self.log("the API server compacts its log".into());
                }
            }
            10 => self.restart_server(),
            _ => self.expire_token(host),
        }
    }

    /// Watches go on, and no request is admitted until the token is renewed.
    fn expire_token(&mut self, host: usize) {
        let lasts = random_duration(
            &mut self.dice,
            Duration::from_secs(2),
            Duration::from_secs(40),
        );
        let Some(replica) = &self.replicas[host] else {
            return;
        };
        let client = replica.client.clone();
        if !self.try_inject(FaultKind::ExpiredToken) {
            return;
        }
        self.log(format!("the token of {client} is refused for {lasts:?}"));
        self.writes.expired_tokens.lock().insert(client.clone());
        self.hide_pods_from(&client, lasts);
        self.token_renewals.push((Instant::now() + lasts, client));
    }

    fn cut_off(&mut self, host: usize) {
        let lasts = random_duration(
            &mut self.dice,
            Duration::from_secs(2),
            Duration::from_secs(40),
        );
        if self.replicas[host].is_some() && self.try_inject(FaultKind::CutOff) {
            self.disconnect(host, lasts);
        }
    }

    fn disconnect(&mut self, host: usize, duration: Duration) {
        let Some(replica) = &self.replicas[host] else {
            return;
        };
        let client = replica.client.clone();
        self.log(format!("{client} is cut off for {duration:?}"));
        self.api.connections().cut_off(&client);
        self.hide_pods_from(&client, duration);
        self.reconnects.push((Instant::now() + duration, client));
    }

    /// Nobody reaches it while it starts, and every watch has to begin again.
    fn restart_server(&mut self) {
        let lasts = random_duration(
            &mut self.dice,
            Duration::from_secs(1),
            Duration::from_secs(12),
        );
        if !self.try_inject(FaultKind::ServerRestart) {
            return;
        }
        self.log("the API server restarts".into());
        for host in 0..2 {
            let Some(replica) = &self.replicas[host] else {
                continue;
            };
            let client = replica.client.clone();
            for kind in ["pods", "nodes", "poddisruptionbudgets"] {
                self.api.connections().end_watches(&client, kind);
            }
            self.disconnect(host, lasts);
        }
    }

    pub(super) fn disturb_watches(&mut self) {
        if self.dice.below(40) > 0 {
            return;
        }
        let host = self.dice.below(2);
        let kind = ["pods", "pods", "nodes"][self.dice.below(3)];
        let (which, lasts) = (
            self.dice.below(3),
            random_duration(
                &mut self.dice,
                Duration::from_secs(1),
                Duration::from_secs(30),
            ),
        );
        let Some(replica) = &self.replicas[host] else {
            return;
        };
        let client = replica.client.clone();
        let fault = [
            FaultKind::WatchLag,
            FaultKind::SilentWatch,
            FaultKind::EndedWatch,
        ][which];
        if !self.try_inject(fault) {
            return;
        }
        let connections = self.api.connections();
        match fault {
            FaultKind::WatchLag => {
                connections.pause_watches(&client, kind);
                self.watch_resumes
                    .push((Instant::now() + lasts, client.clone(), kind));
            }
            // It is noticed a little after the server would have ended it, which is a minute at most.
            FaultKind::SilentWatch => connections.silence_watches(&client, kind),
            _ => connections.end_watches(&client, kind),
        }
        if kind == "pods" {
            let hidden = match fault {
                FaultKind::WatchLag => lasts,
                FaultKind::SilentWatch => SILENT_WATCH_TIMEOUT,
                _ => WATCH_RESTART_TIME,
            };
            self.hide_pods_from(&client, hidden);
        }
        self.log(format!("{fault}: {kind} of {client}"));
    }

    /// Clocks and policies.
    pub(super) fn disturb_replicas(&mut self) {
        if self.dice.below(150) == 0 {
            let host = self.dice.below(2);
            let ahead = self.dice.below(120_000) as i64 - 60_000;
            if self.try_inject(FaultKind::ClockJump) {
                clock::set_wall_clock_ahead(host, ahead);
                self.log(format!(
                    "the clock of {} is ahead by {ahead} ms",
                    HOSTS[host]
                ));
            }
        }
        self.disturb_policy();
    }

    pub(super) fn restore_connections_and_replicas(&mut self) {
        let now = Instant::now();
        for (_, client) in self.reconnects.extract_if(.., |(at, _)| *at <= now) {
            self.api.connections().reconnect(&client);
        }
        for (_, client) in self.token_renewals.extract_if(.., |(at, _)| *at <= now) {
            self.writes.expired_tokens.lock().remove(&client);
        }
        for (_, client, kind) in self.watch_resumes.extract_if(.., |(at, ..)| *at <= now) {
            self.api.connections().resume_watches(&client, kind);
        }
        for host in 0..2 {
            if self.replica_returns_at[host].is_some_and(|at| at <= now) {
                self.replica_returns_at[host] = None;
                self.start_replica(host);
            }
        }
    }
}
