// A language model: continues a text, token by token, once at each depth.

const at = (id) => document.getElementById(id);
// Lets the page be drawn and its files arrive between two tokens.
const breath = () => new Promise((go) => setTimeout(go));

export function text(model, network, { ask, tensor }) {
  let tokenizer = null;
  const places = new Map(); // token -> [piece of the vocabulary, row in it]
  const tokens = model.words.map((ranges, piece) => {
    const found = [];
    for (const [first, count] of ranges) {
      for (let token = first; token < first + count; token += 1) {
        places.set(token, [piece, found.length]);
        found.push(token);
      }
    }
    return found;
  });
  const nothing = new Float32Array(model.state.reduce((a, b) => a * b));
  const words = (pieces) => tokens.slice(0, pieces).reduce((sum, piece) => sum + piece.length, 0);
  const known = (token) => places.has(token) && places.get(token)[0] < network.ends.length;

  async function embedded(token, past) {
    const [piece, place] = places.get(token);
    const row = tensor("int64", BigInt64Array.of(BigInt(place)), [1, 1]);
    const h = tensor("float32", nothing, model.state);
    return (await network.ends[piece].run({ row, past, h })).start;
  }

  // The most probable of the words that are there, and its probability among them.
  async function readout(h, past, pieces) {
    const row = tensor("int64", BigInt64Array.of(0n), [1, 1]);
    let [best, most, sum] = [-1, -Infinity, 0];
    for (let piece = 0; piece < pieces; piece += 1) {
      const { logits } = await network.ends[piece].run({ row, past, h });
      const values = logits.data;
      let top = 0;
      for (let place = 1; place < values.length; place += 1) {
        if (values[place] > values[top]) top = place;
      }
      const now = Math.max(most, values[top]);
      sum *= Math.exp(most - now);
      for (const value of values) sum += Math.exp(value - now);
      if (values[top] > most) best = tokens[piece][top];
      most = now;
    }
    return [best, 1 / sum];
  }

  function tell(prompt, written) {
    at("prompted").textContent = prompt;
    at("written").textContent = written;
  }

  // Writes from the beginning, at one depth more than before.
  async function deeper(asked, going) {
    const depth = asked.depth + 1;
    const pieces = asked.ends;
    const caches = model.caches.slice(0, depth).map(([heads, keys, values]) => [
      tensor("float32", new Float32Array(0), [1, heads, 0, keys]),
      tensor("float32", new Float32Array(0), [1, heads, 0, values]),
    ]);
    const began = performance.now();
    const all = [...asked.ids];
    const chances = [];
    const most = Math.min(model.most ?? Infinity, asked.ids.length + model.new);
    for (let place = 0; place < all.length; place += 1) {
      const past = caches[0][0];
      let h = await embedded(all[place], past);
      for (let block = 0; block < depth; block += 1) {
        const [keys, values] = caches[block];
        const found = await network.blocks[block].run({ h, keys, values });
        h = found.out;
        caches[block] = [found.new_keys, found.new_values];
      }
      if (place < asked.ids.length - 1) continue;
      const [token, chance] = await readout(h, past, pieces);
      chances.push(chance);
      all.push(token);
      tell(asked.values, said(asked, all));
      await breath();
      if (!going()) return null;
      if (model.end.includes(token) || all.length >= most) break;
    }
    const written = said(asked, all);
    const mean = chances.reduce((a, b) => a + b, 0) / chances.length;
    return {
      answer: written.trim(),
      confidence: mean,
      least: Math.min(...chances),
      ms: (performance.now() - began) / (all.length - 1),
      words: words(pieces),
      found: { prompt: asked.values, tokens: all.slice(asked.ids.length), text: written },
    };
  }

  function said(asked, all) {
    const whole = tokenizer.decode(all, { skip_special_tokens: true });
    return whole.slice(tokenizer.decode(asked.ids, { skip_special_tokens: true }).length);
  }

  at("milliseconds").title = "a token";
  at("prompt").value = model.examples[0].prompt;
  at("write").addEventListener("click", () => ask(at("prompt").value.trim() || null));
  let turn = 0;
  at("other").addEventListener("click", () => {
    turn += 1;
    at("prompt").value = model.examples[turn % model.examples.length].prompt;
    ask(at("prompt").value);
  });

  return {
    idle: "Write the beginning of a text.",
    headline: (result, depth) => {
      const all = words(tokens.length);
      const few = result.words < all ? `, ${count(result.words)} of ${count(all)} words` : "";
      return `Depth ${depth} of ${model.depth}${few}`;
    },
    async read(bytes) {
      const { Tokenizer } = await import("./runtime/tokenizers.min.mjs");
      const unpacked = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
      const found = await new Response(unpacked).json();
      tokenizer = new Tokenizer(found.tokenizer, found.config);
      for (const { prompt, ids } of model.examples) {
        if (String(tokenizer.encode(prompt).ids) !== String(ids)) {
          throw new Error(`the tokenizer of this page cuts "${prompt}" otherwise than the model's`);
        }
      }
      if (at("prompt").value) ask(at("prompt").value);
    },
    ready(asked) {
      if (!tokenizer) return false;
      asked.ids ??= tokenizer.encode(asked.values).ids;
      if (asked.ids.length >= (model.most ?? Infinity)) {
        at("answer").textContent = `This text has ${asked.ids.length} tokens; ${model.most} are all.`;
        return false;
      }
      if (asked.ids.every(known)) return true;
      if (network.blocks.length) at("answer").textContent = "Some of these words are yet to come.";
      return false;
    },
    deeper,
  };
}

const count = (number) => number.toLocaleString("en");
