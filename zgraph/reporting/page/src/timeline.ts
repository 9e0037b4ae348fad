// When what runs: a lane for compute, each process group and copies, with what compute waits for.

import type { CustomSeriesRenderItemAPI, CustomSeriesRenderItemParams } from "echarts";
import { barAt, shapeOf, stacks } from "./bar_shapes.js";
import { type Bar, type Kind, type Lanes, lanesOf, visible } from "./bars.js";
import { axisStyle, Chart, tooltipStyle } from "./chart.js";
import { bodyOf, bytes, color, el, few, percent, time } from "./dom.js";
import { stepWith } from "./half_link.js";
import type { FrameView, Place } from "./report.js";
import type { Selection } from "./selection.js";
import { Table } from "./table.js";

const LANE_PX = 44;
const TOP = 8; // pixels above the lanes, and below
const BOTTOM = 54;
const KINDS: Kind[] = ["compute", "communication", "copy", "exposed", "wait", "measured", "blocked"];

export function drawTimeline(view: FrameView, selection: Selection): Chart | null {
  const body = bodyOf("timeline");
  if (!view.isTimed) {
    body.append(
      el("p", {}, "No times are predicted: the pipeline has no target. Compile with zgraph.Pipeline(presets.planned(), target=...)."),
      collectivesTable(view, selection).element,
    );
    return null;
  }
  const lanes = lanesOf(view);
  const height = lanes.names.length * LANE_PX + 84;
  body.append(legend(lanes));
  if (lanes.total > 3 * view.stepUs) {
    body.append(el("p", { class: "hint" }, `Measured, the step took ${time(lanes.total)}, predicted were ${time(view.stepUs)}, which is what is shown; zoom out to see all.`));
  }
  const label = `Timeline of ${time(view.stepUs)} in ${lanes.names.length} lanes: ${lanes.names.join(", ")}.`;
  const whole = { from: 0, to: lanes.total };
  let shown: Bar[] = [];
  let least = 0; // microseconds of a pixel
  let pointed: Bar | undefined; // at by the mouse
  const chart = new Chart(body, "timeline-chart", height, whole, label, () => refresh());

  // A measured step that took far longer would leave nothing to be seen of the predicted one.
  const apart = lanes.total > 3 * view.stepUs;
  if (apart) chart.range = { from: 0, to: view.stepUs * 1.05 };
  const isSelected = ({ place }: Bar) => place?.graph === selection.place?.graph && place?.node === selection.place?.node && !!place;
  const option = () => ({
    animation: false,
    grid: { left: 118, right: 16, top: TOP, bottom: BOTTOM },
    tooltip: { ...tooltipStyle(), trigger: "item", formatter: () => tip(view, pointed) },
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
      data: lanes.names.map(laneName),
      axisTick: { show: false },
      splitLine: { show: true, lineStyle: { color: color("faint") } },
      axisLabel: { color: color("text"), width: 106, overflow: "truncate" },
    },
    dataZoom: chart.zooms(),
    series: [series()],
  });
  const series = () => {
    const { from, to } = chart.range;
    const palette = new Map(KINDS.map((kind) => [kind, color(kind)]));
    const outline = color("text");
    least = (to - from) / Math.max(200, chart.chart.getWidth() - 134);
    shown = visible(lanes, from, to, least);
    const drawn = stacks(shown).map((stack) => ({ stack, outline: null as string | null }));
    const selected = shown.find(isSelected); // of several the whole, before what marks a part of it
    if (selected) drawn.push({ stack: { ...selected, bars: [selected] }, outline });
    return {
      id: "bars",
      type: "custom",
      clip: true,
      renderItem: (params: CustomSeriesRenderItemParams, api: CustomSeriesRenderItemAPI) => {
        const { stack, outline } = drawn[params.dataIndex];
        return shapeOf(stack, params, api, outline ? "none" : palette.get(stack.kind), outline);
      },
      encode: { x: [1, 2], y: 0 },
      data: drawn.map(({ stack }) => [stack.lane, 0, lanes.total]),
      markLine: {
        silent: true,
        symbol: "none",
        label: { show: true, color: color("quiet"), position: "start", rotate: 0, distance: 18, formatter: (mark: { name: string }) => mark.name },
        lineStyle: { color: color("quiet"), type: "dotted" },
        data: view.frame.graphs.slice(1).map((graph, number) => ({ name: graph.direction, xAxis: view.offsets[number + 1] })),
      },
    };
  };
  const refresh = () => chart.chart.setOption({ series: [series()] } as never);
  const find = (event: { offsetX: number; offsetY: number }) => {
    const [us] = chart.chart.convertFromPixel("grid", [event.offsetX, event.offsetY]);
    pointed = barAt(shown, us, (event.offsetY - TOP) / laneHeight(chart, lanes) - 0.5, least);
  };
  // Before the tooltip listens, which shows what this has found.
  chart.chart.getZr().on("mousemove", find);
  chart.chart.setOption(option() as never);
  chart.chart.getZr().on("click", (event) => {
    find(event);
    if (pointed?.place) selection.select(pointed.place);
    else if (pointed && pointed.merged > 1) chart.zoomTo(around(pointed));
  });
  selection.follow((place) => {
    const [from, to] = view.span(place);
    if (!chart.reveal(from, to)) refresh();
  });
  body.append(lanesTable(lanes), collectivesTable(view, selection).element, otherLinks(view));
  return chart;
}

function around(bar: Bar): { from: number; to: number } {
  const width = bar.to - bar.from;
  return { from: bar.from - width / 2, to: bar.to + width / 2 };
}

function laneHeight(chart: Chart, lanes: Lanes): number {
  return (chart.chart.getHeight() - TOP - BOTTOM) / lanes.names.length;
}

function laneName(name: string): string {
  return name.replace("group:", "group ").replaceAll("_", " ");
}

function legend(lanes: Lanes): HTMLElement {
  const kinds: [Kind, string][] = [
    ["compute", "compute"],
    ["wait", "compute waits"],
    ["communication", "collective"],
    ["exposed", "its exposed part"],
  ];
  if (lanes.bars.some((bars) => bars.some((bar) => bar.kind === "copy"))) kinds.push(["copy", "copy"]);
  if (lanes.names.includes("measured")) kinds.push(["measured", "measured call"], ["blocked", "measured wait"]);
  const entries = kinds.map(([kind, text]) => el("li", {}, el("i", { class: "swatch", style: `background:var(--${kind})` }), text));
  const hint = el("p", { class: "hint" }, "Wheel zooms, drag moves, a click shows the node. Thin neighbours are drawn as one; zoom in to part them.");
  return el("div", {}, el("ul", { class: "legend" }, ...entries), hint);
}

function tip(view: FrameView, bar: Bar | undefined): HTMLElement {
  if (!bar) return el("div");
  const title = bar.place ? view.name(bar.place) : bar.merged > 1 ? `${bar.merged} nodes` : bar.label;
  const rows: [string, string][] = [["", `${time(bar.to - bar.from)}, from ${time(bar.from)} to ${time(bar.to)}`]];
  if (bar.kind === "exposed") rows.push(["", "exposed: compute waits"]);
  if (bar.kind === "wait") rows.push(["", "compute waits for a collective"]);
  if (bar.kind === "blocked") rows.push(["", "measured: compute waited"]);
  if (bar.place) {
    const { graph, node } = bar.place;
    const columns = view.frame.graphs[graph].nodes;
    const row = view.collectiveOf[graph].get(node);
    if (row !== undefined) {
      const collectives = view.frame.graphs[graph].collectives;
      const names = collectives.parameters[row].map((number) => view.frame.parameters.name[number]);
      rows.push([names.length > 1 ? `bucket of ${names.length}` : "parameter", few(names)]);
      rows.push(["sent", bytes(collectives.sent_bytes[row])]);
      if (view.text(collectives.reason[row])) rows.push(["exposed because", view.text(collectives.reason[row])]);
    } else if (view.text(columns.parameters[node])) rows.push(["parameters", few(view.text(columns.parameters[node]).split(", "))]);
    rows.push(["module", view.text(columns.module[node])], ["line", view.text(columns.source[node])]);
  }
  const lines = rows.filter(([, value]) => value).map(([name, value]) => el("div", {}, name && el("b", {}, `${name}: `), value));
  return el("div", { class: "tip" }, el("strong", {}, title), ...lines);
}

function lanesTable(lanes: Lanes): HTMLElement {
  const rows = lanes.names.flatMap((name, lane) => {
    if (name === "measured") return [];
    const busy = lanes.bars[lane].filter((bar) => bar.kind !== "exposed" && bar.kind !== "wait");
    return [{ name, count: busy.length, us: busy.reduce((sum, bar) => sum + bar.to - bar.from, 0) }];
  });
  const table = new Table(
    [
      { title: "Lane", show: (row) => laneName(row.name), value: (row) => row.name },
      { title: "Nodes", show: (row) => String(row.count), value: (row) => row.count },
      { title: "Busy", show: (row) => time(row.us), value: (row) => row.us },
    ],
    rows,
    { caption: "Lanes and how long each is busy", id: "lanes-table" },
  );
  table.element.classList.add("narrow");
  return table.element;
}

interface CollectiveRow {
  place: Place;
  row: number;
}

function collectivesTable(view: FrameView, selection: Selection): Table<CollectiveRow> {
  const rows = view.frame.graphs.flatMap((graph, number) =>
    graph.collectives.node.map((node, row) => ({ place: { graph: number, node }, row })),
  );
  const of = ({ place }: CollectiveRow) => view.frame.graphs[place.graph].collectives;
  const exposed = (each: CollectiveRow) => of(each).exposed_us?.[each.row] ?? 0;
  const names = (each: CollectiveRow) => of(each).parameters[each.row].map((number) => view.frame.parameters.name[number]);
  const blocked = (each: CollectiveRow) => view.measured[each.place.graph]?.blocked_us[view.name(each.place)];
  const pick = (each: CollectiveRow) =>
    el("button", { type: "button", class: "link", click: () => selection.select(each.place) }, view.name(each.place));
  return new Table<CollectiveRow>(
    [
      { title: "Collective", show: pick, value: (each) => view.name(each.place) },
      { title: "Exposed", show: (each) => time(exposed(each)), value: exposed, explain: "how long compute is predicted to wait" },
      { title: "Why", show: (each) => view.text(of(each).reason[each.row]), value: (each) => view.text(of(each).reason[each.row]) },
      {
        title: "Takes",
        show: (each) => time(of(each).predicted_us?.[each.row]),
        value: (each) => of(each).predicted_us?.[each.row] ?? 0,
        explain: "predicted, from its start to its result",
      },
      ...(view.measured.some((each) => each)
        ? [{ title: "Measured wait", show: (each: CollectiveRow) => time(blocked(each)), value: (each: CollectiveRow) => blocked(each) ?? -1 }]
        : []),
      { title: "Sent", show: (each) => bytes(of(each).sent_bytes[each.row]), value: (each) => of(each).sent_bytes[each.row] },
      { title: "Graph", show: (each) => view.frame.graphs[each.place.graph].direction, value: (each) => each.place.graph },
      { title: "Carries", show: (each) => few(names(each)), value: (each) => names(each).length, explain: "parameters; several are a bucket" },
    ],
    rows,
    {
      caption: "Collectives, those that are exposed most first",
      id: "collectives-table",
      pageSize: 10,
      sortBy: 1,
      descending: true,
      rowKey: (each) => view.name(each.place),
    },
  );
}

function otherLinks(view: FrameView): HTMLElement {
  const base = stepWith(view, 1);
  const rows = [0.5, 1, 2, 4].map((factor) => ({ factor, found: factor === 1 ? base : stepWith(view, factor) }));
  const names: Record<number, string> = { 0.5: "twice as fast", 1: "as predicted", 2: "half as fast", 4: "a quarter as fast" };
  const table = new Table(
    [
      { title: "Link", show: (row) => names[row.factor], value: (row) => names[row.factor] },
      { title: "Step", show: (row) => time(row.found.stepUs), value: (row) => row.found.stepUs },
      { title: "Exposed", show: (row) => `${time(row.found.exposedUs)} (${percent(row.found.exposedUs, row.found.stepUs)})`, value: (row) => row.found.exposedUs },
      { title: "Step changes by", show: (row) => change(row.found.stepUs, base.stepUs), value: (row) => row.found.stepUs - base.stepUs },
    ],
    rows,
    { caption: "On another link: every collective takes that much less or more time", id: "links-table" },
  );
  table.element.classList.add("narrow");
  const off = Math.abs(base.stepUs - view.stepUs) / Math.max(view.stepUs, 1);
  const note = off > 0.01 ? ` Which collectives share a link is taken as predicted, where the step takes ${time(view.stepUs)}.` : "";
  const text = `The order of the graph stays as it is; a compile for such a link might choose another.${note}`;
  return el("div", {}, table.element, el("p", { class: "hint" }, text));
}

function change(now: number, before: number): string {
  if (now === before) return "";
  return `${now > before ? "+" : "−"}${time(Math.abs(now - before))} (${now > before ? "+" : "−"}${percent(Math.abs(now - before), before)})`;
}
