//! Sound tables in any column order, and what is wrong with others.

use super::*;
use proptest::prelude::*;
use stowage_scheduling::units::Moment;

fn text(text: &str) -> TrafficText<'_> {
    TrafficText {
        file: "day.csv",
        text,
    }
}

const HEAD: &str = "minute,service,requests,prompt_tokens,output_tokens";

/// A day of ten requests a minute, without some minutes.
fn day_without(missing: &[usize]) -> String {
    let rows = (0..MINUTES).filter(|minute| !missing.contains(minute));
    let rows: String = rows
        .map(|minute| format!("{minute},code,{},1000,100\n", 10 + minute % 2))
        .collect();
    format!("{HEAD}\n{rows}")
}

fn minutes_error(text_of: &str) -> String {
    minutes::read(text(text_of), Service::Code, Gaps::Refuse)
        .unwrap_err()
        .to_string()
}

#[test]
fn a_day_is_found_by_its_column_names_in_any_order() {
    let rows: String = (0..MINUTES)
        .rev()
        .map(|minute| format!("30,x,code,{minute},3000,3\r\n60,y,conv,{minute},6000,6\r\n"))
        .collect();
    let shuffled =
        format!("\u{feff}output_tokens,note,service,minute,prompt_tokens,requests\r\n{rows}");
    let day = minutes::read(text(&shuffled), Service::Conversation, Gaps::Refuse).unwrap();
    assert_eq!(day.minutes().len(), MINUTES);
    assert_eq!(
        day.minute_at(Moment(60_000)),
        Minute {
            requests: 6.0,
            prompt: 1000.0,
            output: 10.0
        }
    );
    assert_eq!(day.requests(), 6.0 * 1440.0);
}

#[test]
fn a_gap_is_refused_and_filled_only_if_asked_for() {
    let gap = day_without(&[0, 700, 701, 1439]);
    let error = minutes_error(&gap);
    assert!(
        error.contains("day.csv: minute 0 of code is missing, the first of 4"),
        "{error}"
    );
    assert!(error.contains("ask for gaps to be filled"), "{error}");
    let day = minutes::read(text(&gap), Service::Code, Gaps::Fill).unwrap();
    let at = |minute: usize| day.minutes()[minute].requests;
    assert_eq!(
        (at(0), at(1439)),
        (11.0, 10.0),
        "at an end, the row beside it"
    );
    assert!(
        (at(700) - (11.0 - 1.0 / 3.0)).abs() < 1e-9 && (at(701) - (11.0 - 2.0 / 3.0)).abs() < 1e-9
    );
    assert_eq!(at(699), 11.0);
}

#[test]
fn what_is_wrong_is_named_with_its_line_and_column() {
    let row = |row: &str| minutes_error(&format!("{HEAD}\n0,code,10,1000,100\n{row}\n"));
    for (found, wanted) in [
        (minutes_error(""), "day.csv is empty"),
        (minutes_error(HEAD), "day.csv has column names and no rows"),
        (
            minutes_error("minute,service,requests\n0,code,1\n"),
            "line 1: there is no column \"prompt_tokens\" among minute",
        ),
        (
            row("1,code,ten,1000,100"),
            "line 3: requests is \"ten\"; write a number",
        ),
        (
            row("1,code,NaN,1000,100"),
            "line 3: requests is \"NaN\"; write a number",
        ),
        (
            row("1,code,-4,1000,100"),
            "line 3: requests is -4, less than nothing",
        ),
        (
            row("1,code,1e12,1000,100"),
            "line 3: requests is 1e12; write at most",
        ),
        (
            row("1.5,code,10,1000,100"),
            "line 3: minute is 1.5; write a whole number",
        ),
        (
            row("1440,code,10,1000,100"),
            "line 3: minute is 1440; write at most 1439",
        ),
        (
            row("1,chat,10,1000,100"),
            "line 3: service is \"chat\"; write code or conv",
        ),
        (row("1,code,10,1000"), "line 3: 4 fields under 5 columns"),
        (
            row("0,code,10,1000,100"),
            "line 3: minute 0 of code is there before, at line 2",
        ),
        (
            row("1,code,10,5,100"),
            "line 3: 10 requests with 5 prompt and 100 output tokens",
        ),
        (row("1,code,0,5,100"), "line 3: 0 requests with 5 prompt"),
        (
            minutes_error(&format!("{HEAD}\n0,conv,10,1000,100\n")),
            "no row whose service is code; it has conv",
        ),
    ] {
        assert!(
            found.starts_with("day.csv") && found.contains(wanted),
            "{found}\nshould contain\n{wanted}"
        );
    }
}

#[test]
fn single_requests_are_read_with_and_without_services_and_prefixes() {
    let plain = "output_tokens,offset_ms,prompt_tokens\n10,0,100\n0,59999,200\n30,60000,300\n";
    let requests = single_requests::read(text(plain)).unwrap();
    assert_eq!(
        (requests.len(), requests[0].service, requests[2].prompt),
        (3, None, 300)
    );
    let day = single_requests::by_minute(requests, true).unwrap();
    assert_eq!(
        day.minutes()[0],
        Minute {
            requests: 2.0,
            prompt: 150.0,
            output: 5.5
        }
    );
    let prefixes =
        "offset_ms,prompt_tokens,output_tokens,prefix_blocks,cached_prefix_blocks\n5,1000,10,4,1\n";
    let requests = single_requests::read(text(prefixes)).unwrap();
    let prompt = |cache| {
        single_requests::by_minute(requests.clone(), cache)
            .unwrap()
            .minutes()[0]
            .prompt
    };
    assert_eq!((prompt(true), prompt(false)), (750.0, 1000.0));
    assert_eq!(single_requests::by_minute([], false), None);
}

#[test]
fn requests_out_of_order_or_with_more_cached_than_they_have_are_refused() {
    let backwards =
        "service,offset_ms,prompt_tokens,output_tokens\ncode,9,1,1\nconv,3,1,1\ncode,8,1,1\n";
    let error = single_requests::read(text(backwards))
        .unwrap_err()
        .to_string();
    assert!(error.contains("line 4: offset_ms is 8, after 9"), "{error}");
    let cached =
        "offset_ms,prompt_tokens,output_tokens,prefix_blocks,cached_prefix_blocks\n5,1000,10,4,5\n";
    let error = single_requests::read(text(cached)).unwrap_err().to_string();
    assert!(
        error.contains("line 2: cached_prefix_blocks is 5; write at most 4"),
        "{error}"
    );
}

#[test]
fn the_built_in_day_has_a_night_and_its_peak() {
    let day = built_in::working_day(42, 30.0, RequestSize::CODE);
    assert!((day.peak_per_s() - 30.0).abs() < 1e-9);
    let night = day.minutes()[60..360]
        .iter()
        .map(|minute| minute.requests)
        .sum::<f64>()
        / 300.0
        / 60.0;
    assert!(
        (1.0..3.0).contains(&night),
        "{night} requests a second at night"
    );
    assert!(
        (0.3..0.6).contains(&(day.mean_per_s() / day.peak_per_s())),
        "{}",
        day.mean_per_s()
    );
    assert_eq!(day, built_in::working_day(42, 30.0, RequestSize::CODE));
    assert_ne!(day, built_in::working_day(43, 30.0, RequestSize::CODE));
    assert!((day.clone().scaled(3.0).requests() / day.requests() - 3.0).abs() < 1e-9);
}

#[test]
fn a_catalog_has_a_long_tail_and_every_size() {
    let catalog = ZipfCatalog::generate(42, 60, 100.0, 1.0);
    assert!((catalog.per_s() - 100.0).abs() < 1e-9);
    assert!(
        catalog
            .models
            .windows(2)
            .all(|pair| pair[0].per_s > pair[1].per_s)
    );
    assert!((catalog.models[0].per_s / catalog.models[59].per_s - 60.0).abs() < 1e-9);
    let sizes: Vec<f64> = catalog
        .models
        .iter()
        .map(|model| model.shape.parameters)
        .collect();
    assert!(
        sizes.iter().any(|size| *size < 2e9) && sizes.iter().any(|size| *size > 3e10),
        "{sizes:?}"
    );
    let sound = |model: &CatalogModel| {
        (150.0..=2400.0).contains(&model.size.prompt) && (30.0..=480.0).contains(&model.size.output)
    };
    assert!(catalog.models.iter().all(sound));
    assert_eq!(catalog, ZipfCatalog::generate(42, 60, 100.0, 1.0));
    assert_ne!(catalog, ZipfCatalog::generate(43, 60, 100.0, 1.0));
    assert!(ZipfCatalog::generate(42, 0, 100.0, 1.0).models.is_empty());
}

proptest! {
    #[test]
    fn what_comes_between_two_moments_is_what_comes_in_their_parts(
        from in 0..100_000_000u64, first in 0..10_000_000u64, second in 0..10_000_000u64,
    ) {
        let day = built_in::working_day(1, 20.0, RequestSize::CONVERSATION);
        let (from, cut, to) = (Moment(from), Moment(from + first), Moment(from + first + second));
        let whole = day.requests_between(from, to);
        let parts = day.requests_between(from, cut).plus(day.requests_between(cut, to));
        prop_assert!((whole.count - parts.count).abs() < 1e-6 * (1.0 + whole.count));
        prop_assert!(whole.count == 0.0 || (whole.prompt - parts.prompt).abs() < 1e-6 * whole.prompt);
    }

    #[test]
    fn no_text_makes_a_reader_panic(rows in "[-0-9a-z.,\n]{0,200}") {
        for head in [HEAD, "offset_ms,prompt_tokens,output_tokens"] {
            let file = format!("{head}\n{rows}");
            let _ = minutes::read(text(&file), Service::Code, Gaps::Fill);
            let _ = single_requests::read(text(&file));
        }
    }
}
