// Bars in lanes over time, which one can zoom, point at and choose.

import type { CustomSeriesRenderItemAPI, CustomSeriesRenderItemParams } from "echarts";
import { barAt, labelOf, shapeOf, stacks } from "./bar_shapes.js";
import { type Bar, KINDS, type Lanes, visible } from "./bars.js";
import { axisStyle, Chart, type Range, tooltipStyle } from "./chart.js";
import { color, time } from "./dom.js";

const LANE_PX = 44;
const TOP = 8; // pixels above the lanes, and below
const BOTTOM = 54;
const LABEL_PX = 22; // of a bar that has room for its label

export interface LaneChartOptions {
  id: string;
  /** What it shows, for those who cannot see it. */
  label: string;
  laneName?: (name: string) => string;
  /** What the mouse shows of a bar. */
  tip: (bar: Bar | undefined) => HTMLElement;
  /** A click on one that stands for several zooms to it; on another it is chosen. */
  choose?: (bar: Bar) => void;
  isSelected?: (bar: Bar) => boolean;
  marks?: { name: string; xAxis: number }[];
  /** What is shown at first; all where it is missing. */
  range?: Range;
  /** Whether wide bars bear their labels. */
  labels?: boolean;
}

export interface LaneChart {
  chart: Chart;
  redraw: () => void;
}

export function drawLanes(parent: HTMLElement, lanes: Lanes, options: LaneChartOptions): LaneChart {
  const height = lanes.names.length * LANE_PX + 84;
  let shown: Bar[] = [];
  let least = 0; // microseconds of a pixel
  let pointed: Bar | undefined; // at by the mouse
  const chart = new Chart(parent, options.id, height, { from: 0, to: lanes.total }, options.label, () => redraw());
  if (options.range) chart.range = options.range;
  const option = () => ({
    animation: false,
    grid: { left: 118, right: 16, top: TOP, bottom: BOTTOM },
    tooltip: { ...tooltipStyle(), trigger: "item", formatter: () => options.tip(pointed) },
    xAxis: {
      ...axisStyle(),
      type: "value",
      min: 0,
      max: lanes.total,
      axisLabel: { color: color("quiet"), formatter: (value: number) => time(value), hideOverlap: true },
    },
    yAxis: {
      ...axisStyle(),
      type: "category",
      inverse: true,
      data: lanes.names.map((name) => options.laneName?.(name) ?? name),
      axisTick: { show: false },
      splitLine: { show: true, lineStyle: { color: color("faint") } },
      axisLabel: { color: color("text"), width: 106, overflow: "truncate" },
    },
    dataZoom: chart.zooms(),
    series: series(),
  });
  const series = () => {
    const { from, to } = chart.range;
    const palette = new Map(KINDS.map((kind) => [kind, color(kind)]));
    const outline = color("text");
    least = (to - from) / Math.max(200, chart.chart.getWidth() - 134);
    shown = visible(lanes, from, to, least);
    const drawn = stacks(shown).map((stack) => ({ stack, outline: null as string | null }));
    const selected = options.isSelected && shown.find(options.isSelected); // of several the whole, before what marks a part of it
    if (selected) drawn.push({ stack: { ...selected, bars: [selected] }, outline });
    const bars = {
      id: "bars",
      type: "custom",
      clip: true,
      renderItem: (params: CustomSeriesRenderItemParams, api: CustomSeriesRenderItemAPI) => {
        const { stack, outline } = drawn[params.dataIndex];
        const gap = options.labels ? 1 : 0; // between neighbours that bear labels of their own
        return shapeOf(stack, params, api, outline ? "none" : palette.get(stack.kind), outline, gap);
      },
      encode: { x: [1, 2], y: 0 },
      data: drawn.map(({ stack }) => [stack.lane, 0, lanes.total]),
      markLine: {
        silent: true,
        symbol: "none",
        label: { show: true, color: color("quiet"), position: "start", rotate: 0, distance: 18, formatter: (mark: { name: string }) => mark.name },
        lineStyle: { color: color("quiet"), type: "dotted" },
        data: options.marks ?? [],
      },
    };
    if (!options.labels) return [bars];
    const wide = shown.filter((bar) => bar.merged === 1 && bar.to - bar.from > LABEL_PX * least);
    const labels = {
      id: "labels",
      type: "custom",
      clip: true,
      silent: true,
      renderItem: (params: CustomSeriesRenderItemParams, api: CustomSeriesRenderItemAPI) => labelOf(wide[params.dataIndex], api, color("on-bar")),
      encode: { x: [1, 2], y: 0 },
      data: wide.map((bar) => [bar.lane, bar.from, bar.to]),
    };
    return [bars, labels];
  };
  const redraw = () => chart.chart.setOption({ series: series() } as never);
  const laneHeight = () => (chart.chart.getHeight() - TOP - BOTTOM) / lanes.names.length;
  const find = (event: { offsetX: number; offsetY: number }) => {
    const [us] = chart.chart.convertFromPixel("grid", [event.offsetX, event.offsetY]);
    pointed = barAt(shown, us, (event.offsetY - TOP) / laneHeight() - 0.5, least);
  };
  // Before the tooltip listens, which shows what this has found.
  chart.chart.getZr().on("mousemove", find);
  chart.chart.setOption(option() as never);
  chart.chart.getZr().on("click", (event) => {
    find(event);
    if (pointed && pointed.merged > 1) chart.zoomTo(around(pointed));
    else if (pointed) options.choose?.(pointed);
  });
  return { chart, redraw };
}

function around(bar: Bar): Range {
  const width = bar.to - bar.from;
  return { from: bar.from - width / 2, to: bar.to + width / 2 };
}
