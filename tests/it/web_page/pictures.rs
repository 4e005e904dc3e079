//! Pictures of the page for people to look at, in a folder that `STOWAGE_SCREENSHOTS` names.

use super::{IS_DRAWN, large, url};
use crate::browser::Browser;
use crate::needs::report_skipped;
use crate::running_demo::RunningDemo;
use std::path::{Path, PathBuf};

const FOLDER: &str = "STOWAGE_SCREENSHOTS";
const PHONE: (u32, u32) = (390, 844);
const LAPTOP: (u32, u32) = (1440, 900);

struct Album {
    folder: PathBuf,
    /// Of the file's name.
    of: &'static str,
}

impl Album {
    fn take(&self, browser: &mut Browser, name: &str) {
        let file = self.folder.join(format!("{}-{name}.png", self.of));
        browser.save_screenshot(&file);
        assert!(
            std::fs::metadata(&file).unwrap().len() > 10_000,
            "{} has nothing in it",
            file.display()
        );
    }

    fn everything(&self, browser: &mut Browser) {
        for theme in ["light", "dark"] {
            browser.emulate_theme(theme);
            for view in ["bars", "heat", "table"] {
                browser.view(view);
                browser.wait_for(
                    "a GPU is there",
                    "document.querySelector('.gpu, canvas, tbody tr')&&1",
                );
                self.take(browser, &format!("{view}-{theme}"));
            }
            browser.view("bars");
            browser.click(".gpu");
            self.take(browser, &format!("gpu-{theme}"));
            browser.press("Escape");
            browser.click("#pending button, #activity button");
            browser.wait_for(
                "it is explained",
                "document.querySelector('#drawer .headline')&&1",
            );
            self.take(browser, &format!("drawer-{theme}"));
            browser.press("Escape");
        }
        browser.emulate_theme("light");
        browser.resize(PHONE, true);
        self.take(browser, "phone");
        browser.evaluate("document.querySelector('#nodes').scrollIntoView()");
        self.take(browser, "phone-nodes");
        browser.resize(LAPTOP, false);
    }
}

#[test]
fn screenshots_are_taken_on_request() {
    let Some(folder) = std::env::var_os(FOLDER) else {
        return report_skipped(format_args!("{FOLDER} names no folder"));
    };
    let Some(mut browser) = Browser::start() else {
        return;
    };
    let folder = Path::new(&folder);
    std::fs::create_dir_all(folder).unwrap();
    let album = |of| Album {
        folder: folder.to_owned(),
        of,
    };
    let demo = RunningDemo::start();
    browser.go(&format!("{}/", demo.operators));
    browser.wait_for("the page is drawn", IS_DRAWN);
    album("demo").everything(&mut browser);
    let served = large::served();
    browser.go(&url(&served));
    browser.wait_for("the page is drawn", IS_DRAWN);
    assert_eq!(
        served.bind(&crate::served::pod("late", "30Gi"), "node-0000"),
        ""
    );
    browser.wait_for(
        "it is decided",
        "document.querySelector('#activity button')&&1",
    );
    album("large").everything(&mut browser);
}
