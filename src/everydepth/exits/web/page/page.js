// Fetches what every depth needs, then block after block, and answers with what is there.
// What is asked and shown is up to the kind of model: pictures.js, text.js.

const at = (id) => document.getElementById(id);
// A function of two v128 instructions: a browser without SIMD finds it invalid.
const SIMD = new Uint8Array([
  0, 97, 115, 109, 1, 0, 0, 0, 1, 5, 1, 96, 0, 1, 123, 3, 2, 1, 0, 10, 10, 1, 8, 0, 65, 0, 253, 15,
  253, 98, 11,
]);

let ort, model, kind;
const network = { ends: [], blocks: [] };
const rows = [];
let loaded = 0;
let total = 0;
let current = null; // what is asked: its values, and how deep it was answered
let running = Promise.resolve();
let paused = null; // resolves when the download may go on

// For tests and for the curious: what was answered, in order.
const log = [];
window.everydepth = { log, settled: () => running };

function say(text, bad = false) {
  at("status").textContent = text;
  at("status").classList.toggle("bad", bad);
}

async function fetched(file) {
  const response = await fetch(file.file);
  if (!response.ok) throw new Error(`${file.file}: ${response.status} ${response.statusText}`);
  const reader = response.body.getReader();
  const parts = [];
  for (;;) {
    const { done, value } = await reader.read();
    if (done) break;
    parts.push(value);
    loaded += value.length;
    at("bar").style.width = `${Math.min(100, (100 * loaded) / total)}%`;
  }
  const whole = new Uint8Array(parts.reduce((sum, part) => sum + part.length, 0));
  let place = 0;
  for (const part of parts) {
    whole.set(part, place);
    place += part.length;
  }
  return whole;
}

const tensor = (type, values, shape) => new ort.Tensor(type, values, shape);

// Answers with the blocks that are there, from the depth that is already known.
async function answer() {
  const asked = current;
  const going = () => asked === current;
  while (asked && going() && asked.depth < network.blocks.length && kind.ready(asked)) {
    asked.ends = network.ends.length;
    const began = performance.now();
    const result = await kind.deeper(asked, going);
    if (!going() || !result) return;
    asked.depth += 1;
    show(asked, result, result.ms ?? performance.now() - began);
  }
}

function again() {
  running = running.then(() => answer()).catch((error) => say(String(error), true));
  return running;
}

function show(asked, result, took) {
  const { depth } = asked;
  const cells = rows[depth - 1].cells;
  rows[depth - 1].className = "";
  cells[1].textContent = cells[1].title = result.answer;
  cells[2].textContent = `${(100 * result.confidence).toFixed(1)} %`;
  cells[5].textContent = took.toFixed(1);
  rows.forEach((row, place) => row.classList.toggle("last", place === depth - 1));
  at("answer").textContent = kind.headline(result, depth);
  const threshold = model.thresholds && model.thresholds[depth - 1];
  const sure = threshold != null && result.least >= threshold;
  log.push({ depth, ends: asked.ends, loaded, sure, ms: took, ...result.found });
  if (asked.sure === undefined && sure) asked.sure = depth;
}

function table() {
  const mega = total >= 1e7;
  at("size").textContent = mega ? "MB" : "kB";
  const size = (bytes) => (mega ? (bytes / 1e6).toFixed(1) : Math.round(bytes / 1000));
  let bytes = 0;
  for (const file of model.files) {
    bytes += file.bytes;
    if (file.part !== "block") continue;
    const found = model.quality && model.quality[rows.length];
    const quality = found == null ? "–" : model.share ? `${(100 * found).toFixed(1)} %` : short(found);
    const row = at("depths").insertRow();
    row.className = "waiting";
    for (const text of [rows.length + 1, "", "", quality, size(bytes), ""]) {
      row.insertCell().textContent = text;
    }
    rows.push(row);
  }
}

const short = (value) =>
  value.toLocaleString("en", { notation: "compact", maximumSignificantDigits: 3 });

function ask(values) {
  current = values && { values, depth: 0 };
  for (const row of rows) {
    row.className = "waiting";
    for (const cell of [1, 2, 5]) row.cells[cell].textContent = "";
  }
  if (!values) at("answer").textContent = kind.idle;
  if (paused) paused();
  return again();
}

async function download() {
  for (const file of model.files) {
    if (at("stop").checked && current && current.sure !== undefined) {
      say(`Sure at depth ${current.sure}: stopped after ${kB(loaded)} of ${kB(total)}.`);
      await new Promise((go) => (paused = go));
      paused = null;
    }
    const here = network.blocks.length;
    say(`${here} of ${model.depth} blocks are here, ${kB(loaded)} of ${kB(total)}.`);
    const bytes = await fetched(file);
    if (file.part === "tokens") await kind.read(bytes);
    else (file.part === "block" ? network.blocks : network.ends).push(
      await ort.InferenceSession.create(bytes, { logSeverityLevel: 3 }),
    );
    const answered = again();
    if (at("stop").checked) await answered;
  }
  say(`All ${model.depth} blocks are here: ${kB(loaded)}.`);
  await running;
  if (current && current.ends < network.ends.length) current.depth = model.depth - 1;
  await again();
}

const kB = (bytes) => `${Math.round(bytes / 1000).toLocaleString("en")} kB`;

async function main() {
  if (typeof WebAssembly !== "object" || !WebAssembly.validate(SIMD)) {
    say("This browser has no WebAssembly with SIMD, which the network needs; use a newer one.", true);
    return;
  }
  const described = await fetch("model.json");
  model = await described.json();
  total = model.files.reduce((sum, file) => sum + file.bytes, 0);
  document.title = `${model.model}, while it downloads`;
  at("title").textContent = `${model.model}: it answers while it downloads`;
  if (model.metric) at("metric").textContent = model.metric;
  document.body.classList.toggle("unmeasured", !model.quality); // no column of dashes
  at("stopping").hidden = !model.thresholds;
  table();
  for (const part of document.querySelectorAll("[data-kind]")) {
    part.hidden = part.dataset.kind !== model.kind;
  }
  const kinds = await import(`./${model.kind}.js`);
  kind = kinds[model.kind](model, network, { ask, tensor });
  at("answer").textContent = kind.idle;
  ort = await import("./runtime/ort.wasm.bundle.min.mjs");
  const code = new URL("runtime/ort-wasm-simd-threaded.wasm", document.baseURI).href;
  ort.env.wasm.wasmPaths = { wasm: code }; // a folder would be searched for its loader, too
  ort.env.wasm.numThreads = 1;
  ort.env.logLevel = "error";
  await download();
}

main().catch((error) => say(String(error), true));
