// Everything about the selected node.

import { bodyOf, bytes, el, time } from "./dom.js";
import type { FrameView, Place } from "./report.js";
import type { Selection } from "./selection.js";

const MOST_LINKS = 40;

export function drawDetails(view: FrameView, selection: Selection): void {
  bodyOf("details").append(el("p", { class: "hint" }, "Select a node in any of the pictures or tables."));
  selection.listen((place) => show(view, selection, place));
}

function show(view: FrameView, selection: Selection, place: Place): void {
  const body = bodyOf("details");
  const graph = view.frame.graphs[place.graph];
  const { nodes } = graph;
  const { node } = place;
  const text = (column: number[]) => view.text(column[node]);
  const [from, to] = view.span(place);
  const exposed = nodes.exposed_us?.[node] ?? 0;
  const lane = view.frame.lanes[nodes.lane[node]] ?? "";
  const row = view.collectiveOf[place.graph].get(node);
  const facts: [string, string][] = [
    ["Result", [text(nodes.dtype), text(nodes.shape), text(nodes.stride) && `strides ${text(nodes.stride)}`].filter(Boolean).join(" ")],
    ["Bytes", nodes.bytes[node] ? `${bytes(nodes.bytes[node])}, ${view.report.memory_classes[nodes.storage[node]]}` : ""],
    ["Lane", lane],
    ["Cost", nodes.cost_us && nodes.cost_us[node] ? `${time(nodes.cost_us[node])}${lane.startsWith("group:") ? " if nothing shares the link" : ""}` : ""],
    ["Runs", view.isTimed && to > from ? `from ${time(from)} to ${time(to)}` : ""],
    ["Exposed", exposed && row === undefined ? time(exposed) : ""],
    ["Module", text(nodes.module)],
    ["Line", text(nodes.source)],
    ["Position", `${node} in the ${graph.direction}${graph.critical.includes(node) ? ", on the critical path" : ""}`],
  ];
  const list = el("dl");
  for (const [name, value] of facts) if (value) list.append(el("dt", {}, name), el("dd", {}, value));
  body.append(el("h3", { id: "selected-name" }, view.name(place)), el("pre", { id: "selected-code" }, view.lineText(nodes.line[node])), list);
  if (row !== undefined) body.append(collective(view, selection, place, row));
  else if (text(nodes.parameters)) body.append(names("Parameters", text(nodes.parameters).split(", ")));
  body.append(links(view, selection, "Inputs", place.graph, nodes.inputs[node]));
  body.append(links(view, selection, "Users", place.graph, view.users[place.graph][node]));
}

function collective(view: FrameView, selection: Selection, place: Place, row: number): HTMLElement {
  const columns = view.frame.graphs[place.graph].collectives;
  const parameters = columns.parameters[row].map((number) => view.frame.parameters.name[number]);
  const group = `${columns.group_size[row]} ranks of group ${view.text(columns.group[row])}`;
  const facts: [string, string][] = [
    ["Collective", `${view.text(columns.kind[row])} of ${view.text(columns.dtype[row])} over ${group}`],
    ["Codec", view.text(columns.codec[row])],
    ["Sent", bytes(columns.sent_bytes[row])],
    ["Takes", columns.predicted_us ? time(columns.predicted_us[row]) : ""],
    ["Exposed", columns.exposed_us?.[row] ? `${time(columns.exposed_us[row])}: ${view.text(columns.reason[row])}` : ""],
  ];
  const list = el("dl");
  for (const [name, value] of facts) if (value) list.append(el("dt", {}, name), el("dd", {}, value));
  const ends = [columns.node[row], columns.wait[row]].filter((node) => node >= 0 && node !== place.node);
  return el(
    "div",
    {},
    list,
    links(view, selection, place.node === columns.node[row] ? "Waited for by" : "Started by", place.graph, ends),
    names(parameters.length > 1 ? `Bucket of ${parameters.length} parameters` : "Parameter", parameters),
  );
}

function names(title: string, texts: string[]): HTMLElement {
  const list = el("ul", {}, ...texts.map((name) => el("li", {}, name)));
  return texts.length > 6 ? el("details", {}, el("summary", {}, title), list) : el("div", {}, el("h4", {}, title), list);
}

function links(view: FrameView, selection: Selection, title: string, graph: number, nodes: number[]): HTMLElement {
  if (!nodes.length) return el("div");
  const made = nodes.slice(0, MOST_LINKS).map((node) => {
    const place = { graph, node };
    return el("li", {}, el("button", { type: "button", class: "link", click: () => selection.select(place) }, view.name(place)));
  });
  if (nodes.length > MOST_LINKS) made.push(el("li", {}, `and ${nodes.length - MOST_LINKS} more`));
  return el("div", {}, el("h4", {}, title), el("ul", {}, ...made));
}
