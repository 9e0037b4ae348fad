// How bars are drawn: all of a lane and kind as one shape, for thousands of shapes would take long to draw.

import type { CustomSeriesRenderItemAPI, CustomSeriesRenderItemParams } from "echarts";
import type { Bar, Kind } from "./bars.js";
import { echarts } from "./chart.js";

export interface Stack {
  lane: number;
  kind: Kind;
  bars: Bar[];
}

interface Rectangle {
  x: number;
  y: number;
  width: number;
  height: number;
}

const Rectangles = echarts.graphic.extendShape({
  shape: { all: [] as Rectangle[] },
  buildPath(path: CanvasRenderingContext2D, shape: { all: Rectangle[] }) {
    for (const { x, y, width, height } of shape.all) path.rect(x, y, width, height);
  },
});
echarts.graphic.registerShape("zgraph-bars", Rectangles);

/** Bars of one lane and kind together, those that mark a part of another last. */
export function stacks(bars: Bar[]): Stack[] {
  const found = new Map<string, Stack>();
  for (const bar of bars) {
    const key = `${bar.kind} ${bar.lane}`;
    const known = found.get(key);
    if (known) known.bars.push(bar);
    else found.set(key, { lane: bar.lane, kind: bar.kind, bars: [bar] });
  }
  return [...found.values()];
}

/** The part of a lane's height that a bar takes: from, to. */
function across(kind: Kind): [number, number] {
  return kind === "exposed" || kind === "blocked" ? [0.53, 0.83] : [0.17, 0.83];
}

/** The bars of a stack; wide ones leave so many pixels free behind them. */
export function shapeOf(stack: Stack, params: CustomSeriesRenderItemParams, api: CustomSeriesRenderItemAPI, fill: string | undefined, outline: string | null, gap = 0) {
  const area = params.coordSys as unknown as Rectangle;
  const [zero, middle] = api.coord([0, stack.lane]);
  const [pixels, height] = api.size?.([1, 1]) as number[]; // of one microsecond, and of a lane
  const [from, to] = across(stack.kind);
  const all: Rectangle[] = [];
  for (const bar of stack.bars) {
    const left = Math.max(area.x, zero + bar.from * pixels);
    const right = Math.min(area.x + area.width, zero + bar.to * pixels);
    const width = right - left > 6 * gap ? right - left - gap : right - left;
    if (right >= left) all.push({ x: left, y: middle + (from - 0.5) * height, width: Math.max(1, width), height: (to - from) * height });
  }
  const style = { fill, stroke: outline ?? undefined, lineWidth: outline ? 3 : 0 };
  return { type: "zgraph-bars" as unknown as "rect", shape: { all } as never, style };
}

/** The label of one bar, in its middle. */
export function labelOf(bar: Bar, api: CustomSeriesRenderItemAPI, fill: string) {
  const [x, y] = api.coord([(bar.from + bar.to) / 2, bar.lane]);
  return { type: "text" as const, silent: true, style: { text: bar.label, x, y, fill, font: "12px sans-serif", align: "center" as const, verticalAlign: "middle" as const } };
}

/** The bar at a time and a height, which counts lanes: the one drawn last. */
export function barAt(bars: Bar[], us: number, lane: number, slack: number): Bar | undefined {
  const number = Math.round(lane);
  const inside = lane - number + 0.5;
  return bars.findLast((bar) => {
    const [from, to] = across(bar.kind);
    return bar.lane === number && inside >= from && inside <= to && us >= bar.from && us <= Math.max(bar.to, bar.from + slack);
  });
}
