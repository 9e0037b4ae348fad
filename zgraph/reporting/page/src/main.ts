// The page: reads the report that stands in it, and draws each section for the chosen frame; plans are of all.

import type { Chart } from "./chart.js";
import { drawDetails } from "./details.js";
import { el } from "./dom.js";
import { drawGraph } from "./graph.js";
import { drawMemory } from "./memory.js";
import { drawParameters } from "./parameters.js";
import { drawPasses } from "./passes.js";
import { drawPipeline } from "./pipeline.js";
import { drawRanks } from "./ranks.js";
import { FrameView, type Report } from "./report.js";
import { Selection } from "./selection.js";
import { drawSites } from "./sites.js";
import { drawSummary } from "./summary.js";
import { drawTimeline } from "./timeline.js";

function main(): void {
  const report = JSON.parse(document.getElementById("report")?.textContent ?? "{}") as Report;
  const selection = new Selection();
  let charts: (Chart | null)[] = [];
  let dispose = () => {};
  let shown = 0;
  let plans: (Chart | null)[] = [];
  let drawing = 0; // which of all the times a frame was drawn

  const draw = (number: number) => {
    shown = number;
    delete document.documentElement.dataset["drawn"];
    charts.forEach((chart) => chart?.dispose());
    charts = [];
    dispose();
    dispose = () => {};
    selection.forget();
    const view = new FrameView(report, report.frames[number]);
    const steps: [string, () => void][] = [
      ["summary", () => drawSummary(view)],
      ["details", () => drawDetails(view, selection)],
      ["timeline", () => charts.push(drawTimeline(view, selection))],
      ["memory", () => charts.push(drawMemory(view, selection))],
      ["passes", () => drawPasses(view)],
      ["parameters", () => drawParameters(view, selection)],
      ["graph", () => (dispose = drawGraph(view, selection))],
      ["ranks", () => drawRanks(view)],
      ["all", () => (document.documentElement.dataset["drawn"] = view.frame.frame)],
    ];
    // One section at a time: what is drawn can be seen and used while the others follow.
    const next = () => {
      const step = drawing === mine ? steps.shift() : undefined;
      if (!step) return;
      step[1]();
      performance.mark(`zgraph ${step[0]}`);
      setTimeout(next);
    };
    const mine = ++drawing;
    next();
  };

  const drawPlans = () => {
    plans.forEach((chart) => chart?.dispose());
    plans = [drawPipeline(report), drawSites(report)];
  };

  document.title = `zgraph report, rank ${report.rank}`;
  if (!report.frames?.length) {
    document.querySelector("main")?.replaceChildren(el("p", {}, "Nothing was compiled: the report has no frames."));
    return;
  }
  if (report.frames.length > 1) chooser(report, draw);
  drawPlans();
  draw(0);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    const { place } = selection;
    drawPlans();
    draw(shown);
    if (place) selection.select(place);
  });
}

function chooser(report: Report, draw: (number: number) => void): void {
  const options = report.frames.map((frame, number) => {
    const graphs = frame.graphs.map((graph) => graph.direction).join(" and ");
    return el("option", { value: number }, `${frame.frame}: ${graphs}, ${frame.parameters.name.length} parameters`);
  });
  const select = el("select", { id: "frame", change: () => draw(Number(select.value)) }, ...options);
  document.getElementById("frames")?.append(el("label", {}, "Frame ", select));
}

main();
