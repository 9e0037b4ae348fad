// What would become of the step on another link: the predicted times, run once more with longer or shorter collectives.

import type { FrameView, Graph } from "./report.js";

export interface Outcome {
  stepUs: number;
  exposedUs: number;
}

const NOTHING: number[] = [];

/** The step if every collective took `factor` times as long as predicted: one at a time on each lane, beside compute. */
export function stepWith(view: FrameView, factor: number): Outcome {
  const total: Outcome = { stepUs: 0, exposedUs: 0 };
  for (const graph of view.frame.graphs) {
    const found = run(view, graph, factor);
    total.stepUs += found.stepUs;
    total.exposedUs += found.exposedUs;
  }
  return total;
}

function run(view: FrameView, graph: Graph, factor: number): Outcome {
  const { lane, cost_us, start_us, end_us, inputs } = graph.nodes;
  const waits = new Set(graph.collectives.wait);
  const scaled = view.frame.lanes.map((name) => name.startsWith("group:"));
  // What shares its link with another lane takes longer than it costs: as long as the prediction says.
  const takes = (node: number) => {
    const begin = start_us?.[node];
    const finish = end_us?.[node];
    return scaled[lane[node]] && begin != null && finish != null ? (finish - begin) * factor : (cost_us?.[node] ?? 0);
  };
  const free = view.frame.lanes.map(() => 0);
  const end = new Array<number>(lane.length).fill(0);
  const behind: number[][] = [];
  let now = 0;
  let exposed = 0;
  for (let node = 0; node < lane.length; node++) {
    let blocks = NOTHING;
    for (const input of inputs[node]) {
      const more = lane[input] > 0 ? [input] : lane[input] < 0 && !waits.has(input) ? behind[input] : NOTHING;
      if (more.length) blocks = blocks.length ? [...new Set([...blocks, ...more])] : more;
    }
    behind.push(blocks);
    const ready = behind[node].reduce((latest, each) => Math.max(latest, end[each]), 0);
    if (lane[node] > 0) {
      const begin = Math.max(now, ready, free[lane[node]]);
      end[node] = begin + takes(node);
      free[lane[node]] = end[node];
    } else if (lane[node] === 0 || waits.has(node)) {
      exposed += Math.max(0, ready - now);
      now = Math.max(now, ready) + (lane[node] === 0 ? (cost_us?.[node] ?? 0) : 0);
    }
  }
  return { stepUs: now, exposedUs: exposed };
}
