//! What is made of an agent that says nothing for a while, or something old.

use super::*;

#[test]
fn a_silent_agent_costs_a_margin_and_then_the_expired_rule_applies() {
    let mut bench = MeasurementFixture::new();
    let pod = demand(10, 0, &Policy::default());
    bench.read_with(
        [(0, &[]), (0, &[])],
        EngineLoad::new(Percent::new(99), Some(0)),
    );
    assert_eq!(
        (bench.freshness(), bench.free()),
        (Freshness::Fresh, [90, 90])
    );
    bench.pass(5);
    assert_eq!(
        (bench.freshness(), bench.free()),
        (Freshness::Stale, [85, 85])
    );
    assert_eq!(
        bench.ledger.snapshot().node("n").unwrap().gpus[0].engine_load,
        EngineLoad::default()
    );
    bench.pass(25);
    assert_eq!(
        (bench.freshness(), bench.free()),
        (Freshness::Expired, [85, 85])
    );
    assert_eq!(bench.verdict(&pod), Ok(()));
    bench.read([(0, &[]), (0, &[])]);
    assert_eq!(
        (bench.freshness(), bench.free()),
        (Freshness::Fresh, [90, 90])
    );
}

#[test]
fn a_policy_may_close_a_node_without_fresh_reports() {
    let mut policy = Policy::default();
    policy.telemetry.expired = ExpiredRule::Refuse;
    let mut bench = MeasurementFixture::with(policy);
    let pod = bench.wait("pod", 10, 0);
    assert_eq!(bench.verdict(&pod), Err(Misfit::NoFreshReport));
    assert_eq!(
        bench.ledger.ledger_mut().assume(&uid("pod"), &node()),
        Err(Misfit::NoFreshReport.into())
    );
    bench.read([(0, &[]), (0, &[])]);
    assert_eq!(bench.verdict(&pod), Ok(()));
    bench.pass(29);
    assert_eq!(bench.verdict(&pod), Ok(()), "stale is not expired");
    bench.pass(1);
    assert_eq!(bench.verdict(&pod), Err(Misfit::NoFreshReport));
}

#[test]
fn an_old_report_is_as_old_as_its_sender_says() {
    let mut bench = MeasurementFixture::new();
    let sampled = bench.now.before(Millis::seconds(12));
    bench.ledger.ledger_mut().set_now(bench.now);
    bench.ledger.ledger_mut().take_reading(
        &node(),
        NodeReading {
            sampled,
            ..NodeReading::default()
        }
        .into(),
    );
    assert_eq!(bench.freshness(), Freshness::Stale);
}
