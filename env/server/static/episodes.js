// Where frames come from: an episode on the server, or a recording that holds all of them.
// A frame is {command, observation, reward, done, score, view, worth}; the first one's command is null.

/** A request that the server refused, or that never reached it; the message is one line to show. */
export class RequestError extends Error {}

export async function request(path, body) {
  const options = body === undefined
    ? {}
    : { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) };
  let response;
  try {
    response = await fetch(path, options);
  } catch {
    throw new RequestError("the server does not answer");
  }
  const text = await response.text();
  let record;
  try {
    record = JSON.parse(text);
  } catch {
    throw new RequestError(`${path}: expected JSON, found status ${response.status}`);
  }
  if (!response.ok) throw new RequestError(record.error ?? `${path}: status ${response.status}`);
  return record;
}

/** An episode that the server plays. `recorded` are texts of a replay file, to be played again. */
export class ServerEpisode {
  constructor(id, first, recorded) {
    this.id = id;
    this.frames = [first];
    this.recorded = recorded;
  }

  static async start(setup, recorded = []) {
    const reply = await request("reset", setup);
    const episode = new ServerEpisode(reply.session_id, null, recorded);
    episode.frames = [await episode.frame(reply, null)];
    return episode;
  }

  get ended() {
    return this.frames.at(-1).done;
  }

  async step(command) {
    const reply = await request(`step/${this.id}`, { command });
    this.frames.push(await this.frame(reply, command));
  }

  /** What a player would answer now. */
  async suggest(player) {
    if (player !== "recording") return (await request(`suggest/${this.id}`, { policy: player })).command;
    const next = this.recorded[this.frames.length - 1];
    if (next === undefined) throw new RequestError("the recording has no more answers");
    return next;
  }

  replay() {
    return request(`replay/${this.id}`);
  }

  /** Give the session back; that it may be gone already is no fault. */
  close() {
    fetch(`delete/${this.id}`, { method: "POST" }).catch(() => {});
  }

  /** The step has been taken whether or not this is answered: a refusal stands in the worth's place. */
  async worth() {
    try {
      return await request(`worth/${this.id}`);
    } catch (error) {
      if (!(error instanceof RequestError)) throw error;
      return { retain: [], why_not: error.message };
    }
  }

  async frame(reply, command) {
    const asks = reply.view && !reply.done;
    const worth = asks ? await this.worth() : { retain: [], why_not: null };
    const { observation, reward, done, score = null, view = null } = reply;
    return { command, observation, reward, done, score, view, worth };
  }
}

/** A recording: every frame is there from the start. */
export class RecordedEpisode {
  constructor({ replay, frames }) {
    this.frames = frames;
    this.record = replay;
  }

  get ended() {
    return true;
  }

  async replay() {
    return this.record;
  }
}

/** What to send to /reset for the contents of a file, and the texts in it: a replay, or a graph alone.
 * @throws RequestError if it is neither */
export function fromFile(name, text) {
  let record;
  try {
    record = JSON.parse(text);
  } catch {
    throw new RequestError(`${name}: expected JSON, found something else`);
  }
  if (record?.format === "scheduler-replay-1") {
    if (!Array.isArray(record.actions) || !record.actions.every((action) => typeof action === "string")) {
      throw new RequestError(`${name}: actions: expected a list of texts`);
    }
    return { setup: { graph: record.graph, rules: record.rules }, actions: record.actions };
  }
  if (record?.nodes && record?.hardware) return { setup: { graph: record }, actions: [] };
  throw new RequestError(`${name}: expected a replay of the format scheduler-replay-1 or a graph, found neither`);
}
