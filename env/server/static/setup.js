// The form that says which episode to start.

import { byId, fillSelect } from "./dom.js";

const names = (entries) => (entries ?? []).map((entry) => entry.name ?? entry);

/** Offer what /tasks lists. */
export function offer(environments) {
  const all = Object.keys(environments);
  fillSelect(byId("environment"), [{ options: all.map((name) => [name, name]) }]);
  byId("environment-field").hidden = all.length < 2;
  byId("environment").addEventListener("change", () => fillSetup(environments));
  byId("graph").addEventListener("change", showRandom);
  fillSetup(environments);
  byId("setup").hidden = false;
}

function fillSetup(environments) {
  const environment = byId("environment").value;
  const { tasks, real, presets } = environments[environment];
  const scheduler = environment === "scheduler";
  const groups = [{ label: "Tasks", options: names(tasks).map((name) => [`task:${name}`, name]) }];
  if (scheduler) {
    groups.push({ label: "Real networks", options: names(real).map((name) => [`real:${name}`, name]) });
    groups.push({ label: "Random", options: [["random:", "random graph"]] });
  }
  fillSelect(byId("graph"), groups);
  fillSelect(byId("hardware"), [
    { options: [["", "as given"]] },
    { label: "Machines", options: names(presets).map((name) => [name, name.replaceAll("_", " ")]) },
  ]);
  for (const field of document.querySelectorAll("#setup .scheduler-only")) field.hidden = !scheduler;
  showRandom();
}

function showRandom() {
  const random = byId("graph").value === "random:";
  for (const field of document.querySelectorAll("#setup .random")) field.hidden = !random;
}

/** The body of /reset that the form asks for. */
export function chosenSetup() {
  const [kind, name] = byId("graph").value.split(/:(.*)/s);
  const environment = byId("environment").value;
  if (environment !== "scheduler") return { environment, task: name };
  const random = { random: true, curriculum_level: Number(byId("level").value), seed: Number(byId("seed").value) };
  const graph = kind === "random" ? random : { [kind]: name };
  return { environment, ...graph, rules: byId("rules").value, hardware: byId("hardware").value || null };
}
