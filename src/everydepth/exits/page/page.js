// Fetches the ends of the network, then block after block, and answers with what is there.

const at = (id) => document.getElementById(id);
// A function of two v128 instructions: a browser without SIMD finds it invalid.
const SIMD = new Uint8Array([
  0, 97, 115, 109, 1, 0, 0, 0, 1, 5, 1, 96, 0, 1, 123, 3, 2, 1, 0, 10, 10, 1, 8, 0, 65, 0, 253, 15,
  253, 98, 11,
]);

let ort, model, ends;
const blocks = [];
const rows = [];
let loaded = 0;
let total = 0;
let pixels = null;
let running = Promise.resolve();
let paused = null; // resolves when the download may go on
let example = -1;

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
  return ort.InferenceSession.create(whole);
}

const tensor = (values, shape) => new ort.Tensor("float32", values, shape);

function softmax(logits) {
  const most = Math.max(...logits);
  const weights = Array.from(logits, (value) => Math.exp(value - most));
  const sum = weights.reduce((a, b) => a + b, 0);
  return weights.map((value) => value / sum);
}

// Runs the picture through the blocks that are there, from the depth that is already known.
async function answer() {
  if (!pixels || !blocks.length) return;
  const asked = pixels;
  const pictures = tensor(asked.values, [1, ...model.shape]);
  if (!asked.state) {
    const nothing = tensor(new Float32Array(model.state.reduce((a, b) => a * b)), model.state);
    asked.state = (await ends.run({ pictures, h: nothing })).start;
    asked.depth = 0;
  }
  while (asked.depth < blocks.length && asked === pixels) {
    const began = performance.now();
    asked.state = (await blocks[asked.depth].run({ h: asked.state })).out;
    asked.depth += 1;
    const { logits } = await ends.run({ pictures, h: asked.state });
    const took = performance.now() - began;
    if (asked === pixels) show(asked.depth, Array.from(logits.data), took);
  }
}

function again() {
  running = running.then(() => answer()).catch((error) => say(String(error), true));
  return running;
}

function show(depth, logits, took) {
  const chances = softmax(logits);
  const best = chances.indexOf(Math.max(...chances));
  const name = model.labels[best];
  const cells = rows[depth - 1].cells;
  rows[depth - 1].className = "";
  cells[1].textContent = name;
  cells[2].textContent = `${(100 * chances[best]).toFixed(1)} %`;
  cells[5].textContent = took.toFixed(1);
  rows.forEach((row, place) => row.classList.toggle("last", place === depth - 1));
  at("answer").textContent = `${name}, at depth ${depth} of ${model.depth}`;
  const threshold = model.thresholds && model.thresholds[depth - 1];
  const sure = threshold != null && chances[best] >= threshold;
  log.push({ depth, logits, best, loaded, sure });
  if (pixels.sure === undefined && sure) pixels.sure = depth;
}

function table() {
  let bytes = model.files[0].bytes;
  for (let depth = 1; depth <= model.depth; depth += 1) {
    bytes += model.files[depth].bytes;
    const quality = model.quality ? `${(100 * model.quality[depth - 1]).toFixed(1)} %` : "–";
    const row = at("depths").insertRow();
    row.className = "waiting";
    for (const text of [depth, "", "", quality, Math.round(bytes / 1000), ""]) {
      row.insertCell().textContent = text;
    }
    rows.push(row);
  }
}

function forget() {
  for (const row of rows) {
    row.className = "waiting";
    for (const cell of [1, 2, 5]) row.cells[cell].textContent = "";
  }
}

function ask(values) {
  pixels = { values };
  forget();
  if (paused) paused();
  return again();
}

async function download() {
  ends = await fetched(model.files[0]);
  for (let depth = 1; depth <= model.depth; depth += 1) {
    if (at("stop").checked && pixels && pixels.sure !== undefined) {
      say(`Sure at depth ${pixels.sure}: stopped after ${kB(loaded)} of ${kB(total)}.`);
      await new Promise((go) => (paused = go));
      paused = null;
    }
    say(`${depth - 1} of ${model.depth} blocks are here, ${kB(loaded)} of ${kB(total)}.`);
    blocks.push(await fetched(model.files[depth]));
    await again();
  }
  say(`All ${model.depth} blocks are here: ${kB(loaded)}.`);
}

const kB = (bytes) => `${Math.round(bytes / 1000).toLocaleString("en")} kB`;

// -- pictures ----------------------------------------------------------------------------------

const board = at("board");
const pen = board.getContext("2d", { willReadFrequently: true });

function clear() {
  pen.fillStyle = "#000";
  pen.fillRect(0, 0, board.width, board.height);
}

// What is drawn is moved and scaled to fill the picture, as in the data sets of digits.
function drawn() {
  const data = pen.getImageData(0, 0, board.width, board.height).data;
  let [left, top, right, bottom] = [board.width, board.height, -1, -1];
  for (let y = 0; y < board.height; y += 1) {
    for (let x = 0; x < board.width; x += 1) {
      if (data[4 * (y * board.width + x)] < 32) continue;
      left = Math.min(left, x);
      right = Math.max(right, x);
      top = Math.min(top, y);
      bottom = Math.max(bottom, y);
    }
  }
  if (right < 0) return null;
  const side = Math.max(right - left, bottom - top) + 1;
  return [(left + right + 1 - side) / 2, (top + bottom + 1 - side) / 2, side, side];
}

function read(source, part) {
  const [channels, height, width] = model.shape;
  const small = document.createElement("canvas");
  small.width = width;
  small.height = height;
  const brush = small.getContext("2d", { willReadFrequently: true });
  brush.fillRect(0, 0, width, height);
  brush.imageSmoothingQuality = "high";
  brush.drawImage(source, ...part, 0, 0, width, height);
  const data = brush.getImageData(0, 0, width, height).data;
  const values = new Float32Array(channels * height * width);
  for (let place = 0; place < height * width; place += 1) {
    const [r, g, b] = data.slice(4 * place, 4 * place + 3);
    for (let channel = 0; channel < channels; channel += 1) {
      const light = channels === 1 ? (r + g + b) / 3 : [r, g, b][channel];
      values[channel * height * width + place] =
        model.low + ((model.high - model.low) * light) / 255;
    }
  }
  return values;
}

function paint(values) {
  const [channels, height, width] = model.shape;
  for (let y = 0; y < height; y += 1) {
    for (let x = 0; x < width; x += 1) {
      const light = [0, 1, 2].map((channel) => {
        const value = values[(channel % channels) * height * width + y * width + x];
        return Math.round((255 * (value - model.low)) / (model.high - model.low));
      });
      pen.fillStyle = `rgb(${light.join()})`;
      const [w, h] = [board.width / width, board.height / height];
      pen.fillRect(x * w, y * h, w + 1, h + 1);
    }
  }
}

function drawing() {
  let last = null;
  const place = (event) => {
    const box = board.getBoundingClientRect();
    return [
      ((event.clientX - box.left) * board.width) / box.width,
      ((event.clientY - box.top) * board.height) / box.height,
    ];
  };
  board.addEventListener("pointerdown", (event) => {
    if (example >= 0) clear();
    example = -1;
    board.setPointerCapture(event.pointerId);
    last = place(event);
  });
  board.addEventListener("pointermove", (event) => {
    if (!last) return;
    const next = place(event);
    pen.strokeStyle = "#fff";
    pen.lineWidth = 26;
    pen.lineCap = "round";
    pen.beginPath();
    pen.moveTo(...last);
    pen.lineTo(...next);
    pen.stroke();
    last = next;
  });
  board.addEventListener("pointerup", () => {
    last = null;
    const part = drawn();
    if (part) ask(read(board, part));
  });
  at("clear").addEventListener("click", () => {
    clear();
    pixels = null;
    forget();
    at("answer").textContent = "Draw something.";
  });
  let turn = 0;
  at("example").addEventListener("click", () => {
    example = turn % model.examples.length;
    turn += 1;
    paint(model.examples[example].pixels);
    ask(Float32Array.from(model.examples[example].pixels));
  });
  at("upload").addEventListener("change", async (event) => {
    const [file] = event.target.files;
    if (!file) return;
    const picture = await createImageBitmap(file);
    const side = Math.min(picture.width, picture.height);
    const part = [(picture.width - side) / 2, (picture.height - side) / 2, side, side];
    const values = read(picture, part);
    example = 0;
    paint(values);
    ask(values);
  });
}

async function main() {
  clear();
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
  at("stopping").hidden = !model.thresholds;
  table();
  drawing();
  ort = await import("./runtime/ort.wasm.bundle.min.mjs");
  const code = new URL("runtime/ort-wasm-simd-threaded.wasm", document.baseURI).href;
  ort.env.wasm.wasmPaths = { wasm: code }; // a folder would be searched for its loader, too
  ort.env.wasm.numThreads = 1;
  ort.env.logLevel = "error";
  await download();
}

main().catch((error) => say(String(error), true));
