// When what runs: a lane for compute, each process group and copies, with what compute waits for.

import { type Bar, type Kind, type Lanes, lanesOf } from "./bars.js";
import type { Chart } from "./chart.js";
import { bodyOf, bytes, el, few, percent, time } from "./dom.js";
import { stepWith } from "./half_link.js";
import { drawLanes } from "./lane_chart.js";
import type { FrameView, Place } from "./report.js";
import type { Selection } from "./selection.js";
import { Table } from "./table.js";

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
  body.append(legend(lanes));
  // A measured step that took far longer would leave nothing to be seen of the predicted one.
  const apart = lanes.total > 3 * view.stepUs;
  if (apart) {
    body.append(el("p", { class: "hint" }, `Measured, the step took ${time(lanes.total)}, predicted were ${time(view.stepUs)}, which is what is shown; zoom out to see all.`));
  }
  const { chart, redraw } = drawLanes(body, lanes, {
    id: "timeline-chart",
    label: `Timeline of ${time(view.stepUs)} in ${lanes.names.length} lanes: ${lanes.names.join(", ")}.`,
    laneName,
    tip: (bar) => tip(view, bar),
    choose: ({ place }) => place && selection.select(place),
    isSelected: ({ place }) => place?.graph === selection.place?.graph && place?.node === selection.place?.node && !!place,
    marks: view.frame.graphs.slice(1).map((graph, number) => ({ name: graph.direction, xAxis: view.offsets[number + 1] })),
    ...(apart ? { range: { from: 0, to: view.stepUs * 1.05 } } : {}),
  });
  selection.follow((place) => {
    const [from, to] = view.span(place);
    if (!chart.reveal(from, to)) redraw();
  });
  body.append(lanesTable(lanes), collectivesTable(view, selection).element, otherLinks(view));
  return chart;
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
