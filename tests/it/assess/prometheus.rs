//! `stowage assess` and a Prometheus: one that misbehaves, and a real one.

use super::fixture::{answer, week};
use super::*;
use crate::alerts::prometheus::RunningPrometheus;
use crate::alerts::promtool;
use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;

/// An HTTP server that gives each query this answer, after so many milliseconds.
fn stand_in(status: &'static str, body: impl Fn(&str) -> String + Send + 'static) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    std::thread::spawn(move || {
        for stream in listener.incoming().map_while(Result::ok) {
            let mut lines = BufReader::new(&stream).lines().map_while(Result::ok);
            let asked = lines.next().unwrap_or_default();
            lines.take_while(|line| !line.is_empty()).for_each(drop);
            let body = body(&asked);
            let head = format!(
                "HTTP/1.1 {status}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
                body.len()
            );
            // In pieces, as a slow one does.
            for piece in [head.as_bytes()]
                .into_iter()
                .chain(body.as_bytes().chunks(60_000))
            {
                let _ = { &stream }.write_all(piece);
                std::thread::yield_now();
            }
        }
    });
    url
}

const EMPTY: &str = r#"{"status":"success","data":{"resultType":"matrix","result":[]}}"#;
/// A second after the last sample of the fixture.
const AT: &str = "2026-11-22T23:00:01Z";

fn on_server(url: &str, more: &[&str]) -> Said {
    let cluster = committed("device-plugin.json");
    let fixed = [
        "--cluster",
        &cluster,
        "--prometheus",
        url,
        "--at",
        AT,
        "--step",
        "1h",
        "-o",
        "json",
    ];
    assess(&[&fixed[..], more].concat())
}

#[test]
fn an_empty_prometheus_says_nothing_and_that_is_said() {
    let said = on_server(&stand_in("200 OK", |_| EMPTY.into()), &[]);
    let said = said.json();
    let cautions = said["cautions"].to_string();
    assert!(cautions.contains("Without figures of pods"), "{cautions}");
    let summary = said["summary"].as_str().unwrap();
    assert!(summary.starts_with("Unknown: of no workload"), "{summary}");
}

#[test]
fn a_prometheus_that_cannot_answer_is_an_error_with_a_way_out() {
    let error = r#"{"status":"error","errorType":"execution","error":"query processing would load too many samples into memory"}"#;
    let html = "<html>login</html>";
    for (status, body, expected) in [
        (
            "422 Unprocessable Entity",
            error,
            "it answers: query processing would load too many samples",
        ),
        (
            "200 OK",
            html,
            "that is no answer of a Prometheus; give the address before /api/v1",
        ),
        ("502 Bad Gateway", html, "it answers 502 Bad Gateway"),
        ("200 OK", &EMPTY[..40], "that is no answer"),
        (
            "200 OK",
            r#"{"status":"success","data":{"resultType":"vector","result":[]}}"#,
            "a vector is no answer",
        ),
    ] {
        let said = on_server(&stand_in(status, move |_| body.into()), &[]);
        assert!(
            said.code == 2 && said.err.contains(expected),
            "{expected}: {}",
            said.err
        );
    }
    let said = on_server("http://127.0.0.1:1", &[]);
    assert!(
        said.code == 2 && said.err.contains("cannot be reached"),
        "{}",
        said.err
    );
    let token = committed("week.json");
    let said = on_server("http://127.0.0.1:1", &["--prometheus-token-file", &token]);
    assert!(
        said.code == 2 && said.err.contains("https:// only"),
        "{}",
        said.err
    );
}

#[test]
fn figures_that_the_api_calls_partial_are_shown_as_incomplete() {
    let incomplete = |beside: &'static str| {
        let body = EMPTY.replace("{\"status", &format!("{{{beside}\"status"));
        let said = on_server(&stand_in("200 OK", move |_| body.clone()), &[]);
        let cautions = said.json()["cautions"].to_string();
        let found = cautions.split_once("Figures may be incomplete: ");
        found.map(|(_, why)| why.split_once('"').unwrap().0.to_owned())
    };
    for (beside, why) in [
        (
            r#""warnings":["a store was unreachable"],"#,
            Some("a store was unreachable."),
        ),
        (
            r#""isPartial":true,"#,
            Some("not all storage nodes have answered."),
        ),
        (r#""warnings":["x"],"isPartial":false,"#, Some("x.")),
        (r#""warnings":null,"#, None),
        (
            r#""infos":["metric might not be a counter"],"isPartial":false,"#,
            None,
        ),
    ] {
        assert_eq!(incomplete(beside).as_deref(), why, "{beside}");
    }
}

#[test]
fn a_server_is_asked_a_day_at_a_time_and_its_answers_are_those_of_the_file() {
    let url = stand_in("200 OK", |asked| {
        let value = |key: &str| {
            let from = asked.split_once(&format!("{key}=")).unwrap().1;
            from.split(['&', ' ']).next().unwrap().to_owned()
        };
        let [start, end] = ["start", "end"].map(|key| value(key).parse::<i64>().unwrap());
        assert!(end - start < 86_400, "{asked}");
        let query = value("query");
        let week = week()
            .into_iter()
            .filter(|(labels, _)| query.contains(labels[0].1.split(':').next_back().unwrap()));
        let mut whole = answer(&week.collect::<Vec<_>>());
        for series in whole["data"]["result"].as_array_mut().unwrap() {
            let values = series["values"].as_array_mut().unwrap();
            values.retain(|value| (start..=end).contains(&value[0].as_i64().unwrap()));
        }
        whole.to_string()
    });
    assert_eq!(
        on_server(&url, &[]).json(),
        on_fixture(&["-o", "json"]).json()
    );
}

#[test]
fn a_real_prometheus_with_the_week_in_it_says_what_the_file_says() {
    let folder = tempfile::tempdir().unwrap();
    let mut text = String::new();
    let mut by_name: Vec<_> = week();
    by_name.sort();
    for (labels, values) in &by_name {
        let name = &labels[0].1;
        let pairs: Vec<String> = labels[1..]
            .iter()
            .map(|(key, value)| format!("{key}=\"{value}\""))
            .collect();
        for (hour, value) in (0..HOURS).zip(values) {
            text += &format!(
                "{name}{{{}}} {value} {}\n",
                pairs.join(","),
                START + hour * 3600
            );
        }
    }
    let (input, data) = (folder.path().join("week.om"), folder.path().join("data"));
    std::fs::write(&input, text + "# EOF\n").unwrap();
    let paths = [&input, &data].map(|path| path.display().to_string());
    if promtool(&[
        "tsdb",
        "create-blocks-from",
        "--max-block-duration=240h",
        "openmetrics",
        &paths[0],
        &paths[1],
    ])
    .is_none()
    {
        return;
    }
    let Some(running) = RunningPrometheus::start_in(folder, &[]) else {
        return;
    };
    let url = format!("http://{}", running.address);
    let said = on_server(&url, &[]);
    assert_eq!((said.code, &*said.err), (0, ""));
    assert_eq!(said.json(), on_fixture(&["-o", "json"]).json());
    // By the minute every sample counts for the five minutes after it, and the rest of the hour is a gap.
    let cluster = committed("device-plugin.json");
    let by_minute = [
        "--cluster",
        &cluster,
        "--prometheus",
        &url,
        "--at",
        AT,
        "-o",
        "json",
    ];
    let said = assess(&by_minute).json();
    let kv = &workload(&said, "llama-8b")["kvCachePercent"];
    let covered = kv["coveredPercent"].as_u64().unwrap();
    assert!(kv["peak"] == 45 && (8..=10).contains(&covered), "{kv}");
}
