//! By keyboard, by pointer, in light and dark, on small screens, and behind `stowage ui`.

use super::{IS_DRAWN, cluster, served, url, visiting};
use crate::browser::Browser;
use crate::running_demo::KillOnDrop;
use crate::served::{pod, with_priority};
use futures::FutureExt;
use futures::future::BoxFuture;
use serde_json::json;
use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::sync::Arc;
use stowage_kubernetes_objects::port::{AuthError, OperatorPage, PageAuthority};
use stowage_scheduling::units::Millis;

/// The events of the page's stream that were taken, counted before the page sees them.
const COUNT_EVENTS: &str = "globalThis.heard = 0; const parse = JSON.parse; \
    JSON.parse = (...text) => { globalThis.heard += 1; return parse(...text); };";

#[test]
fn a_pod_is_explained_by_keyboard_and_the_focus_comes_back() {
    let served = served();
    let Some(mut browser) = visiting(&served) else {
        return;
    };
    browser.tab_to("default/large");
    browser.press("Enter");
    browser.wait_for(
        "it is explained",
        "document.getElementById('drawer').innerText.includes('No node fits it now')",
    );
    browser.expect("dialog", "default/large");
    // The list is drawn again below the drawer.
    assert_eq!(
        served.bind(&with_priority(pod("later", "10Gi"), -10), "node-b"),
        ""
    );
    browser.wait_for(
        "it is drawn",
        "!document.getElementById('pending').innerText.includes('default/later')",
    );
    for _ in 0..40 {
        browser.press("Tab");
        let inside = "document.activeElement === document.body || document.getElementById('drawer').contains(document.activeElement)";
        assert_eq!(
            browser.evaluate(inside),
            true,
            "the focus leaves the open drawer"
        );
    }
    browser.press("Escape");
    browser.wait_for("it is closed", "!document.getElementById('drawer').open");
    let back = "document.activeElement.innerText === 'default/large' \
                && document.getElementById('pending').contains(document.activeElement)";
    browser.wait_for("the focus is back", back);
    browser.press("Enter");
    browser.wait_for("it opens again", "document.getElementById('drawer').open");
    assert_eq!(browser.take_errors(), [""; 0]);
}

#[test]
fn a_gpu_opens_by_keyboard_and_leads_to_its_pods() {
    let served = served();
    let Some(mut browser) = visiting(&served) else {
        return;
    };
    browser.tab_to("node-a, GPU 0");
    browser.press("Enter");
    browser.expect("heading", "GPU 0 of node-a");
    let said = browser.text("document.getElementById('drawer').innerText");
    for part in [
        "GPU-node-a-0",
        "60.0 GiB of 72.0 GiB",
        "45.0 GiB",
        "91 %",
        "acme/Chat-8B",
        "default/job",
    ] {
        assert!(said.contains(part), "{part:?}: {said}");
    }
    browser.tab_to("default/chat");
    browser.press("Enter");
    browser.wait_for(
        "the pod is explained",
        "document.getElementById('drawer').innerText.includes('It is on its node')",
    );
    browser.press("Escape");
    browser.wait_for("it is closed", "!document.getElementById('drawer').open");
    browser.wait_for(
        "the focus is where it began",
        "document.activeElement.dataset.key === 'GPU-node-a-0'",
    );
    assert_eq!(browser.take_errors(), [""; 0]);
}

#[test]
fn a_click_counts_although_the_page_changes_below_it() {
    let served = served();
    let Some(mut browser) = Browser::start() else {
        return;
    };
    browser.before_each_page(COUNT_EVENTS);
    browser.go(&url(&served));
    browser.wait_for("the page is drawn", IS_DRAWN);
    let at = browser.middle_of("[data-key=GPU-node-b-0]");
    browser.send_mouse_event("mousePressed", &at);
    let heard = browser.evaluate("heard").as_u64().unwrap();
    assert_eq!(
        served.bind(&with_priority(pod("later", "10Gi"), -10), "node-b"),
        ""
    );
    browser.wait_for("the page has the change", &format!("heard > {heard}"));
    browser.evaluate(
        "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))",
    );
    browser.send_mouse_event("mouseReleased", &at);
    browser.wait_for("the GPU is shown", "document.getElementById('drawer').open");
    browser.press("Escape");
    browser.wait_for(
        "the change is drawn",
        "document.querySelector('.segment[title^=\"default/later\"]')&&1",
    );
    assert_eq!(browser.take_errors(), [""; 0]);
}

#[test]
fn search_filter_and_the_three_views_show_the_same_gpus() {
    let served = served();
    let Some(mut browser) = visiting(&served) else {
        return;
    };
    let shown = "[...document.querySelectorAll('.gpu')].map((one) => one.dataset.key)";
    browser.press("/");
    browser.write("chat-8b");
    browser.wait_for(
        "GPUs with pods of the model are left",
        &format!("{shown}.length === 1"),
    );
    assert_eq!(browser.evaluate(shown), json!(["GPU-node-a-0"]));
    assert_eq!(
        browser.evaluate("document.querySelectorAll('.segment.hit').length"),
        1
    );
    browser.view("table");
    browser.wait_for(
        "so it is in the table",
        "document.querySelectorAll('tbody tr').length === 1",
    );
    browser.expect("button", "node-a GPU 0");
    browser.search("no such pod");
    browser.wait_for(
        "it says that nothing is left",
        "document.getElementById('nothing')&&1",
    );
    browser.search("");
    browser.wait_for(
        "all are there again",
        "document.querySelectorAll('tbody tr').length === 14",
    );
    browser.filter("kv");
    browser.wait_for(
        "one has a full KV cache",
        "document.querySelectorAll('tbody tr').length === 1",
    );
    browser.filter("all");
    browser.view("heat");
    while browser.evaluate("document.activeElement.tagName") != "CANVAS" {
        browser.press("Tab");
    }
    let at = "document.getElementById('heat-at').innerText";
    for (key, gpu) in [
        ("ArrowRight", "node-a, GPU 1,"),
        ("ArrowDown", "node-c, GPU 4,"),
        ("ArrowLeft", "node-c, GPU 3,"),
    ] {
        browser.press(key);
        assert!(
            browser.text(at).starts_with(gpu),
            "{key} leads to {}",
            browser.text(at)
        );
    }
    browser.press("Enter");
    browser.expect("heading", "GPU 3 of node-c");
    browser.press("Escape");
    browser.wait_for("it is closed", "!document.getElementById('drawer').open");
    browser.wait_for(
        "the focus is back",
        "document.activeElement.tagName === 'CANVAS'",
    );
    assert_eq!(browser.take_errors(), [""; 0]);
}

#[test]
fn a_key_counts_before_the_heat_map_is_first_drawn() {
    let served = served();
    let Some(mut browser) = visiting(&served) else {
        return;
    };
    browser.filter("kv");
    browser.wait_for(
        "the filter is drawn",
        "document.querySelectorAll('.gpu').length === 1",
    );
    // One script: no frame is drawn between its lines.
    let pressed = "(() => { \
        const filter = document.getElementById('filter'); filter.value = 'all'; filter.dispatchEvent(new Event('change')); \
        document.querySelector('[data-view=heat]').click(); \
        document.querySelector('#view canvas').dispatchEvent(new KeyboardEvent('keydown', { key: 'ArrowRight' })); \
        return document.getElementById('heat-at').innerText; })()";
    let said = browser.text(pressed);
    assert!(said.starts_with("node-a, GPU 1,"), "{said}");
    assert_eq!(browser.take_errors(), [""; 0]);
}

#[test]
fn a_table_stays_where_it_is_while_the_cluster_changes() {
    let served = served();
    let Some(mut browser) = visiting(&served) else {
        return;
    };
    browser.resize((390, 800), true);
    browser.view("table");
    browser.wait_for(
        "it is wider than the screen",
        "document.querySelector('tbody tr')&&1",
    );
    browser.evaluate("document.querySelector('[data-key=GPU-node-b-1]').focus()");
    browser.evaluate("document.querySelector('.scroller').scrollLeft = 150");
    assert_eq!(
        served.bind(&with_priority(pod("later", "10Gi"), -10), "node-b"),
        ""
    );
    let changed = "document.querySelector('[data-key=GPU-node-b-0]').closest('tr').innerText.includes('10.0 GiB of')";
    browser.wait_for("a change is drawn", changed);
    assert_eq!(
        browser.evaluate("document.querySelector('.scroller').scrollLeft"),
        150
    );
    assert_eq!(
        browser.text("document.activeElement.dataset.key"),
        "GPU-node-b-1"
    );
}

impl Browser {
    fn search(&mut self, text: &str) {
        self.evaluate("document.getElementById('search').select()");
        match text {
            "" => self.press("Backspace"),
            text => self.write(text),
        }
    }

    fn filter(&mut self, value: &str) {
        self.evaluate(&format!(
            "(() => {{ const one = document.getElementById('filter'); one.value = '{value}'; one.dispatchEvent(new Event('change')); }})()"
        ));
    }
}

#[test]
fn it_follows_the_systems_theme_unless_one_is_chosen() {
    let served = served();
    let Some(mut browser) = visiting(&served) else {
        return;
    };
    let brightness = "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).reduce((sum, one) => sum + Number(one), 0) / 3";
    let is_dark = |browser: &mut Browser| browser.evaluate(brightness).as_f64().unwrap() < 128.0;
    browser.emulate_theme("dark");
    assert!(is_dark(&mut browser));
    browser.emulate_theme("light");
    assert!(!is_dark(&mut browser));
    browser.click("#theme");
    browser.click("#theme");
    assert_eq!(
        browser.text("document.getElementById('theme').innerText"),
        "Theme: dark"
    );
    assert!(is_dark(&mut browser), "the chosen theme counts");
    browser.go(&url(&served));
    browser.wait_for("the page is drawn again", IS_DRAWN);
    assert!(is_dark(&mut browser), "and lasts");
    assert_eq!(browser.take_errors(), [""; 0]);
}

#[test]
fn no_screen_scrolls_sideways() {
    let served = served();
    let Some(mut browser) = visiting(&served) else {
        return;
    };
    for (width, is_phone) in [
        (320, true),
        (390, true),
        (768, false),
        (1101, false),
        (2560, false),
    ] {
        browser.resize((width, 800), is_phone);
        for view in ["bars", "heat", "table"] {
            browser.view(view);
            let wide = browser.evaluate("document.documentElement.scrollWidth");
            assert!(
                wide.as_u64() <= Some(width.into()),
                "{view} at {width} pixels is {wide} wide"
            );
        }
    }
}

#[test]
fn stowage_ui_serves_the_whole_page_behind_its_key() {
    let Some(mut browser) = Browser::start() else {
        return;
    };
    let served = served();
    let ui = Command::new(env!("CARGO_BIN_EXE_stowage"))
        .args(["ui", "--server", &format!("http://{}", served.operators)])
        .env("KUBECONFIG", "/nonexistent")
        .stdout(Stdio::piped())
        .spawn();
    let mut ui = KillOnDrop(ui.unwrap());
    let mut line = String::new();
    BufReader::new(ui.0.stdout.take().unwrap())
        .read_line(&mut line)
        .unwrap();
    browser.go(line.trim().strip_prefix("Open ").unwrap());
    browser.wait_for("the page is drawn", IS_DRAWN);
    browser.click("#pending [data-key='default/large']");
    browser.wait_for(
        "a pod is explained",
        "document.getElementById('drawer').innerText.includes('No node fits it now')",
    );
    assert_eq!(browser.take_errors(), [""; 0]);
}

/// Accepts no token, so that a browser cannot read a page without one.
struct NobodyMaySee;

impl PageAuthority for NobodyMaySee {
    fn may_see<'a>(
        &'a self,
        _: &'a str,
        _: &'a OperatorPage,
    ) -> BoxFuture<'a, Result<Option<Millis>, AuthError>> {
        futures::future::ready(Err(AuthError::Invalid("unknown".into()))).boxed()
    }
}

#[test]
fn where_a_token_is_asked_for_it_says_how_to_open_the_page() {
    let Some(mut browser) = Browser::start() else {
        return;
    };
    let mut cluster = cluster();
    cluster.pages = Some(Arc::new(NobodyMaySee));
    let served = cluster.serve();
    browser.go(&url(&served));
    let said = "document.querySelector('[role=alert]')?.innerText.includes('stowage ui --server')";
    browser.wait_for("it says so", said);
    browser.expect("StaticText", "Not allowed, trying again");
}
