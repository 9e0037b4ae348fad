// The code before and after a pass side by side, with what changed inside of a line marked.

import { diffWordsWithSpace } from "diff";
import { count, el } from "./dom.js";
import type { FrameView, Pass, Runs } from "./report.js";

const AROUND = 2; // unchanged lines that are shown on either side
const MOST_ROWS = 120; // at a time
const LONGEST = 2000; // characters of a line that are compared word by word

type Side = { line: number; at: number } | null;
type Row = { before: Side; after: Side; changed: boolean } | "gap";

export function drawDiff(view: FrameView, pass: Pass, into: HTMLElement): void {
  const rows = rowsOf(view, pass);
  const body = el("tbody");
  const more = el("button", { type: "button", click: () => show() }, "Show more");
  let shown = 0;
  const show = () => {
    const next = rows.slice(shown, shown + MOST_ROWS);
    body.append(...next.map((row) => rowElement(view, row)));
    shown += next.length;
    more.hidden = shown >= rows.length;
    more.textContent = `Show more of ${count(rows.length - shown)} lines`;
  };
  show();
  const caption = `${pass.name}, ${pass.direction} graph: before and after`;
  const head = el("tr", {}, el("th", { scope: "col", colspan: 2 }, "Before"), el("th", { scope: "col", colspan: 2 }, "After"));
  const table = el("table", { class: "diff", id: "diff-table" }, el("caption", {}, caption), columns(), el("thead", {}, head), body);
  const notes = pass.notes.length ? el("ul", {}, ...pass.notes.map((note) => el("li", {}, note))) : null;
  into.replaceChildren(
    el("h3", {}, caption),
    el("p", { class: "code" }, pass.options),
    ...(notes ? [notes] : []),
    el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": caption }, table),
    more,
  );
}

function columns(): HTMLElement {
  return el("colgroup", {}, ...["at", "side", "at", "side"].map((name) => el("col", { class: name })));
}

/** Numbers of the lines of a graph before a pass. */
export function linesBefore(view: FrameView, pass: Pass): number[] {
  const lines = unrolled(view.frame.captured[pass.direction] ?? []);
  for (const each of view.frame.passes) {
    if (each === pass) return lines;
    if (each.direction !== pass.direction) continue;
    for (const [at, removed, runs] of [...each.hunks].reverse()) lines.splice(at, removed, ...unrolled(runs));
  }
  return lines;
}

export function unrolled(runs: Runs): number[] {
  return runs.flatMap(([first, length]) => Array.from({ length }, (_, number) => first + number));
}

function rowsOf(view: FrameView, pass: Pass): Row[] {
  const before = linesBefore(view, pass);
  const rows: Row[] = [];
  let done = 0; // lines before that are dealt with
  let shift = 0; // by how much lines after are further down
  const same = (from: number, to: number) => {
    for (let at = from; at < to; at++) {
      rows.push({ before: { line: before[at], at }, after: { line: before[at], at: at + shift }, changed: false });
    }
  };
  for (const [at, removed, runs] of pass.hunks) {
    if (at - done > 2 * AROUND) {
      if (done) same(done, done + AROUND);
      rows.push("gap");
      same(at - AROUND, at);
    } else same(done, at);
    const put = unrolled(runs);
    for (const [old, now] of paired(view, before.slice(at, at + removed), put)) {
      rows.push({
        before: old === null ? null : { line: before[at + old], at: at + old },
        after: now === null ? null : { line: put[now], at: at + shift + now },
        changed: true,
      });
    }
    done = at + removed;
    shift += put.length - removed;
  }
  same(done, Math.min(before.length, done + AROUND));
  if (done + AROUND < before.length) rows.push("gap");
  return rows;
}

/** Positions of lines to be set side by side: those of one name, and the others alone. */
function paired(view: FrameView, before: number[], after: number[]): [number | null, number | null][] {
  const { name } = view.frame.lines;
  const place = new Map(after.map((line, position) => [name[line], position]));
  const found: [number | null, number | null][] = [];
  let next = 0;
  before.forEach((line, old) => {
    const now = place.get(name[line]);
    if (now !== undefined && now >= next) {
      for (; next < now; next++) found.push([null, next]);
      found.push([old, next++]);
    } else found.push([old, null]);
  });
  for (; next < after.length; next++) found.push([null, next]);
  return found;
}

function rowElement(view: FrameView, row: Row): HTMLElement {
  if (row === "gap") return el("tr", { class: "gap" }, el("td", { colspan: 4 }, "⋯"));
  const before = row.before && view.lineText(row.before.line);
  const after = row.after && view.lineText(row.after.line);
  const parts = row.changed && before && after && before.length < LONGEST && after.length < LONGEST ? diffWordsWithSpace(before, after) : null;
  const old = parts ? parts.filter((part) => !part.added).map((part) => (part.removed ? el("del", {}, part.value) : part.value)) : [before];
  const now = parts ? parts.filter((part) => !part.removed).map((part) => (part.added ? el("ins", {}, part.value) : part.value)) : [after];
  const shade = (side: Side, name: string) => (row.changed && side ? name : "");
  return el(
    "tr",
    {},
    el("td", { class: "at" }, row.before && row.before.at + 1),
    el("td", { class: shade(row.before, "removed") }, ...old),
    el("td", { class: "at" }, row.after && row.after.at + 1),
    el("td", { class: shade(row.after, "added") }, ...now),
  );
}
