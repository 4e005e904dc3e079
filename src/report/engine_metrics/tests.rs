//! Figures of a page of every engine and version, and of pages with impossible values.

use super::scan::{MetricLine, Scan, WantedMetrics};
use super::{Engine, Figures, UnknownPage, parse_page};
use stowage_scheduling::ids::ModelId;

macro_rules! page {
    ($name:literal) => {
        include_bytes!(concat!(
            env!("CARGO_WORKSPACE_DIR"),
            "/tests/fixtures/engines/",
            $name,
            ".txt"
        ))
    };
}

fn figures(engine: Engine, model: &str) -> Figures {
    Figures {
        engine,
        model: ModelId::parse(model).ok(),
        kv_cache_usage: None,
        kv_cache_tokens: None,
        waiting: None,
        running: None,
        preemptions: None,
        generated_tokens: None,
        prompt_tokens: None,
        time_per_token: None,
        time_to_first_token: None,
        sleep_level: None,
        problems: Vec::new(),
    }
}

#[test]
fn every_engine_and_version_is_read_to_the_last_figure() {
    let load =
        |of: Figures, kv: Option<f64>, tokens: Option<u64>, waiting: u64, running: u64| Figures {
            kv_cache_usage: kv,
            kv_cache_tokens: tokens,
            waiting: Some(waiting),
            running: Some(running),
            ..of
        };
    let vllm = |model| figures(Engine::Vllm, model);
    let generated = |tokens: u64, of: Figures| Figures {
        generated_tokens: Some(tokens),
        ..of
    };
    let pages: [(&[u8], Figures); 13] = [
        // Two ranks; of eleven requests that wait, nine wait for something else than room.
        (
            page!("vllm-0.33"),
            Figures {
                preemptions: Some(20),
                ..load(
                    vllm("Qwen/Qwen3-32B"),
                    Some(0.9126984126984127),
                    Some(2 * 152_064),
                    2,
                    99,
                )
            },
        ),
        (
            page!("vllm-0.12"),
            generated(
                84_211 + 79_004,
                load(
                    vllm("meta-llama/Llama-3.1-8B-Instruct"),
                    Some(0.6342857142857143),
                    Some(438_608 + 438_400),
                    3,
                    21,
                ),
            ),
        ),
        (
            page!("vllm-0.12-asleep"),
            Figures {
                sleep_level: Some(1),
                ..load(vllm("Qwen/Qwen3-32B"), Some(0.0), None, 0, 0)
            },
        ),
        (
            page!("vllm-0.10"),
            load(
                vllm("Qwen/Qwen2.5-7B-Instruct"),
                Some(0.0625),
                Some(61_440 * 16),
                0,
                4,
            ),
        ),
        (
            page!("vllm-0.8"),
            load(
                // Its first line of interest names no model, a later one does.
                vllm("mistralai/Mistral-7B-Instruct-v0.3"),
                Some(0.9998242839571253),
                Some(5_691 * 16),
                118,
                31,
            ),
        ),
        // Two data-parallel ranks, each seen twice by its tensor-parallel ranks.
        (
            page!("sglang"),
            generated(
                7_557_572,
                load(
                    figures(Engine::Sglang, "deepseek-ai/DeepSeek-V3"),
                    Some(0.71),
                    Some(2 * 147_456),
                    7,
                    77,
                ),
            ),
        ),
        (
            page!("trtllm-serve"),
            generated(
                51_877,
                load(
                    figures(Engine::TrtllmServe, "nvidia/Llama-3.1-70B-Instruct-FP8"),
                    Some(0.25),
                    Some(8192 * 32),
                    1,
                    16,
                ),
            ),
        ),
        (
            page!("triton"),
            load(
                figures(Engine::Triton, ""),
                Some(0.4375),
                Some(6272 * 64),
                2,
                14,
            ),
        ),
        (
            page!("dynamo"),
            load(
                figures(Engine::Dynamo, "Qwen/Qwen3-0.6B"),
                Some(0.15625),
                None,
                2,
                6,
            ),
        ),
        (
            page!("dynamo-vllm-worker"),
            load(vllm("Qwen/Qwen3-0.6B"), Some(0.16), None, 2, 6),
        ),
        (
            page!("lmdeploy"),
            generated(
                20_117,
                load(
                    figures(Engine::Lmdeploy, "internlm/internlm3-8b-instruct"),
                    Some(0.875),
                    None,
                    4,
                    7,
                ),
            ),
        ),
        (
            page!("tgi"),
            generated(
                30_112,
                load(figures(Engine::Tgi, ""), Some(0.25), None, 11, 24),
            ),
        ),
        (
            page!("llama-cpp"),
            generated(
                29_201,
                load(figures(Engine::LlamaCpp, ""), None, None, 1, 3),
            ),
        ),
    ];
    for (page, expected) in pages {
        // A wrong engine in the hint changes nothing.
        for hint in [None, Some(Engine::Lmdeploy)] {
            let found = parse_page(page, hint).unwrap();
            // Of the engines' own pages, in another test.
            let without_latencies = Figures {
                prompt_tokens: None,
                time_per_token: None,
                time_to_first_token: None,
                ..found
            };
            assert_eq!(without_latencies, expected);
        }
    }
}

#[test]
fn a_hint_decides_where_two_engines_write_one_page() {
    let read = parse_page(page!("dynamo-vllm-worker"), Some(Engine::Dynamo)).unwrap();
    assert_eq!(
        (read.engine, read.kv_cache_usage),
        (Engine::Dynamo, Some(0.15625))
    );
    assert_eq!(
        (read.waiting, read.running),
        (Some(2), Some(6)),
        "its worker says what it does not"
    );
}

#[test]
fn only_requests_waiting_for_capacity_count_as_queue() {
    let waiting = |page: &str| parse_page(page.as_bytes(), None).unwrap().waiting;
    let total = "vllm:num_requests_waiting 9\n";
    let reason = |reason: &str, n: &str| {
        format!("vllm:num_requests_waiting_by_reason{{reason=\"{reason}\"}} {n}\n")
    };
    assert_eq!(waiting(total), Some(9), "an engine that gives no reasons");
    assert_eq!(
        waiting(&format!(
            "{total}{}{}",
            reason("capacity", "2"),
            reason("deferred", "7")
        )),
        Some(2)
    );
    assert_eq!(
        waiting(&format!("{}{total}", reason("capacity", "0"))),
        Some(0)
    );
    assert_eq!(
        waiting(&format!("{total}{}", reason("deferred", "7"))),
        Some(9),
        "no capacity said"
    );
    assert_eq!(
        waiting(&format!("{total}{}", reason("capacity", "NaN"))),
        Some(9),
        "the most that it can be"
    );
}

#[test]
fn an_impossible_value_gives_a_problem_and_no_figure() {
    let problems = |page: &str| {
        let figures = parse_page(page.as_bytes(), None).unwrap();
        let got = (
            figures.kv_cache_usage,
            figures.waiting,
            figures.kv_cache_tokens,
        );
        (
            got,
            figures
                .problems
                .iter()
                .map(ToString::to_string)
                .collect::<Vec<_>>(),
        )
    };
    for (value, shown) in [
        ("NaN", "NaN"),
        ("+Inf", "inf"),
        ("-Inf", "-inf"),
        ("-0.5", "-0.5"),
        ("1.5", "1.5"),
        ("42", "42"),
    ] {
        let (figures, named) = problems(&format!(
            "vllm:num_requests_waiting 3\nvllm:kv_cache_usage_perc {value}\n"
        ));
        assert_eq!(figures, (None, Some(3), None), "{value}");
        assert_eq!(
            named,
            [format!(
                "vllm:kv_cache_usage_perc is {shown}, which cannot be"
            )]
        );
    }
    for value in ["NaN", "Inf", "-1", "1e300", "2.5", "1000000000001"] {
        let (figures, named) = problems(&format!(
            "vllm:num_requests_waiting {value}\nvllm:kv_cache_usage_perc 0.5\n"
        ));
        assert_eq!(figures, (Some(0.5), None, None), "{value}");
        assert_eq!(named.len(), 1, "{named:?}");
    }
    for (labels, shown) in [
        (r#"num_gpu_blocks="many",block_size="16""#, "many"),
        (
            r#"kv_cache_size_tokens="-5",num_gpu_blocks="10",block_size="16""#,
            "-5",
        ),
        (
            r#"num_gpu_blocks="1000000000000",block_size="16""#,
            "16000000000000",
        ),
    ] {
        let (figures, named) = problems(&format!("vllm:cache_config_info{{{labels}}} 1\n"));
        assert_eq!(figures, (None, None, None));
        assert!(
            named.len() == 1 && named[0].contains(&format!(" is {shown}, ")),
            "{named:?}"
        );
    }
    let (figures, named) =
        problems("tgi_batch_current_max_tokens 99\ntgi_batch_max_total_tokens 10\n");
    assert_eq!(figures, (None, None, None));
    assert_eq!(named, ["the KV cache's usage is 9.9, which cannot be"]);
}

#[test]
fn an_impossible_value_of_one_rank_invalidates_the_figure() {
    let page = "vllm:num_requests_waiting{engine=\"0\"} 3\nvllm:num_requests_waiting{engine=\"1\"} NaN\n\
        vllm:num_requests_running{engine=\"0\"} 3\nvllm:num_requests_running{engine=\"1\"} three\n";
    let figures = parse_page(page.as_bytes(), None).unwrap();
    assert_eq!((figures.waiting, figures.running), (None, None));
    let named: Vec<_> = figures.problems.iter().map(ToString::to_string).collect();
    assert_eq!(
        named,
        [
            "vllm:num_requests_waiting is NaN, which cannot be",
            "a line of vllm:num_requests_running cannot be read"
        ]
    );
}

#[test]
fn a_share_slightly_over_one_counts_as_one() {
    let usage = |value: &str| {
        parse_page(format!("sglang:token_usage {value}").as_bytes(), None)
            .unwrap()
            .kv_cache_usage
    };
    assert_eq!(usage("1.0005"), Some(1.0));
    assert_eq!(usage("1.002"), None);
    assert!(usage("-0.0").unwrap().is_sign_positive());
}

#[test]
fn a_former_metric_name_does_not_replace_an_impossible_current_value() {
    let page = b"vllm:gpu_cache_usage_perc 0.5\nvllm:kv_cache_usage_perc NaN\n";
    assert_eq!(parse_page(page, None).unwrap().kv_cache_usage, None);
}

#[test]
fn sleep_has_a_level_only_if_the_memory_is_gone() {
    let level = |awake, offloaded, discarded| {
        let page: String = [
            ("awake", awake),
            ("weights_offloaded", offloaded),
            ("discard_all", discarded),
        ]
        .map(|(state, value)| {
            format!("vllm:engine_sleep_state{{sleep_state=\"{state}\"}} {value}\n")
        })
        .concat();
        parse_page(page.as_bytes(), None).unwrap().sleep_level
    };
    assert_eq!(level("1.0", "0.0", "0.0"), None);
    assert_eq!(level("0.0", "1.0", "0.0"), Some(1));
    assert_eq!(level("0.0", "0.0", "1.0"), Some(2));
    assert_eq!(
        level("0.0", "0.0", "0.0"),
        None,
        "it takes no requests, and keeps its memory"
    );
    assert_eq!(level("NaN", "1.0", "0.0"), None);
}

#[test]
fn more_ranks_than_there_can_be_are_not_added_up() {
    let page: String = (0..100_000)
        .map(|rank| format!("vllm:num_requests_waiting{{engine=\"{rank}\"}} 1\n"))
        .collect();
    let figures = parse_page(page.as_bytes(), None).unwrap();
    assert_eq!(figures.waiting, None);
    assert_eq!(
        figures.problems[0].to_string(),
        "vllm:num_requests_waiting has more than 256 ranks"
    );
}

#[test]
fn a_histogram_that_cannot_be_is_unknown_and_named() {
    let whole =
        "vllm:time_to_first_token_seconds_sum 3\nvllm:time_to_first_token_seconds_count 2\n";
    let bucket = "vllm:time_to_first_token_seconds_bucket";
    let bounds: String = (0..1000)
        .map(|bound| format!("{bucket}{{le=\"{bound}\"}} 1\n"))
        .collect();
    for (lines, problem) in [
        (
            "vllm:time_to_first_token_seconds_sum -1\n",
            "seconds_sum is -1, which cannot be",
        ),
        (
            "vllm:time_to_first_token_seconds_count 1.5\n",
            "seconds_count is 1.5, which cannot be",
        ),
        (
            "vllm:time_to_first_token_seconds_sum NaN\n",
            "seconds_sum is NaN, which cannot be",
        ),
        (
            &format!("{bucket}{{le=\"fast\"}} 1\n"),
            "seconds_bucket is fast, which cannot be",
        ),
        (
            &format!("{bucket} 1\n"),
            "a line of vllm:time_to_first_token_seconds_bucket cannot be read",
        ),
        (
            &format!("{bucket}{{le=\"1\"}}\n"),
            "a line of vllm:time_to_first_token_seconds_bucket cannot be read",
        ),
        (&bounds, "seconds_bucket has more than 64 bounds"),
    ] {
        let figures = parse_page(format!("{whole}{lines}").as_bytes(), None).unwrap();
        assert_eq!(figures.time_to_first_token, None, "{problem}");
        let named = figures.problems[0].to_string();
        assert!(named.ends_with(problem), "{named}");
    }
    let only_infinite = format!("{whole}{bucket}{{le=\"+Inf\"}} 2\n");
    let figures = parse_page(only_infinite.as_bytes(), None).unwrap();
    let histogram = figures.time_to_first_token.unwrap();
    assert_eq!(
        (histogram.sum, histogram.count, histogram.buckets),
        (3.0, 2.0, vec![])
    );
    let without_sum = parse_page(b"vllm:time_to_first_token_seconds_count 2\n", None).unwrap();
    assert_eq!(without_sum.time_to_first_token, None);
}

#[test]
fn a_page_of_no_engine_is_an_error_that_shows_it() {
    assert_eq!(parse_page(b"", None), Err(UnknownPage::Empty));
    assert_eq!(
        parse_page(b" \r\n\n", Some(Engine::Vllm)),
        Err(UnknownPage::Empty)
    );
    let html = format!("\n<!DOCTYPE html><title>{}</title>\n", "x".repeat(10_000));
    let error = parse_page(html.as_bytes(), None).unwrap_err().to_string();
    assert!(
        error.starts_with("no metric of a known engine; first line: \"<!DOCTYPE html><title>xxx"),
        "{error}"
    );
    assert!(error.len() < 150, "{error}");
    assert!(parse_page(&[0xff; 4096], None).is_err());
}

#[test]
fn an_idle_engine_is_identified_by_its_metric_prefix() {
    let page = b"# HELP x y\nvllm:request_success_total{model_name=\"a\"} 0\n";
    assert_eq!(parse_page(page, None).unwrap(), figures(Engine::Vllm, ""));
}

#[test]
fn every_line_that_the_format_allows_is_parsed() {
    let wanted = WantedMetrics::new(&[("a:b", 'a'), ("a:bc", 'c'), ("d", 'd')]);
    let value = |line: &str| {
        let lines: Vec<_> = Scan::new(line.as_bytes(), &wanted).collect();
        match lines[..] {
            [] => None,
            [MetricLine::Sample(sample)] => Some((sample.tag, sample.value)),
            _ => panic!("{lines:?}"),
        }
    };
    for line in [
        "d 5",
        "  \t d\t5 \r\n",
        "d{} 5 1712345678901",
        "d{}5",
        "d {x=\"1\",} 5 # {trace_id=\"} 7\"} 1 1.5",
        "d{x=\"}\",y=\",\",z=\"\\\"} 9 \\\\\"} 5.0 -1",
        "d{ x = \"a b\" , \"quoted.name\"=\"1\" } 5e0",
        "\n\n# TYPE d gauge\nd 5\n# EOF",
    ] {
        assert_eq!(value(line), Some(('d', 5.0)), "{line}");
    }
    assert_eq!(value("a:b 1"), Some(('a', 1.0)));
    assert_eq!(value("a:bc 1"), Some(('c', 1.0)));
    assert_eq!(value("a:bcd 1"), None);
    assert_eq!(value("# d 1"), None);
    assert_eq!(
        value("{\"d\",x=\"y\"} 1"),
        None,
        "a quoted name is passed over"
    );
    assert_eq!(value("d +Inf"), Some(('d', f64::INFINITY)));
    assert!(value("d NaN").unwrap().1.is_nan());
}

#[test]
fn lines_that_the_format_does_not_allow_are_skipped_and_counted() {
    let wanted = WantedMetrics::new(&[("d", ())]);
    for line in [
        "d ",
        "d five",
        "d 0x10",
        "d 1_000",
        "d{x=\"1\" 5",
        "d{x=\"1} 5",
        "d{x=1} 5",
        "d{x} 5",
        "d{,} 5",
        "d{x=\"1\"y=\"2\"} 5",
        "d{x=\"\\",
        "d 5 now",
        "d 5 1 2",
    ] {
        let page = format!("{line}\nd 7\n");
        let mut scan = Scan::new(page.as_bytes(), &wanted);
        assert_eq!(scan.next(), Some(MetricLine::Garbled(())), "{line}");
        assert!(
            matches!(scan.next(), Some(MetricLine::Sample(sample)) if sample.value == 7.0),
            "{line}"
        );
        assert_eq!((scan.next(), scan.malformed_lines()), (None, 1));
    }
    let mut scan = Scan::new(b"<html>\n\xff\xfe\n4 d\nd\nother garbage\n", &wanted);
    assert_eq!((scan.next(), scan.malformed_lines()), (None, 3));
}

#[test]
fn label_values_are_decoded_when_asked_for() {
    let wanted = WantedMetrics::new(&[("d", ())]);
    let page = "d{plain=\"a b\",escaped=\"\\\\ \\\" \\n \\t \\\\n\"} 1".as_bytes();
    let Some(MetricLine::Sample(sample)) = Scan::new(page, &wanted).next() else {
        panic!("a sample")
    };
    let values: Vec<_> = sample
        .labels
        .map(|label| label.value().into_owned())
        .collect();
    assert_eq!(values, ["a b", "\\ \" \n \\t \\n"]);
}
