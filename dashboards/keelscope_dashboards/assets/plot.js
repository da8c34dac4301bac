// A chart and a heatmap of a page: axes, marks on the canvas, the cursor shared with every other chart.
(function (ks) {
  "use strict";

  const DASH = { solid: [], dashed: [6, 4], dotted: [2, 3] };
  const MARGIN = { small: { l: 58, r: 8, t: 6, b: 22 } };

  // What both kinds share: a chart in a panel body, its cursor, its tip.
  class Canvas {
    constructor(view, body, block) {
      this.view = view;
      this.block = block;
      this.body = body;
      this.margin = MARGIN[block.size] || view.scene.plain.margin;
      this.chart = new ks.Chart(body, this.frame(), () => this.draw());
      this.tip = this.chart.add("div", "tip");
      this.tip.hidden = true;
      this.gone = new AbortController();
      const { signal } = this.gone;
      ks.drag(this.chart, (at) => this.move(at), signal);
      body.addEventListener("pointerleave", () => { this.tip.hidden = true; }, { signal });
      body.addEventListener("pointermove", (event) => {
        const at = event.pointerType === "touch" ? null : this.chart.at(event, false), lines = at ? this.told(at) : [];
        this.tip.hidden = !lines.length;
        if (lines.length) ks.showTip(this.chart, this.tip, at, lines);
      }, { signal });
    }

    frame() {
      const { block } = this, { plain } = this.view.scene;
      const axis = (from, title) => ({ ...from, title: { ...from.title, text: title || "" } });
      const small = block.size === "small" ? { showgrid: false } : {};
      return { ...plain, margin: this.margin, xaxis: { ...axis(plain.xaxis, block.x && block.x.title), ...small }, yaxis: axis(plain.yaxis, block.y && block.y.title) };
    }

    close() {
      this.gone.abort();
      this.chart.close();
    }
  }

  ks.LineChart = class extends Canvas {
    update(block, keep) {
      if (!keep) this.held = null;
      this.block = block;
      this.draw();
    }

    ranges() {
      const { x, y, lines, levels } = this.block, { view } = this;
      const tile = view.tile(), whole = x.kind === "step" && !x.clock && tile && tile.bins ? [[tile.first[0], tile.last[tile.bins - 1]]] : [];
      const xs = ks.extent([...lines.map((line) => line.x), ...whole]);
      const ys = lines.flatMap((line) => [line.y, line.low, line.high].filter(Boolean));
      const extent = ks.extent([...ys, levels.map((level) => level.value)]);
      if (extent && levels.some((level) => level.label)) extent[1] += 0.06 * (extent[1] - extent[0]); // room for the words
      this.held = ks.roomy(extent, y.span, this.held);
      if (x.kind === "relative") return [[0, 1], this.held];
      if (x.kind === "depth" && xs) return [[xs[0] - 0.5, xs[1] + 0.5], this.held];
      if (x.kind === "step" && view.zoomX && !x.clock) return [view.zoomX, this.held];
      if (!xs) return [[0, 1], this.held];
      const room = (xs[1] - xs[0] || 1) * 0.01;
      return [[xs[0] - room, xs[1] + room], this.held];
    }

    draw() {
      const { chart, block } = this, [x, y] = this.ranges();
      const most = Math.max(5, chart.height / 42);
      const ticks = block.y.log ? ks.logTicks(y, Math.max(3, chart.height / 42)) : ks.plainTicks(y, most);
      const counts = !block.x.clock && block.x.kind !== "relative";
      chart.axes(this.frame(), { range: x, ticks: (counts ? ks.countTicks : ks.plainTicks)(x, Math.max(2, chart.width / 72)) }, { range: y, ticks });
      const context = chart.clear();
      this.drawSpans(context);
      this.drawLevels(context);
      const focus = this.view.focus;
      for (const line of block.lines.filter((one) => one.run !== focus)) this.drawLine(context, line, false);
      for (const line of block.lines.filter((one) => one.run === focus)) this.drawLine(context, line, true);
      this.nameSpans(context);
      this.cross();
    }

    drawSpans(context) {
      const { chart, view } = this, { palette } = view.scene;
      this.block.spans.forEach((span, i) => {
        const left = chart.px(span.start), right = chart.px(span.end);
        context.fillStyle = palette.muted;
        context.globalAlpha = i % 2 ? 0.09 : 0.03;
        context.fillRect(left, 0, right - left, chart.height);
        context.globalAlpha = 1;
      });
    }

    // Names of the bands, over everything else.
    nameSpans(context) {
      const { chart, view } = this, { palette } = view.scene;
      context.font = '11px "JetBrains Mono", ui-monospace, monospace';
      context.textAlign = "center";
      for (const span of this.block.spans) {
        const left = chart.px(span.start), right = chart.px(span.end);
        if (right - left > 16 + 6.6 * span.label.length) write(context, span.label, (left + right) / 2, 14, palette);
      }
    }

    drawLevels(context) {
      const { chart, view } = this, { palette } = view.scene;
      context.font = "11px Inter, system-ui, sans-serif";
      for (const level of this.block.levels) {
        const at = chart.py(level.value);
        context.strokeStyle = palette.axis;
        context.lineWidth = 1;
        context.beginPath();
        context.moveTo(0, at);
        context.lineTo(chart.width, at);
        context.stroke();
        context.textAlign = "left";
        if (level.label) write(context, level.label, 8, at < 14 ? at + 14 : at - 5, palette);
      }
    }

    drawLine(context, line, focused) {
      const { chart, view } = this, { settings, palette } = view.scene;
      const xs = Float64Array.from(line.x, (x) => chart.px(x)), ys = Float64Array.from(line.y, (y) => chart.py(y));
      const colour = palette.runs[line.slot % palette.runs.length];
      const up = (values) => Float64Array.from(values, (y) => chart.py(y));
      if (line.low && line.high) ks.paintBand(context, xs, up(line.low), up(line.high), colour);
      const plain = line.dash === "solid" && this.block.size !== "small";
      ks.paintLine(context, xs, ys, {
        colour, slot: line.slot, halo: palette.paper, dash: DASH[line.dash], symbol: plain ? settings.symbols[line.slot] : "",
        width: focused ? 1.9 : 1.4, alpha: line.faint ? 0.6 : focused ? 1 : 0.85,
      });
      if (xs.length === 1) ks.paintMarker(context, settings.symbols[line.slot], xs[0], ys[0], 4, palette.paper);
      this.drawEdges(context, line, xs, colour);
    }

    // What has no place on the axis: exact zeros at its low end, infinities and, as crosses, NaN at its high end.
    drawEdges(context, line, xs, colour) {
      const { chart, view } = this;
      for (let i = 0; i < xs.length; i++) {
        if (line.y[i] === -Infinity) {
          context.fillStyle = colour;
          context.fillRect(xs[i] - 0.75, chart.height - 6, 1.5, 6);
        } else if (line.y[i] === Infinity) {
          context.fillStyle = ks.css(view.scene.look.alarm);
          context.fillRect(xs[i] - 0.75, 0, 1.5, 6);
        }
      }
      for (const x of line.bad || []) ks.paintCross(context, chart.px(x), 5, ks.css(view.scene.look.alarm));
    }

    // The cursor on this axis, null where the axis has none.
    place() {
      const { x } = this.block, { view } = this;
      if (x.kind === "depth") return view.depth();
      if (x.kind === "relative") return view.depth() / (view.tile() ? ks.depthOf(view.tile(), view.tile().layers) : x.length);
      if (x.kind !== "step") return null;
      return x.clock ? ks.interpolated(x.clock.steps, x.clock.values, view.step()) : view.step();
    }

    cross() { this.chart.cross(this.place(), null); }

    move([x]) {
      const { kind, clock } = this.block.x, { view } = this;
      if (kind === "depth") view.moveToDepth(undefined, Math.round(x));
      if (kind === "relative" && view.tile()) view.moveToDepth(undefined, Math.round(x * ks.depthOf(view.tile(), view.tile().layers)));
      if (kind === "step") view.moveTo({ step: clock ? ks.interpolated(clock.values, clock.steps, x) : x });
    }

    told([x]) {
      const { block } = this, rows = [];
      for (const line of block.lines) {
        const i = ks.nearest(line.x, x);
        if (i < 0) continue;
        const value = block.y.log ? ks.value(line.y[i]) : ks.plain(line.y[i]);
        rows.push([line.x[i], `${value} · ${line.label}`]);
      }
      if (!rows.length) return [];
      const at = rows.reduce((best, row) => (Math.abs(row[0] - x) < Math.abs(best - x) ? row[0] : best), rows[0][0]);
      const unit = block.x.kind === "relative" ? `${(100 * at).toFixed(1)} % of the depth`
        : block.x.kind === "depth" ? `${block.x.title.split(" (")[0]} ${ks.count(at)}` : `${block.x.title || "step"} ${ks.count(at)}`;
      return [unit, ...rows.slice(0, 9).map((row) => row[1])];
    }
  };

  ks.HeatChart = class extends Canvas {
    constructor(view, body, block, legend) {
      super(view, body, block);
      this.legend = legend;
      this.zoomX = this.zoomY = null;
      body.addEventListener("wheel", (event) => this.wheel(event), { passive: false, signal: this.gone.signal });
      body.addEventListener("dblclick", () => { this.zoomX = this.zoomY = null; this.draw(); }, { signal: this.gone.signal });
    }

    frame() {
      const frame = super.frame(), tile = this.tile(), { xaxis, yaxis } = frame;
      const title = tile ? `${tile.depth} (${ks.depthOf(tile, 1)} = input)` : "";
      return { ...frame, xaxis: { ...xaxis, showgrid: false, title: { ...xaxis.title, text: "step" } }, yaxis: { ...yaxis, showgrid: false, title: { ...yaxis.title, text: title } } };
    }

    panel() {
      const { series, scale, reference, part } = this.block;
      return `${encodeURIComponent(series)}&scale=${scale}&reference=${reference}&part=${encodeURIComponent(part)}`;
    }

    tile() { return this.view.data ? this.view.data.tile(this.block.run, this.panel()) : null; }

    update(block) {
      this.block = block;
      this.fetch();
      this.draw();
    }

    fetch() {
      const run = this.view.run(this.block.run);
      if (run) this.view.data.want(run.id, this.panel(), run.revision);
    }

    draw() {
      const tile = this.tile(), { chart } = this;
      if (!tile || !tile.bins) {
        chart.axes(this.frame(), { range: [0, 1], ticks: NONE }, { range: [0, 1], ticks: NONE });
        chart.clear();
        chart.cross(null, null);
        chart.say(["Loading…"]);
        return;
      }
      const run = this.view.run(this.block.run);
      const x = this.zoomX || this.view.scene.extent(run, tile), y = this.zoomY || [0.5, tile.layers + 0.5];
      chart.axes(this.frame(), { range: x, ticks: ks.countTicks(x, Math.max(2, chart.width / 72)) }, { range: y, ticks: ks.layerTicks(y[0], y[1], Math.max(2, chart.height / 34), tile) });
      const context = chart.clear(), image = context.createImageData(chart.canvas.width, chart.canvas.height);
      const look = this.look(tile);
      ks.paintCells(image, tile, { x0: x[0], x1: x[1], y0: y[0], y1: y[1] }, look);
      context.putImageData(image, 0, 0);
      chart.say([]);
      this.drawLegend(look, tile);
      this.cross();
    }

    // Colours about a reference, about 0, or one ramp over the range of the values.
    look(tile) {
      const { scene } = this.view, { block } = this, size = scene.colours.length;
      if (block.diverging && block.scale === "decades") return { ...scene.look, limit: block.limit, kind: "diverging" };
      const [low, high] = this.range(tile);
      if (block.scale === "linear" && low < 0 && high > 0) {
        const far = Math.max(-low, high);
        return { ...scene.look, table: ks.rampTable(tile.unit, -far, far, size), low: -far, high: far, kind: "about 0" };
      }
      const least = block.scale === "linear" ? 0 : LEAST, middle = (low + high) / 2, half = Math.max(least, high - low) / 2 || 0.5;
      const wide = [middle - half, middle + half];
      return { ...scene.look, colours: scene.ramp, table: ks.rampTable(tile.unit, ...wide, size), low: wide[0], high: wide[1], kind: "ramp" };
    }

    // The range of the values: of all heatmaps of the page that show the same, so that they can be compared.
    range(tile) {
      const tiles = this.view.pages.heats(this.panel()).map((chart) => chart.tile()).filter((one) => one && one.bins);
      return ks.extent((tiles.length ? tiles : [tile]).map((one) => ks.spread(one, 0.025, 0.975) || [])) || [0, 1];
    }

    drawLegend(look, tile) {
      const ticks = look.kind === "diverging"
        ? [-1, -3 / 16, -1 / 16, 0, 1 / 16, 3 / 16, 1].map((share) => [50 * (1 + ks.symlog(share * look.limit, look.limit)), short(share * look.limit)])
        : [0, 0.5, 1].map((share) => [100 * share, this.tick(look.low + share * (look.high - look.low), share, look, tile)]);
      const words = { output: "decades vs output side", input: "decades vs input side", median: "decades vs depth median", none: look.kind === "diverging" ? "decades about 1" : "" };
      const pooled = tile.rows > 1 ? ` · farthest of every ${ks.count(tile.rows)} recorded steps` : "";
      const title = `${words[this.block.reference] || ""}${pooled}`;
      ks.drawScale(this.legend, title, look.colours, ticks);
      this.legend.scale = { title, colours: look.colours, ticks };
    }

    // The ends of the scale say so where some cells lie beyond them.
    tick(value, share, look, tile) {
      const text = this.block.scale === "linear" ? (value === 0 ? "0" : ks.plain(value)) : ks.value(value);
      const [low, high] = look.kind === "ramp" ? ks.spread(tile, 0, 1) || [value, value] : [value, value];
      const room = (look.high - look.low) * 1e-6;
      return share === 0 && low < look.low - room ? `≤ ${text}` : share === 1 && high > look.high + room ? `≥ ${text}` : text;
    }

    cross() {
      const tile = this.tile();
      if (tile && tile.bins) this.chart.cross(this.view.step(), ks.layerAt(tile, this.view.depth()));
    }

    move([x, y]) {
      const tile = this.tile();
      if (tile) this.view.moveToDepth(x, ks.depthOf(tile, Math.min(tile.layers, Math.max(1, Math.round(y)))));
    }

    told([x, y]) {
      const tile = this.tile();
      if (!tile || !tile.bins || x > tile.edges[tile.bins] || x < tile.edges[0]) return [];
      return ks.tipLines(tile, ks.binAt(tile, x), Math.min(tile.layers, Math.max(1, Math.round(y))));
    }

    wheel(event) {
      const tile = this.tile();
      if (!(event.ctrlKey || event.metaKey) || !tile) return;
      event.preventDefault();
      const at = this.chart.at(event, true), whole = this.view.scene.extent(this.view.run(this.block.run), tile);
      this.zoomX = ks.within(ks.zoomed(this.chart.x, at[0], event.deltaY, 2), whole);
      this.zoomY = ks.within(ks.zoomed(this.chart.y, at[1], event.deltaY, 4), [0.5, tile.layers + 0.5]);
      this.draw();
    }
  };

  // A strip of colours with its ticks.
  ks.drawScale = function (box, title, colours, ticks) {
    const stops = Array.from({ length: 33 }, (_, i) => ks.css(colours[Math.round((i / 32) * (colours.length - 1))]));
    const bar = Object.assign(document.createElement("div"), { className: "scale-bar" });
    bar.style.background = `linear-gradient(90deg, ${stops.join(",")})`;
    const row = Object.assign(document.createElement("div"), { className: "scale-ticks" });
    row.append(...ticks.map(([left, text]) => {
      const tick = Object.assign(document.createElement("span"), { textContent: text });
      tick.style.left = `${left}%`;
      return tick;
    }));
    const scale = Object.assign(document.createElement("div"), { className: "legend-scale" });
    scale.append(bar, row);
    box.replaceChildren(ks.element("span", { class: "quiet" }, title), scale, ...MARKS.map(([kind, text]) => (
      ks.element("span", { class: "legend-mark" }, ks.element("span", { class: `swatch ${kind}` }), text))));
  };

  // Text that stays readable over lines.
  function write(context, text, x, y, palette) {
    context.strokeStyle = palette.paper;
    context.lineWidth = 3;
    context.lineJoin = "round";
    context.strokeText(text, x, y);
    context.fillStyle = palette.muted;
    context.fillText(text, x, y);
  }

  const MARKS = [["zero", "exactly 0"], ["nan", "NaN, Inf"], ["absent", "not observed"]];
  const NONE = { values: [], text: [] };
  const LEAST = 0.3; // decades that a ramp spans at least, so that what is alike looks alike
  const short = (value) => (value > 0 ? "+" : value < 0 ? "−" : "") + String(Number(Math.abs(value).toPrecision(2)));
})((window.keelscope = window.keelscope || {}));
