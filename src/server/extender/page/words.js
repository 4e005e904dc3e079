// Small things that every part of the page uses: elements, amounts, times. Text is only ever set as text.

// Characters that turn the direction of what follows, or have no width: shown by their numbers, so that no name looks like another.
const MARKS = /[\u061c\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff]/g;
export const plain = (text) => text.replace(MARKS, (mark) => `\\u${mark.charCodeAt(0).toString(16).padStart(4, "0")}`);

export function el(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "on") Object.entries(value).forEach(([event, act]) => made.addEventListener(event, act));
    else if (name === "data") Object.assign(made.dataset, value);
    else if (name === "class") made.className = value;
    else made.setAttribute(name, value === true ? "" : plain(String(value)));
  }
  const said = children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false);
  made.append(...said.map((child) => (typeof child === "string" ? plain(child) : child)));
  return made;
}

export function bytes(amount) {
  if (amount === null || amount === undefined) return "unknown";
  const gib = amount / 2 ** 30;
  if (gib >= 10240) return `${(gib / 1024).toFixed(1)} TiB`;
  if (gib >= 100) return `${Math.round(gib)} GiB`;
  if (gib >= 1) return `${gib.toFixed(1)} GiB`;
  return `${Math.round(amount / 2 ** 20)} MiB`;
}

export function percent(part, whole) { return whole > 0 ? Math.round((100 * part) / whole) : 0; }

export function time(millis) {
  const seconds = Math.max(0, Math.round(millis / 1000));
  if (seconds < 60) return `${seconds} s`;
  if (seconds < 7200) return `${Math.floor(seconds / 60)} min`;
  if (seconds < 172800) return `${Math.floor(seconds / 3600)} h`;
  return `${Math.floor(seconds / 86400)} d`;
}

export function plural(count, word) { return `${number(count)} ${word}${count === 1 ? "" : "s"}`; }

export const podName = (pod) => (typeof pod === "string" ? pod : `${pod.namespace}/${pod.name}`);
export const number = (value) => value.toLocaleString("en");
// A GPU's model in the few letters that tell it apart.
export const shortModel = (model) => model.replace(/^(NVIDIA|Tesla)[- ]/, "").replace(/-(HBM3|SXM4|PCIe)/g, "");
