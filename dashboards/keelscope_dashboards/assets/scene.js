// What the three linked charts show for one view: ranges, heatmap cells, profiles, histories, thumbnails.
(function (ks) {
  "use strict";

  const LEVEL_SPAN = 4; // decades an axis of levels spans at least, so that flat looks flat

  ks.Scene = class {
    constructor(settings, view) {
      this.settings = settings;
      this.view = view;
      this.levels = { key: "", range: [-1, 0] };
      this.use();
    }

    // Make the charts, which need boxes of some size, once.
    mount() {
      if (this.heatmap) return;
      const redraw = () => this.view.invalidate();
      this.heatmap = new ks.Chart(document.getElementById("heatmap"), this.frames.heatmap, redraw);
      this.profile = new ks.Chart(document.getElementById("profile"), this.frames.profile, redraw);
      this.history = new ks.Chart(document.getElementById("history"), this.frames.history, redraw);
      ks.listenToCharts(this.view);
    }

    // Take the colours of the scheme that is on.
    use() {
      const scheme = document.documentElement.getAttribute("data-scheme") === "dark" ? "dark" : "light";
      const { settings } = this;
      this.scheme = scheme;
      this.palette = settings.palettes[scheme];
      this.frames = settings.frames[scheme];
      this.colours = ks.lookup(settings.colours[scheme]);
      this.ramp = ks.lookup(settings.ramps[scheme]);
      this.plain = settings.plain[scheme];
      const dark = scheme === "dark", ratio = window.devicePixelRatio || 1;
      this.look = {
        colours: this.colours, limit: settings.limit, period: Math.round(6 * ratio), stroke: Math.round(2 * ratio),
        ground: word(dark ? "#23272d" : "#ffffff"), zero: word(dark ? "#7d8590" : "#8a929d"),
        dots: word(dark ? "#4b535e" : "#aab2bd"), blank: word(dark ? "#0f1215" : "#f4f6f8"),
        alarmGround: word(dark ? "#3a1230" : "#fbe3f1"), alarm: word(dark ? "#ff6ac1" : "#c2257a"),
      };
      this.painted = "";
    }

    colour(run) { return this.palette.runs[run.slot % this.palette.runs.length]; }

    draw() {
      const { view } = this;
      const tile = view.tile();
      if (!tile || tile.bins === 0) return this.blank();
      const x = this.stepRange(tile), y = view.zoomY || [0.5, tile.layers + 0.5];
      const layers = ks.layerTicks(y[0], y[1], Math.max(2, this.heatmap.height / 38), tile);
      const levels = this.levelRange();
      this.frames.heatmap.yaxis.title.text = `${tile.depth} (${ks.depthOf(tile, 1)} = input)`;
      const steps = ks.countTicks(x, Math.max(2, this.heatmap.width / 72));
      this.heatmap.axes(this.frames.heatmap, { range: x, ticks: steps }, { range: y, ticks: layers });
      this.profile.axes(this.frames.profile, { range: levels, ticks: ks.powerTicks(levels, this.profile.width / 60) }, { range: y, ticks: layers });
      this.history.axes(this.frames.history, { range: x, ticks: steps }, { range: levels, ticks: ks.powerTicks(levels, this.history.height / 24) });
      this.drawCells(tile);
      this.drawCursor();
    }

    // Only what depends on the cursor.
    drawCursor() {
      const { view } = this;
      if (!view.tile()) return;
      this.drawProfiles();
      this.drawHistories();
      this.heatmap.cross(view.step(), view.layer);
      this.profile.cross(null, view.layer);
      this.history.cross(view.step(), null);
    }

    blank() {
      for (const chart of [this.heatmap, this.profile, this.history]) {
        chart.axes(this.frames[chart.box.id], { range: [0, 1], ticks: NO_TICKS }, { range: [0, 1], ticks: NO_TICKS });
        chart.clear();
        chart.cross(null, null);
        chart.say([]);
      }
      this.painted = "";
      this.heatmap.say([this.view.whyEmpty()]);
    }

    // Steps of all shown runs, or of the focused one alone where it would be a sliver among them.
    stepRange(tile) {
      const { view } = this;
      if (view.zoomX) return view.zoomX;
      const own = this.extent(view.run(view.focus), tile);
      let [low, high] = own;
      for (const run of view.shown()) {
        const other = view.data.tile(run.id, view.panel);
        if (!other || !other.bins) continue;
        const [from, to] = this.extent(run, other);
        low = Math.min(low, from);
        high = Math.max(high, to);
      }
      return own[1] - own[0] < (high - low) / 3 ? own : [low, high];
    }

    // First and last step of a run; one that is being written gets room for what is to come.
    extent(run, tile) {
      const end = tile.edges[tile.bins];
      if (run.status !== "live") return [tile.edges[0], tile.behind ? Math.max(end, run.head) : end];
      return [tile.edges[0], Math.max(end, run.planned > run.head ? run.planned : ks.roomFor(end))];
    }

    // Range of the level axes: wide enough for all shown runs but stray cells; it only grows while the same runs are shown.
    levelRange() {
      const { view } = this, shown = view.shown();
      const key = `${view.panel}|${shown.map((run) => run.id).join()}`;
      const version = shown.map((run) => (view.data.tile(run.id, view.panel) || {}).revision).join();
      if (this.levels.key === key && this.levels.version === version) return this.levels.range;
      let low = Infinity, high = -Infinity;
      for (const run of shown) {
        const tile = view.data.tile(run.id, view.panel), spread = tile && ks.spread(tile, 0.002, 0.998);
        if (spread) { low = Math.min(low, spread[0]); high = Math.max(high, spread[1]); }
      }
      if (low > high) [low, high] = [-1, 0];
      const middle = (low + high) / 2, half = Math.max(LEVEL_SPAN, (high - low) * 1.12) / 2;
      let range = [middle - half, middle + half];
      if (this.levels.key === key && low >= this.levels.range[0] && high <= this.levels.range[1]) range = this.levels.range;
      this.levels = { key, version, range };
      return range;
    }

    drawCells(tile) {
      const chart = this.heatmap, { view } = this;
      const key = [view.focus, view.panel, tile.revision, tile.bins, chart.x, chart.y, chart.width, chart.height, chart.ratio, this.scheme].join("|");
      if (key === this.painted) return;
      this.painted = key;
      const context = chart.clear();
      const image = context.createImageData(chart.canvas.width, chart.canvas.height);
      ks.paintCells(image, tile, { x0: chart.x[0], x1: chart.x[1], y0: chart.y[0], y1: chart.y[1] }, this.look);
      context.putImageData(image, 0, 0);
      const end = chart.px(tile.edges[tile.bins]);
      chart.say([]);
      if (chart.width - end > 90) this.noteAfter(chart, end);
    }

    noteAfter(chart, left) {
      const run = this.view.run(this.view.focus);
      chart.say([this.view.tile().behind ? "reading" : run.status === "live" ? "not yet trained" : "not recorded"]);
      chart.notes.firstChild.style.marginLeft = `${left + 10}px`;
    }

    style(run) {
      const focused = run.id === this.view.focus;
      return {
        colour: this.colour(run), symbol: this.settings.symbols[run.slot], slot: run.slot, halo: this.palette.paper,
        width: focused ? 1.9 : 1.4, alpha: focused ? 1 : 0.85,
      };
    }

    // Shown runs with the focused one last, so that it lies on top.
    stacked() {
      const { view } = this;
      return view.shown().filter((run) => run.id !== view.focus).concat(view.shown().filter((run) => run.id === view.focus));
    }

    drawProfiles() {
      const chart = this.profile, { view } = this, context = chart.clear(), notes = [];
      const own = view.tile();
      for (const run of this.stacked()) {
        const tile = view.data.tile(run.id, view.panel);
        if (!tile || !tile.bins) continue;
        const levels = this.profileOf(run, tile);
        const xs = new Float64Array(levels.length), ys = new Float64Array(levels.length);
        for (let i = 0; i < levels.length; i++) {
          xs[i] = chart.px(levels[i]);
          ys[i] = chart.py(spread(i, tile.layers, own.layers));
        }
        ks.paintLine(context, xs, ys, this.style(run));
        zeroTicks(context, levels, (i) => [0, ys[i] - 0.75, 6, 1.5], this.colour(run));
        notes.push(...this.offAxis(run, levels, this.nanCount(run, tile)));
      }
      chart.say(notes);
    }

    profileOf(run, tile) {
      const { view } = this, exact = view.exact("profile", run);
      if (exact) return exact.levels;
      const bin = ks.binAt(tile, view.step());
      return Float64Array.from({ length: tile.layers }, (_, i) => ks.levelAt(tile, bin, i));
    }

    nanCount(run, tile) {
      const exact = this.view.exact("profile", run), from = ks.binAt(tile, this.view.step()) * tile.layers;
      return exact ? exact.nan : tile.codes.subarray(from, from + tile.layers).reduce((n, code) => n + (code === ks.NAN), 0);
    }

    offAxis(run, levels, nan) {
      let zeros = 0, bad = 0, below = 0;
      const floor = this.levels.range[0];
      for (const level of levels) {
        if (level === -Infinity) zeros++;
        else if (level === Infinity) bad++;
        else if (level < floor) below++;
      }
      const notes = [];
      const layers = (n) => `${ks.count(n)} layer${n > 1 ? "s" : ""}`;
      if (zeros) notes.push(`${run.name}: ${layers(zeros)} exactly 0`);
      if (nan) notes.push(`${run.name}: ${layers(nan)} NaN`);
      if (bad) notes.push(`${run.name}: ${layers(bad)} infinite`);
      if (below) notes.push(`${run.name}: ${layers(below)} below 10${ks.power(Math.floor(floor))}`);
      return notes;
    }

    drawHistories() {
      const chart = this.history, { view } = this, context = chart.clear();
      const own = view.tile();
      for (const run of this.stacked()) {
        const tile = view.data.tile(run.id, view.panel);
        if (!tile || !tile.bins) continue;
        const layer = view.layerOf(tile, own);
        const style = this.style(run), band = view.exact("history", run);
        if (band) this.drawBand(chart, context, band, style);
        else this.drawBins(chart, context, tile, layer, style);
      }
    }

    drawBins(chart, context, tile, layer, style) {
      const xs = new Float64Array(tile.bins), ys = new Float64Array(tile.bins);
      for (let bin = 0; bin < tile.bins; bin++) {
        xs[bin] = chart.px((tile.first[bin] + tile.last[bin]) / 2);
        ys[bin] = chart.py(ks.levelAt(tile, bin, layer));
      }
      ks.paintLine(context, xs, ys, style);
      const levels = { length: tile.bins, at: (bin) => ks.levelAt(tile, bin, layer) };
      zeroTicks(context, levels, (bin) => [xs[bin] - 0.75, chart.height - 6, 1.5, 6], style.colour);
    }

    drawBand(chart, context, band, style) {
      const n = band.first.length;
      const xs = Float64Array.from({ length: n }, (_, i) => chart.px((band.first[i] + band.last[i]) / 2));
      context.globalAlpha = 0.25;
      context.fillStyle = style.colour;
      context.beginPath();
      for (let i = 0; i < n; i++) context.lineTo(xs[i], chart.py(band.high[i]));
      for (let i = n - 1; i >= 0; i--) context.lineTo(xs[i], chart.py(band.low[i]));
      context.fill();
      ks.paintLine(context, xs, Float64Array.from({ length: n }, (_, i) => chart.py((band.low[i] + band.high[i]) / 2)), style);
    }

    // Small heatmaps on the verdict cards.
    drawThumbs() {
      for (const canvas of document.querySelectorAll("canvas[data-thumb]")) {
        const tile = this.view.data.tile(canvas.dataset.thumb, this.view.panel);
        if (tile && tile.bins && this.view.run(canvas.dataset.thumb)) this.drawThumb(canvas, tile);
      }
    }

    drawThumb(canvas, tile) {
      const run = this.view.run(canvas.dataset.thumb);
      const key = `${tile.revision}|${this.view.panel}|${this.scheme}`;
      if (canvas.painted === key || !canvas.clientWidth) return;
      canvas.painted = key;
      const ratio = window.devicePixelRatio || 1;
      canvas.width = Math.round(canvas.clientWidth * ratio);
      canvas.height = Math.round(canvas.clientHeight * ratio);
      const context = canvas.getContext("2d"), image = context.createImageData(canvas.width, canvas.height);
      const [start, end] = this.extent(run, tile);
      ks.paintCells(image, tile, { x0: start, x1: end, y0: 0.5, y1: tile.layers + 0.5 }, this.look);
      context.putImageData(image, 0, 0);
    }

    drawLegend(panel) {
      const ticks = this.legendTicks();
      const against = { output: "decades vs output side", input: "decades vs input side", median: "decades vs depth median" };
      document.getElementById("legend-title").textContent = against[panel.reference];
      const stops = Array.from({ length: 33 }, (_, i) => ks.css(this.colours[Math.round((i / 32) * (this.colours.length - 1))]));
      document.getElementById("legend-bar").style.background = `linear-gradient(90deg, ${stops.join(",")})`;
      document.getElementById("legend-ticks").replaceChildren(...ticks.map(([left, text]) => {
        const element = document.createElement("span");
        element.textContent = text;
        element.style.left = `${left}%`;
        return element;
      }));
    }

    // Where each tick of the colour scale lies, in percent, and what it says.
    legendTicks() {
      return this.settings.ticks.map((tick) => [50 * (1 + ks.symlog(tick, this.settings.limit)), tick > 0 ? `+${tick}` : String(tick).replace("-", "−")]);
    }

    // A run in the profile and in the history, as they are drawn.
    profileLine(run) {
      const tile = this.view.data.tile(run.id, this.view.panel);
      if (!tile || !tile.bins) return {};
      return { x: Array.from({ length: tile.layers }, (_, i) => ks.depthOf(tile, i + 1)), y: this.profileOf(run, tile) };
    }

    historyLine(run) {
      const { view } = this, tile = view.data.tile(run.id, view.panel), band = view.exact("history", run);
      if (!tile || !tile.bins) return {};
      if (band) return { x: band.first, y: band.low.map((low, i) => (low + band.high[i]) / 2), low: band.low, high: band.high };
      const layer = view.layerOf(tile, view.tile());
      return { x: tile.last, y: Float64Array.from({ length: tile.bins }, (_, bin) => ks.levelAt(tile, bin, layer)) };
    }
  };

  // Position of layer index i of a run with `layers` layers on an axis of `on` layers: by relative depth.
  const spread = (i, layers, on) => (layers === on ? i + 1 : layers === 1 ? (on + 1) / 2 : 1 + (i * (on - 1)) / (layers - 1));

  // Exact zeros have no place on an axis of powers: short ticks at its low end.
  function zeroTicks(context, levels, box, colour) {
    context.fillStyle = colour;
    for (let i = 0; i < levels.length; i++) if (levels.at(i) === -Infinity) context.fillRect(...box(i));
  }

  const NO_TICKS = { values: [], text: [] };

  function word(hex) {
    const n = parseInt(hex.slice(1), 16);
    return ((255 << 24) | ((n & 255) << 16) | (n & 0xff00) | (n >> 16)) >>> 0;
  }
})((window.keelscope = window.keelscope || {}));
