// The parts of ECharts that the page uses, and what all its charts share: colours, zoom by wheel, drag and keys.

import { CustomChart, LineChart } from "echarts/charts";
import { DataZoomComponent, GridComponent, LegendComponent, MarkLineComponent, TooltipComponent } from "echarts/components";
import * as echarts from "echarts/core";
import { CanvasRenderer } from "echarts/renderers";
import { color, el } from "./dom.js";

echarts.use([
  CustomChart,
  LineChart,
  DataZoomComponent,
  GridComponent,
  LegendComponent,
  MarkLineComponent,
  TooltipComponent,
  CanvasRenderer,
]);

export { echarts };

export interface Range {
  from: number;
  to: number;
}

export class Chart {
  readonly element: HTMLElement;
  readonly chart: echarts.ECharts;
  range: Range;
  private pending = 0;
  private marked: { value: number; text: string; shape: echarts.graphic.Group } | null = null;

  /**
   * @param whole the axis from end to end
   * @param label what the chart shows, for those who cannot see it
   * @param onRange called once a frame after the range has changed
   */
  constructor(
    parent: HTMLElement,
    id: string,
    height: number,
    readonly whole: Range,
    label: string,
    private readonly onRange: () => void,
  ) {
    this.range = { ...whole };
    const canvas = el("div", { style: `height:${height}px` });
    const keys = "Keys: arrows move, plus and minus zoom, 0 shows all.";
    this.element = el(
      "div",
      { id, class: "chart", role: "group", tabindex: 0, "aria-label": `${label} ${keys} The tables below say the same.` },
      canvas,
    );
    parent.append(this.element);
    this.chart = echarts.init(canvas, null, { renderer: "canvas" });
    this.chart.on("datazoom", () => this.readRange());
    this.chart.on("rendered", () => this.placeMark());
    this.element.addEventListener("keydown", (event) => this.key(event));
    new ResizeObserver(() => this.chart.resize()).observe(canvas);
  }

  dispose(): void {
    this.chart.dispose();
  }

  /** What every chart has: the range, which wheel, drag and slider change. */
  zooms(): object[] {
    const shared = { xAxisIndex: 0, filterMode: "none", startValue: this.range.from, endValue: this.range.to };
    return [
      { type: "inside", ...shared, throttle: 30, zoomOnMouseWheel: true, moveOnMouseMove: true },
      {
        type: "slider",
        ...shared,
        height: 18,
        bottom: 6,
        borderColor: color("line"),
        fillerColor: color("filler"),
        textStyle: { color: color("quiet") },
        labelFormatter: "",
        showDataShadow: false,
        brushSelect: false,
      },
    ];
  }

  zoomTo(range: Range): void {
    const from = Math.max(this.whole.from, range.from);
    const to = Math.min(this.whole.to, range.to);
    this.chart.dispatchAction({ type: "dataZoom", startValue: from, endValue: to });
  }

  /** Mark a value of the axis by a line upon the chart, which is not drawn again for that. */
  markAt(value: number, text: string): void {
    if (this.marked) this.chart.getZr().remove(this.marked.shape);
    this.marked = { value, text, shape: new echarts.graphic.Group() };
    this.chart.getZr().add(this.marked.shape);
    this.placeMark();
  }

  private placeMark(): void {
    if (!this.marked) return;
    const { value, text, shape } = this.marked;
    const [x] = this.chart.convertToPixel("grid", [value, 0]);
    const grid = (this.chart.getOption() as { grid: { top: number; bottom: number }[] }).grid[0];
    const bottom = this.chart.getHeight() - grid.bottom;
    const seen = this.chart.containPixel("grid", [x, bottom - 1]);
    shape.removeAll();
    if (!seen) return;
    const above = { zlevel: 1, silent: true };
    shape.add(new echarts.graphic.Line({ ...above, shape: { x1: x, y1: grid.top, x2: x, y2: bottom }, style: { stroke: color("text"), lineDash: [5, 3] } }));
    shape.add(new echarts.graphic.Text({ ...above, x: x + 4, y: grid.top + 2, style: { text, fill: color("text"), fontSize: 12 } }));
  }

  /** Bring a stretch into view; whether that took a zoom, which it does not where it is seen already. */
  reveal(from: number, to: number): boolean {
    const width = this.range.to - this.range.from;
    if (from >= this.range.from && to <= this.range.to && to - from > width / 200) return false;
    const wanted = Math.min(width, Math.max((to - from) * 12, (this.whole.to - this.whole.from) / 500));
    const begin = Math.max(this.whole.from, (from + to - wanted) / 2);
    this.zoomTo({ from: begin, to: begin + wanted });
    return true;
  }

  private readRange(): void {
    const option = this.chart.getOption() as { dataZoom: { startValue: number; endValue: number }[] };
    const { startValue, endValue } = option.dataZoom[0];
    this.range = { from: startValue, to: endValue };
    this.element.dataset["from"] = String(startValue);
    this.element.dataset["to"] = String(endValue);
    if (!this.pending) {
      this.pending = requestAnimationFrame(() => {
        this.pending = 0;
        this.onRange();
      });
    }
  }

  private key(event: KeyboardEvent): void {
    const width = this.range.to - this.range.from;
    const middle = (this.range.from + this.range.to) / 2;
    const around = (half: number) => this.zoomTo({ from: middle - half, to: middle + half });
    const moved = (by: number) => {
      const from = Math.min(Math.max(this.range.from + by, this.whole.from), this.whole.to - width);
      this.zoomTo({ from, to: from + width });
    };
    const actions: Record<string, () => void> = {
      ArrowLeft: () => moved(-width / 5),
      ArrowRight: () => moved(width / 5),
      "+": () => around(width / 4),
      "=": () => around(width / 4),
      "-": () => around(width),
      "0": () => this.zoomTo(this.whole),
    };
    const action = actions[event.key];
    if (action && !event.ctrlKey && !event.metaKey) {
      event.preventDefault();
      action();
    }
  }
}

export function axisStyle(): object {
  return {
    axisLine: { lineStyle: { color: color("line") } },
    axisLabel: { color: color("quiet") },
    splitLine: { lineStyle: { color: color("faint") } },
    nameTextStyle: { color: color("quiet") },
  };
}

export function tooltipStyle(): object {
  return {
    backgroundColor: color("raised"),
    borderColor: color("line"),
    textStyle: { color: color("text"), fontSize: 12 },
    confine: true,
    enterable: false,
    transitionDuration: 0,
  };
}
