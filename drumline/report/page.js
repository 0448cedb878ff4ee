"use strict";
(() => {
  const charts = JSON.parse(document.getElementById("data").textContent);
  const colours = ["#2f8fd8", "#e0762b", "#1f9d6b", "#cc79a7", "#d9a400", "#5bbfe0", "#a06fd6", "#8a8f96"];
  // Further ones have hues that are far from each other.
  const colour = (number) => number < colours.length ? colours[number] : `hsl(${Math.round(number * 137.5) % 360} 60% 48%)`;
  const dashes = [undefined, [6, 4], [2, 3], [12, 3, 2, 3], [16, 5], [6, 3, 1, 3, 1, 3]];
  const ink = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const text = (value) => value == null ? "" : value !== 0 && Math.abs(value) < 1e-3 ? (+value.toPrecision(3)).toExponential() : Math.abs(value) >= 1e4 ? value.toPrecision(3) : String(+value.toPrecision(5));
  const axis = () => ({stroke: () => ink("--quiet"), grid: {stroke: () => ink("--line"), width: 1}, ticks: {show: false}, font: "12px system-ui"});
  const drawn = [];
  const whole = (plot) => [plot.data[0][0], plot.data[0][plot.data[0].length - 1]];
  const isZoomed = (plot) => plot.scales.x.min > whole(plot)[0] || plot.scales.x.max < whole(plot)[1];
  // uPlot zooms by mouse only: one finger selects steps, two fingers move and stretch them.
  const zoomByTouch = (plot) => {
    const fingers = new Map();
    let isPinched = false;
    const at = (event) => event.clientX - plot.over.getBoundingClientRect().left;
    const select = (left, width) => plot.setSelect({left, width, top: 0, height: plot.over.clientHeight}, false);
    const pinch = ([one, other]) => {
      const perPixel = (other.step - one.step) / (other.x - one.x);
      const [first, last] = whole(plot);
      const min = Math.max(first, one.step - one.x * perPixel);
      const max = Math.min(last, one.step + (plot.over.clientWidth - one.x) * perPixel);
      if (perPixel > 0 && min < max) plot.setScale("x", {min, max});
    };
    const lift = (event) => {
      const finger = fingers.get(event.pointerId);
      fingers.delete(event.pointerId);
      if (finger === undefined || fingers.size) return;
      const [left, right] = [finger.from, finger.x].sort((one, other) => one - other);
      select(0, 0);
      if (event.type === "pointerup" && !isPinched && right - left >= 20) {
        plot.setScale("x", {min: plot.posToVal(left, "x"), max: plot.posToVal(right, "x")});
      }
    };
    plot.over.addEventListener("pointerdown", (event) => {
      if (event.pointerType !== "touch") return;
      fingers.set(event.pointerId, {from: at(event), x: at(event), step: plot.posToVal(at(event), "x")});
      isPinched = fingers.size > 1;
    });
    plot.over.addEventListener("pointermove", (event) => {
      const finger = fingers.get(event.pointerId);
      if (finger === undefined) return;
      finger.x = at(event);
      if (fingers.size === 2) pinch([...fingers.values()]);
      else if (!isPinched) select(Math.min(finger.from, finger.x), Math.abs(finger.x - finger.from));
    });
    for (const type of ["pointerup", "pointercancel"]) plot.over.addEventListener(type, lift);
  };
  for (const place of document.querySelectorAll(".chart")) {
    const {axis: name, series, percent} = charts[+place.dataset.chart];
    const reset = place.parentElement.querySelector(".reset");
    const shown = (value) => percent && value != null ? `${+(value * 100).toPrecision(4)}%` : text(value);
    const size = () => ({width: Math.max(200, place.parentElement.clientWidth - 24), height: 220});
    const options = {
      ...size(),
      scales: {x: {time: false}},
      cursor: {drag: {x: true, y: false}},
      axes: [{...axis(), size: 32}, {...axis(), size: 62, values: (plot, values) => values.map(shown)}],
      series: [{label: name}, ...series.map((one) => ({
        label: one.label, stroke: colour(one.colour), width: 1.5, dash: dashes[one.dash % dashes.length],
        points: {show: one.x.length < 40}, value: (plot, value) => shown(value),
      }))],
      legend: {markers: {dash: (plot, number) => number && series[number - 1].dash ? "dashed" : "solid"}},
      hooks: {setScale: [(plot, key) => { if (key === "x") reset.hidden = !isZoomed(plot); }]},
    };
    const plot = new uPlot(options, uPlot.join(series.map((one) => [one.x, one.y])), place);
    drawn.push(plot);
    zoomByTouch(plot);
    reset.addEventListener("click", () => plot.setScale("x", {min: whole(plot)[0], max: whole(plot)[1]}));
    new ResizeObserver(() => { if (plot.width !== size().width) plot.setSize(size()); }).observe(place.parentElement);
  }
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => drawn.forEach((plot) => plot.redraw()));
  const every = +document.body.dataset.refresh;
  if (every) setInterval(() => { if (!drawn.some(isZoomed)) location.reload(); }, every * 1000);
})();
