// A layered drawing of an acyclic graph: one row a depth, and a lane beside the nodes for every tensor that is read
// further down than in the next row. Consumers of a tensor share its lane, so a lane is as long as the tensor lives.

export const NODE = { width: 114, height: 40 };
const ROW = 70;
const BETWEEN = 16;
const LANE = 12;
const SWEEPS = 12;

/**
 * @param nodes [{id, inputs}], ids are positions
 * @param order ids in topological order
 * @returns {width, height, centre: [{x, y}] by id, depth: [row] by id, route(from, to): SVG path of an edge}
 */
export function layOut(nodes, order) {
  const depth = depths(nodes, order);
  const { rows, items, lanes } = place(nodes, order, depth);
  for (let sweep = 0; sweep < SWEEPS; sweep++) sortRows(rows, sweep % 2 === 0);
  assignX(rows);
  const left = Math.min(...rows.flat().map((item) => item.x - item.width / 2)) - BETWEEN;
  const right = Math.max(...rows.flat().map((item) => item.x + item.width / 2)) + BETWEEN;
  const middle = (row) => BETWEEN + NODE.height / 2 + row * ROW;
  const centre = items.map((item, id) => ({ x: item.x - left, y: middle(depth[id]) }));

  function route(from, to) {
    const half = NODE.height / 2;
    let { x, y } = centre[from];
    let path = `M${x},${(y += half)}`;
    const curve = (toX, toY) => {
      path += `C${x},${(y + toY) / 2} ${toX},${(y + toY) / 2} ${toX},${toY}`;
      [x, y] = [toX, toY];
    };
    for (const [offset, item] of (lanes.get(from) ?? []).entries()) {
      const row = depth[from] + 1 + offset;
      if (row >= depth[to]) break;
      curve(item.x - left, middle(row) - half);
      path += `V${(y = middle(row) + half)}`;
    }
    curve(centre[to].x, centre[to].y - half);
    return path;
  }
  return { width: right - left, height: 2 * BETWEEN + NODE.height + (rows.length - 1) * ROW, centre, depth, route };
}

/** Row of each node: 0 without inputs, else one below its lowest input. */
export function depths(nodes, order) {
  const depth = new Array(nodes.length).fill(0);
  for (const id of order) depth[id] = Math.max(-1, ...nodes[id].inputs.map((input) => depth[input])) + 1;
  return depth;
}

function place(nodes, order, depth) {
  const rows = Array.from({ length: Math.max(...depth) + 1 }, () => []);
  const item = (row, width) => {
    const made = { width, x: 0, above: [], below: [] };
    rows[row].push(made);
    return made;
  };
  const items = [];
  for (const id of order) items[id] = item(depth[id], NODE.width);
  const lowest = new Array(nodes.length).fill(0);
  for (const { id, inputs } of nodes) for (const i of inputs) lowest[i] = Math.max(lowest[i], depth[id]);
  const lanes = new Map();
  for (const id of order) {
    const lane = [];
    for (let row = depth[id] + 1; row < lowest[id]; row++) lane.push(item(row, LANE));
    lane.forEach((step, index) => join(index ? lane[index - 1] : items[id], step));
    if (lane.length) lanes.set(id, lane);
  }
  for (const { id, inputs } of nodes) {
    for (const input of new Set(inputs)) {
      const rowsBetween = depth[id] - depth[input] - 1;
      join(rowsBetween ? lanes.get(input)[rowsBetween - 1] : items[input], items[id]);
    }
  }
  return { rows, items, lanes };
}

function join(upper, lower) {
  upper.below.push(lower);
  lower.above.push(upper);
}

/** Order each row by the mean place of what its items are joined to in the row before: fewer edges cross. */
function sortRows(rows, downwards) {
  for (const row of downwards ? rows : [...rows].reverse()) {
    row.forEach((item, index) => {
      const joined = downwards ? item.above : item.below;
      item.rank = joined.length ? mean(joined.map((other) => other.place)) : (index + 0.5) / row.length;
    });
    row.sort((a, b) => a.rank - b.rank);
    row.forEach((item, index) => (item.place = (index + 0.5) / row.length));
  }
}

function assignX(rows) {
  for (const row of rows) settle(row, row.map(() => 0));
  for (let sweep = 0; sweep < 2 * SWEEPS; sweep++) {
    const downwards = sweep % 2 === 1; // the last one too: what follows a node stands straight below it
    for (const row of downwards ? rows : [...rows].reverse()) settle(row, row.map((item) => wish(item, downwards)));
  }
}

/** Where an item would stand: by the nodes that a node is joined to, by the rest of its lane, else by what there is. */
function wish(item, downwards) {
  const joined = downwards ? item.above : item.below;
  if (!joined.length) return item.x;
  const alike = joined.filter((other) => other.width === item.width);
  return mean((alike.length ? alike : joined).map((other) => other.x));
}

/** Put a row's items as near to where they wish to be as their widths allow, in the least-squares sense. */
function settle(row, wishes) {
  let offset = 0;
  const offsets = row.map((item, index) => {
    if (index) offset += (row[index - 1].width + item.width) / 2 + BETWEEN;
    return offset;
  });
  const blocks = [];
  wishes.forEach((wish, index) => {
    blocks.push({ sum: wish - offsets[index], count: 1 });
    while (blocks.length > 1 && value(blocks.at(-2)) > value(blocks.at(-1))) {
      const last = blocks.pop();
      blocks.at(-1).sum += last.sum;
      blocks.at(-1).count += last.count;
    }
  });
  let index = 0;
  for (const block of blocks) for (let i = 0; i < block.count; i++, index++) row[index].x = value(block) + offsets[index];
}

function value(block) {
  return block.sum / block.count;
}

function mean(numbers) {
  return numbers.reduce((sum, number) => sum + number, 0) / numbers.length;
}
