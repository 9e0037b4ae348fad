// Where the elements of the picture go. Each open group is laid out alone by dagre, and is then a box in the group around
// it: that is far cheaper than one layout of everything, and what did not change is not laid out again.

import dagre from "@dagrejs/dagre";

export const WIDTH = 190;
export const HEIGHT = 42;
const PADDING = 16; // of a box around what is inside
const TITLE = 18; // above it
const MOST_KEPT = 500; // layouts of single groups
const THOROUGH = 40; // elements up to which dagre may take its time

/** An element, or an open group, and the open group that it is in. */
export interface Inside {
  id: string;
  inside: string | null;
}

export interface Task {
  elements: Inside[];
  around: Inside[];
  edges: [string, string, number][];
}

/** Centre and size. */
export interface Box {
  x: number;
  y: number;
  width: number;
  height: number;
}

interface Laid {
  width: number;
  height: number;
  places: [string, Box][];
}

interface Level {
  children: string[];
  edges: Map<string, [string, string, number]>;
}

export class Layout {
  private readonly known = new Map<string, Laid>();

  /** Where each element and each open group goes. */
  places(task: Task): Map<string, Box> {
    const parent = new Map([...task.around, ...task.elements].map(({ id, inside }) => [id, inside]));
    const levels = new Map<string | null, Level>([null, ...task.around.map(({ id }) => id)].map((id) => [id, { children: [], edges: new Map() }]));
    for (const [id, inside] of parent) levels.get(inside)?.children.push(id);
    for (const [from, to, weight] of task.edges) lift(from, to, weight, parent, levels);
    const found = new Map<string, Box>();
    const sizes = new Map<string | null, Laid>();
    const measure = (id: string | null): Laid => {
      const level = levels.get(id);
      if (!level) return { width: WIDTH, height: HEIGHT, places: [] };
      const boxes = level.children.map((child): [string, number, number] => {
        const { width, height } = measure(child);
        return levels.has(child) ? [child, width + 2 * PADDING, height + 2 * PADDING + TITLE] : [child, width, height];
      });
      const laid = this.laid(boxes, [...level.edges.values()]);
      sizes.set(id, laid);
      return laid;
    };
    const put = (id: string | null, left: number, top: number) => {
      for (const [child, { x, y, width, height }] of sizes.get(id)?.places ?? []) {
        found.set(child, { x: left + x, y: top + y, width, height });
        put(child, left + x - width / 2 + PADDING, top + y - height / 2 + PADDING + TITLE);
      }
    };
    measure(null);
    put(null, 0, 0);
    return found;
  }

  private laid(boxes: [string, number, number][], edges: [string, string, number][]): Laid {
    const key = JSON.stringify([boxes, edges]);
    let found = this.known.get(key);
    if (!found) {
      if (this.known.size >= MOST_KEPT) this.known.clear();
      found = arranged(boxes, edges);
      this.known.set(key, found);
    }
    return found;
  }
}

/** Add an edge to the innermost group that holds both ends, between what holds them there. */
function lift(from: string, to: string, weight: number, parent: Map<string, string | null>, levels: Map<string | null, Level>): void {
  const chain = new Map<string | null, string>(); // by group what of it holds the beginning
  for (let at: string | null = from; at !== null; at = parent.get(at) ?? null) chain.set(parent.get(at) ?? null, at);
  let end = to;
  for (;;) {
    const group = parent.get(end) ?? null;
    const begin = chain.get(group);
    if (begin !== undefined) {
      if (begin === end) return;
      const edges = levels.get(group)?.edges;
      const key = `${begin}>${end}`;
      const known = edges?.get(key);
      if (known) known[2] += weight;
      else edges?.set(key, [begin, end, weight]);
      return;
    }
    if (group === null) return;
    end = group;
  }
}

function arranged(boxes: [string, number, number][], edges: [string, string, number][]): Laid {
  const graph = new dagre.graphlib.Graph();
  graph.setGraph({ rankdir: "TB", nodesep: 18, ranksep: 38, edgesep: 6, ranker: boxes.length > THOROUGH ? "longest-path" : "network-simplex" });
  graph.setDefaultEdgeLabel(() => ({}));
  for (const [id, width, height] of boxes) graph.setNode(id, { width, height });
  for (const [from, to, weight] of edges) graph.setEdge(from, to, { weight: Math.min(weight, 8) });
  dagre.layout(graph);
  const whole = graph.graph();
  return { width: whole.width ?? 0, height: whole.height ?? 0, places: boxes.map(([id, width, height]) => [id, { x: graph.node(id).x, y: graph.node(id).y, width, height }]) };
}
