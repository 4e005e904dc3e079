// Three views of the nodes: bars for a few, a heat map for many, and a table that says the same in text.

import { bytes, el, percent, plain, plural, podName, shortModel } from "./words.js";

export const KV_HIGH = 80;

// The pods of each GPU of a node, by its place.
function podsByGpu(node) {
  const by = node.gpus.map(() => []);
  for (const pod of node.pods) for (const place of pod.gpus) by[place]?.push(pod);
  return by;
}

// Bars. Only nodes in view are in the document: heights follow from the number of GPUs and columns.
const HEAD = 34, ROW = 46, GAP = 10, GPU_WIDTH = 215;

export class Bars {
  constructor(room, page) {
    this.room = room;
    this.page = page;
    this.list = el("div", { class: "list", role: "list" });
    this.cards = new Map();
    this.watch = () => requestAnimationFrame(() => this.draw());
  }
  open() {
    this.room.replaceChildren(this.list);
    addEventListener("scroll", this.watch, { passive: true });
    addEventListener("resize", this.watch);
    this.cards.clear();
    this.list.replaceChildren();
  }
  shut() {
    removeEventListener("scroll", this.watch);
    removeEventListener("resize", this.watch);
  }
  draw() {
    const nodes = this.page.shown();
    const most = Math.max(1, Math.floor((this.list.clientWidth - 24) / GPU_WIDTH));
    // Nodes have two, four or eight GPUs: no row of three.
    const columns = most === 3 ? 2 : most > 4 && most < 8 ? 4 : Math.min(most, 8);
    const top = -this.list.getBoundingClientRect().top;
    const [from, to] = [top - 600, top + innerHeight + 600];
    const keep = new Set();
    let y = 0, above = null;
    for (const { node, places } of nodes) {
      const rows = Math.ceil(Math.max(1, places.length) / columns);
      const height = HEAD + rows * ROW + 10;
      if (y + height >= from && y <= to) {
        keep.add(node.name);
        let card = this.cards.get(node.name);
        const shape = `${places.join()}|${columns}`;
        if (!card || this.page.state.dirty.has(node.name) || card.shape !== shape || card.look !== this.page.look) {
          const made = this.card(node, places, columns);
          const focused = card?.element.contains(document.activeElement) ? document.activeElement.dataset.key : null;
          // In the nodes' order, which is the order of the Tab key.
          if (card) card.element.replaceWith(made); else if (above) above.after(made); else this.list.prepend(made);
          if (focused) made.querySelector(`[data-key="${CSS.escape(focused)}"]`)?.focus();
          card = { element: made, shape, look: this.page.look };
          this.cards.set(node.name, card);
        }
        above = card.element;
        card.element.style.transform = `translateY(${y}px)`;
        card.element.style.height = `${height}px`;
      }
      y += height + GAP;
    }
    for (const [name, card] of this.cards) if (!keep.has(name)) { card.element.remove(); this.cards.delete(name); }
    this.list.style.height = `${y}px`;
    this.page.empty(this.list, nodes.length);
  }
  card(node, places, columns) {
    const by = podsByGpu(node);
    const gpus = el("div", { class: "gpus" }, places.map((place) => this.gpu(node, place, by[place])));
    gpus.style.gridTemplateColumns = `repeat(${columns}, minmax(0, 1fr))`;
    const models = [...new Set(node.gpus.map((gpu) => shortModel(gpu.model)))].join(", ");
    const bad = node.freshness !== "fresh" && node.freshness !== "unreported";
    return el("div", { class: "node", role: "listitem" },
      el("div", { class: "node-head" },
        el("h3", {}, node.name), el("span", { class: "dim" }, plural(node.gpus.length, "GPU") + (models ? ` · ${models}` : "")),
        node.pool && el("span", { class: "tag" }, node.pool),
        node.kind !== "stowage" && el("span", { class: "tag" }, node.kind === "dra" ? "DRA" : "device plugin"),
        node.freshness === "unreported" && el("span", { class: "tag" }, "no agent"),
        bad && el("span", { class: "tag bad" }, `report ${node.freshness}`),
        node.closed && el("span", { class: "tag bad" }, "closed")),
      gpus);
  }
  gpu(node, place, pods) {
    const gpu = node.gpus[place], total = gpu.totalBytes || 1;
    const segments = [];
    for (const pod of pods) {
      const own = pod.phase === "softly-reserved" ? 0 : gpu.exclusive && pods.length === 1 ? gpu.allocatedBytes : pod.bytesPerGpu;
      if (!own) continue;
      const segment = el("span", { class: `segment ${this.page.pattern(pod.class)} ${pod.phase}${pod.leaving ? " leaving" : ""}${this.page.matches(pod) ? " hit" : ""}` });
      segment.style.flexBasis = `${(100 * own) / total}%`;
      segment.title = plain(`${podName(pod.pod)}: ${bytes(own)}, ${pod.class}${pod.leaving ? ", leaving" : ""}`);
      segments.push(segment);
    }
    if (gpu.unaccountedBytes) {
      const other = el("span", { class: "segment unaccounted" });
      other.style.flexBasis = `${(100 * gpu.unaccountedBytes) / total}%`;
      other.title = `In use beyond what pods have: ${bytes(gpu.unaccountedBytes)}`;
      segments.push(other);
    }
    const bar = el("span", { class: "vram" }, segments);
    const edge = el("span", { class: "headroom" });
    edge.style.width = `${(100 * Math.max(0, total - gpu.allocatableBytes)) / total}%`;
    edge.title = "The driver's reserve and headroom: never allocated";
    bar.append(edge);
    const kv = el("span", { class: `kv${gpu.kvCachePercent >= KV_HIGH ? " high" : ""}` }, el("span"));
    kv.firstChild.style.width = `${gpu.kvCachePercent ?? 0}%`;
    const busy = pods.length > 0;
    const kvText = gpu.kvCachePercent === null ? "KV –" : `KV ${gpu.kvCachePercent} %`;
    const button = el("button", {
      type: "button", class: `gpu ${gpu.health}`, data: { key: gpu.uuid },
      on: { click: () => this.page.openGpu(node.name, place) },
    },
      el("span", { class: "unseen" }, describe(node, gpu, pods)),
      el("span", { class: "gpu-line", "aria-hidden": "true" },
        el("span", { class: "gpu-name" }, `GPU ${gpu.index}`),
        gpu.health !== "healthy" && el("span", { class: "tag bad" }, gpu.health),
        gpu.starting && el("span", { class: "tag" }, "starting"),
        gpu.exclusive && el("span", { class: "tag" }, "exclusive"),
        // What has no room is left out whole.
        el("span", { class: "gpu-more" }, gpu.queue ? el("span", {}, `queue ${gpu.queue}`) : null, busy && (gpu.kvCachePercent || gpu.queue) ? el("span", {}, kvText) : null),
        el("span", { class: "gpu-figures" }, `${Math.round(gpu.allocatedBytes / 2 ** 30)} / ${Math.round(gpu.allocatableBytes / 2 ** 30)} GiB`)),
      bar, kv);
    return button;
  }
}

export function describe(node, gpu, pods) {
  const parts = [`${node.name}, GPU ${gpu.index}`, `${percent(gpu.allocatedBytes, gpu.allocatableBytes)} % of ${bytes(gpu.allocatableBytes)} allocated`];
  if (gpu.health !== "healthy") parts.push(gpu.health);
  if (gpu.kvCachePercent !== null) parts.push(`KV cache ${gpu.kvCachePercent} %`);
  if (gpu.queue) parts.push(`${plural(gpu.queue, "request")} waiting`);
  if (gpu.unaccountedBytes) parts.push(`${bytes(gpu.unaccountedBytes)} unaccounted`);
  if (pods) parts.push(pods.length ? plural(pods.length, "pod") : "no pods");
  return parts.join(", ");
}

// The heat map: a cell for each GPU, the GPUs of a node together.
const LONG_QUEUE = 32;
const MEASURES = {
  allocated: ["Allocated", (gpu) => gpu.allocatedBytes / (gpu.allocatableBytes || 1), "0", "100 %"],
  kv: ["KV cache", (gpu) => (gpu.kvCachePercent === null ? null : gpu.kvCachePercent / 100), "0", "100 %"],
  queue: ["Queue", (gpu) => (gpu.queue === null ? null : Math.min(1, gpu.queue / LONG_QUEUE)), "0", `${LONG_QUEUE} or more`],
  health: ["Health", (gpu) => (gpu.health === "healthy" ? 0 : gpu.health === "draining" ? 0.5 : 1), "healthy", "not healthy"],
};

export class Heat {
  constructor(room, page) {
    this.room = room;
    this.page = page;
    this.measure = "allocated";
    this.at = 0;
    this.canvas = el("canvas", { tabindex: 0, role: "application", "aria-roledescription": "heat map", "aria-label": "Heat map of GPUs. Arrow keys move, Enter opens. The view Table says the same in text.", "aria-describedby": "heat-at" });
    this.readout = el("p", { id: "heat-at", class: "readout", "aria-live": "polite" }, "Move over a cell, or use the arrow keys.");
    this.choice = el("div", { class: "choice", role: "group", "aria-label": "What the color shows" },
      Object.entries(MEASURES).map(([key, [name]]) => el("button", { type: "button", data: { measure: key }, on: { click: () => { this.measure = key; this.draw(); } } }, name)));
    this.scale = el("div", { class: "scale", "aria-hidden": "true" }, el("span"), el("span", { class: "ramp" }), el("span"), el("span", { class: "swatch unknown" }), el("span", {}, "unknown"));
    this.canvas.addEventListener("mousemove", (event) => this.point(event));
    this.canvas.addEventListener("click", (event) => { this.point(event); this.open1(); });
    this.canvas.addEventListener("keydown", (event) => this.key(event));
    this.watch = () => this.draw();
  }
  open() {
    this.room.replaceChildren(el("div", { class: "heat-bar" }, this.choice, this.scale), this.readout, this.canvas);
    addEventListener("resize", this.watch);
    // Keys count from now on, not from the next frame.
    this.draw();
  }
  shut() { removeEventListener("resize", this.watch); }
  draw() {
    for (const button of this.choice.children) button.setAttribute("aria-pressed", button.dataset.measure === this.measure);
    [this.scale.firstChild.textContent, this.scale.children[2].textContent] = MEASURES[this.measure].slice(2);
    const groups = new Map();
    let count = 0;
    for (const shown of this.page.shown()) {
      const pool = shown.node.pool ?? "";
      if (!groups.has(pool)) groups.set(pool, []);
      groups.get(pool).push(shown);
      count += shown.places.length;
    }
    const width = this.room.clientWidth;
    const size = count > 4000 ? 9 : count > 800 ? 12 : count > 200 ? 16 : 22, gap = size > 12 ? 2 : 1, space = size > 12 ? 8 : 5;
    this.cells = [];
    const labels = [];
    let y = 0;
    for (const [pool, nodes] of [...groups].sort()) {
      if (groups.size > 1 || pool) { labels.push([pool || "no pool", nodes.length, y + 12]); y += 20; }
      let x = 0, tallest = 0;
      for (const { node, places } of nodes) {
        const across = Math.min(places.length, 4), down = Math.ceil(places.length / 4);
        const wide = across * (size + gap);
        if (x + wide > width && x > 0) { x = 0; y += tallest + space; tallest = 0; }
        places.forEach((place, n) => this.cells.push({ node, place, x: x + (n % 4) * (size + gap), y: y + Math.floor(n / 4) * (size + gap) }));
        tallest = Math.max(tallest, down * (size + gap));
        x += wide + space;
      }
      y += tallest + space + 4;
    }
    const ratio = devicePixelRatio || 1, height = Math.max(y, 20);
    if (this.canvas.width !== Math.round(width * ratio) || this.canvas.height !== Math.round(height * ratio)) {
      this.canvas.width = Math.round(width * ratio);
      this.canvas.height = Math.round(height * ratio);
      this.canvas.style.height = `${height}px`;
    }
    const style = getComputedStyle(document.documentElement), ramp = ["0", "1", "2", "3", "4", "5"].map((n) => style.getPropertyValue(`--heat-${n}`).trim());
    const [ink, none, bad] = ["--ink", "--heat-none", "--bad"].map((name) => style.getPropertyValue(name).trim());
    const pen = this.canvas.getContext("2d");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, width, height);
    pen.font = "12px system-ui, sans-serif";
    pen.fillStyle = style.getPropertyValue("--dim");
    labels.forEach(([pool, nodes, at]) => pen.fillText(plain(`${pool} · ${plural(nodes, "node")}`), 0, at));
    const value = MEASURES[this.measure][1];
    for (const cell of this.cells) {
      const gpu = cell.node.gpus[cell.place], of = value(gpu);
      pen.fillStyle = of === null ? none : ramp[Math.min(5, Math.floor(of * 5.999))];
      pen.fillRect(cell.x, cell.y, size, size);
      if (gpu.health !== "healthy") {
        pen.strokeStyle = bad;
        pen.lineWidth = 2;
        pen.beginPath(); pen.moveTo(cell.x + 1, cell.y + 1); pen.lineTo(cell.x + size - 1, cell.y + size - 1); pen.moveTo(cell.x + size - 1, cell.y + 1); pen.lineTo(cell.x + 1, cell.y + size - 1); pen.stroke();
      }
    }
    this.at = Math.min(this.at, Math.max(0, this.cells.length - 1));
    const cell = this.cells[this.at];
    if (cell && document.activeElement === this.canvas) { pen.strokeStyle = ink; pen.lineWidth = 2; pen.strokeRect(cell.x - 1, cell.y - 1, size + 2, size + 2); }
    this.size = size;
    this.page.empty(this.readout, this.cells.length);
  }
  select(at, is_said) {
    if (at < 0 || at >= this.cells.length) return;
    this.at = at;
    const { node, place } = this.cells[at];
    const pods = node.pods.filter((pod) => pod.gpus.includes(place));
    this.readout.setAttribute("aria-live", is_said ? "polite" : "off");
    this.readout.textContent = plain(describe(node, node.gpus[place], pods));
  }
  point(event) {
    const at = this.cells.findIndex((cell) => event.offsetX >= cell.x && event.offsetX < cell.x + this.size + 1 && event.offsetY >= cell.y && event.offsetY < cell.y + this.size + 1);
    if (at >= 0) this.select(at, false);
  }
  open1() { const cell = this.cells[this.at]; if (cell) this.page.openGpu(cell.node.name, cell.place); }
  key(event) {
    const here = this.cells[this.at];
    if (!here) return;
    const row = (sign) => {
      const rows = this.cells.map((cell, at) => ({ at, dx: Math.abs(cell.x - here.x), dy: (cell.y - here.y) * sign })).filter((cell) => cell.dy > 0);
      rows.sort((a, b) => a.dy - b.dy || a.dx - b.dx);
      return rows[0]?.at ?? this.at;
    };
    const to = { ArrowRight: () => this.at + 1, ArrowLeft: () => this.at - 1, ArrowDown: () => row(1), ArrowUp: () => row(-1), Home: () => 0, End: () => this.cells.length - 1 }[event.key];
    if (to) { event.preventDefault(); this.select(to(), true); this.draw(); } else if (event.key === "Enter") this.open1();
  }
}

// The table: a page of rows at a time, one for each GPU. Only its rows are made again, so that it stays where it is scrolled to.
const PER_PAGE = 100;
const HEAD_CELLS = ["Node", "GPU", "Model", "Health", "Allocated", "Free", "Unaccounted", "KV cache", "Queue", "Pods"];

export class GpuTable {
  constructor(room, page) {
    this.room = room;
    this.page = page;
    this.first = 0;
    this.body = el("tbody");
    this.said = el("span");
    const step = (by, text) => el("button", { type: "button", on: { click: () => { this.first = Math.max(0, this.first + by); this.draw(); } } }, text);
    [this.back, this.on] = [step(-PER_PAGE, "Previous"), step(PER_PAGE, "Next")];
    this.table = el("div", { class: "scroller", tabindex: 0, role: "region", "aria-label": "GPUs" },
      el("table", {}, el("caption", { class: "unseen" }, "GPUs"), el("thead", {}, el("tr", {}, HEAD_CELLS.map((name) => el("th", { scope: "col" }, name)))), this.body));
    this.pager = el("p", { class: "pager" }, this.back, this.said, this.on);
  }
  open() { this.first = 0; this.room.replaceChildren(this.table, this.pager); }
  shut() {}
  draw() {
    const rows = this.page.shown().flatMap(({ node, places }) => places.map((place) => ({ node, gpu: node.gpus[place], place })));
    this.first = Math.min(this.first, Math.max(0, rows.length - 1));
    const shown = rows.slice(this.first, this.first + PER_PAGE);
    const cell = (text) => el("td", {}, text);
    const focused = this.body.contains(document.activeElement) ? document.activeElement.dataset.key : null;
    this.body.replaceChildren(...shown.map(({ node, gpu, place }) => el("tr", {},
      el("th", { scope: "row" }, node.name),
      el("td", {}, el("button", { type: "button", class: "plain", data: { key: gpu.uuid }, "aria-label": `${node.name} GPU ${gpu.index}`, on: { click: () => this.page.openGpu(node.name, place) } }, String(gpu.index))),
      cell(shortModel(gpu.model)), cell(gpu.health), cell(`${bytes(gpu.allocatedBytes)} of ${bytes(gpu.allocatableBytes)}`),
      cell(bytes(Math.max(0, gpu.allocatableBytes - gpu.allocatedBytes - gpu.unaccountedBytes))), cell(bytes(gpu.unaccountedBytes)),
      cell(gpu.kvCachePercent === null ? "unknown" : `${gpu.kvCachePercent} %`), cell(gpu.queue === null ? "unknown" : String(gpu.queue)),
      cell(String(node.pods.filter((pod) => pod.gpus.includes(place)).length)))));
    if (focused) this.body.querySelector(`[data-key="${CSS.escape(focused)}"]`)?.focus({ preventScroll: true });
    this.back.disabled = this.first === 0;
    this.on.disabled = this.first + PER_PAGE >= rows.length;
    this.said.textContent = `${rows.length ? this.first + 1 : 0} to ${Math.min(rows.length, this.first + PER_PAGE)} of ${rows.length}`;
    this.page.empty(this.pager, rows.length);
  }
}
