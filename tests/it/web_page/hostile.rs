//! Text that others chose is shown as text, wherever it comes from: pods, annotations, agents' reports, policies and the API
//! server's messages.

use super::{GIB, report_of_use, url};
use crate::browser::Browser;
use crate::served::{
    ServedCluster, bind_args, bound_on, node, pod, policy_without_engines, report,
};
use crate::web_page::IS_DRAWN;
use serde_json::json;
use stowage_kubernetes_objects::port::BindOutcome;
use stowage_scheduling::policy::{Class, Match, Tenant};

/// Names have no space, and HTML needs none.
const POD: &str = "\"><img/src=x/onerror=ran=1>'";
const MODEL: &str = "acme/\u{202e}<svg/onload=ran=2>\u{200f}</script>";
const NODE: &str = "<b/onmouseover=ran=3>n</b>&lt;";
const GPU_MODEL: &str = "NVIDIA-<iframe/src=javascript:ran=4>";
/// A policy in a file has DNS labels; what is shown does not depend on that.
const CLASS: &str = "<style>*{display:none}</style>\n\"`${ran=5}";
const TENANT: &str = "</dl><script>ran=6</script>\u{2066}";
const HOSTILE_MESSAGE: &str = "denied:\n\n<img src=x onerror=\"ran=7\"> </script>\u{202e}tpircs";

/// Nothing was made of them, and nothing ran.
fn is_clean(browser: &mut Browser, place: &str) {
    let made = "[...document.querySelectorAll('img, svg, iframe, b, style, main script, dialog script, [onmouseover], [onerror]')].map((one) => one.outerHTML)";
    assert_eq!(browser.evaluate(made), json!([]), "{place}");
    assert_eq!(browser.evaluate("typeof ran"), "undefined", "{place}");
    // A mark that turns the direction of what follows would make one name look like another.
    let all = "[...document.querySelectorAll('[title], [aria-label]')].map((one) => one.title + one.ariaLabel).join() + \
               document.body.innerText";
    let turned = browser.evaluate(&format!(
        "/[\\u200e\\u200f\\u202a-\\u202e\\u2066-\\u2069]/.exec({all})?.index ?? null"
    ));
    assert!(
        turned.is_null(),
        "{place}: {}",
        browser.text("document.body.innerText")
    );
}

fn shows(browser: &mut Browser, place: &str, part: &str) {
    let is_shown = format!("document.body.innerText.includes({})", json!(part));
    browser.wait_for(&format!("{place} shows {part:?}"), &is_shown);
}

#[test]
fn untrusted_text_is_never_interpreted_as_html() {
    let Some(mut browser) = Browser::start() else {
        return;
    };
    let mut policy = policy_without_engines();
    let mut classes = policy.classes().to_vec();
    let every = classes.last_mut().unwrap();
    *every = Class {
        name: CLASS.into(),
        engine: false,
        ..every.clone()
    };
    classes.insert(
        0,
        Class {
            matches: Match {
                priority: Some(7..=7),
                ..Match::default()
            },
            ..Class::new("<u>top</u>")
        },
    );
    policy = policy.with_classes(classes).unwrap();
    policy = policy
        .with_tenants(vec![Tenant::new(TENANT, &["default"])])
        .unwrap();
    let hostile = |name: &str, vram: &str| {
        let mut pod = pod(name, vram);
        pod["metadata"]["annotations"]["stowage.dev/model"] = json!(MODEL);
        pod
    };
    let waiting = format!("{POD}-waits");
    let mut cluster = ServedCluster::with_gpus(&[]);
    cluster.nodes = vec![node(NODE)];
    cluster.policy = policy;
    let served = cluster
        .with([
            bound_on(hostile(POD, "40Gi"), NODE, &[0], 40 * GIB),
            hostile(&waiting, "100Gi"),
            hostile("<i>unbound</i>", "1Gi"),
        ])
        .serve();
    let mut first = report(NODE, "boot", 1, 2);
    first["gpus"][0]["model"] = json!(GPU_MODEL);
    assert_eq!(served.report(first).status, 200);
    served
        .control_plane
        .binds
        .lock()
        .push_back(BindOutcome::Refused {
            message: HOSTILE_MESSAGE.into(),
        });
    let refused = served
        .post(
            "/scheduler/bind",
            bind_args(&pod("<i>unbound</i>", "1Gi"), NODE),
        )
        .json();
    assert_ne!(refused["Error"], "");
    assert_eq!(
        served.filter_passed(&hostile(&waiting, "100Gi"), &[NODE]),
        [""; 0]
    );

    browser.go(&url(&served));
    browser.wait_for("the page is drawn", IS_DRAWN);
    for part in [
        POD,
        NODE,
        &GPU_MODEL["NVIDIA-".len()..],
        "</dl><script>ran=6</script>\\u2066",
        "<img src=x onerror=\"ran=7\">",
        "<u>top</u>",
    ] {
        shows(&mut browser, "the page", part);
    }
    is_clean(&mut browser, "bars");
    for view in ["heat", "table"] {
        browser.view(view);
        shows(&mut browser, view, POD);
        is_clean(&mut browser, view);
    }
    browser.view("bars");
    browser.wait_for("bars are drawn", "document.querySelector('.gpu') !== null");
    browser.click(".gpu");
    shows(
        &mut browser,
        "the GPU",
        "acme/\\u202e<svg/onload=ran=2>\\u200f</script>",
    );
    shows(&mut browser, "the GPU", GPU_MODEL);
    is_clean(&mut browser, "the GPU");
    for name in [POD, &waiting] {
        browser.evaluate(
            "document.getElementById('search').focus(); document.getElementById('drawer').close()",
        );
        browser.evaluate(&format!(
            "[...document.querySelectorAll('button')].find((one) => one.innerText.endsWith({})).click()",
            json!(name)
        ));
        browser.wait_for(
            "it is explained",
            "document.querySelector('#drawer .headline')&&1",
        );
        shows(&mut browser, "the explanation", "acme/\\u202e<svg");
        is_clean(&mut browser, "the explanation");
    }
    for sequence in 2..5 {
        assert_eq!(served.report(report_of_use(NODE, 2, sequence)).status, 200);
    }
    browser.wait_for(
        "a change arrives",
        "document.body.innerText.includes('20.0 GiB')",
    );
    is_clean(&mut browser, "a change");
    assert_eq!(browser.take_errors(), [""; 0]);
}
