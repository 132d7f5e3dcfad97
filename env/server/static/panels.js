// Fast memory, latency, the kernels so far, and the observation with its changes marked.

import { bytesText, cyclesText, element, kernelClass, makers, shape, signedPercent } from "./dom.js";

const CHART = { height: 190, left: 52, right: 110, top: 12, bottom: 24 };

/** Fast memory to scale: what is in it, and what would be if the kernel ended with this retain list. */
export function drawMemory(holder, view, retain) {
  const maker = makers(view);
  const sizes = new Map(view.nodes.map((node) => [node.id, node.bytes]));
  const chosen = [...retain].map((id) => ({ id, bytes: sizes.get(id) ?? 0 }));
  const total = (tensors) => tensors.reduce((sum, tensor) => sum + tensor.bytes, 0);
  const scale = Math.max(view.capacity, total(view.fast_mem), total(chosen));
  const bar = (name, tensors) => {
    const used = total(tensors);
    const text = `${name}: ${bytesText(used)} of ${bytesText(view.capacity)}`;
    const strip = element("div", { class: "strip", role: "img", "aria-label": `${text}, tensors ${tensors.map((t) => t.id)}` });
    const room = element("div", { class: "capacity" });
    room.style.width = `${(100 * view.capacity) / scale}%`;
    strip.append(room);
    let left = 0;
    for (const { id, bytes } of tensors) {
      const made = maker.has(id) ? kernelClass(maker.get(id)) : "unmade";
      const block = element("div", { class: `tensor ${made}`, title: `tensor ${id}, ${bytesText(bytes)}` },
        bytes / scale > 0.06 ? String(id) : ""); // half a number would be another number
      block.style.left = `${(100 * left) / scale}%`;
      block.style.width = `${(100 * bytes) / scale}%`;
      strip.append(block);
      left += bytes;
    }
    const over = used > view.capacity;
    return element("div", { class: "memory-row" },
      element("div", { class: "caption" }, element("span", {}, name), element("span", { class: over ? "over" : "" },
        `${bytesText(used)} of ${bytesText(view.capacity)}${over ? ", too much" : ""}`)),
      strip);
  };
  holder.replaceChildren(bar("now", view.fast_mem));
  if (!view.ended) holder.append(bar("after this kernel, if it ends here", chosen));
}

/** Cycles so far by nodes placed, up to the present frame, between zero and the naive or greedy total. */
export function drawLatency(holder, frames) {
  const last = frames.at(-1).view;
  const { height, left, right, top, bottom } = CHART;
  const width = Math.max(300, holder.clientWidth);
  const highest = 1.06 * Math.max(last.greedy, last.latency, last.best_from_here ?? 0) || 1;
  const x = (placed) => left + ((width - left - right) * placed) / last.nodes.length;
  const y = (cycles) => height - bottom - ((height - top - bottom) * cycles) / highest;
  const points = frames.map(({ view }) => [view.nodes.filter((node) => node.state !== "pending").length, view]);
  const line = (value) => points.map(([placed, view], index) => `${index ? "L" : "M"}${x(placed)},${y(value(view))}`).join("");
  const rule = (cycles, name) =>
    shape("line", { x1: left, x2: width - right, y1: y(cycles), y2: y(cycles), class: `rule ${name}` });
  const gain = (cycles) => ` ${signedPercent(cycles / last.greedy - 1)}`;
  const marks = [
    ["greedy", last.greedy, ""],
    last.ended ? ["done", last.latency, gain(last.latency)] : ["so far", last.latency, ""],
  ];
  const parts = [rule(0, "axis"), rule(last.greedy, "greedy")];
  if (last.optimum !== null) {
    parts.push(rule(last.optimum, "optimum"));
    marks.push(["optimum", last.optimum, gain(last.optimum)]);
  }
  if (points.every(([, view]) => view.best_from_here !== null)) {
    parts.push(shape("path", { d: line((view) => view.best_from_here), class: "trace best" }));
    if (!last.ended) marks.push(["reachable", last.best_from_here, gain(last.best_from_here)]);
  }
  const [placed] = points.at(-1);
  parts.push(shape("path", { d: line((view) => view.latency), class: "trace spent" }));
  parts.push(shape("circle", { cx: x(placed), cy: y(last.latency), r: 3.5, class: "now" }));
  for (const cycles of [0, last.greedy]) {
    parts.push(shape("text", { x: left - 6, y: y(cycles) + 4, class: "tick end" }, cyclesText(cycles)));
  }
  for (const count of [0, last.nodes.length]) {
    parts.push(shape("text", { x: x(count), y: height - 8, class: "tick middle" }, String(count)));
  }
  parts.push(shape("text", { x: x(last.nodes.length / 2), y: height - 8, class: "tick middle" }, "nodes placed"));
  parts.push(...labels(marks, y, width - right + 8));
  const spoken = marks.map(([name, cycles]) => `${name} ${cyclesText(cycles)}`).join(", ");
  holder.replaceChildren(
    shape("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `Latency in cycles: ${spoken}` }, ...parts),
  );
}

/** Names at the ends of lines, pushed apart where they would touch. */
function labels(marks, y, x) {
  const apart = 13;
  const sorted = marks.map(([name, cycles, more]) => ({ name, more, at: y(cycles) + 4 })).sort((a, b) => a.at - b.at);
  for (let index = 1; index < sorted.length; index++) {
    sorted[index].at = Math.max(sorted[index].at, sorted[index - 1].at + apart);
  }
  const overflow = sorted.length ? sorted.at(-1).at - (CHART.height - CHART.bottom + 4) : 0;
  if (overflow > 0) {
    sorted.at(-1).at -= overflow;
    for (let index = sorted.length - 2; index >= 0; index--) {
      sorted[index].at = Math.min(sorted[index].at, sorted[index + 1].at - apart);
    }
  }
  return sorted.map(({ name, more, at }) =>
    shape("text", { x, y: at, class: `mark ${name.replace(" ", "-")}` }, name + more));
}

/** One row a kernel: members, tile, what it kept, cycles. */
export function drawKernels(body, view) {
  const rows = view.kernels.map((kernel, index) => [kernel, index, cyclesText(kernel.latency)]);
  const { open_kernel: open } = view;
  if (open.nodes.length) rows.push([{ ...open, retained: open.retain }, view.kernels.length, "open"]);
  body.replaceChildren(
    ...rows.map(([kernel, index, cycles]) =>
      element("tr", {},
        element("td", {}, element("span", { class: `swatch ${kernelClass(index)}` }), kernel.nodes.join(" ")),
        element("td", { class: "number" }, String(kernel.tile)),
        element("td", {}, kernel.retained.join(" ") || "–"),
        element("td", { class: "number" }, cycles))),
  );
  body.closest(".table").scrollTop = body.scrollHeight;
}

/** An observation, one key a line; what differs from the one before is marked. Other texts are shown as they are. */
export function drawObservation(holder, text, before) {
  const now = parsed(text);
  if (now === null || typeof now !== "object" || Array.isArray(now)) {
    holder.replaceChildren(typeof text === "string" ? text : JSON.stringify(text, null, 1));
    return;
  }
  const old = parsed(before);
  const known = old !== null && typeof old === "object";
  holder.replaceChildren(
    "{\n",
    ...Object.entries(now).flatMap(([key, value], index, all) => [
      "  ", element("span", { class: "key" }, JSON.stringify(key)), ": ",
      ...valueNodes(value, known ? old[key] : value, known),
      index < all.length - 1 ? ",\n" : "\n",
    ]),
    "}",
  );
}

function valueNodes(value, old, known) {
  if (Array.isArray(value) && value.some((entry) => entry !== null && typeof entry === "object")) {
    const before = Array.isArray(old) ? old : [];
    return ["[", ...value.flatMap((entry, index) => [
      "\n    ",
      marked([spaced(entry)], known && !same(entry, before[index])),
      index < value.length - 1 ? "," : "",
    ]), "\n  ]"];
  }
  if (value !== null && typeof value === "object" && !Array.isArray(value) && old !== null && typeof old === "object") {
    const entries = Object.entries(value);
    return ["{", ...entries.flatMap(([key, inner], index) => [
      marked([`${JSON.stringify(key)}: ${spaced(inner)}`], known && !same(inner, old[key])),
      index < entries.length - 1 ? ", " : "",
    ]), "}"];
  }
  return [marked([spaced(value)], known && !same(value, old))];
}

function marked(children, changed) {
  return changed ? element("mark", {}, ...children) : element("span", {}, ...children);
}

function spaced(value) {
  if (Array.isArray(value)) return `[${value.map(spaced).join(", ")}]`;
  if (value !== null && typeof value === "object") {
    return `{${Object.entries(value).map(([key, inner]) => `${JSON.stringify(key)}: ${spaced(inner)}`).join(", ")}}`;
  }
  return JSON.stringify(value);
}

function same(a, b) {
  return JSON.stringify(a) === JSON.stringify(b);
}

/** The JSON value of a text, or null where it is none (a plain environment's observation). */
export function parsed(text) {
  try {
    return JSON.parse(text);
  } catch {
    return null;
  }
}
