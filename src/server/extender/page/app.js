// Puts the page together: takes events, draws at most once a frame, and opens the drawer.

import { explanation } from "./explain.js";
import { drawActivity, drawPending, drawReservations, drawTenants, drawTotals, Plots } from "./panels.js";
import { State, follow, textOf } from "./state.js";
import { Bars, GpuTable, Heat, KV_HIGH, describe } from "./views.js";
import { bytes, el, plain, plural, podName, time } from "./words.js";

const $ = (id) => document.getElementById(id);
const state = new State();
// Above so many GPUs the bars no longer fit a screen or two.
const MANY_GPUS = 64;

const page = {
  state, look: 0, query: "", filter: "all",
  pattern(name) { const place = state.classes.findIndex((one) => one.name === name); return `c${place < 0 ? 7 : place % 8}`; },
  matches(pod) { return page.query !== "" && text(pod).includes(page.query); },
  // The nodes and GPUs that the search and the filter leave.
  shown() {
    if (page.cache) return page.cache;
    const found = [];
    for (const name of state.names) {
      const node = state.nodes.get(name), query = page.query;
      const whole = query === "" || `${name} ${node.pool ?? ""} ${node.kind}`.toLowerCase().includes(query);
      const hits = new Set();
      if (!whole) for (const pod of node.pods) if (page.matches(pod)) pod.gpus.forEach((place) => hits.add(place));
      const places = [];
      node.gpus.forEach((gpu, place) => {
        const is_found = whole || hits.has(place) || gpu.uuid.toLowerCase().includes(query) || gpu.model.toLowerCase().includes(query);
        if (is_found && passes(node, gpu)) places.push(place);
      });
      if (places.length || (whole && !node.gpus.length && page.filter === "all")) found.push({ node, places });
    }
    return (page.cache = found);
  },
  empty(beside, count) {
    const said = $("nothing");
    if (count || !state.names.length) { said?.remove(); return; }
    if (!said) beside.after(el("p", { id: "nothing", class: "none" }, "No GPU matches. Change the search or the filter."));
  },
  openGpu(name, place) {
    const node = state.nodes.get(name), gpu = node?.gpus[place];
    if (!gpu) return;
    const pods = node.pods.filter((pod) => pod.gpus.includes(place));
    const rows = [["Node", name], ["GPU", `${gpu.index} · ${gpu.uuid}`], ["Model", gpu.model], ["Health", gpu.health],
      ["Allocated", `${bytes(gpu.allocatedBytes)} of ${bytes(gpu.allocatableBytes)}`], ["Total", bytes(gpu.totalBytes)], ["Used, as measured", bytes(gpu.usedBytes)],
      ["Unaccounted", bytes(gpu.unaccountedBytes)], ["Lent by engines", bytes(gpu.lendableBytes)],
      ["KV cache", share(gpu.kvCachePercent)], ["Requests waiting", gpu.queue === null ? "unknown" : String(gpu.queue)],
      ["Time per token", gpu.timePerTokenMicros === null ? "unknown" : `${(gpu.timePerTokenMicros / 1000).toFixed(1)} ms`],
      ["SM activity", share(gpu.activity.smPercent)], ["Memory bandwidth in use", share(gpu.activity.memoryBandwidthPercent)]];
    show(`GPU ${gpu.index} of ${name}`,
      el("dl", { class: "facts" }, rows.map(([name, value]) => [el("dt", {}, name), el("dd", {}, value)])),
      el("h3", {}, "Pods"),
      pods.length ? el("ul", { class: "pods" }, pods.map((pod) => el("li", {},
        el("button", { type: "button", class: "plain", on: { click: () => page.openPod(podName(pod.pod)) } }, el("span", { class: `swatch ${page.pattern(pod.class)}` }), podName(pod.pod)),
        el("span", { class: "dim" }, `${bytes(pod.bytesPerGpu)} · ${pod.class} · priority ${pod.priority}${pod.model ? ` · ${pod.model}` : ""} · ${pod.leaving ? "leaving" : pod.phase}${pod.starting ? ", starting" : ""}${pod.borrows ? ", on lent VRAM" : ""}`)))) : el("p", { class: "none" }, "None."));
  },
  async openPod(name) {
    const body = el("div", { "aria-busy": "true" }, el("p", { class: "none" }, "Asking Stowage why…"));
    show(name, body);
    try {
      const answer = await fetch(`v1/explain?pod=${encodeURIComponent(name)}`, { cache: "no-store" });
      const said = await answer.text();
      body.replaceChildren(...(answer.ok ? explanation(JSON.parse(said)) : [el("p", { class: "none" }, textOf(said))]));
    } catch {
      body.replaceChildren(el("p", { class: "none" }, "Stowage does not answer. Close this, and open it again when the page is connected."));
    }
    body.removeAttribute("aria-busy");
  },
};

function share(percent) { return percent === null ? "unknown" : `${percent} %`; }

function text(pod) { return `${podName(pod.pod)} ${pod.class} ${pod.model ?? ""} ${pod.tenant ?? ""}`.toLowerCase(); }

function passes(node, gpu) {
  switch (page.filter) {
    case "free": return gpu.health === "healthy" && gpu.allocatableBytes - gpu.allocatedBytes - gpu.unaccountedBytes >= gpu.allocatableBytes / 2;
    case "kv": return gpu.kvCachePercent >= KV_HIGH;
    case "queue": return gpu.queue > 0;
    case "ill": return gpu.health !== "healthy" || ["stale", "expired"].includes(node.freshness);
    default: return true;
  }
}

let opener = {};
function show(title, ...content) {
  $("drawer-title").textContent = plain(title);
  $("drawer-body").replaceChildren(...content);
  if ($("drawer").open) $("drawer-title").focus();
  else {
    const from = document.activeElement;
    opener = { key: from.dataset.key, room: from.closest("[id]")?.id };
    $("drawer").showModal();
  }
  $("drawer").scrollTop = 0;
}

// The browser gives the focus back to what opened the drawer; that may have been drawn again meanwhile, or be gone.
$("drawer").addEventListener("close", () => {
  if (!opener.key) return;
  const again = document.querySelector(`#${opener.room} [data-key="${CSS.escape(opener.key)}"]`);
  if (document.activeElement !== again) (again ?? $("nodes")).focus({ preventScroll: !again });
});

const views = { bars: new Bars($("view"), page), heat: new Heat($("view"), page), table: new GpuTable($("view"), page) };
const plots = new Plots($("plots"));
let view = null, chosen = false;

function choose(name) {
  if (view === name) return;
  views[view]?.shut();
  view = name;
  $("nothing")?.remove();
  document.querySelectorAll("[data-view]").forEach((button) => button.setAttribute("aria-pressed", button.dataset.view === name));
  views[name].open();
}

// A click counts if its element is there from the press to the release: in between nothing is drawn.
let pressed = false;
function release() { pressed = false; draw(); }
addEventListener("pointerdown", () => { pressed = true; }, true);
for (const end of ["pointerup", "pointercancel"]) addEventListener(end, () => setTimeout(release), true);
// A scroll bar keeps the release to itself.
addEventListener("pointermove", (event) => { if (pressed && !event.buttons) release(); }, true);

let is_due = false, painted = false;
function draw() {
  if (is_due) return;
  is_due = true;
  requestAnimationFrame(() => {
    is_due = false;
    if (!state.heard || pressed) return;
    page.cache = null;
    if (!chosen) {
      const gpus = [...state.nodes.values()].reduce((sum, node) => sum + node.gpus.length, 0);
      choose(gpus > MANY_GPUS ? "heat" : "bars");
    }
    drawTotals($("totals"), state);
    drawLegend();
    views[view].draw();
    state.dirty.clear();
    drawPending($("pending"), page);
    drawReservations($("reservations"), page);
    drawActivity($("activity"), page);
    drawTenants($("tenants"), state);
    plots.draw(state);
    drawStanding();
    if (!painted) { painted = true; performance.mark("first-fleet"); document.documentElement.dataset.ready = ""; }
  });
}

let legend = "";
function drawLegend() {
  const key = state.classes.map((one) => one.name + bytes(one.allocatedBytes) + one.pods).join("|");
  if (key === legend) return;
  legend = key;
  $("legend").replaceChildren(...state.classes.map((one) => el("li", {}, el("span", { class: `swatch ${page.pattern(one.name)}` }), one.name, " ",
    el("span", { class: "dim" }, `${bytes(one.allocatedBytes)} · ${plural(one.pods, "pod")}`))),
  el("li", {}, el("span", { class: "swatch unaccounted" }), "unaccounted"), el("li", {}, el("span", { class: "swatch headroom" }), "headroom"));
}

function drawStanding() {
  const { leading, state: why, mode, version } = state.standing ?? {};
  const said = plain(`${leading ? "Leading" : "Standby"}${mode === "shadow" ? " · shadow mode" : ""} · ${version ?? ""}${why ? ` · ${why}` : ""}`);
  if ($("standing").textContent !== said) $("standing").textContent = said;
}

// Spoken now and then: a count for each change would never be silent.
let said = "";
setInterval(() => {
  const now = `${plural(state.pendingCount, "pod")} pending, ${plural(state.names.length, "node")}`;
  if (state.heard && now !== said) { said = now; $("summary").textContent = now; }
}, 30000);

function link(kind, text) {
  $("link").className = `link ${kind}`;
  if ($("link-text").textContent !== text) $("link-text").textContent = text;
}

function notice(said) { const text = plain(said); $("notice").hidden = !text; if ($("notice").textContent !== text) $("notice").textContent = text; }

setInterval(() => {
  const age = performance.now() - state.heard;
  if ($("link").classList.contains("live") && age > 7000) $("link-text").textContent = `Last event ${time(age)} ago`;
  if (state.heard && !pressed) { drawPending($("pending"), page); drawActivity($("activity"), page); drawReservations($("reservations"), page); }
}, 1000);

follow({
  linking(failures) { if (!failures && !state.heard) link("", "Connecting"); },
  event(name, data) { state.take(name, data); link("live", "Live"); notice(""); draw(); },
  lost() { link("lost", "Connection lost, trying again"); },
  refused(status, why) {
    link("lost", "Not allowed, trying again");
    if (status === 401) notice(`This address takes a token, which a browser does not send. Run this, and open the address it prints: stowage ui --server ${location.origin}`);
    else if (status === 403) notice(`${why}. Bind the ClusterRole stowage-viewer to the user.`);
    else { link("lost", "Refused, trying again"); notice(why); }
  },
});

function narrow() { page.cache = null; page.look += 1; draw(); }
$("search").addEventListener("input", () => { page.query = $("search").value.trim().toLowerCase(); narrow(); });
$("filter").addEventListener("change", () => { page.filter = $("filter").value; narrow(); });
document.querySelectorAll("[data-view]").forEach((button) => button.addEventListener("click", () => { chosen = true; choose(button.dataset.view); draw(); }));
$("close").addEventListener("click", () => $("drawer").close());
$("drawer").addEventListener("click", (event) => { if (event.target === $("drawer")) $("drawer").close(); });
addEventListener("keydown", (event) => {
  if (event.key === "/" && !/^(INPUT|SELECT|TEXTAREA)$/.test(document.activeElement.tagName) && !$("drawer").open) { event.preventDefault(); $("search").focus(); }
});

const THEMES = ["system", "light", "dark"];
function theme(name) {
  if (name === "system") delete document.documentElement.dataset.theme; else document.documentElement.dataset.theme = name;
  $("theme").textContent = `Theme: ${name}`;
  plots.forget();
  page.look += 1;
  draw();
}
let themed = "system";
try { themed = localStorage.getItem("theme") ?? "system"; } catch { /* storage may be off */ }
$("theme").addEventListener("click", () => {
  themed = THEMES[(THEMES.indexOf(themed) + 1) % 3];
  try { localStorage.setItem("theme", themed); } catch { /* it lasts as long as the page */ }
  theme(themed);
});
theme(THEMES.includes(themed) ? themed : "system");
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => theme(themed));
