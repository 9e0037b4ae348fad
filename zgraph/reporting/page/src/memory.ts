// What lives when: the memory curve stacked by class, the budget, and what makes up the peak.

import { axisStyle, Chart, tooltipStyle } from "./chart.js";
import { bodyOf, bytes, color, count, el, percent } from "./dom.js";
import { bytesByClass, type FrameView, type Memory } from "./report.js";
import type { Selection } from "./selection.js";
import { Table } from "./table.js";

const MOST_POINTS = 1000;

export function drawMemory(view: FrameView, selection: Selection): Chart | null {
  const body = bodyOf("memory");
  const { memory } = view.frame;
  if (!memory || !memory.nodes) {
    body.append(el("p", {}, "The memory of this frame could not be predicted."));
    return null;
  }
  const curves = [...bytesByClass(view.report, memory)];
  const sums = cumulative(curves.map(([, curve]) => curve));
  const total = sums[sums.length - 1] ?? new Array<number>(memory.nodes).fill(0);
  body.append(headline(view, memory));
  const label = `Memory over the ${count(memory.nodes)} nodes of a step, at most ${bytes(memory.peak_bytes)}.`;
  const whole = { from: 0, to: memory.nodes - 1 };
  const chart = new Chart(body, "memory-chart", 320, whole, label, () => refresh());
  const budget = memory.budget_bytes !== null && memory.budget_bytes < 3 * memory.peak_bytes ? memory.budget_bytes : null;
  const highest = Math.max(memory.peak_bytes, budget ?? 0, 1);

  const series = () => {
    const points = sampled(total, chart.range.from, chart.range.to);
    // Each area reaches down to zero: the sums of fewer classes are drawn upon those of more.
    const areas = curves.map(([name], number) => ({
      id: name,
      name,
      type: "line",
      step: "middle",
      showSymbol: false,
      lineStyle: { width: 0 },
      areaStyle: { color: color(classColor(view, name)), opacity: 1 },
      itemStyle: { color: color(classColor(view, name)) },
      emphasis: { disabled: true },
      z: 2 + curves.length - number,
      data: points.map((position) => [position, sums[number][position]]),
    }));
    return [...areas, lines()];
  };
  const lines = () => ({
    id: "lines",
    type: "line",
    data: [],
    z: 40,
    markLine: {
      silent: true,
      symbol: "none",
      animation: false,
      data: [
        ...(budget === null ? [] : [line({ yAxis: budget }, `budget ${bytes(budget)}`, "exposed", "insideStartTop")]),
        ...view.firstPosition.slice(1).map((position, number) =>
          line({ xAxis: position }, view.frame.graphs[number + 1].direction, "quiet", "insideEndTop")),
        line({ xAxis: memory.peak_position }, "peak", "text", "insideEndBottom"),
      ],
    },
  });
  const refresh = () => chart.chart.setOption({ series: series() } as never);
  chart.chart.setOption({
    animation: false,
    legend: { top: 4, left: 70, icon: "rect", itemWidth: 12, itemHeight: 12, textStyle: { color: color("text") }, data: curves.map(([name]) => name), selectedMode: false },
    grid: { left: 80, right: 16, top: 48, bottom: 58 },
    tooltip: {
      ...tooltipStyle(),
      trigger: "axis",
      formatter: (items: { axisValue?: number; value: [number, number] }[]) => tip(view, curves, Math.round(items[0].value[0])),
    },
    xAxis: { ...axisStyle(), type: "value", min: 0, max: whole.to, axisLabel: { color: color("quiet"), showMaxLabel: false }, name: "node, in program order", nameLocation: "middle", nameGap: 20, minInterval: 1, splitLine: { show: false } },
    yAxis: {
      ...axisStyle(),
      type: "value",
      min: 0,
      max: highest * 1.1,
      interval: 2 ** Math.ceil(Math.log2(highest / 6)),
      axisLabel: { color: color("quiet"), formatter: (value: number) => bytes(value), showMaxLabel: false },
    },
    dataZoom: chart.zooms(),
    series: series(),
  } as never);
  chart.chart.getZr().on("click", (event) => {
    const point = [event.offsetX, event.offsetY];
    if (!chart.chart.containPixel("grid", point)) return;
    const [x] = chart.chart.convertFromPixel("grid", point);
    const position = Math.min(Math.max(Math.round(x), 0), memory.nodes - 1);
    selection.select(view.placeAt(position));
  });
  selection.follow((place) => {
    const position = view.position(place);
    if (position < chart.range.from || position > chart.range.to) chart.zoomTo(whole);
    chart.markAt(position, "selected");
  });
  body.append(classTable(view, memory, curves), atPeak(view, memory, selection));
  return chart;
}

function line(at: object, name: string, shade: string, position: string): object {
  return {
    ...at,
    name,
    lineStyle: { color: color(shade), type: shade === "quiet" ? "dotted" : "dashed", width: shade === "text" ? 1 : 1.5 },
    label: { show: true, formatter: name, position, color: color(shade), rotate: 0 },
  };
}

function cumulative(curves: number[][]): number[][] {
  const found: number[][] = [];
  curves.forEach((curve, number) => {
    const below = found[number - 1];
    found.push(below ? curve.map((value, position) => value + below[position]) : curve);
  });
  return found;
}

/** Positions to draw: all, or the highest of each of as many stretches as one could see. */
function sampled(total: number[], from: number, to: number): number[] {
  const first = Math.max(0, Math.floor(from) - 1);
  const last = Math.min(total.length - 1, Math.ceil(to) + 1);
  const stride = Math.max(1, Math.ceil((last - first + 1) / MOST_POINTS));
  const found: number[] = [];
  for (let begin = first; begin <= last; begin += stride) {
    let highest = begin;
    for (let position = begin; position < Math.min(begin + stride, last + 1); position++) {
      if (total[position] > total[highest]) highest = position;
    }
    found.push(highest);
  }
  return found;
}

export function classColor(view: FrameView, name: string): string {
  return name === "workspace" ? "class8" : `class${view.report.memory_classes.indexOf(name)}`;
}

function headline(view: FrameView, memory: Memory): HTMLElement {
  const at = view.placeAt(memory.peak_position);
  const where = `The step holds most, ${bytes(memory.peak_bytes)}, at ${view.name(at)} in the ${view.frame.graphs[at.graph].direction}`;
  const budget = memory.budget_bytes === null ? "; no budget was set" : `; the budget is ${bytes(memory.budget_bytes)}`;
  const held = Object.entries(view.report.at_rest).filter(([, kept]) => kept > 0).map(([name, kept]) => `${name} ${bytes(kept)}`);
  const beside = held.length ? ` Between steps the rank keeps ${held.join(", ")}, which come on top.` : "";
  const unknown = memory.unknown.length ? ` The sizes of ${memory.unknown.length} nodes are known only at run time and count nothing.` : "";
  return el("p", {}, `${where}${budget}.${beside}${unknown}`);
}

function tip(view: FrameView, curves: [string, number[]][], position: number): HTMLElement {
  const rows = curves
    .filter(([, curve]) => curve[position] > 0)
    .map(([name, curve]) => el("div", {}, el("i", { class: "swatch", style: `background:var(--${classColor(view, name)})` }), `${name}: ${bytes(curve[position])}`));
  const sum = curves.reduce((all, [, curve]) => all + curve[position], 0);
  return el("div", { class: "tip" }, el("strong", {}, view.name(view.placeAt(position))), el("div", {}, `together ${bytes(sum)}`), ...rows.reverse());
}

function classTable(view: FrameView, memory: Memory, curves: [string, number[]][]): HTMLElement {
  const swatch = (name: string) => el("span", {}, el("i", { class: "swatch", style: `background:var(--${classColor(view, name)})` }), name);
  const rows = curves.map(([name, curve]) => ({ name, at: curve[memory.peak_position], most: curve.reduce((a, b) => Math.max(a, b), 0) }));
  const table = new Table(
    [
      { title: "What lives", show: (row) => swatch(row.name), value: (row) => row.name },
      { title: "At the peak", show: (row) => bytes(row.at), value: (row) => row.at },
      { title: "Share", show: (row) => percent(row.at, memory.peak_bytes), value: (row) => row.at / memory.peak_bytes },
      { title: "At most", show: (row) => bytes(row.most), value: (row) => row.most },
    ],
    rows,
    { caption: "What makes up the peak", id: "classes-table", sortBy: 1, descending: true },
  );
  table.element.classList.add("narrow");
  return table.element;
}

function atPeak(view: FrameView, memory: Memory, selection: Selection): HTMLElement {
  const { node, bytes: sizes, kind, first, last } = memory.storages;
  const classes = view.report.memory_classes;
  const place = (row: number) => view.placeAt(node[row]);
  const module = (row: number) => view.text(view.frame.graphs[place(row).graph].nodes.module[place(row).node]);
  const pick = (row: number) =>
    el("button", { type: "button", class: "link", click: () => selection.select(place(row)) }, view.name(place(row)));
  return new Table<number>(
    [
      { title: "Made by", show: pick, value: (row) => view.name(place(row)) },
      { title: "Bytes", show: (row) => bytes(sizes[row]), value: (row) => sizes[row] },
      { title: "Class", show: (row) => classes[kind[row]], value: (row) => classes[kind[row]] },
      { title: "Lives", show: (row) => `${count(first[row])} to ${count(last[row])}`, value: (row) => first[row], explain: "positions in the step" },
      { title: "Module", show: module, value: module },
    ],
    memory.at_peak,
    { caption: "Largest storages at the peak", id: "peak-table", pageSize: 10 },
  ).element;
}
