//! The traces themselves, where they are there: their sums are those that they were published with.

use super::*;
use crate::needs;
use stowage_scheduling::testkit::random::Random;

fn within(found: f64, wanted: f64, share: f64) {
    assert!(
        (found / wanted - 1.0).abs() <= share,
        "{found}, not {wanted}"
    );
}

#[test]
fn the_composite_day_of_both_services() {
    const FILE: &str = "llm/llm_24h_per_minute.csv";
    let Some(text) = needs::trace(FILE) else {
        return;
    };
    let of = |service| {
        minutes::read(
            TrafficText {
                file: FILE,
                text: &text,
            },
            service,
            Gaps::Refuse,
        )
        .unwrap()
    };
    let (code, conv) = (of(Service::Code), of(Service::Conversation));
    assert_eq!(
        (code.minutes().len(), conv.minutes().len()),
        (MINUTES, MINUTES)
    );
    assert_eq!(code.minutes()[0].requests, 1766.0);
    within(code.peak_per_s() / code.mean_per_s(), 2.6, 0.03);
    within(conv.peak_per_s() / conv.mean_per_s(), 1.6, 0.03);
    within(code.minutes()[700].prompt, 2048.0, 0.1);
}

#[test]
fn the_hour_of_single_requests() {
    const FILE: &str = "llm/azure2023_requests.csv";
    let Some(text) = needs::trace(FILE) else {
        return;
    };
    let requests = single_requests::read(TrafficText {
        file: FILE,
        text: &text,
    })
    .unwrap();
    assert_eq!(requests.len(), 28_185);
    for (service, size) in [
        (Service::Code, RequestSize::CODE),
        (Service::Conversation, RequestSize::CONVERSATION),
    ] {
        let of: Vec<_> = requests
            .iter()
            .filter(|request| request.service == Some(service))
            .copied()
            .collect();
        let mean = |tokens: fn(&TracedRequest) -> u64| {
            of.iter().map(tokens).sum::<u64>() as f64 / of.len() as f64
        };
        within(mean(|request| request.prompt), size.prompt, 0.005);
        within(mean(|request| request.output), size.output, 0.005);
        assert_eq!(
            single_requests::by_minute(of.clone(), false)
                .unwrap()
                .requests(),
            of.len() as f64
        );
    }
}

#[test]
fn the_hour_with_known_prefixes() {
    const FILE: &str = "llm/mooncake_conversation_requests.csv";
    let Some(text) = needs::trace(FILE) else {
        return;
    };
    let requests = single_requests::read(TrafficText {
        file: FILE,
        text: &text,
    })
    .unwrap();
    assert_eq!(requests.len(), 12_031);
    let tokens = |cache| {
        let day = single_requests::by_minute(requests.clone(), cache).unwrap();
        day.minutes()
            .iter()
            .map(|minute| minute.requests * minute.prompt)
            .sum::<f64>()
    };
    // 36.6 % of all blocks are known.
    within(tokens(true) / tokens(false), 1.0 - 0.366, 0.02);
}

#[test]
fn the_week_has_the_requests_that_its_source_states() {
    const FILE: &str = "llm/azure2024_week_7min.csv";
    let Some(text) = needs::trace(FILE) else {
        return;
    };
    let source = TrafficText {
        file: FILE,
        text: &text,
    };
    for (service, requests) in [(Service::Code, 16.80e6), (Service::Conversation, 27.30e6)] {
        let week = week::read(source, service, &mut Random::seeded(42, 0)).unwrap();
        within(week.iter().sum(), requests, 0.01);
    }
}
