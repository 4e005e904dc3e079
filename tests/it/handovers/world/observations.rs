//! What the API server's objects show after each step, and what must not be among it.

use super::*;

impl HandoverCluster {
    pub(super) fn note_audit(&mut self, replica: &RacingReplica) {
        let found = audit(replica, "stowage_gpu_conflicts_detected_total");
        if !self.proxy && found > 0 {
            self.broken.push(format!(
                "{} reports {found} conflicts between bound pods that are none",
                replica.client
            ));
        }
        self.tally.reported += found;
        self.tally.remedied +=
            replica.service.metrics.conflicts.evictions.with_label_values(&["written"]).get();
    }

    pub(super) fn look(&mut self) {
        let pods = self.api.list("pods");
        self.note_bindings(&pods);
        for (pod, devices) in holds(&pods) {
            if self.seen_holds.insert((pod.clone(), devices.clone())) {
                self.tally.held += 1;
                self.say(format!("{pod} holds {devices:?}"));
            }
        }
        for pod in &pods {
            let is_evicted = pod["status"]["conditions"].as_array().is_some_and(|conditions| {
                conditions.iter().any(|condition| condition["reason"] == "EvictionByEvictionAPI")
            });
            if is_evicted && self.leaving.insert(name(pod)) {
                self.tally.evicted += 1;
                self.say(format!("{} is evicted", name(pod)));
            }
        }
        self.broken.append(&mut self.lies.lock());
        self.judge(&pods);
    }

    pub(super) fn note_bindings(&mut self, pods: &[Arc<Value>]) {
        for pod in pods {
            let written = &pod["metadata"]["annotations"];
            let (Some(node), Some(devices)) =
                (pod["spec"]["nodeName"].as_str(), written["stowage.dev/devices"].as_str())
            else {
                continue;
            };
            let place = format!("{node}/{devices}");
            match self.known.insert(name(pod), place.clone()) {
                None => {
                    self.tally.bound += 1;
                    let epoch = written["stowage.dev/leader-epoch"].as_str().unwrap_or("none");
                    self.tally.epochs.insert(epoch.to_owned());
                    // The last part is the process' own, and another one each time.
                    let term = epoch.rsplit_once('/').map_or(epoch, |(term, _)| term);
                    self.history.push(format!("{} {} is bound to {place} in {term}", self.at(), name(pod)));
                }
                Some(before) if before != place => {
                    self.broken.push(format!("{}: {before} became {place}", name(pod)));
                }
                Some(_) => {}
            }
        }
    }

    pub(super) fn judge(&mut self, pods: &[Arc<Value>]) {
        for (gpu, on_it) in promised_twice(pods) {
            let what = format!("{gpu} is promised twice: {on_it:?}");
            if !self.twice.insert(what.clone()) {
                continue;
            }
            self.say(what.clone());
            if self.proxy {
                self.tally.by_proxy += 1;
            } else {
                self.broken.push(what);
            }
        }
    }
}

/// What a replica's audit says of bound pods that cannot all be where they are.
pub(super) fn audit(replica: &RacingReplica, family: &str) -> u64 {
    let kinds = ["overcommitted", "exclusive-shared"].map(|kind| format!("{family}{{kind=\"{kind}\"}}"));
    let text = replica.service.metrics.render();
    let lines = text.lines().filter(|line| kinds.iter().any(|kind| line.starts_with(kind)));
    lines.filter_map(|line| line.rsplit_once(' ')?.1.parse::<u64>().ok()).sum()
}
