// A classifier: draw, upload or take an example, and see what each depth calls it.

const at = (id) => document.getElementById(id);

export function pictures(model, network, { ask, tensor }) {
  let example = -1;
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
      ask(null);
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

  clear();
  drawing();

  return {
    idle: "Draw something.",
    headline: (result, depth) => `${result.answer}, at depth ${depth} of ${model.depth}`,
    ready: () => true,
    // Runs the picture through the blocks that are there, from the depth that is already known.
    async deeper(asked) {
      const [ends] = network.ends;
      const picture = tensor("float32", asked.values, [1, ...model.shape]);
      if (!asked.state) {
        const size = model.state.reduce((a, b) => a * b);
        const nothing = tensor("float32", new Float32Array(size), model.state);
        asked.state = (await ends.run({ pictures: picture, h: nothing })).start;
      }
      asked.state = (await network.blocks[asked.depth].run({ h: asked.state })).out;
      const { logits } = await ends.run({ pictures: picture, h: asked.state });
      const chances = softmax(logits.data);
      const best = chances.indexOf(Math.max(...chances));
      return {
        answer: model.labels[best],
        confidence: chances[best],
        least: chances[best],
        found: { best, logits: Array.from(logits.data) },
      };
    },
  };
}

function softmax(logits) {
  const most = Math.max(...logits);
  const weights = Array.from(logits, (value) => Math.exp(value - most));
  const sum = weights.reduce((a, b) => a + b, 0);
  return weights.map((value) => value / sum);
}
