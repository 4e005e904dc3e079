//! The scanner against a naive reader that splits, copies and reads one character after the other.

use super::scan::{MetricLine, Scan, WantedMetrics, whole_lines};
use super::{Engine, parse_page};
use proptest::prelude::*;

const NAMES: [&str; 5] = [
    "vllm:num_requests_waiting",
    "vllm:num_requests_running",
    "vllm:kv_cache_usage_perc",
    "tgi_queue_size",
    "up",
];

/// Its name, and its labels and value if it can be read.
type Read = (String, Option<(Vec<(String, String)>, u64)>);

fn scanned(page: &[u8]) -> Vec<Read> {
    let wanted = WantedMetrics::new(&NAMES.map(|name| (name, name)));
    let lines = Scan::new(page, &wanted).map(|line| match line {
        MetricLine::Garbled(name) => (name.to_owned(), None),
        MetricLine::Sample(sample) => {
            let text = |bytes| String::from_utf8_lossy(bytes).into_owned();
            let labels = sample
                .labels
                .map(|label| (text(label.name), label.value().into_owned()))
                .collect();
            (
                sample.tag.to_owned(),
                Some((labels, sample.value.to_bits())),
            )
        }
    });
    lines.collect()
}

fn naive(page: &str) -> Vec<Read> {
    page.split('\n').filter_map(naive_line).collect()
}

const BLANKS: [char; 3] = [' ', '\t', '\r'];

fn naive_line(line: &str) -> Option<Read> {
    let line = line.trim_start_matches(BLANKS);
    let end = line.find(['{', ' ', '\t'])?;
    let name = NAMES.iter().find(|name| **name == &line[..end])?;
    Some((name.to_string(), naive_sample(&line[end..])))
}

fn naive_sample(text: &str) -> Option<(Vec<(String, String)>, u64)> {
    let mut rest: Vec<char> = text.trim_matches(BLANKS).chars().collect();
    rest.reverse();
    let mut labels = Vec::new();
    if rest.last() == Some(&'{') {
        rest.pop();
        loop {
            skip_blanks(&mut rest);
            if rest.last()? == &'}' {
                rest.pop();
                break;
            }
            let name = if rest.last()? == &'"' {
                naive_quoted(&mut rest)?.0
            } else {
                naive_word(&mut rest)
            };
            skip_blanks(&mut rest);
            if name.is_none() || rest.pop()? != '=' {
                return None;
            }
            skip_blanks(&mut rest);
            labels.push((name?, naive_quoted(&mut rest)?.1));
            skip_blanks(&mut rest);
            match rest.last()? {
                ',' => drop(rest.pop()),
                '}' => {}
                _ => return None,
            }
        }
    }
    let text: String = rest.into_iter().rev().collect();
    let mut words = text.split(BLANKS).filter(|word| !word.is_empty());
    let value: f64 = words.next()?.parse().ok()?;
    let is_whole = match words.next() {
        None => true,
        Some(word) if word.starts_with('#') => true,
        Some(word) => {
            word.parse::<f64>().is_ok() && words.next().is_none_or(|word| word.starts_with('#'))
        }
    };
    is_whole.then(|| (labels, value.to_bits()))
}

fn skip_blanks(rest: &mut Vec<char>) {
    while rest.last().is_some_and(|c| BLANKS.contains(c)) {
        rest.pop();
    }
}

fn naive_word(rest: &mut Vec<char>) -> Option<String> {
    let mut word = String::new();
    while rest
        .last()
        .is_some_and(|c| c.is_ascii_alphanumeric() || "_:.".contains(*c))
    {
        word.extend(rest.pop());
    }
    (!word.is_empty()).then_some(word)
}

/// As written, and decoded.
fn naive_quoted(rest: &mut Vec<char>) -> Option<(Option<String>, String)> {
    if rest.pop()? != '"' {
        return None;
    }
    let (mut raw, mut text) = (String::new(), String::new());
    loop {
        let c = rest.pop()?;
        match c {
            '"' => return Some((Some(raw), text)),
            '\\' => {
                let escaped = rest.pop()?;
                raw.extend(['\\', escaped]);
                match escaped {
                    'n' => text.push('\n'),
                    '\\' | '"' => text.push(escaped),
                    _ => text.extend(['\\', escaped]),
                }
            }
            _ => {
                raw.push(c);
                text.push(c);
            }
        }
    }
}

fn blanks() -> impl Strategy<Value = String> {
    "[ \t]{0,2}"
}

fn labels() -> impl Strategy<Value = String> {
    let label = (
        "[a-z_]{1,6}|\"[a-z.]{1,4}\"",
        blanks(),
        "([a-z0-9{},#= é]|\\\\\\\\|\\\\\"|\\\\n|\\\\t){0,8}",
    )
        .prop_map(|(name, blank, value)| format!("{blank}{name}{blank}={blank}\"{value}\"{blank}"));
    let list = (prop::collection::vec(label, 0..4), any::<bool>()).prop_map(|(labels, comma)| {
        let comma = if comma && !labels.is_empty() { "," } else { "" };
        format!("{{{}{comma}}}", labels.join(","))
    });
    prop_oneof![Just(String::new()), list]
}

fn line() -> impl Strategy<Value = String> {
    let name = prop_oneof![
        prop::sample::select(&NAMES[..]).prop_map(str::to_owned),
        "[a-z_:]{1,8}",
        prop::sample::select(&NAMES[..]).prop_map(|name| format!("{name}_total")),
    ];
    let value = "[0-9]{1,4}|0\\.[0-9]{1,6}|-?[0-9]e[+-]?[0-9]{1,3}|NaN|[+-]Inf|[a-z]{1,3}|";
    let behind = "| 17[0-9]{11}| #  \\{trace_id=\"[a-z}\"]{1,4}\"\\} 1 2| 1\\.5 # x| x";
    let sample = (
        blanks(),
        name,
        labels(),
        "[ \t]{1,2}",
        value,
        behind,
        "[ \t]{0,2}\r?",
    )
        .prop_map(|(before, name, labels, blank, value, behind, after)| {
            format!("{before}{name}{labels}{blank}{value}{behind}{after}")
        });
    prop_oneof![
        8 => sample,
        1 => "# (HELP|TYPE|EOF) ?[ -~]{0,20}",
        1 => "[ -~]{0,20}",
        1 => blanks(),
    ]
}

fn page() -> impl Strategy<Value = String> {
    (prop::collection::vec(line(), 0..12), any::<bool>())
        .prop_map(|(lines, ends)| lines.join("\n") + if ends { "\n" } else { "" })
}

/// A page with a few characters written over others.
fn damaged_page() -> impl Strategy<Value = String> {
    let damage = (
        any::<prop::sample::Index>(),
        prop::sample::select(&['"', '\\', '{', '}', ',', '=', '\n', ' ', '\r', '#', '7'][..]),
    );
    (page(), prop::collection::vec(damage, 0..5)).prop_map(|(page, damages)| {
        let mut characters: Vec<char> = page.chars().collect();
        for (place, character) in damages.iter().filter(|_| !page.is_empty()) {
            let place = place.index(characters.len());
            characters[place] = *character;
        }
        characters.into_iter().collect()
    })
}

/// Pages of one rank with each name once, so that a figure is one line's value.
fn plain_page() -> impl Strategy<Value = String> {
    (0u32..100_000, 0u32..100_000, 0u32..=1000).prop_map(|(waiting, running, usage)| {
        let usage = f64::from(usage) / 1000.0;
        format!(
            "# HELP x y\nvllm:num_requests_waiting{{engine=\"0\"}} {waiting}\n\
             vllm:num_requests_running{{engine=\"0\"}} {running}\nvllm:kv_cache_usage_perc{{engine=\"0\"}} {usage}\n"
        )
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn the_scanner_reads_what_the_naive_reader_reads(page in damaged_page()) {
        prop_assert_eq!(scanned(page.as_bytes()), naive(&page));
    }

    #[test]
    fn no_bytes_make_the_reader_panic(page in prop::collection::vec(any::<u8>(), 0..400), hint in 0..=Engine::ALL.len()) {
        let _ = parse_page(&page, Engine::ALL.get(hint).copied());
        let mut behind_a_name = b"vllm:cache_config_info".to_vec();
        behind_a_name.extend(page);
        let _ = parse_page(&behind_a_name, None);
    }

    #[test]
    fn a_page_cut_anywhere_gives_no_figure_that_the_whole_one_does_not(page in plain_page(), cut: prop::sample::Index) {
        let whole = parse_page(page.as_bytes(), None).expect("a page of vLLM");
        let cut = &page.as_bytes()[..cut.index(page.len() + 1)];
        let Ok(part) = parse_page(whole_lines(cut), None) else { return Ok(()) };
        prop_assert!(part.waiting.is_none() || part.waiting == whole.waiting);
        prop_assert!(part.running.is_none() || part.running == whole.running);
        prop_assert!(part.kv_cache_usage.is_none() || part.kv_cache_usage == whole.kv_cache_usage);
        prop_assert_eq!(part.problems, []);
    }

    #[test]
    fn ranks_are_added_up_and_the_fullest_counts(ranks in prop::collection::vec((0u64..1000, 0u32..=1000), 1..20)) {
        let page: String = ranks.iter().enumerate().map(|(rank, (waiting, usage))| format!(
            "vllm:num_requests_waiting{{engine=\"{rank}\"}} {waiting}.0\n\
             vllm:kv_cache_usage_perc{{engine=\"{rank}\"}} {}\n",
            f64::from(*usage) / 1000.0,
        )).collect();
        let figures = parse_page(page.as_bytes(), None).expect("a page of vLLM");
        let fullest = ranks.iter().map(|(_, usage)| *usage).max().expect("one at least");
        prop_assert_eq!(figures.waiting, Some(ranks.iter().map(|(waiting, _)| waiting).sum()));
        prop_assert_eq!(figures.kv_cache_usage, Some(f64::from(fullest) / 1000.0));
    }
}
