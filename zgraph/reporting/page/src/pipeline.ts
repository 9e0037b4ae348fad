// The plan of a pipeline: when each rank runs which micro-batch, and what ranks, stages and schedules take.

import type { Bar, Kind, Lanes } from "./bars.js";
import type { Chart } from "./chart.js";
import { bodyOf, bytes, el, percent, time } from "./dom.js";
import { drawLanes } from "./lane_chart.js";
import type { Pipeline, PipelineRun, Report } from "./report.js";
import { type Column, Table } from "./table.js";

const NAMES = { forward: "forward", backward: "backward", weights: "backward of weights" };

/** Draw the section; null where the report has no pipeline. */
export function drawPipeline(report: Report): Chart | null {
  const plan = report.pipeline;
  if (!plan) return null;
  for (const hidden of document.querySelectorAll<HTMLElement>("#pipeline, nav a[href='#pipeline']")) hidden.hidden = false;
  const body = bodyOf("pipeline");
  const lanes = lanesOf(plan);
  body.append(figures(plan), legend(plan));
  const { chart } = drawLanes(body, lanes, {
    id: "pipeline-chart",
    label: `Timeline of ${time(lanes.total)} of ${lanes.names.length} ranks under ${plan.schedule}.`,
    tip: (bar) => tip(plan, bar),
    labels: true,
  });
  body.append(ranksTable(plan), stagesTable(plan), schedulesTable(plan));
  return chart;
}

/** Bars by rank, with the number of their action where a node has its place. */
function lanesOf(plan: Pipeline): Lanes {
  const run = plan.schedules[plan.schedule];
  const names = run.peak_bytes.map((_, rank) => `rank ${rank}`);
  const bars: Bar[][] = names.map(() => []);
  const { rank, kind, stage, micro_batch, start_us, end_us } = plan.actions;
  const several = plan.stages.length > names.length;
  for (let node = 0; node < rank.length; node++) {
    const label = several ? `${stage[node]}/${micro_batch[node]}` : String(micro_batch[node]);
    bars[rank[node]].push({ lane: rank[node], from: start_us[node], to: end_us[node], kind: kind[node], place: { graph: stage[node], node }, merged: 1, label });
  }
  return { names, bars, total: run.step_us };
}

function figures(plan: Pipeline): HTMLElement {
  const run = plan.schedules[plan.schedule];
  const shown: [string, string][] = [
    ["Step, predicted", time(run.step_us)],
    ["If each micro-batch gathered anew", plan.unkept ? time(plan.unkept.step_us) : ""],
    ["Bubble", percent(run.bubble, 1)],
    ["Schedule", plan.schedule],
    ["Micro-batches", String(plan.micro_batches)],
    ["Largest peak of a rank", bytes(Math.max(...run.peak_bytes))],
    ["Budget beside what rests", plan.budget_bytes === null ? "none" : bytes(plan.budget_bytes)],
  ];
  const filled = shown.filter(([, value]) => value);
  return el("dl", { class: "figures" }, ...filled.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))));
}

function legend(plan: Pipeline): HTMLElement {
  const kinds = (Object.keys(NAMES) as Kind[]).filter((kind) => (plan.actions.kind as Kind[]).includes(kind)) as (keyof typeof NAMES)[];
  const entries = kinds.map((kind) => el("li", {}, el("i", { class: "swatch", style: `background:var(--${kind})` }), NAMES[kind]));
  const named = plan.stages.length > plan.schedules[plan.schedule].peak_bytes.length ? "stage and micro-batch" : "its micro-batch";
  const text = `Each bar bears ${named}; between bars a rank waits for another. Wheel zooms, drag moves.`;
  return el("div", {}, el("ul", { class: "legend" }, ...entries), el("p", { class: "hint" }, text));
}

function tip(plan: Pipeline, bar: Bar | undefined): HTMLElement {
  if (!bar) return el("div");
  const when = el("div", {}, `${time(bar.to - bar.from)}, from ${time(bar.from)} to ${time(bar.to)}`);
  if (!bar.place) return el("div", { class: "tip" }, el("strong", {}, `${bar.merged} of rank ${bar.lane}`), when);
  const { kind, stage, micro_batch } = plan.actions;
  const { node } = bar.place;
  return el("div", { class: "tip" }, el("strong", {}, `${NAMES[kind[node]]} of micro-batch ${micro_batch[node]}, stage ${stage[node]}`), when);
}

function sized<Row>(title: string, value: (row: Row) => number, explain = ""): Column<Row> {
  return { title, show: (row) => bytes(value(row)), value, explain };
}

function timed<Row>(title: string, value: (row: Row) => number, explain = ""): Column<Row> {
  return { title, show: (row) => time(value(row)), value, explain };
}

function ranksTable(plan: Pipeline): HTMLElement {
  const { step_us, peak_bytes, in_flight } = plan.schedules[plan.schedule];
  const busy_us = lanesOf(plan).bars.map((bars) => bars.reduce((sum, bar) => sum + bar.to - bar.from, 0));
  const parameters = (rank: number) => plan.stages.reduce((sum, stage) => sum + (stage.rank === rank ? stage.parameter_bytes : 0), 0);
  const stages = (rank: number) => plan.stages.flatMap((stage, number) => (stage.rank === rank ? [number] : [])).join(", ");
  return new Table<number>(
    [
      { title: "Rank", show: String, value: (rank) => rank },
      { title: "Stages", show: stages, value: stages },
      timed("Busy", (rank) => busy_us[rank], "with forwards and backwards"),
      { title: "Of the step", show: (rank) => percent(busy_us[rank], step_us), value: (rank) => busy_us[rank] / step_us },
      sized("Peak", (rank) => peak_bytes[rank], "with what rests between steps"),
      sized("Parameters", parameters, "at rest"),
      { title: "In flight", show: (rank) => String(in_flight[rank]), value: (rank) => in_flight[rank], explain: "most micro-batches at once, over all its stages" },
    ],
    busy_us.map((_, rank) => rank),
    { caption: "Ranks of the pipeline", id: "pipeline-ranks-table" },
  ).element;
}

function stagesTable(plan: Pipeline): HTMLElement {
  const of = (number: number) => plan.stages[number];
  const kept: Column<number>[] =
    plan.budget_bytes === null
      ? []
      : [{ title: "keep_bytes", show: (number) => String(of(number).keep_bytes ?? ""), value: (number) => of(number).keep_bytes ?? -1, explain: "what the budget has room for, as zgraph.PipelineStage takes it" }];
  return new Table<number>(
    [
      { title: "Stage", show: String, value: (number) => number },
      { title: "Rank", show: (number) => String(of(number).rank), value: (number) => of(number).rank },
      timed("Forward", (number) => of(number).forward_us),
      timed("Backward", (number) => of(number).backward_us),
      sized("Saved", (number) => of(number).activation_bytes, "by one micro-batch for its backward"),
      sized("Sent on", (number) => of(number).sent_to_next_bytes, "to the next stage"),
      sized("Parameters", (number) => of(number).parameter_bytes, "at rest"),
      sized("At stage 3", (number) => of(number).stage_3_bytes, "parameters at ZeRO stage 3, gathered"),
      ...kept,
    ],
    plan.stages.map((_, number) => number),
    { caption: "Stages, for each micro-batch", id: "pipeline-stages-table" },
  ).element;
}

function schedulesTable(plan: Pipeline): HTMLElement {
  const rows: [string, PipelineRun][] = Object.entries(plan.schedules);
  if (plan.unkept) rows.push([`${plan.schedule}, nothing kept`, plan.unkept]);
  const fits = ([, run]: [string, PipelineRun]) => (run.fits ? "yes" : "no");
  return new Table<[string, PipelineRun]>(
    [
      { title: "Schedule", show: ([name]) => (name === plan.schedule ? el("b", {}, name) : name), value: ([name]) => name },
      timed("Step", ([, run]) => run.step_us),
      { title: "Bubble", show: ([, run]) => percent(run.bubble, 1), value: ([, run]) => run.bubble, explain: "the part of all ranks' time in which they wait" },
      sized("Largest peak", ([, run]) => Math.max(...run.peak_bytes), "of a rank"),
      ...(plan.budget_bytes === null ? [] : [{ title: "Within the budget", show: fits, value: fits }]),
    ],
    rows,
    { caption: "Schedules that can be run, the fastest first; the planned one is bold", id: "pipeline-schedules-table", sortBy: 1 },
  ).element;
}
