// The graph as SVG: nodes in layers, kernels as rounded outlines around theirs, what is held and what may be kept.

import { kernelClass, makers, shape } from "./dom.js";
import { NODE } from "./layout.js";

const PAD = 7;
const BAND = 22;

/**
 * Draw a state.
 * @param holder the element that takes the drawing
 * @param layout of `layOut`
 * @param view the state
 * @param values worth by tensor id: {worth_cycles, kind}
 * @param choice {retain: Set of ids that would be kept, may: Set of ids that may be, toggle(id) or null}
 */
export function drawGraph(holder, layout, view, values, choice) {
  const focused = holder.contains(document.activeElement) ? document.activeElement.dataset.id : null;
  const held = new Set(view.fast_mem.map((tensor) => tensor.id));
  const maker = makers(view);
  const most = Math.max(1, ...[...values.values()].map((value) => Math.abs(value.worth_cycles)));
  const drawing = shape(
    "svg",
    {
      viewBox: `0 0 ${layout.width} ${layout.height}`,
      width: layout.width,
      height: layout.height,
      role: "group",
      "aria-label": `Graph of ${view.nodes.length} nodes, ${view.kernels.length} kernels done`,
    },
    ...hulls(layout, view),
    shape("g", { class: "edges" }, ...edges(layout, view, held, maker)),
    ...view.nodes.map((node) => box(layout, view, node, { held, maker, choice, value: values.get(node.id), most })),
  );
  drawing.style.minWidth = `${Math.round(0.72 * layout.width)}px`;
  holder.replaceChildren(drawing);
  if (focused !== null) holder.querySelector(`[data-id="${CSS.escape(focused)}"][tabindex]`)?.focus();
}

/** Scroll the drawing so that the current node is in sight. */
export function showCurrent(holder) {
  const current = holder.querySelector(".node.current");
  if (!current) return;
  const outer = holder.getBoundingClientRect();
  const inner = current.getBoundingClientRect();
  holder.scrollTop += inner.top - outer.top - (outer.height - inner.height) / 2;
  holder.scrollLeft += inner.left - outer.left - (outer.width - inner.width) / 2;
}

/** An outline is the union of the members' boxes and of bands between them, three times: edge, ground, tint. */
function hulls(layout, view) {
  const kernels = [...view.kernels];
  if (view.open_kernel.nodes.length) kernels.push({ ...view.open_kernel, open: true });
  return kernels.map((kernel, index) => {
    const bands = kernel.nodes.flatMap((id) => bandInto(layout, view.nodes[id], kernel.nodes));
    const blob = (grow, name) =>
      shape(
        "g",
        { class: name },
        ...bands.map((path) => shape("path", { d: path, "stroke-width": BAND + 2 * grow })),
        ...kernel.nodes.map((id) => outlined(layout.centre[id], PAD + grow)),
      );
    const label = `kernel of ${kernel.nodes.join(", ")}, tile ${kernel.tile}${kernel.open ? ", open" : ""}`;
    return shape(
      "g",
      { class: `hull ${kernelClass(index)}${kernel.open ? " open" : ""}` },
      shape("title", {}, label),
      blob(0, "line"),
      blob(-1.5, "ground"),
      blob(-1.5, "tint"),
    );
  });
}

function bandInto(layout, node, members) {
  const joined = node.inputs.filter((input) => members.includes(input));
  if (!joined.length) return [];
  const nearest = joined.reduce((best, input) => (layout.depth[input] > layout.depth[best] ? input : best));
  return [layout.route(nearest, node.id)];
}

function outlined({ x, y }, pad) {
  const width = NODE.width + 2 * pad;
  const height = NODE.height + 2 * pad;
  return shape("rect", { x: x - width / 2, y: y - height / 2, width, height, rx: 5 + pad });
}

function edges(layout, view, held, maker) {
  const drawn = [];
  for (const node of view.nodes) {
    for (const input of new Set(node.inputs)) {
      const kept = held.has(input) && node.state === "pending";
      const name = node.id === view.current ? "into-current" : node.state === "pending" ? "" : "read";
      drawn.push({ kept, made: shape("path", {
        d: layout.route(input, node.id),
        class: kept ? `kept ${name} ${kernelClass(maker.get(input) ?? 0)}` : name,
      }) });
    }
  }
  return [...drawn.filter((edge) => !edge.kept), ...drawn.filter((edge) => edge.kept)].map((edge) => edge.made);
}

function box(layout, view, node, { held, maker, choice, value, most }) {
  const { x, y } = layout.centre[node.id];
  const [left, top] = [x - NODE.width / 2, y - NODE.height / 2];
  const may = choice.may.has(node.id);
  const kept = choice.retain.has(node.id);
  const current = node.id === view.current;
  const state = current ? "current" : node.state;
  const parts = [
    shape("rect", { x: left, y: top, width: NODE.width, height: NODE.height, rx: 5, class: "box" }),
    shape("text", { x: left + 9, y: top + 17, class: "name" }, `${node.id}  ${node.op}`),
    shape("text", { x: left + 9, y: top + 31, class: "detail" }, `${node.shape.join("×")}`),
  ];
  if (node.uses_left) {
    parts.push(shape("text", { x: left + NODE.width - 9, y: top + 31, class: "detail end" }, `${node.uses_left}×`));
  }
  if (held.has(node.id)) {
    const name = `held ${kernelClass(maker.get(node.id) ?? 0)}`;
    parts.push(shape("rect", { x: left - 4, y: top + 6, width: 8, height: NODE.height - 12, class: name }));
  }
  if (value && value.kind !== "does_not_matter") {
    const width = Math.max(3, (Math.abs(value.worth_cycles) / most) * (NODE.width / 2 - 6));
    const from = value.worth_cycles > 0 ? x : x - width;
    parts.push(shape("rect", { x: from, y: top + NODE.height + 2, width, height: 4, class: `worth ${value.kind}` }));
  }
  if (may) parts.push(shape("circle", { cx: left + NODE.width - 12, cy: top + 13, r: 4.5, class: kept ? "pin on" : "pin" }));
  const words = [`node ${node.id}, ${node.op}, ${node.shape.join(" by ")}`, `${node.uses_left} reads left`];
  if (current) words.push("current");
  if (held.has(node.id)) words.push("in fast memory");
  const described = may ? `keep tensor ${words.join(", ")}` : words.join(", ");
  const toggles = may && choice.toggle
    ? { role: "checkbox", tabindex: 0, "aria-checked": String(kept), "aria-label": described }
    : { role: "img", "aria-label": described };
  const made = shape("g", { class: `node ${state}${may ? " may" : ""}`, "data-id": node.id, ...toggles }, ...parts);
  if (may && choice.toggle) {
    made.addEventListener("click", () => choice.toggle(node.id));
    made.addEventListener("keydown", (event) => {
      if (event.key !== " " && event.key !== "Enter") return;
      event.preventDefault();
      event.stopPropagation();
      choice.toggle(node.id);
    });
  }
  return made;
}
