// What the timeline draws: bars by lane, of which as many are merged as one could not tell apart.

import type { FrameView, Place } from "./report.js";

export const KINDS = ["compute", "communication", "copy", "exposed", "wait", "measured", "blocked", "forward", "backward", "weights"] as const;
export type Kind = (typeof KINDS)[number];

/** A bar; without a place it stands for several nodes, or for a whole graph. */
export interface Bar {
  lane: number;
  from: number;
  to: number;
  kind: Kind;
  place: Place | null;
  merged: number;
  label: string;
}

export interface Lanes {
  names: string[];
  bars: Bar[][];
  total: number;
}

/** Bars of a frame: its lanes as predicted, and beneath them what was measured. */
export function lanesOf(view: FrameView): Lanes {
  const { frame } = view;
  const names = [...frame.lanes];
  const bars: Bar[][] = names.map(() => []);
  frame.graphs.forEach((graph, number) => {
    const { lane } = graph.nodes;
    for (let node = 0; node < lane.length; node++) {
      const place = { graph: number, node };
      const [from, to] = view.span(place);
      if (to <= from) continue;
      const row = view.collectiveOf[number].get(node);
      if (lane[node] >= 0) {
        const kind = lane[node] === 0 ? "compute" : names[lane[node]].startsWith("group:") ? "communication" : "copy";
        bars[lane[node]].push({ lane: lane[node], from, to, kind, place, merged: 1, label: "" });
      } else if (row !== undefined) {
        bars[0].push({ lane: 0, from, to, kind: "wait", place, merged: 1, label: "" });
      }
      const exposed = graph.nodes.exposed_us?.[node] ?? 0;
      if (lane[node] > 0 && exposed > 0) {
        bars[lane[node]].push({ lane: lane[node], from: Math.max(from, to - exposed), to, kind: "exposed", place, merged: 1, label: "" });
      }
    }
  });
  let total = view.stepUs;
  if (view.measured.some((each) => each)) total = Math.max(total, addMeasured(view, names, bars));
  for (const lane of bars) lane.sort((a, b) => a.from - b.from);
  return { names, bars, total };
}

function addMeasured(view: FrameView, names: string[], bars: Bar[][]): number {
  const lane = names.push("measured") - 1;
  bars.push([]);
  let offset = 0;
  view.measured.forEach((measured, graph) => {
    if (!measured) return;
    const { direction } = view.frame.graphs[graph];
    bars[lane].push({ lane, from: offset, to: offset + measured.us, kind: "measured", place: null, merged: 1, label: direction });
    const lines = view.frame.graphs[graph].nodes.line;
    const nodeOf = new Map(lines.map((line, node) => [view.frame.lines.name[line], node]));
    for (const [name, us] of Object.entries(measured.blocked_us)) {
      const at = measured.waited_at_us?.[name];
      const node = nodeOf.get(name);
      if (at === undefined || us <= 0) continue;
      const place = node === undefined ? null : { graph, node };
      bars[lane].push({ lane, from: offset + at, to: offset + at + us, kind: "blocked", place, merged: 1, label: name });
    }
    offset += measured.us;
  });
  return offset;
}

/** Bars that are seen between two times; neighbours of one kind that are thinner than `least` become one. */
export function visible(lanes: Lanes, from: number, to: number, least: number): Bar[] {
  const found: Bar[] = [];
  for (const bars of lanes.bars) {
    const open = new Map<Kind, Bar>();
    for (const bar of bars) {
      if (bar.from > to) break;
      if (bar.to < from) continue;
      const last = open.get(bar.kind);
      if (last && bar.to - bar.from < least && last.to - last.from < 2 * least && bar.from - last.to < least) {
        last.to = Math.max(last.to, bar.to);
        last.merged += bar.merged;
        last.place = null;
      } else {
        const copy = { ...bar };
        open.set(bar.kind, copy);
        found.push(copy);
      }
    }
  }
  // What marks a part of another bar is drawn upon it.
  return found.sort((a, b) => Number(marks(a)) - Number(marks(b)));
}

function marks(bar: Bar): boolean {
  return bar.kind === "exposed" || bar.kind === "blocked";
}
