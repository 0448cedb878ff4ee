"use strict";
(() => {
  const charts = JSON.parse(document.getElementById("data").textContent);
  const colours = ["#2f8fd8", "#e0762b", "#1f9d6b", "#cc79a7", "#d9a400", "#5bbfe0", "#a06fd6", "#8a8f96"];
  const ink = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const text = (value) => value == null ? "" : Math.abs(value) >= 1e4 || (value !== 0 && Math.abs(value) < 1e-3) ? value.toPrecision(3) : String(+value.toPrecision(5));
  const axis = () => ({stroke: () => ink("--quiet"), grid: {stroke: () => ink("--line"), width: 1}, ticks: {show: false}, font: "12px system-ui"});
  const drawn = [];
  let isZoomed = false;
  for (const place of document.querySelectorAll(".chart")) {
    const {axis: name, series, percent} = charts[+place.dataset.chart];
    const shown = (value) => percent && value != null ? `${+(value * 100).toPrecision(4)}%` : text(value);
    const size = () => ({width: Math.max(200, place.parentElement.clientWidth - 24), height: 220});
    const options = {
      ...size(),
      scales: {x: {time: false}},
      cursor: {drag: {x: true, y: false}},
      axes: [{...axis(), size: 32}, {...axis(), size: 62, values: (plot, values) => values.map(shown)}],
      series: [{label: name}, ...series.map((one) => ({
        label: one.label, stroke: colours[one.colour % colours.length], width: 1.5, dash: one.dashed ? [6, 4] : undefined,
        points: {show: one.x.length < 40}, value: (plot, value) => shown(value),
      }))],
      hooks: {setScale: [(plot, key) => {
        const steps = plot.data[0];
        if (key === "x") isZoomed = plot.scales.x.min > steps[0] || plot.scales.x.max < steps[steps.length - 1];
      }]},
    };
    const joined = uPlot.join(series.map((one) => [one.x, one.y]));
    const plot = new uPlot(options, joined, place);
    drawn.push(plot);
    let from = null;  // uPlot zooms by mouse only
    plot.over.addEventListener("pointerdown", (event) => { from = event.pointerType === "touch" ? event.offsetX : null; });
    plot.over.addEventListener("pointerup", (event) => {
      if (from === null || Math.abs(event.offsetX - from) < 20) return;
      const [min, max] = [from, event.offsetX].sort((one, other) => one - other).map((x) => plot.posToVal(x, "x"));
      plot.setScale("x", {min, max});
    });
    new ResizeObserver(() => { if (plot.width !== size().width) plot.setSize(size()); }).observe(place.parentElement);
  }
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => drawn.forEach((plot) => plot.redraw()));
  const every = +document.body.dataset.refresh;
  if (every) setInterval(() => { if (!isZoomed) location.reload(); }, every * 1000);
})();
