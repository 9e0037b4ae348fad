// The parameters: how each lies, what carries it, in how many bytes.

import { bodyOf, bytes, count, el } from "./dom.js";
import type { FrameView } from "./report.js";
import type { Selection } from "./selection.js";
import { type Column, Table } from "./table.js";

export function drawParameters(view: FrameView, selection: Selection): void {
  const body = bodyOf("parameters");
  const table = view.frame.parameters;
  const all = table.name.map((_, row) => row);
  if (!all.length) {
    body.append(el("p", {}, "The frame reads no sharded parameters."));
    return;
  }
  const text = (title: string, numbers: number[], explain = ""): Column<number> => ({
    title,
    show: (row) => view.text(numbers[row]),
    value: (row) => view.text(numbers[row]),
    explain,
  });
  const size = (title: string, column: number[], explain: string): Column<number> => ({
    title,
    show: (row) => bytes(column[row]),
    value: (row) => column[row],
    explain,
  });
  const carriers = (row: number) =>
    table.collectives[row].map(([graph, number]) => {
      const place = { graph, node: view.frame.graphs[graph].collectives.node[number] };
      const with_ = view.frame.graphs[graph].collectives.parameters[number].length;
      const name = view.name(place);
      const button = el("button", { type: "button", class: "link", click: () => selection.select(place) }, name);
      return el("div", {}, button, with_ > 1 ? ` with ${with_ - 1} more` : "");
    });
  const shown = new Table<number>(
    [
      { title: "Parameter", show: (row) => table.name[row], value: (row) => table.name[row] },
      text("Shape", table.shape),
      text("At rest as", table.dtype),
      { title: "Stage", show: (row) => (table.zero_stage[row] < 0 ? "" : String(table.zero_stage[row])), value: (row) => table.zero_stage[row], explain: "of ZeRO" },
      text("Lifetime", table.lifetime, "how long the gathered parameter is kept"),
      size("Wire", table.wire_bytes, "its share of what collectives send in a step"),
      text("Codec", table.codec, "how its gradient is compressed"),
      text("Rests on", table.rests),
      size("Local", table.local_bytes, "at rest on this rank"),
      size("Feedback", table.feedback_bytes, "what error feedback keeps for it"),
      { title: "Carried by", show: (row) => el("span", {}, ...carriers(row)), value: (row) => table.collectives[row].length },
    ],
    all,
    { caption: "Parameters that the frame reads", id: "parameters-table", pageSize: 25, rowKey: (row) => table.name[row] },
  );
  const status = el("span", { role: "status" });
  const filter = () => {
    const wanted = field.value.toLowerCase();
    const found = all.filter((row) => table.name[row].toLowerCase().includes(wanted));
    status.textContent = wanted ? `${count(found.length)} of ${count(all.length)}` : "";
    shown.set(found);
  };
  const field = el("input", { type: "search", id: "parameters-filter", input: filter });
  body.append(el("label", {}, "Filter by name ", field), " ", status, shown.element);
}
