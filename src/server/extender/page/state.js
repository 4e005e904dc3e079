// What the page knows of the cluster: the first event is everything, each later one what changed.

export class State {
  constructor() {
    this.nodes = new Map();
    this.names = [];
    this.history = [];
    this.activity = [];
    this.classes = [];
    this.tenants = [];
    this.pending = [];
    this.pendingCount = 0;
    this.standing = null;
    this.now = 0;
    this.heard = 0;
    // Names of nodes that changed since they were last drawn.
    this.dirty = new Set();
  }

  take(event, data) {
    this.heard = performance.now();
    if (event === "whole") {
      this.nodes = new Map(data.fleet.nodes.map((node) => [node.name, node]));
      this.names = [...this.nodes.keys()];
      for (const part of ["now", "classes", "tenants", "pending", "pendingCount"]) this[part] = data.fleet[part];
      this.history = data.history;
      this.activity = data.activity;
      this.standing = data.standing;
      this.names.forEach((name) => this.dirty.add(name));
      this.reshaped = true;
    } else {
      this.change(data);
    }
  }

  change({ fleet, standing, sums, activity }) {
    for (const part of ["now", "classes", "tenants", "pending", "pendingCount"]) {
      if (part in fleet) this[part] = fleet[part];
    }
    for (const name of fleet.gone ?? []) this.nodes.delete(name);
    for (const node of fleet.nodes ?? []) {
      this.nodes.set(node.name, node);
      this.dirty.add(node.name);
    }
    if (fleet.gone || fleet.nodes) {
      this.names = [...this.nodes.keys()].sort();
      this.reshaped = true;
    }
    for (const change of fleet.changed ?? []) {
      const node = this.nodes.get(change.name);
      if (change.node) { Object.assign(node, change.node); this.reshaped = true; }
      for (const [place, fields] of Object.entries(change.gpus ?? {})) Object.assign(node.gpus[place], fields);
      if (change.left || change.pods) {
        const pods = new Map(node.pods.map((pod) => [pod.uid, pod]));
        (change.left ?? []).forEach((uid) => pods.delete(uid));
        (change.pods ?? []).forEach((pod) => pods.set(pod.uid, pod));
        node.pods = [...pods.values()].sort((a, b) => (a.uid < b.uid ? -1 : 1));
      }
      this.dirty.add(change.name);
    }
    if (standing) this.standing = standing;
    if (sums && sums.at > (this.history.at(-1)?.at ?? -1)) this.history = [...this.history.slice(-359), sums];
    const latest = this.activity.at(-1)?.number ?? 0;
    const news = (activity ?? []).filter((entry) => entry.number > latest);
    if (news.length) this.activity = [...this.activity, ...news].slice(-500);
  }

  // The server's clock now, in milliseconds.
  clock() { return this.now + (performance.now() - this.heard); }
}

// Reads the events, and connects again when they end. A browser's EventSource would hide why it is refused.
export async function follow(handle) {
  let last = null, failures = 0;
  for (;;) {
    if (document.hidden) await visible();
    const abort = new AbortController();
    const hide = () => { if (document.hidden) abort.abort(); };
    let timer;
    const onHide = () => { clearTimeout(timer); if (document.hidden) timer = setTimeout(hide, 60000); };
    document.addEventListener("visibilitychange", onHide);
    try {
      handle.linking(failures);
      const headers = last ? { "Last-Event-ID": last } : {};
      const answer = await fetch("v1/fleet/events", { headers, signal: abort.signal, cache: "no-store" });
      if (!answer.ok) {
        handle.refused(answer.status, textOf(await answer.text()));
        failures += 1;
      } else {
        const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
        const parts = [];
        let held = "", heard = false;
        for (;;) {
          const { value, done } = await Promise.race([reader.read(), silence(abort)]);
          if (done) break;
          // Of the two line breaks that end an event, one may come with this piece and the other one with the next.
          const text = held + value;
          held = /(^|[^\n])\n$/.test(text) ? "\n" : "";
          const pieces = text.slice(0, text.length - held.length).split("\n\n");
          pieces.forEach((piece, place) => {
            parts.push(piece);
            if (place === pieces.length - 1) return;
            const event = parsed(parts.splice(0).join(""));
            if (!event) return;
            last = event.id;
            failures = 0;
            heard = true;
            handle.event(event.event, JSON.parse(event.data));
          });
        }
        // One that ends without an event is not asked for again at once.
        if (!heard) failures += 1;
      }
    } catch (error) {
      if (!document.hidden) { failures += 1; handle.lost(failures); }
    }
    abort.abort();
    clearTimeout(timer);
    document.removeEventListener("visibilitychange", onHide);
    if (failures) await new Promise((done) => setTimeout(done, Math.min(1000 * 2 ** (failures - 1), 10000)));
  }
}

function visible() {
  return new Promise((done) => {
    const look = () => { if (!document.hidden) { document.removeEventListener("visibilitychange", look); done(); } };
    document.addEventListener("visibilitychange", look);
    look();
  });
}

// The server says something every five seconds: one that does not is gone.
let ears;
function silence() {
  clearTimeout(ears);
  return new Promise((_, fail) => { ears = setTimeout(() => fail(new Error("silent")), 20000); });
}

function parsed(text) {
  const event = {};
  for (const line of text.split("\n")) {
    const at = line.indexOf(": ");
    if (at > 0) event[line.slice(0, at)] = line.slice(at + 2);
  }
  return event.data ? event : null;
}

export function textOf(body) {
  try { return JSON.parse(body).Error ?? body; } catch { return body.trim(); }
}
