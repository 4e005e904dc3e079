// The panels beside the nodes, and the plots. Each is drawn again only if what it says has changed.

import { bytes, el, number, percent, plural, podName, time } from "./words.js";

// Times pass every second: they are written into what is there.
const drawn = new WeakMap();
function draw(room, key, make, times = []) {
  redraw(room, key, make);
  room.querySelectorAll(".when").forEach((when, place) => { if (when.textContent !== times[place]) when.textContent = times[place]; });
}

function redraw(room, key, make) {
  if (drawn.get(room) === key) return;
  if (room.contains(document.activeElement)) {
    // A list that is rebuilt would take the focus away.
    const focused = document.activeElement.dataset.key;
    drawn.set(room, key);
    room.replaceChildren(...make());
    if (focused) room.querySelector(`[data-key="${CSS.escape(focused)}"]`)?.focus();
    return;
  }
  drawn.set(room, key);
  room.replaceChildren(...make());
}

const none = (text) => [el("p", { class: "none" }, text)];

export function sums(state) {
  const sums = { gpus: 0, healthy: 0, allocatable: 0, allocated: 0, unaccounted: 0, kvSum: 0, kvCount: 0, kvMax: null, queue: 0 };
  for (const node of state.nodes.values()) {
    for (const gpu of node.gpus) {
      sums.gpus += 1;
      sums.healthy += gpu.health === "healthy";
      sums.allocatable += gpu.allocatableBytes;
      sums.allocated += gpu.allocatedBytes;
      sums.unaccounted += gpu.unaccountedBytes;
      sums.queue += gpu.queue ?? 0;
      if (gpu.kvCachePercent !== null && gpu.allocatedBytes > 0) {
        sums.kvSum += gpu.kvCachePercent;
        sums.kvCount += 1;
        sums.kvMax = Math.max(sums.kvMax ?? 0, gpu.kvCachePercent);
      }
    }
  }
  return sums;
}

export function drawTotals(room, state) {
  const of = sums(state);
  const evicted = state.activity.filter((entry) => entry.kind === "evicted" && state.now - entry.at < 3600000).length;
  const free = Math.max(0, of.allocatable - of.allocated - of.unaccounted);
  const tiles = [
    ["GPUs", number(of.gpus), of.healthy === of.gpus ? plural(state.names.length, "node") : `${of.gpus - of.healthy} not healthy`],
    ["VRAM allocated", `${percent(of.allocated, of.allocatable)} %`, `${bytes(of.allocated)} of ${bytes(of.allocatable)}`],
    ["VRAM free", bytes(free), of.unaccounted ? `${bytes(of.unaccounted)} unaccounted` : "all else is accounted for"],
    ["KV cache", of.kvCount ? `${Math.floor(of.kvSum / of.kvCount)} %` : "–", of.kvCount ? `mean; highest ${of.kvMax} %` : "no engine reports it"],
    ["Queue", number(of.queue), "requests waiting"],
    ["Pending", number(state.pendingCount), "pods without a node"],
    ["Evicted", number(evicted), "recently, an hour at most"],
  ];
  draw(room, JSON.stringify(tiles), () => tiles.map(([name, value, more]) => el("div", { class: "tile" }, el("dt", {}, name), el("dd", { class: "figure" }, value), el("dd", { class: "dim" }, more))));
}

const MOST_LISTED = 40;
const podButton = (page, name) => el("button", { type: "button", class: "plain pod", data: { key: name }, on: { click: () => page.openPod(name) } }, name);

const GATES = { planned: "behind the planner's gate", others: "behind another scheduling gate" };

export function drawPending(room, page) {
  const { state } = page, now = state.clock(), list = state.pending.slice(0, MOST_LISTED);
  const rows = list.map((pod) => [podName(pod.pod), pod.class, pod.gpus > 1 ? `${pod.gpus} × ${bytes(pod.bytesPerGpu)}` : bytes(pod.bytesPerGpu),
    pod.reservation ? `reserved on ${pod.reservation.node}` : GATES[pod.gate] ?? (pod.refused ? "no node fits" : "not asked about yet")]);
  draw(room, JSON.stringify([rows, state.pendingCount]), () => rows.length ? [
    el("ul", { class: "rows" }, rows.map(([name, of, size, why]) => el("li", {},
      el("div", {}, el("span", { class: `swatch ${page.pattern(of)}` }), podButton(page, name), el("span", { class: "when" })),
      el("div", { class: "dim" }, `${size} · ${of} · ${why}`)))),
    state.pendingCount > rows.length ? el("p", { class: "dim" }, `${number(state.pendingCount - rows.length)} more`) : null].filter(Boolean) : none("No pod waits."), list.map((pod) => time(now - pod.since)));
}

export function drawReservations(room, page) {
  const { state } = page, now = state.clock();
  const list = state.pending.filter((pod) => pod.reservation).slice(0, MOST_LISTED);
  const rows = list.map((pod) => [podName(pod.pod), pod.reservation.node, pod.reservation.gpus.length, pod.reservation.victims.map(podName)]);
  const times = list.map(({ reservation: { deadline } }) => (deadline > now ? `${time(deadline - now)} left` : "over"));
  draw(room, JSON.stringify(rows), () => rows.length ? [el("ul", { class: "rows" }, rows.map(([name, node, gpus, victims]) => el("li", {},
    el("div", {}, podButton(page, name), el("span", { class: "when" })),
    el("div", { class: "dim" }, `${plural(gpus, "GPU")} of ${node}; `, victims.length ? `waits for ${victims.join(", ")} to leave` : "all victims have left"))))] : none("No VRAM is reserved."), times);
}

const KINDS = { bound: "Bound", "not-bound": "Not bound", refused: "No node fits", reserved: "Reserved", "reservation-ended": "Reservation ended", nominated: "Nominated", evicted: "Evicted", "not-evicted": "Not evicted", warning: "Warning", policy: "Policy", shadow: "Shadow" };
const GOOD = new Set(["bound", "reserved", "nominated"]), BAD = new Set(["not-bound", "not-evicted", "warning", "evicted"]);

export function drawActivity(room, page) {
  const { state } = page, now = state.clock();
  const latest = state.activity.slice(-MOST_LISTED).reverse();
  const key = JSON.stringify(latest.map((entry) => entry.number));
  const place = (entry) => {
    const gpus = entry.gpus?.length ? ` · ${entry.gpus.map((uuid) => { const gpu = state.nodes.get(entry.node)?.gpus.find((one) => one.uuid === uuid); return gpu ? `GPU ${gpu.index}` : uuid; }).join(", ")}` : "";
    return entry.node ? `${entry.node}${gpus}` : "";
  };
  draw(room, key, () => latest.length ? [el("ol", { class: "rows" }, latest.map((entry) => el("li", {},
    el("div", {}, el("span", { class: `kind ${GOOD.has(entry.kind) ? "good" : BAD.has(entry.kind) ? "bad" : ""}` }, KINDS[entry.kind] ?? entry.kind), podButton(page, podName(entry.pod)), el("span", { class: "when" })),
    el("div", { class: "dim" }, [place(entry), entry.text].filter(Boolean).join(" · ")))))] : none("Nothing was decided since this replica started."), latest.map((entry) => time(now - entry.at)));
}

export function drawTenants(room, state) {
  const rows = state.tenants;
  draw(room, JSON.stringify(rows), () => rows.length ? [el("ul", { class: "rows" }, rows.map((tenant) => {
    const [used, guarantee, limit, say] = tenant.guaranteeBytes ?? tenant.limitBytes
      ? [tenant.usedBytes, tenant.guaranteeBytes, tenant.limitBytes, bytes]
      : [tenant.usedMilliGpus, tenant.guaranteeMilliGpus, tenant.limitMilliGpus, (milli) => `${(milli / 1000).toFixed(1)} GPUs`];
    const whole = Math.max(used, guarantee ?? 0, limit ?? 0) || 1;
    const bar = el("span", { class: "share" }, el("span", { class: `used${guarantee && used > guarantee ? " over" : ""}` }), guarantee ? el("span", { class: "mark" }) : null);
    bar.firstChild.style.width = `${(100 * used) / whole}%`;
    if (guarantee) bar.lastChild.style.left = `${(100 * guarantee) / whole}%`;
    const said = [`${say(used)} used`, guarantee ? `${say(guarantee)} guaranteed` : "no guarantee", limit ? `limit ${say(limit)}` : null, tenant.pending ? `${tenant.pending} pending` : null].filter(Boolean).join(" · ");
    return el("li", {}, el("div", {}, tenant.name), bar, el("div", { class: "dim" }, said));
  }))] : none("The policy names no tenants."));
}

// History of the last hour: four small plots with one axis of time.
const PLOTS = [
  ["VRAM allocated", (one) => [percent(one.allocatedBytes, one.allocatableBytes)], ["%"], 100],
  ["KV cache: mean, highest", (one) => [one.kvCacheMeanPercent, one.kvCacheMaxPercent], ["%", "%"], 100],
  ["Requests waiting", (one) => [one.queue], [""], null],
  ["Pending pods", (one) => [one.pending], [""], null],
];

// Half a pod is none.
const WHOLE = [1, 2, 5].flatMap((step) => Array.from({ length: 7 }, (_, power) => step * 10 ** power)).sort((a, b) => a - b);

export class Plots {
  constructor(room) { this.room = room; this.made = []; }
  forget() { this.made.forEach((plot) => plot.destroy()); this.made = []; this.room.replaceChildren(); this.drawn = null; }
  draw(state) {
    const latest = state.history.at(-1)?.at, width = this.room.clientWidth;
    if (!globalThis.uPlot || (latest === this.drawn && width === this.width)) return;
    if (width !== this.width) this.forget();
    [this.drawn, this.width] = [latest, width];
    const wall = (Date.now() - state.clock()) / 1000;
    const times = state.history.map((one) => one.at / 1000 + wall);
    const style = getComputedStyle(document.documentElement), color = (name) => style.getPropertyValue(name).trim();
    if (!this.room.children.length) {
      // All frames before the first plot: the columns have their widths then.
      this.room.append(...PLOTS.map(([title]) => el("figure", { class: "plot" }, el("figcaption", {}, title, el("span", { class: "latest" })), el("div", { "aria-hidden": "true" }))));
    }
    PLOTS.forEach(([, read, units, top], place) => {
      const values = state.history.map(read), data = [times, ...units.map((_, n) => values.map((one) => one[n]))];
      if (!this.made[place]) {
        const frame = this.room.children[place];
        const axis = { stroke: color("--dim"), grid: { stroke: color("--line"), width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif" };
        this.made[place] = new uPlot({
          width: frame.lastChild.clientWidth || 240, height: 104, legend: { show: false }, cursor: { show: false }, padding: [6, 18, 0, 0],
          scales: { x: { time: true, range: (_, low, high) => [high - Math.min(3600, Math.max(600, high - low)), high] }, y: { range: (_, low, high) => [0, top ?? Math.max(5, high * 1.1)] } },
          axes: [{ ...axis, space: 70, size: 22, values: "{HH}:{mm}" }, { ...axis, size: 34, space: 30, incrs: top ? undefined : WHOLE }],
          series: [{}, ...units.map((_, n) => ({ stroke: color(n ? "--plot-2" : "--plot-1"), width: 1.5, dash: n ? [4, 3] : undefined, fill: n || units.length > 1 ? undefined : color("--plot-fill"), points: { show: false } }))],
        }, data, frame.lastChild);
      } else this.made[place].setData(data);
      const now = values.at(-1);
      this.room.children[place].querySelector(".latest").textContent = now ? now.map((value, n) => (value === null ? "–" : `${value}${units[n] ? ` ${units[n]}` : ""}`)).join(", ") : "";
    });
  }
}
