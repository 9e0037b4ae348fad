// One line of figures, for which machine they are, and what made them.

import { bodyOf, bytes, count, el, percent, time } from "./dom.js";
import type { FrameView } from "./report.js";

export function drawSummary(view: FrameView): void {
  const body = bodyOf("summary");
  const { frame, report } = view;
  const sum = (value: (graph: (typeof frame.graphs)[number]) => number) => frame.graphs.reduce((all, graph) => all + value(graph), 0);
  const exposed = sum((graph) => graph.exposed_us ?? 0);
  const measured = view.measured.every((each) => each) ? view.measured.reduce((all, each) => all + (each?.us ?? 0), 0) : null;
  const figures: [string, string, string][] = [
    ["step-time", "Step, predicted", view.isTimed ? time(view.stepUs) : "no target"],
    ["measured-time", "Step, measured", measured === null ? "" : time(measured)],
    ["exposed-time", "Exposed communication", view.isTimed ? `${time(exposed)} (${percent(exposed, view.stepUs)})` : ""],
    ["peak-bytes", "Peak of the step", frame.memory ? bytes(frame.memory.peak_bytes) : ""],
    ["budget-bytes", "Budget", frame.memory?.budget_bytes != null ? bytes(frame.memory.budget_bytes) : "none"],
    ["sent-bytes", "Sent by this rank", bytes(sum((graph) => graph.sent_bytes))],
    ["node-count", "Nodes", frame.graphs.map((graph) => `${count(graph.nodes.line.length)} ${graph.direction}`).join(", ")],
  ];
  const list = el("dl", { class: "figures" });
  for (const [id, name, value] of figures) {
    if (value) list.append(el("div", {}, el("dt", {}, name), el("dd", { id }, value)));
  }
  const machine = frame.hardware ? `Times are predicted for ${frame.hardware.name} with ${frame.hardware.backend}. ` : "";
  const made = Object.entries(report.made_with).map(([name, version]) => `${name} ${version}`).join(", ");
  const when = frame.from_step > 0 ? ` These graphs run from optimizer step ${frame.from_step} on.` : "";
  const why = frame.reason ? ` Compiled again because ${frame.reason}.` : "";
  const where = `Rank ${report.rank} of ${report.world_size}, lowered by ${frame.lowering}.`;
  body.append(list, el("p", { class: "hint" }, `${machine}${where}${when}${why} Made with ${made}.`));
}
