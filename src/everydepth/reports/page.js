"use strict";
// The page is complete without this script but for its charts and its dial. Text from data is only
// ever set as text.
const page = JSON.parse(document.getElementById("page-data").textContent);
const slider = document.getElementById("depth");
const plots = [...document.querySelectorAll(".chart")];
let depth = page.start;

const INK = "#2b303b";
const SHAPES = {
  x: (k) => [{ type: "line", x0: k, x1: k, y0: 0, y1: 1, yref: "paper", layer: "below",
    line: { color: INK, width: 2, dash: "dot" } }],
  both: (k) => ["x", "y"].map((along) => ({
    type: "rect", line: { color: "#ffffff", width: 2 },
    ...(along === "x"
      ? { xref: "x domain", x0: 0, x1: 1, y0: k - 0.5, y1: k + 0.5 }
      : { yref: "y domain", y0: 0, y1: 1, x0: k - 0.5, x1: k + 0.5 }),
  })),
};

function shapes(chart) {
  const make = SHAPES[chart.dial];
  return make ? make(Math.min(depth, chart.last)) : [];
}

function drawChart(element) {
  const chart = page.charts[Number(element.dataset.chart)];
  const layout = { ...chart.figure.layout, shapes: shapes(chart), height: element.clientHeight,
    modebar: { bgcolor: "rgba(255,255,255,0)", color: "#98a2b3", activecolor: INK } };
  const options = { responsive: true, displaylogo: false, modeBarButtons: [["toImage"]] };
  Plotly.newPlot(element, chart.figure.data, layout, options);
  element.dataset.drawn = depth;
}

function moveChart(element) {
  const chart = page.charts[Number(element.dataset.chart)];
  if (element.dataset.drawn === String(depth)) return;
  element.dataset.drawn = depth;
  if (SHAPES[chart.dial]) Plotly.relayout(element, { shapes: shapes(chart) });
}

const visible = new Set();
function refresh() {
  if (typeof Plotly === "undefined") return;
  for (const element of visible) {
    if ("drawn" in element.dataset) moveChart(element);
    else drawChart(element);
  }
}

function turn(to) {
  depth = Math.max(page.first, Math.min(page.depth, to));
  if (slider) {
    slider.value = depth;
    document.getElementById("depth-now").textContent = page.titles[depth];
    slider.setAttribute("aria-valuetext", page.titles[depth]);
  }
  for (const element of document.querySelectorAll("[data-text]")) {
    element.textContent = page.texts[Number(element.dataset.text)][depth];
  }
  for (const row of document.querySelectorAll("tr[data-depth]")) {
    row.classList.toggle("at", row.dataset.depth === String(Math.min(depth, row.dataset.last)));
  }
  requestAnimationFrame(refresh);
}

if (slider) { // a page without depths has no dial
  slider.addEventListener("input", () => turn(Number(slider.value)));
  document.getElementById("depth-less").addEventListener("click", () => turn(depth - 1));
  document.getElementById("depth-more").addEventListener("click", () => turn(depth + 1));
}

const watcher = new IntersectionObserver((entries) => {
  for (const { target, isIntersecting } of entries) {
    if (isIntersecting) visible.add(target);
    else visible.delete(target);
  }
  requestAnimationFrame(refresh);
}, { rootMargin: "300px" });

async function loadPlotly() {
  const packed = document.getElementById("plotly").textContent;
  const bytes = Uint8Array.from(atob(packed), (letter) => letter.charCodeAt(0));
  const unpacked = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  const script = document.createElement("script");
  script.textContent = await new Response(unpacked).text();
  document.head.append(script);
}

turn(page.start);
loadPlotly().then(() => plots.forEach((element) => watcher.observe(element)), (error) => {
  for (const element of plots) {
    element.textContent = `No chart: this browser could not unpack Plotly (${error}). `
      + "Browsers since 2023 can; the numbers below are complete.";
  }
});
