//! A headless Chromium with one tab, and what a person does in it: looks, types, points.
//!
//! It is spoken to in its DevTools protocol over a pipe, as JSON that a zero byte ends, so that no port is open and no websocket
//! is needed. Everything that the page should not do (an error, a warning, a blocked request, a dialog) is kept for the test:
//! [`Browser::take_errors`].

use crate::client::TEST_TIMEOUT;
use crate::needs::skip_not_installed;
use base64::Engine;
use rustix::process::{Pid, Signal, kill_process_group};
use serde_json::{Value, json};
use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// Names another program than the ones that are looked for.
const CHROMIUM: &str = "STOWAGE_CHROMIUM";
const PROGRAMS: [&str; 4] = ["chromium", "chromium-browser", "google-chrome", "chrome"];

/// Chromium reads requests from descriptor 3 and writes answers to 4; a child here has only the first three.
const SHELL_WITH_PIPES: &str = r#"exec "$0" "$@" 3<&0 4>&1 </dev/null >/dev/null"#;

/// No sandbox: a container has no rights to make one. No traffic of its own, and one picture on every machine.
const OPTIONS: [&str; 14] = [
    "--headless=new",
    "--remote-debugging-pipe",
    "--no-sandbox",
    "--no-zygote",
    "--no-first-run",
    "--no-proxy-server",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--force-color-profile=srgb",
    "--hide-scrollbars",
    "--lang=en-US",
];

/// A screen of an operator's laptop.
const WINDOW_SIZE: (u32, u32) = (1440, 900);
/// Interval between two evaluations of a condition on the page.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Set before any script of the page runs: what its content security policy blocks.
const WATCH_POLICY: &str = "addEventListener('securitypolicyviolation', (event) => \
    console.error(`blocked by ${event.violatedDirective}: ${event.blockedURI} ${event.sample}`));";

pub struct Browser {
    process: Child,
    requests: ChildStdin,
    messages: Receiver<Value>,
    calls: u64,
    session: Option<String>,
    complaints: Vec<String>,
    // Its profile; removed with it.
    _folder: TempDir,
}

/// `None`, with a line that says so, where there is no Chromium.
fn program() -> Option<PathBuf> {
    if let Some(named) = std::env::var_os(CHROMIUM) {
        return Some(named.into());
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    let found = std::env::split_paths(&path)
        .flat_map(|folder| PROGRAMS.map(|name| folder.join(name)))
        .find(|file| file.is_file());
    if found.is_none() {
        skip_not_installed("Chromium, which STOWAGE_CHROMIUM may name,", "chromium");
    }
    found
}

impl Browser {
    /// With an empty tab. `None`, with a line that says so, where there is no Chromium.
    pub fn start() -> Option<Self> {
        let program = program()?;
        let folder = tempfile::tempdir().unwrap();
        let said = folder.path().join("stderr");
        let mut process = Command::new("sh")
            .args(["-c", SHELL_WITH_PIPES])
            .arg(&program)
            .args(OPTIONS)
            .arg(format!("--user-data-dir={}", folder.path().display()))
            .arg(format!("--window-size={},{}", WINDOW_SIZE.0, WINDOW_SIZE.1))
            .arg("about:blank")
            .env("HOME", folder.path())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(File::create(&said).unwrap())
            .process_group(0)
            .spawn()
            .unwrap();
        let requests = process.stdin.take().unwrap();
        let (sender, messages) = channel();
        let answers = BufReader::new(process.stdout.take().unwrap());
        std::thread::spawn(move || {
            let messages = answers.split(0).map_while(Result::ok);
            messages
                .map(|text| serde_json::from_slice(&text).unwrap())
                .try_for_each(|one| sender.send(one))
        });
        let (calls, session, complaints) = (0, None, Vec::new());
        let mut browser = Self {
            process,
            requests,
            messages,
            calls,
            session,
            complaints,
            _folder: folder,
        };
        let targets = browser.try_call("Target.getTargets", json!({}));
        let targets = targets.unwrap_or_else(|error| {
            panic!(
                "{}: {error}\n{}",
                program.display(),
                std::fs::read_to_string(&said).unwrap_or_default()
            )
        });
        let tab = targets["targetInfos"]
            .as_array()
            .unwrap()
            .iter()
            .find(|one| one["type"] == "page")
            .unwrap();
        let to = json!({ "targetId": tab["targetId"], "flatten": true });
        let attached = browser.call("Target.attachToTarget", to);
        browser.session = Some(attached["sessionId"].as_str().unwrap().to_owned());
        for part in ["Page", "Runtime", "Log", "DOM", "Accessibility"] {
            browser.call(&format!("{part}.enable"), json!({}));
        }
        browser.before_each_page(WATCH_POLICY);
        browser.resize(WINDOW_SIZE, false);
        Some(browser)
    }

    /// A script that runs in each page before its own.
    pub fn before_each_page(&mut self, script: &str) {
        self.call(
            "Page.addScriptToEvaluateOnNewDocument",
            json!({ "source": script }),
        );
    }

    pub fn go(&mut self, url: &str) {
        let gone = self.call("Page.navigate", json!({ "url": url }));
        assert!(gone.get("errorText").is_none(), "{url}: {gone}");
    }

    /// What the protocol answers.
    pub fn call(&mut self, method: &str, parameters: Value) -> Value {
        self.try_call(method, parameters)
            .unwrap_or_else(|error| panic!("{method}: {error}"))
    }

    fn try_call(&mut self, method: &str, parameters: Value) -> Result<Value, String> {
        let id = self.send_command(method, parameters)?;
        loop {
            let mut message = self
                .messages
                .recv_timeout(TEST_TIMEOUT)
                .map_err(|error| error.to_string())?;
            if message["id"] == id {
                return match message.get("error") {
                    Some(error) => Err(error.to_string()),
                    None => Ok(message["result"].take()),
                };
            }
            self.record_message(&message);
        }
    }

    fn send_command(&mut self, method: &str, parameters: Value) -> Result<u64, String> {
        self.calls += 1;
        let mut request = json!({ "id": self.calls, "method": method, "params": parameters });
        if let Some(session) = &self.session {
            request["sessionId"] = json!(session);
        }
        let text = [request.to_string().as_bytes(), b"\0"].concat();
        self.requests
            .write_all(&text)
            .map_err(|error| error.to_string())?;
        Ok(self.calls)
    }

    /// An event that nothing waits for.
    fn record_message(&mut self, message: &Value) {
        let of = &message["params"];
        match message["method"].as_str().unwrap_or_default() {
            "Runtime.exceptionThrown" => self.complaints.push(of["exceptionDetails"].to_string()),
            "Runtime.consoleAPICalled"
                if ["error", "warning", "assert"]
                    .iter()
                    .any(|kind| of["type"] == *kind) =>
            {
                self.complaints.push(of["args"].to_string());
            }
            "Log.entryAdded"
                if ["error", "warning"]
                    .iter()
                    .any(|kind| of["entry"]["level"] == *kind) =>
            {
                self.complaints.push(of["entry"].to_string());
            }
            "Page.javascriptDialogOpening" => {
                self.complaints
                    .push(format!("a dialog opened: {}", of["message"]));
                let _ = self.send_command("Page.handleJavaScriptDialog", json!({ "accept": true }));
            }
            "Inspector.targetCrashed" => panic!("the tab crashed"),
            _ => {}
        }
    }

    /// What went wrong in the page since the last look.
    pub fn take_errors(&mut self) -> Vec<String> {
        // All events of what the page has done until now come before this answer.
        self.evaluate("0");
        std::mem::take(&mut self.complaints)
    }

    /// The value of an expression, or of its promise.
    pub fn evaluate(&mut self, expression: &str) -> Value {
        let asked = json!({ "expression": expression, "returnByValue": true, "awaitPromise": true, "userGesture": true });
        let mut answer = self.call("Runtime.evaluate", asked);
        let thrown = &answer["exceptionDetails"]["exception"]["description"];
        assert!(
            thrown.is_null(),
            "{}: {thrown}",
            &expression[..expression.floor_char_boundary(500)]
        );
        answer["result"]["value"].take()
    }

    pub fn text(&mut self, expression: &str) -> String {
        let value = self.evaluate(expression);
        value
            .as_str()
            .unwrap_or_else(|| panic!("{expression} is no text but {value}"))
            .to_owned()
    }

    /// The first value of an expression that JavaScript takes for true.
    pub fn wait_for(&mut self, what: &str, expression: &str) -> Value {
        let began = Instant::now();
        loop {
            let value = self.evaluate(&format!("({expression}) || null"));
            if !value.is_null() {
                return value;
            }
            if began.elapsed() > TEST_TIMEOUT {
                let page = self.evaluate("document.body.innerText");
                panic!("it never came that {what}: {:?}\n{page}", self.complaints);
            }
            std::thread::park_timeout(POLL_INTERVAL);
        }
    }

    pub fn press(&mut self, key: &str) {
        let (code, text) = match key {
            "Backspace" => (8, ""),
            "Tab" => (9, ""),
            "Enter" => (13, "\r"),
            "Escape" => (27, ""),
            "ArrowLeft" => (37, ""),
            "ArrowRight" => (39, ""),
            "ArrowDown" => (40, ""),
            one if one.chars().count() == 1 => (0, one),
            other => panic!("the code of the key {other:?}?"),
        };
        let kinds = [("keyDown", text), ("keyUp", "")];
        for (kind, text) in kinds {
            let mut event = json!({ "type": kind, "key": key, "windowsVirtualKeyCode": code });
            if !text.is_empty() {
                event["text"] = json!(text);
            }
            self.call("Input.dispatchKeyEvent", event);
        }
    }

    pub fn write(&mut self, text: &str) {
        self.call("Input.insertText", json!({ "text": text }));
    }

    /// In the middle of the first element of this selector.
    pub fn click(&mut self, selector: &str) {
        let at = self.middle_of(selector);
        for kind in ["mouseMoved", "mousePressed", "mouseReleased"] {
            self.send_mouse_event(kind, &at);
        }
    }

    /// Its x and y, after it is scrolled into view.
    pub fn middle_of(&mut self, selector: &str) -> Value {
        self.evaluate(&format!(
            "(() => {{ const one = document.querySelector({}); one.scrollIntoView({{ block: 'nearest' }}); \
             const box = one.getBoundingClientRect(); return [box.x + box.width / 2, box.y + box.height / 2]; }})()",
            json!(selector)
        ))
    }

    /// `mouseMoved`, `mousePressed` or `mouseReleased`.
    pub fn send_mouse_event(&mut self, kind: &str, at: &Value) {
        let event =
            json!({ "type": kind, "x": at[0], "y": at[1], "button": "left", "clickCount": 1 });
        self.call("Input.dispatchMouseEvent", event);
    }

    /// The names of everything that assistive technology is told of as a `button`, a `heading` or whatever the role is.
    pub fn accessible_names(&mut self, role: &str) -> Vec<String> {
        let tree = self.call("Accessibility.getFullAXTree", json!({}));
        let of_role =
            |node: &&Value| node["ignored"] != true && node["role"]["value"].as_str() == Some(role);
        let name = |node: &Value| {
            node["name"]["value"]
                .as_str()
                .unwrap_or_default()
                .to_owned()
        };
        tree["nodes"]
            .as_array()
            .unwrap()
            .iter()
            .filter(of_role)
            .map(name)
            .collect()
    }

    /// The theme of the system.
    pub fn emulate_theme(&mut self, theme: &str) {
        let feature = json!([{ "name": "prefers-color-scheme", "value": theme }]);
        self.call("Emulation.setEmulatedMedia", json!({ "features": feature }));
    }

    pub fn resize(&mut self, (width, height): (u32, u32), is_phone: bool) {
        let screen =
            json!({ "width": width, "height": height, "deviceScaleFactor": 1, "mobile": is_phone });
        self.call("Emulation.setDeviceMetricsOverride", screen);
    }

    /// Into a PNG file: what is on the screen, after it has been drawn.
    pub fn save_screenshot(&mut self, file: &Path) {
        self.evaluate(
            "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))",
        );
        let taken = self.call("Page.captureScreenshot", json!({ "format": "png" }));
        let bytes =
            base64::engine::general_purpose::STANDARD.decode(taken["data"].as_str().unwrap());
        std::fs::write(file, bytes.unwrap()).unwrap();
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        // Its renderers are of the same group.
        let group = i32::try_from(self.process.id())
            .ok()
            .and_then(Pid::from_raw);
        let _ = group.map(|group| kill_process_group(group, Signal::KILL));
        let _ = self.process.wait();
    }
}
