// The plan of outer steps: when fragments travel between sites, below the steps that hide them.

import type { Bar, Lanes } from "./bars.js";
import type { Chart } from "./chart.js";
import { bodyOf, bytes, el, time } from "./dom.js";
import { drawLanes } from "./lane_chart.js";
import type { Report, Sites } from "./report.js";

const STEPS = 0;
const SITE = 1;

/** Draw the section; null where the report has no outer steps. */
export function drawSites(report: Report): Chart | null {
  const plan = report.sites;
  if (!plan) return null;
  for (const hidden of document.querySelectorAll<HTMLElement>("#sites, nav a[href='#sites']")) hidden.hidden = false;
  const body = bodyOf("sites");
  const lanes = lanesOf(plan);
  body.append(figures(plan), el("p", { class: "hint" }, "Each bar of the lane site bears the number of its fragment. Wheel zooms, drag moves."));
  return drawLanes(body, lanes, {
    id: "sites-chart",
    label: `Timeline of ${plan.every} steps, and of ${lanes.bars[SITE].length} rounds between sites.`,
    tip: (bar) => tip(plan, bar),
    labels: true,
  }).chart;
}

function lanesOf(plan: Sites): Lanes {
  const total = plan.every * plan.step_us;
  const bar = (lane: number, kind: Bar["kind"], from: number, to: number, label: string): Bar => ({ lane, kind, from, to, label, merged: 1, place: null });
  const steps = Array.from({ length: plan.every }, (_, step) => bar(STEPS, "compute", step * plan.step_us, (step + 1) * plan.step_us, ""));
  const { fragment, start_us, end_us } = plan.rounds;
  const rounds = fragment.map((one, row) => bar(SITE, "communication", Math.max(0, start_us[row]), Math.min(total, end_us[row]), String(one)));
  return { names: ["steps", "site"], bars: [steps, rounds], total };
}

function figures(plan: Sites): HTMLElement {
  const shown: [string, string][] = [
    ["Steps between rounds of a fragment", String(plan.every)],
    ["Fragments", String(plan.fragments)],
    ["Delay", plan.delay === 1 ? "1 step" : `${plan.delay} steps`],
    ["Round", time(plan.round_us)],
    ["A step waits", plan.exposed_us ? time(plan.exposed_us) : "never"],
    ["A site sends, each step", bytes(plan.sent_bytes)],
    ["A rank keeps", bytes(plan.kept_bytes)],
  ];
  return el("dl", { class: "figures" }, ...shown.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))));
}

function tip(plan: Sites, bar: Bar | undefined): HTMLElement {
  if (!bar) return el("div");
  const name = bar.lane === STEPS ? `step ${Math.round(bar.from / plan.step_us) + 1} of ${plan.every}` : `round of fragment ${bar.label}`;
  const heading = bar.merged > 1 ? `${bar.merged} of ${bar.lane === STEPS ? "the steps" : "the rounds"}` : name;
  return el("div", { class: "tip" }, el("strong", {}, heading), el("div", {}, `${time(bar.to - bar.from)}, from ${time(bar.from)} to ${time(bar.to)}`));
}
