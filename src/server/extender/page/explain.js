// An explanation of one pod, in words: as `stowage explain` prints it, in the order in which a reader asks.

import { bytes, el, number, plural, podName, time } from "./words.js";

const VERDICTS = { bound: "It is on its node.", assumed: "Its GPUs are chosen, and its Binding is being written.", reserved: "GPUs are reserved for it until other pods have left.", fits: "It waits, and a node fits.", "does-not-fit": "No node fits it now." };

const facts = (rows) => el("dl", { class: "facts" }, rows.filter(([, value]) => value).map(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]));

function stage(of) {
  switch (of.state) {
    case "bound": return `Bound to ${of.node} for ${time(of.runningForMillis)}; granted ${bytes(of.grantedBytes)}${of.gpus ? ` on ${of.gpus.join(", ")}` : "; on which GPUs is unknown"}.`;
    case "assumed": return `${bytes(of.grantedBytes)} on ${of.node}; the Binding is being written.`;
    case "reserved": return `${plural(of.gpus.length, "GPU")} of ${of.node} for ${time(of.deadlineInMillis)} more; ${plural(of.victimsLeft, "victim")} not terminated yet.`;
    default: {
      if (of.gate === "planned") return `Gated by stowage.dev/plan; ${of.failedAttempts ? `${plural(of.failedAttempts, "attempt")} of the planner failed in a row` : "the planner has not tried it yet"}.`;
      if (of.gate === "others") return "Gated by a scheduling gate that is not Stowage's.";
      if (of.refused?.supposed) return "Waits; kube-scheduler has not asked about it since this replica began to act.";
      if (of.refused) return `Rejected ${time(of.refused.agoMillis)} ago; kube-scheduler asked about ${plural(of.refused.askedAbout, "node")}.`;
      return of.offeredNode ? `Was offered ${of.offeredNode}.` : "kube-scheduler has not asked about it since this replica started.";
    }
  }
}

function node(of) {
  const state = of.misfit ? `does not fit: ${of.misfit.text}` : of.kubeScheduler ? `kube-scheduler refuses it: ${of.kubeScheduler.text}` : of.isOwn ? "has the pod" : of.score ? `fits, rank ${of.score.rank}` : "fits";
  return el("details", { open: of.isOwn || undefined },
    el("summary", {}, el("strong", {}, of.name), " ", el("span", { class: "dim" }, state)),
    of.readyInMillis !== null && of.readyInMillis !== undefined ? el("p", { class: "dim" }, `Answers ${time(of.readyInMillis)} after binding.`) : null,
    el("ul", { class: "obstacles" }, of.gpus.map((gpu) => el("li", { class: gpu.chosen ? "chosen" : "" },
      el("span", {}, `GPU ${gpu.index}${gpu.gone ? ` (${gpu.uuid}, not reported)` : ""}: ${bytes(gpu.freeBytes)} free of ${bytes(gpu.allocatableBytes)}`, gpu.kvCachePercent ? `, KV cache ${gpu.kvCachePercent} %` : "", gpu.chosen ? (of.isOwn ? " – its GPU" : " – would get it") : ""),
      gpu.obstacles.length ? el("span", { class: "dim" }, [...gpu.obstacles.map((one) => one.text), ...gpu.occupants.filter((one) => one.keepReason).map((one) => `${podName(one.pod)} is kept: ${one.keepReason}`)].join("; ")) : null))));
}

export function explanation(of) {
  const { request, tenant } = of;
  const size = request.deviceResource ? `${request.gpus} of ${request.deviceResource}` : request.gpus > 1 ? `${bytes(request.vramBytes)} over ${request.gpus} GPUs of one node` : `${bytes(request.vramBytes)} of one GPU`;
  const parts = [
    el("p", { class: `headline ${of.verdict}` }, VERDICTS[of.verdict] ?? of.verdict),
    el("p", {}, stage(of.stage)),
    of.remedies.length ? el("section", {}, el("h3", {}, of.verdict === "does-not-fit" ? "What would have to change" : "What to look at"), el("ol", { class: "remedies" }, of.remedies.map((one) => el("li", {}, one.text)))) : null,
    (of.conflicts ?? []).length ? el("section", {}, el("h3", {}, "Conflicts"), el("ul", {}, of.conflicts.map((one) => el("li", {}, one.text)))) : null,
    el("h3", {}, "The pod"),
    facts([["Requests", `${size}, ${request.sharing}`], ["Model", request.model], ["Priority", `${request.priority}${request.mayPreempt ? "" : ", never preempts"}`],
      ["Class", `${of.class.name}${of.class.because.length ? `: ${of.class.because.map((one) => `${one.field} is ${one.wants}`).join(", ")}` : ""}${of.class.preemptible ? "; preemptible" : ""}`],
      ["Tenant", tenant && `${tenant.name}: uses ${bytes(tenant.used.vramBytes)}${tenant.limit.vramBytes ? ` of at most ${bytes(tenant.limit.vramBytes)}` : ""}`],
      ["Group", of.group && `cannot be placed: ${of.group.text}`],
      ["Policy", `${of.policy.digest}, ${of.policy.mode === "shadow" ? "shadow mode" : "enforced"}`]]),
    (of.unsupported ?? []).length ? el("section", {}, el("h3", {}, "What is unknown of kube-scheduler"), el("ul", {}, of.unsupported.map((one) => el("li", {}, `${one.text}, on ${plural(one.nodes, "node")}`)))) : null,
    of.groups.length ? el("section", {}, el("h3", {}, "Nodes that do not fit, by reason"), el("ul", { class: "groups" }, of.groups.map((one) => el("li", {}, el("strong", {}, `${number(one.count)} × ${one.code}`), el("span", { class: "dim" }, `such as ${one.example}: ${one.text}`))))) : null,
    of.nodes.length ? el("section", {}, el("h3", {}, of.nodes.length === 1 && of.nodes[0].isOwn ? "Its node" : "Nodes"), of.nodes.map(node)) : null,
    el("p", { class: "dim" }, `In a terminal: stowage explain ${podName(of.pod)}`),
  ];
  return parts.filter(Boolean);
}
