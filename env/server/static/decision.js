// The answer for the current node: what it may say, its text, and the controls that write it.

import { byId, bytesText, cyclesText, element, signedPercent } from "./dom.js";
import { parsed } from "./panels.js";

export const TILES = [32, 64, 128, 256];
export const NO_CHOICE = { fuse: false, tile: null, retain: new Set() };

/** Ids that the current action may name with effect: within reach, and read after the current node. */
export function keepable(view) {
  if (view.current === null || view.ended) return [];
  const reached = [view.current, ...view.open_kernel.nodes];
  const ids = [...view.fast_mem.map((tensor) => tensor.id), ...reached, ...reached.flatMap((id) => view.nodes[id].inputs)];
  const reads = (id) => view.nodes[view.current].inputs.filter((input) => input === id).length;
  return [...new Set(ids)].filter((id) => view.nodes[id].uses_left > reads(id)).sort((a, b) => a - b);
}

function connected(view) {
  return view.nodes[view.current].inputs.some((input) => view.open_kernel.nodes.includes(input));
}

export function answerText({ fuse, tile, retain }) {
  return `{"fuse_with_prev": ${fuse}, "tile": ${tile}, "retain": [${[...retain].join(", ")}]}`;
}

/** The choice that a text makes, or null if it is no action as documented. */
export function choiceOf(text) {
  const record = parsed(text);
  if (!record || typeof record.fuse_with_prev !== "boolean" || !TILES.includes(record.tile)) return null;
  if (!Array.isArray(record.retain) || !record.retain.every(Number.isInteger)) return null;
  return { fuse: record.fuse_with_prev, tile: record.tile, retain: new Set(record.retain) };
}

/** What a hand that answers begins with: go on as before, as far as that is possible. */
export function startingChoice(view) {
  const may = keepable(view);
  const open = view.open_kernel;
  const fuse = connected(view) && open.nodes.length < view.max_fusion;
  const before = [...view.fast_mem.map((tensor) => tensor.id), ...(open.nodes.length ? open.retain : [])];
  const retain = new Set(before.filter((id) => may.includes(id)));
  return { fuse, tile: open.nodes.length ? open.tile : 128, retain };
}

/** Fill in the controls. `toggle(id)` is called when a tensor's box is clicked. */
export function drawControls(view, worth, choice, toggle) {
  byId("fuse").checked = choice.fuse;
  const kernel = view.open_kernel.nodes;
  const why = connected(view) ? "" : "; the node reads nothing of it";
  byId("fuse-text").textContent = kernel.length
    ? `fuse with ${kernel.join(", ")} (${kernel.length} of ${view.max_fusion}${why})`
    : "fuse (no kernel is open)";
  for (const input of byId("tiles").querySelectorAll("input")) input.checked = Number(input.value) === choice.tile;
  const values = new Map(worth.retain.map((value) => [value.id, value]));
  const most = Math.max(1, ...worth.retain.map((value) => Math.abs(value.worth_cycles)));
  const ids = keepable(view);
  const focused = document.activeElement?.dataset?.keep;
  const head = element("p", { class: "keep-head" },
    element("span", {}, ids.length ? "keep" : "no tensor to keep here"),
    element("span", {}, worth.why_not ?? (ids.length ? "worth, % of greedy" : "")));
  const rows = ids.map((id) => keepRow(view.nodes[id], values.get(id), most, choice.retain.has(id), toggle));
  byId("keep").replaceChildren(head, ...rows);
  if (focused) byId("keep").querySelector(`[data-keep="${CSS.escape(focused)}"]`)?.focus();
}

function keepRow(node, value, most, checked, toggle) {
  const input = element("input", { type: "checkbox", "data-keep": node.id, checked });
  input.addEventListener("change", () => toggle(node.id));
  const bar = element("span", { class: "worth-bar" });
  if (value && value.worth_cycles !== 0) {
    const fill = element("span", { class: value.kind });
    const share = (50 * Math.abs(value.worth_cycles)) / most;
    fill.style.width = `${share}%`;
    fill.style.left = `${value.worth_cycles > 0 ? 50 : 50 - share}%`;
    bar.append(fill);
  }
  return element("label", { class: `keep-row ${value?.kind ?? ""}` },
    input,
    element("span", { class: "tensor-name" }, `${node.id} ${node.op}`),
    element("span", { class: "tensor-detail" }, `${bytesText(node.bytes)}, ${node.uses_left}×`),
    bar,
    element("span", { class: "worth-text" }, value ? signedPercent(value.worth_share_of_greedy) : ""));
}

export function situationText(view) {
  const node = view.nodes[view.current];
  const reads = node.inputs.length ? `reads ${node.inputs.join(", ")}` : "reads nothing";
  return `Node ${node.id}, ${node.op} ${node.shape.join("×")}, ${reads}.`;
}

export function resultText(view) {
  const best = view.optimum === null ? "" : ` The optimum is ${againstGreedy(view, view.optimum)}.`;
  const scores = `Score ${scoreText(view.score)}, calibrated ${scoreText(view.calibrated_score)}.`;
  return `Done in ${cyclesText(view.latency)} cycles, ${againstGreedy(view, view.latency)} than greedy.${best} ${scores}`;
}

function againstGreedy(view, latency) {
  const gain = (view.greedy - latency) / view.greedy;
  return `${(100 * Math.abs(gain)).toFixed(1)} % ${gain >= 0 ? "faster" : "slower"}`;
}

export function scoreText(score) {
  return score === null ? "unknown" : score.toFixed(3).replace("-", "−");
}
