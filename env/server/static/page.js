// The page: which episode is shown, which of its frames, who plays, and what every control does.

import {
  answerText, choiceOf, drawControls, keepable, NO_CHOICE, resultText, scoreText, situationText, startingChoice, TILES,
} from "./decision.js";
import { byId, element, fillSelect } from "./dom.js";
import { fromFile, RecordedEpisode, request, RequestError, ServerEpisode } from "./episodes.js";
import { drawGraph, showCurrent } from "./graph.js";
import { layOut } from "./layout.js";
import { drawKernels, drawLatency, drawMemory, drawObservation, parsed } from "./panels.js";
import { chosenSetup, offer } from "./setup.js";

const STEPS_A_SECOND = [0.5, 1, 2, 5, 20];
const POLICIES = [["greedy", "greedy"], ["heuristic", "heuristic"], ["planner", "planner"], ["adapter", "trained adapter"]];
const HAND = ["hand", "you"];
const MOST_DRAWN = 300;

const state = {
  episode: null,
  cursor: 0,
  layout: null,
  choice: NO_CHOICE,
  playing: 0, // number of the loop that plays, 0 while paused
  loops: 0,
  underway: null, // what is asked of the server, one thing at a time
};

// What is shown

function frame() {
  return state.episode.frames[state.cursor];
}

function atPresent() {
  return state.cursor === state.episode.frames.length - 1;
}

function handPlays() {
  return atPresent() && !frame().done && state.episode instanceof ServerEpisode;
}

/** Whether there are controls to compose an answer with. */
function composes() {
  return handPlays() && Boolean(frame().view);
}

/** Show a frame anew: in the present with an answer to be made, in the past with the one that was given. */
function show() {
  const { view } = frame();
  const given = atPresent() ? null : state.episode.frames[state.cursor + 1].command;
  const open = view && view.current !== null && !view.ended;
  if (given !== null) {
    byId("text").value = given;
    state.choice = choiceOf(given) ?? NO_CHOICE;
  } else {
    state.choice = open ? startingChoice(view) : NO_CHOICE;
    byId("text").value = open ? answerText(state.choice) : "";
  }
  render();
  if (view) showCurrent(byId("drawing"));
}

function render() {
  const frames = state.episode.frames.slice(0, state.cursor + 1);
  const { view, observation } = frame();
  renderTransport();
  renderDecision(view);
  drawObservation(byId("observation"), observation, frames.at(-2)?.observation ?? observation);
  const { command, reward } = frame();
  byId("last").textContent = command === null ? "" : `after ${command.trim()}  reward ${reward.toFixed(4)}`;
  const error = parsed(observation)?.error;
  say("remark", error ? `The environment: ${typeof error === "string" ? error : JSON.stringify(error)}` : "");
  if (view) renderDrawings(frames, view);
}

function renderDrawings(frames, view) {
  const values = new Map(frame().worth.retain.map((value) => [value.id, value]));
  byId("graph-name").textContent = `${view.name}, ${view.nodes.length} nodes`;
  if (state.layout) {
    drawGraph(byId("drawing"), state.layout, view, values, {
      retain: state.choice.retain,
      may: new Set(keepable(view)),
      toggle: handPlays() ? toggleKept : null,
    });
  } else {
    byId("drawing").textContent = `${view.nodes.length} nodes are too many to draw; ${MOST_DRAWN} at most.`;
  }
  drawMemory(byId("memory"), view, state.choice.retain);
  drawLatency(byId("latency"), frames);
  drawKernels(byId("kernels"), view);
}

function renderTransport() {
  const last = state.episode.frames.length - 1;
  const [position, count] = [byId("position"), byId("count")];
  position.max = last;
  position.value = state.cursor;
  const { view } = frame();
  const steps = view ? Math.max(last, view.nodes.length) : last;
  count.textContent = view ? `${state.cursor} / ${state.episode.ended ? last : steps}` : `step ${state.cursor}`;
  const over = atPresent() && state.episode.ended;
  byId("back").disabled = state.cursor === 0;
  byId("forward").disabled = over;
  byId("play").disabled = over;
  byId("play").textContent = state.playing ? "Pause" : "Play";
}

function renderDecision(view) {
  const byHand = handPlays();
  const open = view && !view.ended;
  byId("controls").disabled = byId("text").disabled = byId("send").disabled = !byHand;
  byId("fill").hidden = !byHand || !view;
  byId("answer").hidden = frame().done;
  byId("whose").textContent = atPresent() ? "" : "as it was taken";
  if (open) drawControls(view, frame().worth, state.choice, toggleKept);
  if (view) byId("now").textContent = view.ended ? resultText(view) : situationText(view);
  else byId("now").textContent = frame().done ? `Done, score ${scoreText(frame().score)}.` : "Answer with a command.";
}

function say(id, text) {
  byId(id).textContent = text;
  byId(id).hidden = !text;
}

// What is done

/** Do something that asks the server, unless something else is under way; a refusal is shown. Returns whether it was
 * done. */
async function attempt(work) {
  if (state.underway) return false;
  document.body.setAttribute("aria-busy", "true");
  state.underway = settled(work);
  const done = await state.underway;
  state.underway = null;
  document.body.removeAttribute("aria-busy");
  return done;
}

async function settled(work) {
  try {
    await work();
    say("error", "");
    return true;
  } catch (error) {
    pause();
    say("error", error.message);
    if (!(error instanceof RequestError)) console.error(error);
    return false;
  }
}

function open(episode) {
  state.episode = episode;
  state.cursor = 0;
  const { view } = episode.frames[0];
  state.layout = view && view.nodes.length <= MOST_DRAWN ? layOut(view.nodes, view.order) : null;
  document.body.classList.toggle("plain", !view);
  show();
}

async function start(setup, actions = []) {
  pause();
  while (state.underway) await state.underway;
  return attempt(async () => {
    const episode = await ServerEpisode.start(setup, actions);
    state.episode?.close();
    fillPlayers(actions.length > 0, Boolean(episode.frames[0].view));
    open(episode);
  });
}

function act(command) {
  const { episode } = state;
  return attempt(async () => {
    await episode.step(await command());
    state.cursor = episode.frames.length - 1;
    show();
  });
}

function go(cursor) {
  state.cursor = Math.max(0, Math.min(cursor, state.episode.frames.length - 1));
  show();
}

async function forward() {
  if (!atPresent()) {
    go(state.cursor + 1);
    return true;
  }
  const player = byId("player").value;
  if (state.episode.ended) return false;
  if (player === "hand") {
    say("error", "It is your turn: answer, or choose another player.");
    return false;
  }
  return act(() => state.episode.suggest(player));
}

function pause() {
  state.playing = 0;
  byId("play").textContent = "Play";
}

async function play() {
  if (state.playing) return pause();
  const loop = (state.playing = ++state.loops);
  renderTransport();
  while (state.playing === loop) {
    if (!(await forward()) || (atPresent() && state.episode.ended)) break;
    await new Promise((resolve) => setTimeout(resolve, 1000 / STEPS_A_SECOND[byId("speed").value]));
  }
  if (state.playing === loop) {
    pause();
    renderTransport();
  }
}

function choose(change) {
  if (!composes()) return;
  state.choice = { ...state.choice, ...change };
  byId("text").value = answerText(state.choice);
  render();
}

function toggleKept(id) {
  const retain = new Set(state.choice.retain);
  if (!retain.delete(id)) retain.add(id);
  choose({ retain });
}

function answer() {
  if (handPlays()) act(async () => byId("text").value);
}

async function save() {
  await attempt(async () => {
    const text = JSON.stringify(await state.episode.replay(), null, 1);
    const address = URL.createObjectURL(new Blob([text], { type: "application/json" }));
    const link = element("a", { href: address, download: "replay.json" });
    link.click();
    setTimeout(() => URL.revokeObjectURL(address), 10_000); // some browsers read it after the click
  });
}

async function openFile(file) {
  if (!file) return;
  let contents;
  const read = await attempt(async () => (contents = fromFile(file.name, await file.text())));
  if (read) await start(contents.setup, contents.actions);
}

// Controls

function fillPlayers(recorded, drawn) {
  const select = byId("player");
  const before = select.value;
  const players = drawn ? [HAND, ...POLICIES] : [HAND];
  fillSelect(select, [{ options: recorded ? [["recording", "the recording"], ...players] : players }]);
  if (!recorded && players.some(([name]) => name === before)) select.value = before;
}

function listen(id, event, action) {
  byId(id).addEventListener(event, action);
}

function connectControls() {
  for (const tile of TILES) {
    const input = element("input", { type: "radio", name: "tile", value: tile });
    input.addEventListener("change", () => choose({ tile }));
    byId("tiles").append(element("label", {}, input, element("span", {}, String(tile))));
  }
  for (const [policy, name] of POLICIES) {
    const button = element("button", { type: "button", class: "quiet" }, name);
    button.addEventListener("click", () => attempt(async () => typed(await state.episode.suggest(policy))));
    byId("fill").append(button);
  }
  listen("back", "click", () => (pause(), go(state.cursor - 1)));
  listen("forward", "click", () => (pause(), forward()));
  listen("play", "click", play);
  listen("position", "input", (event) => (pause(), go(Number(event.target.value))));
  listen("player", "change", () => say("error", ""));
  listen("save", "click", save);
  listen("fuse", "change", (event) => choose({ fuse: event.target.checked }));
  listen("text", "input", (event) => typed(event.target.value));
  listen("answer", "submit", (event) => (event.preventDefault(), pause(), answer()));
  listen("setup", "submit", (event) => (event.preventDefault(), start(chosenSetup())));
  listen("file", "change", async (event) => {
    await openFile(event.target.files[0]);
    event.target.value = "";
  });
  document.addEventListener("keydown", pressed);
}

function typed(text) {
  if (!handPlays()) return;
  byId("text").value = text;
  state.choice = choiceOf(text) ?? state.choice;
  render();
}

function pressed(event) {
  const { key, target } = event;
  if (target.id === "text" && key === "Enter" && (event.ctrlKey || event.metaKey)) return answer();
  if (event.ctrlKey || event.metaKey || event.altKey || !state.episode) return;
  if (target.matches("select, textarea, input")) return;
  const action = {
    " ": play,
    ArrowLeft: () => (pause(), go(state.cursor - 1)),
    ArrowRight: () => (pause(), forward()),
    Enter: answer,
    f: () => choose({ fuse: !state.choice.fuse }),
  }[key] ?? (TILES[key - 1] ? () => choose({ tile: TILES[key - 1] }) : null);
  if (!action || (target.matches("button, [role=checkbox], summary") && (key === " " || key === "Enter"))) return;
  event.preventDefault();
  action();
}

async function begin() {
  connectControls();
  const recording = byId("recording");
  if (recording) {
    document.body.classList.add("recorded");
    const { replay, frames } = JSON.parse(recording.textContent);
    byId("subtitle").textContent = `Replay, ${replay.rules} rules${replay.made_by ? `, made by ${replay.made_by}` : ""}.`;
    open(new RecordedEpisode({ replay, frames }));
    return;
  }
  await attempt(async () => {
    offer((await request("tasks")).environments);
  });
  if (byId("setup").hidden) return;
  await start(chosenSetup());
}

await begin();
