//! Changes at full speed: clients filter, prioritize and bind while the policy moves their pods from side to side.

use super::*;

/// Which changes were begun and which are known to be in force, by their number; the policy's side is the number's parity.
#[derive(Default)]
struct ReloadProgress {
    begun: AtomicUsize,
    in_force: AtomicUsize,
    is_over: AtomicBool,
    asked: AtomicUsize,
}

impl ReloadProgress {
    /// Asks, and looks whether a policy answered that can have been in force.
    fn answered(&self, ask: impl FnOnce() -> String) -> String {
        let before = self.in_force.load(Ordering::SeqCst);
        let side = ask();
        let after = self.begun.load(Ordering::SeqCst);
        if before == after {
            assert_eq!(
                side,
                SIDES[before % 2],
                "a policy that is not in force any more"
            );
        }
        self.asked.fetch_add(1, Ordering::Relaxed);
        side
    }
}

fn filtered(client: &mut Client<TcpStream>, pod: &Value) -> Vec<String> {
    let answer = client.post("/scheduler/filter", args(pod, &NODES).to_string());
    assert_eq!(answer.status, 200, "{}", answer.text());
    let answer = answer.json();
    let passed: Vec<String> = serde_json::from_value(answer["NodeNames"].clone()).unwrap();
    let refused: Vec<String> = answer["FailedAndUnresolvableNodes"]
        .as_object()
        .unwrap()
        .keys()
        .cloned()
        .collect();
    if passed.len() == 2 && !refused.is_empty() {
        assert_ne!(
            common_side(passed.iter().map(String::as_str)),
            common_side(refused.iter().map(String::as_str))
        );
    }
    passed
}

fn ranked(client: &mut Client<TcpStream>, pod: &Value) -> String {
    let answer = client.post("/scheduler/prioritize", args(pod, &NODES).to_string());
    assert_eq!(answer.status, 200, "{}", answer.text());
    let scores = answer.json();
    let scored = scores
        .as_array()
        .unwrap()
        .iter()
        .filter(|one| one["Score"] != 0);
    common_side(scored.map(|one| one["Host"].as_str().unwrap()))
}

/// Filters, prioritizes and, each time in a while, binds, until it is over.
fn schedule(served: &Served, pods: &[Value], next: &AtomicUsize, progress: &ReloadProgress) {
    let mut client = served.client();
    for round in 0.. {
        if progress.is_over.load(Ordering::SeqCst) {
            return;
        }
        let binds = round % 16 == 0;
        let place = if binds {
            next.fetch_add(1, Ordering::Relaxed)
        } else {
            pods.len() - 1
        };
        // The last pod only sends filter requests; it is never bound.
        let pod = &pods[place.min(pods.len() - 1)];
        let mut passed = Vec::new();
        progress.answered(|| {
            passed = filtered(&mut client, pod);
            common_side(passed.iter().map(String::as_str))
        });
        progress.answered(|| ranked(&mut client, pod));
        if place < pods.len() - 1 {
            let answer = client.post("/scheduler/bind", bind_args(pod, &passed[0]).to_string());
            assert_eq!(answer.status, 200, "{}", answer.text());
            let error = answer.json()["Error"].as_str().unwrap().to_owned();
            // Between its filter and its bind the policy changed: the scheduler asks again.
            assert!(
                ["", "conflict: the node's pool has changed"].contains(&error.as_str()),
                "{error}"
            );
        }
    }
}

#[test]
fn a_policy_that_changes_under_load_fails_no_request_and_mixes_no_decision() {
    let reloading = Reloading::new();
    let digests = SIDES.map(|side| digest_of(&policy_for_side(side)));
    let (progress, next) = (ReloadProgress::default(), AtomicUsize::new(0));
    std::thread::scope(|scope| {
        // A failed assertion here must not let the clients run forever.
        let _over = EndOnDrop(&progress);
        for _ in 0..CLIENTS {
            scope.spawn(|| schedule(&reloading.served, &reloading.pods, &next, &progress));
        }
        for change in 1..=CHANGES {
            let asked = progress.asked.load(Ordering::Relaxed);
            eventually("they ask", || {
                progress.asked.load(Ordering::Relaxed) > asked + 100
            });
            progress.begun.store(change, Ordering::SeqCst);
            reloading.write(&policy_for_side(SIDES[change % 2]));
            reloading.wait_until_in_force(digests[change % 2]);
            progress.in_force.store(change, Ordering::SeqCst);
        }
    });
    eventually("each is counted", || {
        reloading.reloads("applied") == CHANGES as u64
    });
    assert_eq!(reloading.reloads("rejected"), 0);
    let orders = reloading.served.control_plane.orders.lock();
    assert!(orders.len() > 10, "{} were bound", orders.len());
    for (order, _) in orders.iter() {
        let side = SIDES
            .iter()
            .position(|side| *side == side_of(order.placement.node.as_str()))
            .unwrap();
        assert_eq!(
            order.policy, digests[side],
            "{} was placed by the other policy",
            order.key
        );
    }
}

struct EndOnDrop<'a>(&'a ReloadProgress);

impl Drop for EndOnDrop<'_> {
    fn drop(&mut self) {
        self.0.is_over.store(true, Ordering::SeqCst);
    }
}
