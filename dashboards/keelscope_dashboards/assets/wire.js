// Decoding of the binary answers (see wire.py) and number formatting. Pure functions, no DOM.
(function (ks) {
  "use strict";

  ks.ZERO = -32768;
  ks.NAN = -32767;
  ks.ABSENT = -32766;
  ks.INF = 32767;
  ks.KIND = { absent: 0, value: 1, zero: 2, nan: 3, inf: 4 };

  const TYPES = {
    "<f8": Float64Array, "<f4": Float32Array, "<i2": Int16Array, "|u1": Uint8Array,
  };

  ks.unpack = function (buffer) {
    const length = new DataView(buffer).getUint32(0, true);
    const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, length)));
    let at = 4 + length;
    const arrays = {};
    for (const [name, dtype, shape] of header.arrays) {
      const size = shape.reduce((a, b) => a * b, 1);
      arrays[name] = new TYPES[dtype](buffer, at, size);
      at += Math.ceil((size * TYPES[dtype].BYTES_PER_ELEMENT) / 8) * 8;
    }
    return { header, arrays };
  };

  // A tile as the charts use it: codes [bin][layer], edges between bins in steps.
  ks.tileOf = function (header, arrays, old) {
    const tile = {
      bins: header.bins, layers: header.layers, rows: header.rows, unit: header.unit,
      scale: header.scale, reference: header.reference, depth: header.depth, behind: header.behind || 0, revision: header.behind ? -1 : header.revision, generation: header.generation,
      labels: (old || header).labels || [], depths: (old || header).depths || [],
      first: arrays.first, last: arrays.last, level: arrays.reference, codes: arrays.codes,
    };
    tile.edges = ks.edges(tile.first, tile.last);
    return tile;
  };

  // Bins from `header.from` on replace those of an older tile; null when the two do not fit together.
  ks.spliced = function (old, header, arrays) {
    const from = header.from;
    const alike = ["rows", "unit", "layers", "generation"].every((name) => header[name] === old[name]);
    if (!alike || from > old.bins) return null;
    const joined = {};
    const parts = [["first", old.first, 1], ["last", old.last, 1], ["reference", old.level, 1], ["codes", old.codes, old.layers]];
    for (const [name, before, width] of parts) {
      const array = new before.constructor(header.bins * width);
      array.set(before.subarray(0, from * width));
      array.set(arrays[name], from * width);
      joined[name] = array;
    }
    return ks.tileOf(header, joined, old);
  };

  ks.edges = function (first, last) {
    const n = first.length;
    const edges = new Float64Array(n + 1);
    if (n === 0) return edges;
    for (let i = 1; i < n; i++) edges[i] = (last[i - 1] + first[i]) / 2;
    edges[0] = Math.max(Math.min(first[0], 0) - 0.5, first[0] - (n > 1 ? edges[1] - last[0] : 0.5));
    edges[n] = last[n - 1] + (n > 1 ? first[n - 1] - edges[n - 1] : 0.5);
    return edges;
  };

  // Index of the bin that holds a step, or of the nearest one.
  ks.binAt = function (tile, step) {
    let low = 0, high = tile.bins - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (tile.edges[middle] <= step) low = middle; else high = middle - 1;
    }
    return low;
  };

  // Absolute decades of one cell: a number, -Infinity for exactly 0, Infinity, or NaN.
  ks.levelAt = function (tile, bin, layer) {
    const code = tile.codes[bin * tile.layers + layer];
    if (code === ks.ZERO) return -Infinity;
    if (code === ks.INF) return Infinity;
    if (code === ks.NAN || code === ks.ABSENT) return NaN;
    return code * tile.unit + tile.level[bin];
  };

  // Every level of a tile between the shares `low` and `high`, as a range that ignores stray cells.
  ks.spread = function (tile, low, high) {
    const stride = Math.max(1, Math.floor((tile.bins * tile.layers) / 20000));
    const levels = [];
    for (let i = 0; i < tile.codes.length; i += stride) {
      const level = ks.levelAt(tile, Math.floor(i / tile.layers), i % tile.layers);
      if (Number.isFinite(level)) levels.push(level);
    }
    if (!levels.length) return null;
    levels.sort((a, b) => a - b);
    const at = (share) => levels[Math.round(share * (levels.length - 1))];
    return [at(low), at(high)];
  };

  ks.count = (n) => Math.round(n).toLocaleString("en-US");

  const POWERS = { "-": "⁻", 0: "⁰", 1: "¹", 2: "²", 3: "³", 4: "⁴", 5: "⁵", 6: "⁶", 7: "⁷", 8: "⁸", 9: "⁹" };
  ks.power = (n) => String(n).replace(/[-0-9]/g, (c) => POWERS[c]);

  // 10 ** level as it is read: 0.93, 298, 7.18 × 10⁻⁴.
  ks.value = function (level) {
    if (level === -Infinity) return "exactly 0";
    if (level === Infinity) return "Inf";
    if (Number.isNaN(level)) return "no value";
    if (level > -2 && level < 4) return (10 ** level).toLocaleString("en-US", { minimumSignificantDigits: 3, maximumSignificantDigits: 3 });
    let exponent = Math.floor(level);
    let mantissa = (10 ** (level - exponent)).toFixed(2);
    if (mantissa === "10.00") { mantissa = "1.00"; exponent += 1; }
    return `${mantissa} × 10${ks.power(exponent)}`;
  };

  // A value as it is, however large or small.
  ks.plain = function (value) {
    if (Number.isNaN(value)) return "no value";
    if (value === 0) return "exactly 0";
    if (!Number.isFinite(value)) return value > 0 ? "Inf" : "−Inf";
    if (Number.isInteger(value) && Math.abs(value) < 1e7) return ks.count(value).replace("-", "−");
    const text = ks.value(Math.log10(Math.abs(value)));
    return value < 0 ? `−${text}` : text;
  };

  // The blocks of a page with their arrays in place.
  ks.revived = function (value, arrays) {
    if (Array.isArray(value)) return value.map((one) => ks.revived(one, arrays));
    if (value === null || typeof value !== "object") return value;
    if ("$" in value) return arrays[value.$];
    return Object.fromEntries(Object.entries(value).map(([name, one]) => [name, ks.revived(one, arrays)]));
  };

  // Smallest and largest finite number of some arrays, null if there is none.
  ks.extent = function (arrays) {
    let low = Infinity, high = -Infinity;
    for (const array of arrays) {
      for (const value of array) {
        if (!Number.isFinite(value)) continue;
        if (value < low) low = value;
        if (value > high) high = value;
      }
    }
    return low <= high ? [low, high] : null;
  };

  // A range with room around it, at least `span` wide, and no narrower than `held` if that is given.
  ks.roomy = function (extent, span, held) {
    const [low, high] = extent || [0, 1];
    const least = span || Math.max(Math.abs(high), Math.abs(low)) * 0.02 || 1;
    const middle = (low + high) / 2, half = Math.max(least, (high - low) * 1.1) / 2;
    const range = [middle - half, middle + half];
    if (!held || (held[0] <= low && held[1] >= high && held[1] - held[0] < 3 * (range[1] - range[0]))) return held || range;
    return held[1] - held[0] < 3 * (range[1] - range[0]) ? [Math.min(held[0], range[0]), Math.max(held[1], range[1])] : range;
  };

  // Index of the entry of an increasing or unordered list that is nearest to `x`.
  ks.nearest = function (xs, x) {
    let best = -1, far = Infinity;
    for (let i = 0; i < xs.length; i++) {
      const off = Math.abs(xs[i] - x);
      if (off < far) { far = off; best = i; }
    }
    return best;
  };

  // Where `x` lies on a piecewise linear function through increasing points.
  ks.interpolated = function (xs, ys, x) {
    if (!xs.length) return x;
    let i = 1;
    while (i < xs.length - 1 && xs[i] < x) i++;
    if (xs.length === 1 || xs[i] === xs[i - 1]) return ys[0];
    const share = Math.max(0, Math.min(1, (x - xs[i - 1]) / (xs[i] - xs[i - 1])));
    return ys[i - 1] + share * (ys[i] - ys[i - 1]);
  };

  ks.signed = (d) => (d < 0 ? "−" : "+") + Math.abs(d).toFixed(2);

  // Ticks for an axis of log10 values.
  ks.powerTicks = function (range, most) {
    const stride = Math.max(1, Math.ceil((range[1] - range[0]) / most));
    const values = [];
    for (let t = Math.ceil(range[0] / stride) * stride; t <= range[1]; t += stride) values.push(t);
    return { values, text: values.map((t) => `10<sup>${String(t).replace("-", "−")}</sup>`) };
  };

  // Ticks for an axis of log10 values of any width: powers of ten, or plain numbers where it spans less than two.
  ks.logTicks = function (range, most) {
    const decades = range[1] - range[0], powers = ks.powerTicks(range, most);
    if (decades >= 3.5 || (most < 4 && powers.values.length > 1)) return powers;
    const low = 10 ** range[0], high = 10 ** range[1], numbers = [];
    if (decades > 0.6) {
      for (let e = Math.floor(range[0]); e <= range[1]; e++) for (const m of decades > 2 ? [1, 3] : [1, 2, 5]) numbers.push(m * 10 ** e);
    } else {
      const raw = (high - low) / most, unit = 10 ** Math.floor(Math.log10(raw));
      const stride = [1, 2, 5, 10].map((k) => k * unit).find((k) => k >= raw);
      for (let k = Math.ceil((low / stride) * (1 - 1e-9)); k * stride <= high * (1 + 1e-9); k++) numbers.push(k * stride);
    }
    const kept = numbers.filter((value) => value >= low * (1 - 1e-9) && value <= high * (1 + 1e-9));
    return { values: kept.map(Math.log10), text: kept.map(tickText) };
  };

  // A number on an axis: as it is, or short with its power of ten.
  function tickText(value) {
    if (value >= 0.01 && value < 10000) return String(Number(value.toPrecision(3)));
    const [mantissa, exponent] = value.toExponential(2).split("e");
    const power = `10<sup>${String(Number(exponent)).replace("-", "−")}</sup>`;
    return Number(mantissa) === 1 ? power : `${Number(mantissa)}×${power}`;
  }

  // Depth of a layer (1 = at the input) in the unit of its tile, as the report counts it; and the layer that holds a depth.
  ks.depthOf = (tile, layer) => tile.depths[layer - 1] || layer;
  ks.layerAt = function (tile, depth) {
    let layer = 1;
    while (layer < tile.layers && ks.depthOf(tile, layer) < depth) layer += 1;
    return layer;
  };
  ks.depthText = (tile, layer) => `${tile.depth} ${ks.count(ks.depthOf(tile, layer))}`;

  // Layer ticks: the first layer and those whose depth is a multiple of a power of two, or every so many layers where
  // few depths are; each says its depth.
  ks.layerTicks = function (low, high, most, tile) {
    const first = Math.max(1, Math.ceil(low)), last = Math.min(tile.layers, Math.floor(high));
    const depth = (layer) => ks.depthOf(tile, layer), counted = (place) => {
      let stride = 1;
      while ((place(last) - place(first)) / stride > most) stride *= 2;
      const fits = (layer) => place(layer) % stride === 0 && !(low <= 1 && place(layer) - place(first) < stride * 0.5);
      const values = [];
      for (let layer = first; layer <= last; layer++) {
        if (layer === 1 || (place(layer) !== place(layer - 1) && fits(layer))) values.push(layer);
      }
      return values;
    };
    const round = counted(depth), values = round.length > Math.min(2, last - first) ? round : counted((layer) => layer);
    return { values, text: values.map((layer) => ks.count(depth(layer))) };
  };

  // Ticks for a linear axis: round numbers, with all their digits where those are few.
  ks.plainTicks = function (range, most) {
    const raw = (range[1] - range[0]) / Math.max(1, most), unit = 10 ** Math.floor(Math.log10(raw));
    const stride = [1, 2, 5, 10].map((k) => k * unit).find((k) => k >= raw * (1 - 1e-9));
    const values = [];
    for (let k = Math.ceil(range[0] / stride - 1e-9); k * stride <= range[1] + stride * 1e-9; k++) values.push(k * stride);
    const far = Math.max(Math.abs(range[0]), Math.abs(range[1])), digits = Math.max(0, -Math.floor(Math.log10(stride) + 1e-9));
    const text = (value) => {
      if (Math.abs(value) < stride / 2) return "0";
      const size = far >= 1e7 || stride < 1e-4 ? tickText(Math.abs(value)) : Math.abs(value).toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits });
      return value < 0 ? `−${size}` : size;
    };
    return { values, text: values.map(text) };
  };

  // The next round number from `value` up, so that a growing axis moves seldom.
  ks.roomFor = function (value) {
    if (value <= 0) return 1;
    const unit = 10 ** Math.floor(Math.log10(value));
    return [1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10].map((k) => k * unit).find((room) => room >= value * 1.02);
  };
})((window.keelscope = window.keelscope || {}));
