// What each pass did: nodes, bytes, peak and times before and after, its notes, and what changed in the code.

import { bodyOf, bytes, count, el, time } from "./dom.js";
import { drawDiff } from "./diff.js";
import type { FrameView, Pass, Totals } from "./report.js";
import { type Column, Table } from "./table.js";

interface Row {
  number: number;
  pass: Pass;
  seconds: number | undefined;
}

export function drawPasses(view: FrameView): void {
  const body = bodyOf("passes");
  const seconds = view.report.times?.passes[view.frame.frame];
  const rows = view.frame.passes.map((pass, number): Row => ({ number, pass, seconds: seconds?.[number] }));
  if (!rows.some(({ pass }) => pass.before)) {
    body.append(el("p", {}, 'What passes changed is only known with options={"dump": ...} or zgraph.Report(keep_passes=True).'));
  }
  const diff = el("div", { id: "diff", "aria-live": "polite" });
  const open = (row: Row) => {
    drawDiff(view, row.pass, diff);
    diff.scrollIntoView({ block: "nearest" });
  };
  const name = (row: Row) =>
    row.pass.hunks.length
      ? el("button", { type: "button", class: "link", click: () => open(row), title: row.pass.options }, row.pass.name)
      : el("span", { title: row.pass.options }, row.pass.name);
  const table = new Table<Row>(
    [
      { title: "Pass", show: name, value: (row) => row.pass.name },
      { title: "#", show: (row) => String(row.number + 1), value: (row) => row.number, explain: "in the order in which they ran" },
      { title: "Graph", show: (row) => row.pass.direction, value: (row) => row.pass.direction },
      ...(seconds ? [{ title: "Took", show: (row: Row) => time((row.seconds ?? 0) * 1e6), value: (row: Row) => row.seconds ?? 0 }] : []),
      { title: "Lines", show: (row) => lines(row.pass), value: (row) => changedLines(row.pass), explain: "of code taken out and put in" },
      total("Nodes", "nodes", count),
      total("Sent", "sent_bytes", bytes),
      total("Peak", "peak_bytes", bytes),
      total("Time", "predicted_us", time),
      total("Exposed", "exposed_us", time),
      { title: "Notes", show: (row) => notes(row.pass), value: (row) => row.pass.notes.length },
    ],
    [],
    { caption: "Passes in the order in which they ran; before and after, and the change", id: "passes-table", pageSize: 40, sortBy: 1, rowKey: (row) => String(row.number) },
  );
  const idle = rows.filter(({ pass }) => !pass.changed && !pass.notes.length).length;
  const filter = () => table.set(box.checked ? rows.filter(({ pass }) => pass.changed || pass.notes.length) : rows);
  const box = el("input", { type: "checkbox", id: "passes-idle", change: filter, checked: true });
  if (idle) body.append(el("label", {}, box, ` Hide ${idle} that changed nothing and had nothing to say`));
  if (idle) filter();
  else table.set(rows);
  body.append(table.element, el("p", { class: "hint" }, "The name of a pass opens what it changed. Peaks are those of the graph alone; the memory curve above is of the whole step."), diff);
}

function changedLines(pass: Pass): number {
  return pass.hunks.reduce((sum, [, removed, runs]) => sum + removed + runs.reduce((all, [, put]) => all + put, 0), 0);
}

function lines(pass: Pass): string {
  const removed = pass.hunks.reduce((sum, hunk) => sum + hunk[1], 0);
  const put = changedLines(pass) - removed;
  return removed || put ? `−${removed} +${put}` : "";
}

function notes(pass: Pass): Node | string {
  if (!pass.notes.length) return "";
  if (pass.notes.length === 1 && pass.notes[0].length < 60) return pass.notes[0];
  const list = el("ul", {}, ...pass.notes.map((note) => el("li", {}, note)));
  return el("details", {}, el("summary", {}, `${pass.notes.length === 1 ? "1 note" : `${pass.notes.length} notes`}`), list);
}

/** A column of totals: what it was before where it changed, and by how much. */
function total(title: string, field: keyof Totals, show: (value: number) => string): Column<Row> {
  const after = ({ pass }: Row) => pass.after?.[field] ?? null;
  const before = ({ pass }: Row) => pass.before?.[field] ?? null;
  return {
    title,
    value: (row) => after(row) ?? -1,
    show: (row) => {
      const [was, is] = [before(row), after(row)];
      if (is === null) return "";
      if (was === null || was === is) return el("span", { class: "same" }, show(is));
      const by = is - was;
      const text = `${by > 0 ? "+" : "−"}${show(Math.abs(by))}`;
      const better = field !== "nodes" && by < 0;
      const shade = field === "nodes" ? "change" : better ? "better" : "worse";
      return el("span", { title: `before: ${show(was)}` }, `${show(is)} `, el("b", { class: shade }, text));
    },
  };
}
