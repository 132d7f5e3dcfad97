// Elements from data, and numbers as text. Data reaches the page through text nodes and attributes only.

const SVG = "http://www.w3.org/2000/svg";

/** An HTML element. Attributes that are null or false are left out, true is an empty one. */
export function element(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

/** An SVG element. */
export function shape(tag, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

function filled(made, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== false && value !== undefined) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child !== null));
  return made;
}

export function byId(id) {
  return document.getElementById(id);
}

/** Options of a select, the first chosen; groups are {label, options: [[value, text], ...]}. */
export function fillSelect(select, groups) {
  const options = (pairs) => pairs.map(([value, text]) => element("option", { value }, text));
  const filledGroups = groups.filter((group) => group.options.length);
  select.replaceChildren(
    ...filledGroups.flatMap(({ label, options: pairs }) =>
      label ? [element("optgroup", { label }, ...options(pairs))] : options(pairs),
    ),
  );
}

/** Cycles: 9.4 k, 1.23 M. */
export function cyclesText(cycles) {
  const size = Math.abs(cycles);
  if (size >= 1e6) return `${(cycles / 1e6).toFixed(size >= 1e7 ? 1 : 2)} M`;
  if (size >= 1e3) return `${(cycles / 1e3).toFixed(size >= 1e5 ? 0 : 1)} k`;
  return cycles.toFixed(0);
}

export function bytesText(bytes) {
  if (bytes >= 1 << 20) return `${+(bytes / (1 << 20)).toFixed(2)} MiB`;
  if (bytes >= 1 << 10) return `${+(bytes / (1 << 10)).toFixed(1)} KiB`;
  return `${bytes} B`;
}

/** A share as signed percent: +1.2 %, −0.3 %, 0. */
export function signedPercent(share) {
  const percent = (100 * Math.abs(share)).toFixed(Math.abs(share) < 0.0995 ? 1 : 0);
  if (Number(percent) === 0) return share === 0 || Math.abs(share) < 1e-4 ? "0" : share > 0 ? "+<0.1 %" : "−<0.1 %";
  return `${share > 0 ? "+" : "−"}${percent} %`;
}

/** The class that colours what belongs to a kernel. */
export function kernelClass(index) {
  return `kernel-${index % 5}`;
}

/** By node id, the kernel that made its tensor, the open one included; absent if it is not made yet. */
export function makers(view) {
  const maker = new Map();
  view.kernels.forEach((kernel, index) => kernel.nodes.forEach((id) => maker.set(id, index)));
  view.open_kernel.nodes.forEach((id) => maker.set(id, view.kernels.length));
  return maker;
}
