//! Whole frames: a golden file for each situation. `STOWAGE_BLESS=1` writes them again; read what changed before you commit it.

use super::cell::Cell;
use super::draw::{Colors, draw};
use super::state::{KeyOutcome, Top};
use super::table;
use super::view::View;
use crate::cli::output::Columns;
use ratatui::Terminal;
use ratatui::backend::TestBackend;
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};
use std::path::PathBuf;
use std::time::Duration;
use stowage_scheduling::explaining::fleet::{
    Fleet, FleetGpu, FleetNode, FleetPendingPod, FleetPod, FleetReservation,
};
use stowage_scheduling::ids::{GpuModel, GpuUuid, ModelId, NodeName, PodKey, PodUid};
use stowage_scheduling::ledger::{OccupantPhase, SchedulingGate};
use stowage_scheduling::units::{Bytes, Micros, Millis, Moment, Percent};
use stowage_scheduling::vocabulary::gpu::Health;
use stowage_scheduling::vocabulary::node::NodeKind;
use stowage_scheduling::vocabulary::node_reading::{Freshness, GpuActivity};

const NOW: Moment = Moment(100_000_000);

fn gpu(node: &str, index: u32, allocated: u64, kv: Option<u8>) -> FleetGpu {
    FleetGpu {
        uuid: GpuUuid::parse(&format!("GPU-{node}-{index}")).unwrap(),
        index,
        model: GpuModel::parse("NVIDIA-H100-80GB-HBM3").unwrap(),
        parent: None,
        health: Health::Healthy,
        total_bytes: Bytes::gib(80),
        allocatable_bytes: Bytes::gib(72),
        allocated_bytes: Bytes::gib(allocated),
        unaccounted_bytes: Bytes::ZERO,
        lendable_bytes: Bytes::ZERO,
        used_bytes: Some(Bytes::gib(allocated)),
        kv_cache_percent: kv.and_then(Percent::new),
        queue: kv.map(|kv| u32::from(kv) / 20),
        time_per_token_micros: kv
            .filter(|kv| *kv > 0)
            .map(|kv| Micros(u64::from(kv) * 200)),
        activity: GpuActivity {
            sm_percent: kv.and_then(Percent::new),
            memory_bandwidth_percent: kv.and_then(|kv| Percent::new(kv / 2)),
        },
        exclusive: false,
        starting: false,
    }
}

fn pod(name: &str, gpus: &[usize], gib: u64) -> FleetPod {
    FleetPod {
        uid: PodUid::parse(name).unwrap(),
        pod: PodKey::parse("team-a", name).unwrap(),
        class: "serving".into(),
        tenant: Some("team-a".into()),
        priority: 1000,
        model: ModelId::parse("meta-llama/Llama-3.1-8B").ok(),
        bytes_per_gpu: Bytes::gib(gib),
        gpus: gpus.to_vec(),
        phase: OccupantPhase::Bound,
        starting: false,
        leaving: false,
        started: Some(Moment(NOW.0 - 3_600_000)),
        borrows: false,
        has_engine: true,
        limit_bytes: None,
        used_bytes: None,
    }
}

fn node(name: &str, gpus: Vec<FleetGpu>, pods: Vec<FleetPod>) -> FleetNode {
    FleetNode {
        name: NodeName::parse(name).unwrap(),
        kind: NodeKind::Stowage,
        pool: Some("serving".into()),
        freshness: Freshness::Fresh,
        closed: false,
        gpus,
        pods,
    }
}

fn waiting(name: &str, priority: i32, reservation: Option<FleetReservation>) -> FleetPendingPod {
    FleetPendingPod {
        uid: PodUid::parse(name).unwrap(),
        pod: PodKey::parse("team-b", name).unwrap(),
        class: "batch".into(),
        tenant: None,
        priority,
        model: None,
        bytes_per_gpu: Bytes::gib(40),
        gpus: 2,
        gate: SchedulingGate::Open,
        since: Moment(NOW.0 - 90_000),
        refused: true,
        reservation,
    }
}

fn fleet(nodes: Vec<FleetNode>, pending: Vec<FleetPendingPod>) -> Fleet {
    let pending_count = pending.len() as u64;
    Fleet {
        now: NOW,
        classes: Vec::new(),
        tenants: Vec::new(),
        nodes,
        pending,
        pending_count,
    }
}

/// As the demo's cluster is.
fn three_nodes() -> Fleet {
    let mut lost = gpu("node-c", 0, 0, None);
    lost.health = Health::Lost;
    let mut starting = pod("qwen-72b", &[0, 1], 70);
    starting.starting = true;
    starting.model = ModelId::parse("Qwen/Qwen3-32B").ok();
    let reservation = FleetReservation {
        node: NodeName::parse("node-b").unwrap(),
        gpus: Vec::new(),
        victims: Vec::new(),
        deadline: NOW,
    };
    let nodes = vec![
        node(
            "node-a",
            vec![
                gpu("node-a", 0, 40, Some(66)),
                gpu("node-a", 1, 72, Some(97)),
            ],
            vec![pod("llama-1", &[0], 40), pod("llama-2", &[1], 72)],
        ),
        node(
            "node-b",
            vec![gpu("node-b", 0, 70, Some(0)), gpu("node-b", 1, 70, Some(0))],
            vec![starting],
        ),
        FleetNode {
            freshness: Freshness::Stale,
            pool: None,
            ..node("node-c", vec![lost], Vec::new())
        },
    ];
    fleet(
        nodes,
        vec![
            waiting("tune-1", 5, None),
            waiting("tune-2", -10, Some(reservation)),
        ],
    )
}

/// 1,000 nodes with 8 GPUs each.
fn large() -> Fleet {
    let one = |place: u32| {
        let name = format!("node-{place}");
        let gpus = (0..8).map(|index| {
            gpu(
                &name,
                index,
                u64::from((place * 8 + index) % 73),
                Some((place % 101) as u8),
            )
        });
        let pods = (0..8).map(|index| pod(&format!("engine-{place}-{index}"), &[index], 40));
        node(&name, gpus.collect(), pods.collect())
    };
    fleet((0..1000).map(one).collect(), Vec::new())
}

fn top(fleet: Fleet) -> Top {
    let mut top = Top::new("http://127.0.0.1:9445".into(), View::Nodes);
    top.set_fleet(fleet);
    top
}

fn press(top: &mut Top, keys: &str) -> KeyOutcome {
    let press = |top: &mut Top, code| top.handle_key(KeyEvent::new(code, KeyModifiers::NONE));
    keys.chars()
        .map(|c| press(top, KeyCode::Char(c)))
        .last()
        .unwrap_or(KeyOutcome::Continue)
}

/// What is on a terminal of this size.
fn frame(top: &mut Top, width: u16, height: u16) -> String {
    let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
    terminal
        .draw(|frame| draw(top, frame.area(), frame.buffer_mut(), Colors::On))
        .unwrap();
    let buffer = terminal.backend().buffer();
    let row = |y: u16| {
        (0..width)
            .map(|x| buffer[(x, y)].symbol())
            .collect::<String>()
    };
    (0..height)
        .map(|y| row(y).trim_end().to_owned() + "\n")
        .collect()
}

fn check(golden: &str, text: &str) {
    let path =
        PathBuf::from(env!("CARGO_WORKSPACE_DIR")).join(format!("tests/golden/top/{golden}.txt"));
    if std::env::var_os("STOWAGE_BLESS").is_some() {
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, text).unwrap();
    }
    let committed = std::fs::read_to_string(&path).unwrap_or_default();
    assert_eq!(text, committed, "{golden}: STOWAGE_BLESS=1 writes it again");
}

#[test]
fn every_view_of_three_nodes() {
    let mut top = top(three_nodes());
    let views: Vec<String> = ["1", "2", "3", "4", "5", "?"]
        .into_iter()
        .map(|key| {
            press(&mut top, key);
            frame(&mut top, 110, 20)
        })
        .collect();
    check("three-nodes", &views.join(&("─".repeat(110) + "\n")));
}

#[test]
fn the_printed_tables_of_three_nodes() {
    check(
        "once",
        &View::ALL
            .map(|view| table(&three_nodes(), view, Columns(None)))
            .join("\n"),
    );
}

#[test]
fn eight_thousand_gpus_are_scrolled_sorted_and_searched() {
    let mut top = top(large());
    press(&mut top, "2");
    let first = frame(&mut top, 100, 16);
    top.handle_key(KeyEvent::new(KeyCode::PageDown, KeyModifiers::NONE));
    let next = frame(&mut top, 100, 16);
    press(&mut top, "G");
    let last = frame(&mut top, 100, 16);
    assert_eq!(
        (top.rows().len(), top.selected, top.offset),
        (8000, 7999, 8000 - 12)
    );
    press(&mut top, "g>>>>>r");
    let fullest = frame(&mut top, 100, 16);
    press(&mut top, "/node-77");
    let found = frame(&mut top, 100, 16);
    assert_eq!(top.rows().len(), 8 * 11, "node-77 and node-770 to node-779");
    check(
        "eight-thousand-gpus",
        &[first, next, last, fullest, found].join(&("─".repeat(100) + "\n")),
    );
}

#[test]
fn the_last_figures_stay_and_are_marked_as_old() {
    let mut top = top(three_nodes());
    assert!(frame(&mut top, 100, 12).starts_with("3 nodes, 5 GPUs"));
    top.displayed.age = Duration::from_secs(12);
    top.set_problem("no answer from http://127.0.0.1:9445: Connection refused".into());
    let old = frame(&mut top, 100, 12);
    assert!(
        old.starts_with("OLD, 12 s: 3 nodes") && old.contains("node-a"),
        "{old}"
    );
    assert!(
        old.lines().last().unwrap().contains("Connection refused"),
        "{old}"
    );
    top.set_fleet(three_nodes());
    assert!(frame(&mut top, 100, 12).starts_with("3 nodes"));
    let mut never = Top::new("http://nowhere".into(), View::Nodes);
    assert!(frame(&mut never, 60, 12).starts_with("asking http://nowhere"));
    never.set_problem("no answer".into());
    assert!(frame(&mut never, 60, 12).starts_with("no answer"));
}

#[test]
fn any_size_of_the_terminal_can_be_drawn() {
    let mut top = top(large());
    press(&mut top, "3G");
    for (width, height) in [
        (1, 1),
        (1, 40),
        (20, 5),
        (40, 4),
        (300, 6),
        (80, 24),
        (12, 100),
    ] {
        for keys in ["", "?", "?", "/x", "\n"] {
            press(&mut top, keys);
            frame(&mut top, width, height);
        }
        top.handle_key(KeyEvent::new(KeyCode::Esc, KeyModifiers::NONE));
    }
}

#[test]
fn keys_do_what_the_help_says() {
    let mut top = top(three_nodes());
    assert_eq!(press(&mut top, "q"), KeyOutcome::Quit);
    assert_eq!(
        top.handle_key(KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL)),
        KeyOutcome::Quit
    );
    press(&mut top, "?");
    assert_eq!(
        press(&mut top, "q"),
        KeyOutcome::Continue,
        "it closes the help"
    );
    press(&mut top, "/node-b");
    assert_eq!(
        (press(&mut top, "q"), &*top.filter),
        (KeyOutcome::Continue, "node-bq"),
        "a letter of the filter"
    );
    assert_eq!(
        top.handle_key(KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL)),
        KeyOutcome::Quit
    );
    top.handle_key(KeyEvent::new(KeyCode::Backspace, KeyModifiers::NONE));
    top.handle_key(KeyEvent::new(KeyCode::Enter, KeyModifiers::NONE));
    assert_eq!((top.rows().len(), top.is_typing), (1, false));
    top.handle_key(KeyEvent::new(KeyCode::Esc, KeyModifiers::NONE));
    assert_eq!(top.rows().len(), 3);
    press(&mut top, "G");
    top.set_fleet(fleet(Vec::new(), Vec::new()));
    assert_eq!((top.rows().len(), top.selected), (0, 0));
    press(&mut top, "jjjG kk");
    frame(&mut top, 80, 10);
}

#[test]
fn a_hostile_name_reaches_neither_the_screen_nor_the_table_as_it_is() {
    let mut hostile = pod("engine", &[0], 40);
    hostile.class = "a\u{1b}[2J\u{9b}1mb\nc".into();
    hostile.tenant = Some("\u{202e}evil".into());
    let fleet = fleet(
        vec![node(
            "node-a",
            vec![gpu("node-a", 0, 40, None)],
            vec![hostile],
        )],
        Vec::new(),
    );
    let mut top = top(fleet.clone());
    press(&mut top, "3");
    for text in [
        frame(&mut top, 120, 10),
        table(&fleet, View::Pods, Columns(None)),
    ] {
        let is_bad = |c: char| (c.is_control() && c != '\n') || c == '\u{202e}';
        assert!(!text.contains(is_bad) && text.contains("[2J"), "{text:?}");
    }
    top.set_problem("no answer from \u{1b}]0;title\u{7}".into());
    assert!(!frame(&mut top, 120, 10).contains('\u{1b}'));
}

#[test]
fn ages_are_of_the_servers_clock() {
    let rows = View::Pending.rows(&three_nodes());
    assert_eq!(
        rows[0][5],
        super::cell::Cell::Age(Some(Millis::seconds(90)))
    );
}

#[test]
fn pods_without_an_engine_have_no_kv_cache() {
    let job = |name: &str, gpu: usize| FleetPod {
        has_engine: false,
        model: ModelId::parse("org/tuned").ok(),
        ..pod(name, &[gpu], 20)
    };
    let mut beside = gpu("node-a", 0, 60, Some(66));
    beside.queue = Some(3);
    let gpus = vec![
        beside,
        gpu("node-a", 1, 20, Some(0)),
        gpu("node-a", 2, 20, None),
    ];
    let pods = vec![
        pod("llama-1", &[0], 40),
        job("tune-1", 0),
        job("tune-2", 1),
        job("tune-3", 2),
    ];
    let batch = node(
        "node-b",
        vec![gpu("node-b", 0, 20, Some(0))],
        vec![job("tune-4", 0)],
    );
    let fleet = fleet(vec![node("node-a", gpus, pods), batch], Vec::new());
    let loads = |view: View| -> Vec<[String; 2]> {
        let titles = view.columns().iter().map(|column| column.title);
        let kv = titles
            .clone()
            .position(|title| title == "KV CACHE")
            .unwrap();
        let queue = titles.clone().position(|title| title == "QUEUE").unwrap();
        let rows = view.rows(&fleet).into_iter();
        rows.map(|row| [row[kv].text(), row[queue].text()])
            .collect()
    };
    let full = [Cell::Percent(Percent::new(66)).text(), "3".to_owned()];
    let text = |kv: &str, queue: &str| [kv.to_owned(), queue.to_owned()];
    let unknown = text("?", "?");
    let none = text("-", "-");
    assert_eq!(loads(View::Models), [full.clone(), none.clone()]);
    assert_eq!(
        loads(View::Gpus),
        [full.clone(), none.clone(), unknown, none.clone()]
    );
    assert_eq!(loads(View::Nodes), [full, none]);
}

#[test]
fn on_any_screen_the_figures_are_whole() {
    let is_bar = |word: &&str| word.contains(['█', '·']);
    for width in 60..=200 {
        let mut top = top(three_nodes());
        for (view, name, figures) in [
            ("1", "node-a", "112/144 GiB 97 % 7 2 fresh"),
            ("1", "node-c", "0.0/72.0 GiB ? ? 0 stale"),
            ("2", "72.0/72.0", "72.0/72.0 GiB 97 % 4 1"),
            ("3", "qwen-72b", "140.0 GiB 60 min starting"),
            ("4", "tune-1", "5 2 × 40.0 GiB 90 s refused"),
            ("5", "meta-llama", "2 112.0 GiB 97 % 7"),
        ] {
            press(&mut top, view);
            let screen = frame(&mut top, width, 20);
            let row = screen.lines().find(|line| line.contains(name)).unwrap();
            let words: Vec<&str> = row
                .split_whitespace()
                .filter(|word| !is_bar(word))
                .collect();
            let words = words.join(" ");
            assert!(words.ends_with(figures), "{width}: {row}");
        }
    }
}
