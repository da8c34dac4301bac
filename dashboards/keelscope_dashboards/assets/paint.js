// Painting of dense marks on a canvas: heatmap cells and run lines. Pure functions of their arguments, no state.
(function (ks) {
  "use strict";

  const KNEES = 32; // the scale is close to linear below limit / KNEES: half a decade at a limit of 16

  ks.symlog = function (decades, limit) {
    const t = (Math.sign(decades) * Math.log1p((Math.abs(decades) * KNEES) / limit)) / Math.log1p(KNEES);
    return Math.max(-1, Math.min(1, t));
  };

  // Colours of one palette from base64 RGB triples, as one 32-bit word per entry.
  ks.lookup = function (base64) {
    const bytes = Uint8Array.from(atob(base64), (c) => c.charCodeAt(0));
    const words = new Uint32Array(bytes.length / 3);
    for (let i = 0; i < words.length; i++) {
      words[i] = (255 << 24) | (bytes[3 * i + 2] << 16) | (bytes[3 * i + 1] << 8) | bytes[3 * i];
    }
    return words;
  };

  ks.css = (word) => `rgb(${word & 255},${(word >> 8) & 255},${(word >> 16) & 255})`;

  const tables = new Map();

  // Colour index of every 16-bit code at a given unit.
  ks.indexTable = function (unit, limit, size) {
    const key = `${unit}|${limit}|${size}`;
    if (!tables.has(key)) {
      const table = new Uint8Array(65536);
      const middle = (size - 1) / 2;
      for (let code = -32765; code < 32767; code++) {
        table[code & 0xffff] = Math.round(middle * (1 + ks.symlog(code * unit, limit)));
      }
      if (tables.size > 8) tables.clear();
      tables.set(key, table);
    }
    return tables.get(key);
  };

  // The same for one ramp from `low` to `high`.
  ks.rampTable = function (unit, low, high, size) {
    const table = new Uint8Array(65536), scale = (size - 1) / (high - low || 1);
    for (let code = -32765; code < 32767; code++) {
      table[code & 0xffff] = Math.max(0, Math.min(size - 1, Math.round((code * unit - low) * scale)));
    }
    return table;
  };

  const RANK = (code) => (code === ks.INF ? 4 : code === ks.NAN ? 3 : code === ks.ZERO ? 2 : code === ks.ABSENT ? 0 : 1);

  // The code to show for a block of cells: the most severe kind, then the farthest from the reference.
  // Codes of values stay below 32766 in size and marks do not, so one comparison settles almost every cell.
  ks.farthest = function (codes, layers, bin0, bin1, layer0, layer1) {
    let best = ks.ABSENT, rank = 0, far = -1;
    for (let bin = bin0; bin < bin1; bin++) {
      for (let i = bin * layers + layer0, end = bin * layers + layer1; i < end; i++) {
        const code = codes[i], size = code < 0 ? -code : code;
        if (size <= far) continue;
        if (size < 32766) {
          far = size;
          best = code;
          rank = 1;
        } else if (RANK(code) > rank) {
          far = 32765;
          best = code;
          rank = RANK(code);
        }
      }
    }
    return best;
  };

  // Which cells fall into each pixel: [from, to) per pixel, and (-1, -1) where there is none.
  ks.pixelSpans = function (pixels, low, high, edges, count) {
    const from = new Int32Array(pixels).fill(-1), to = new Int32Array(pixels).fill(-1);
    let cell = 0;
    for (let p = 0; p < pixels; p++) {
      const a = low + ((high - low) * p) / pixels, b = low + ((high - low) * (p + 1)) / pixels;
      if (b <= edges[0] || a >= edges[count]) continue;
      while (cell < count - 1 && edges[cell + 1] <= a) cell++;
      let end = cell + 1;
      while (end < count && edges[end] < b) end++;
      // Of two cells that are both wider than a pixel, the one that covers most of it; otherwise all of them.
      if (end - cell === 2 && edges[end] - edges[cell + 1] >= b - a && edges[cell + 1] - edges[cell] >= b - a) {
        const first = edges[cell + 1] - a >= (b - a) / 2;
        from[p] = first ? cell : cell + 1;
        to[p] = from[p] + 1;
      } else {
        from[p] = cell;
        to[p] = end;
      }
    }
    return { from, to };
  };

  function hatch(code, x, y, look) {
    const period = look.period;
    if (code === ks.ABSENT) return x % period < look.stroke && y % period < look.stroke ? look.dots : look.blank;
    const down = (x + y) % period < look.stroke, up = (x - y + period * 4096) % period < look.stroke;
    if (code === ks.ZERO) return down ? look.zero : look.ground;
    if (code === ks.NAN) return up ? look.alarm : look.alarmGround;
    return up || down ? look.alarm : look.alarmGround;
  }

  // Cells of a tile into an ImageData of width x height device pixels. view: x0, x1 in steps, y0, y1 in layers from 1.
  ks.paintCells = function (image, tile, view, look) {
    const width = image.width, height = image.height;
    const out = new Uint32Array(image.data.buffer);
    const rowEdges = Float64Array.from({ length: tile.layers + 1 }, (_, i) => i + 0.5);
    const columns = ks.pixelSpans(width, view.x0, view.x1, tile.edges, tile.bins);
    const rows = ks.pixelSpans(height, view.y0, view.y1, rowEdges, tile.layers);
    const table = look.table || ks.indexTable(tile.unit, look.limit, look.colours.length);
    const column = new Int16Array(height);
    let lastFrom = -2, lastTo = -2;
    for (let x = 0; x < width; x++) {
      if (columns.from[x] < 0) continue;
      if (columns.from[x] !== lastFrom || columns.to[x] !== lastTo) {
        lastFrom = columns.from[x];
        lastTo = columns.to[x];
        poolColumn(column, tile, lastFrom, lastTo, rows);
      }
      for (let y = 0; y < height; y++) {
        if (rows.from[y] < 0) continue;
        const code = column[y], at = (height - 1 - y) * width + x;
        if (code > -32766 && code < 32767) out[at] = look.colours[table[code & 0xffff]];
        else out[at] = hatch(code, x, y, look);
      }
    }
  };

  function poolColumn(column, tile, bin0, bin1, rows) {
    for (let y = 0; y < column.length; y++) {
      if (y > 0 && rows.from[y] === rows.from[y - 1] && rows.to[y] === rows.to[y - 1]) column[y] = column[y - 1];
      else if (rows.from[y] >= 0) column[y] = ks.farthest(tile.codes, tile.layers, bin0, bin1, rows.from[y], rows.to[y]);
    }
  }

  // A run as a line through (x, y) pixel pairs, broken where a value is missing, with a few markers.
  ks.paintLine = function (context, xs, ys, style) {
    context.strokeStyle = context.fillStyle = style.colour;
    context.lineWidth = style.width;
    context.lineJoin = "round";
    context.globalAlpha = style.alpha;
    context.setLineDash(style.dash || []);
    context.beginPath();
    let pen = false;
    for (let i = 0; i < xs.length; i++) {
      if (!Number.isFinite(xs[i]) || !Number.isFinite(ys[i])) { pen = false; continue; }
      if (pen) context.lineTo(xs[i], ys[i]); else context.moveTo(xs[i], ys[i]);
      pen = true;
    }
    context.stroke();
    context.setLineDash([]);
    points(context, xs, ys, style);
    if (style.symbol) markers(context, xs, ys, style);
    context.globalAlpha = 1;
  };

  // The area between two edges, left out where either is missing.
  ks.paintBand = function (context, xs, lows, highs, colour) {
    context.globalAlpha = 0.18;
    context.fillStyle = colour;
    let start = 0;
    for (let i = 0; i <= xs.length; i++) {
      if (i < xs.length && Number.isFinite(xs[i]) && Number.isFinite(lows[i]) && Number.isFinite(highs[i])) continue;
      if (i - start > 1) {
        context.beginPath();
        for (let k = start; k < i; k++) context.lineTo(xs[k], highs[k]);
        for (let k = i - 1; k >= start; k--) context.lineTo(xs[k], lows[k]);
        context.fill();
      }
      start = i + 1;
    }
    context.globalAlpha = 1;
  };

  // A value between two gaps is a point.
  function points(context, xs, ys, style) {
    context.fillStyle = style.colour;
    for (let i = 0; i < ys.length; i++) {
      if (!Number.isFinite(ys[i]) || Number.isFinite(ys[i - 1]) || Number.isFinite(ys[i + 1])) continue;
      context.beginPath();
      context.arc(xs[i], ys[i], 2.2, 0, 2 * Math.PI);
      context.fill();
    }
  }

  // About six markers per line, never closer than 40 pixels, shifted by run so that they do not hide each other.
  function markers(context, xs, ys, style) {
    const every = Math.max(1, Math.floor(xs.length / 6));
    let [lastX, lastY] = [Infinity, Infinity];
    for (let i = Math.floor(every * (0.3 + 0.22 * style.slot)) % every; i < xs.length; i += every) {
      if (!Number.isFinite(xs[i]) || !Number.isFinite(ys[i]) || Math.hypot(xs[i] - lastX, ys[i] - lastY) < 40) continue;
      [lastX, lastY] = [xs[i], ys[i]];
      ks.paintMarker(context, style.symbol, xs[i], ys[i], 4, style.halo);
    }
  }

  const SHAPES = {
    circle: (c, x, y, r) => c.arc(x, y, r, 0, 2 * Math.PI),
    square: (c, x, y, r) => c.rect(x - r * 0.9, y - r * 0.9, r * 1.8, r * 1.8),
    "triangle-up": (c, x, y, r) => polygon(c, x, y, r * 1.2, [[0, -1], [0.95, 0.75], [-0.95, 0.75]]),
    "triangle-down": (c, x, y, r) => polygon(c, x, y, r * 1.2, [[0, 1], [0.95, -0.75], [-0.95, -0.75]]),
    diamond: (c, x, y, r) => polygon(c, x, y, r * 1.2, [[0, -1], [1, 0], [0, 1], [-1, 0]]),
    hexagon: (c, x, y, r) => polygon(c, x, y, r * 1.1, [[-0.5, -0.9], [0.5, -0.9], [1, 0], [0.5, 0.9], [-0.5, 0.9], [-1, 0]]),
    cross: (c, x, y, r) => polygon(c, x, y, r, CROSS),
    x: (c, x, y, r) => polygon(c, x, y, r * 1.1, CROSS.map(([a, b]) => [(a - b) * 0.71, (a + b) * 0.71])),
  };
  const CROSS = [[-0.35, -1], [0.35, -1], [0.35, -0.35], [1, -0.35], [1, 0.35], [0.35, 0.35], [0.35, 1], [-0.35, 1],
    [-0.35, 0.35], [-1, 0.35], [-1, -0.35], [-0.35, -0.35]];

  function polygon(c, x, y, r, points) {
    points.forEach(([a, b], i) => (i ? c.lineTo(x + a * r, y + b * r) : c.moveTo(x + a * r, y + b * r)));
    c.closePath();
  }

  ks.paintCross = function (context, x, y, colour) {
    context.strokeStyle = colour;
    context.lineWidth = 1.3;
    context.beginPath();
    context.moveTo(x - 2.5, y - 2.5);
    context.lineTo(x + 2.5, y + 2.5);
    context.moveTo(x - 2.5, y + 2.5);
    context.lineTo(x + 2.5, y - 2.5);
    context.stroke();
  };

  ks.paintMarker = function (context, symbol, x, y, radius, halo) {
    context.beginPath();
    SHAPES[symbol](context, x, y, radius);
    if (halo) {
      const keep = [context.strokeStyle, context.lineWidth];
      [context.strokeStyle, context.lineWidth] = [halo, 2];
      context.stroke();
      [context.strokeStyle, context.lineWidth] = keep;
    }
    context.fill();
  };
})((window.keelscope = window.keelscope || {}));
