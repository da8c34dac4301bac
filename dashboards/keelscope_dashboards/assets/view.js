// The view: which runs, metric, step and layer are on show; changed by the pointer, the keyboard, the address, live data.
(function (ks) {
  "use strict";

  const REST = 120, ADDRESS_REST = 250, SHOWN_AT_FIRST = 6;
  const $ = (id) => document.getElementById(id);

  ks.View = class {
    constructor(settings, digest) {
      this.settings = settings;
      this.digest = digest; // of the words that Dash has drawn
      this.runs = [];
      this.focus = null;
      this.panel = settings.panels[0].name;
      this.hidden = null;
      this.at = null; // step under the cursor, null follows the newest
      this.layer = null;
      this.zoomX = this.zoomY = null;
      this.dirty = { all: false, cursor: false };
      this.rested = new Map();
      this.wish = ks.readAddress(location.search);
      if (settings.panels.some((panel) => panel.name === this.wish.metric)) this.panel = this.wish.metric;
      this.pages = new ks.Pages(this);
      this.scene = new ks.Scene(settings, this);
      this.slider = ks.makeSlider($("slider"), (step) => this.moveTo({ step }));
      this.picker = ks.makePicker($("picker"), this);
      this.pages.open(ks.readPage(location.pathname, settings.pages), this.wish.rest);
      this.data = new ks.Data((state, fresh) => this.onState(state, fresh), (run, panel) => this.onTile(run, panel), (n) => this.onLost(n));
      ks.listen(this);
      this.scene.drawLegend(this.panelOf());
      this.markPanel();
      this.data.start();
      if (this.pages.page.name === "overview") this.scene.mount();
    }

    // --- what is on show

    run(id) { return this.runs.find((run) => run.id === id) || null; }
    readable() { return this.runs.filter((run) => !run.error); }
    shown() { return this.readable().filter((run) => !this.hidden.has(run.id) && run.panels.includes(this.panel)); }
    drawn() { return this.readable().filter((run) => this.hidden && !this.hidden.has(run.id)); }
    tile() { return this.focus && this.data.tile(this.focus, this.panel); }
    panelOf() { return this.settings.panels.find((panel) => panel.name === this.panel); }

    step() {
      const tile = this.tile();
      if (!tile || !tile.bins) return this.wish.step !== null ? this.wish.step : Math.max(0, (this.run(this.focus) || {}).head || 0);
      if (this.at === null) return tile.last[tile.bins - 1];
      return this.at;
    }

    // Depth of the cursor, as the report counts it.
    depth() {
      const tile = this.tile();
      if (tile && this.layer !== null) return ks.depthOf(tile, this.layer);
      return Math.max(1, Math.round(this.wish.layer || 1));
    }

    // Nearest step that is recorded in the focused run.
    snapped(step) {
      const tile = this.tile();
      if (!tile || !tile.bins) return step;
      const bin = ks.binAt(tile, step);
      if (tile.behind && step > tile.last[tile.bins - 1]) return Math.round(step); // not read yet
      return Math.min(tile.last[bin], Math.max(tile.first[bin], Math.round(step)));
    }

    // Index of the layer of another run at the same relative depth as the cursor.
    layerOf(tile, own) {
      if (tile.layers === own.layers) return this.layer - 1;
      return own.layers < 2 ? tile.layers >> 1 : Math.round(((this.layer - 1) * (tile.layers - 1)) / (own.layers - 1));
    }

    whyEmpty() {
      const run = this.run(this.focus);
      if (!run) return "";
      if (run.rows === 0) return "Waiting for the first recorded step.";
      if (!run.panels.includes(this.panel)) return `${run.name} does not record ${this.panelOf().key}.`;
      return "Loading…";
    }

    // --- changes

    moveTo({ step, layer, follow }) {
      if (follow) this.at = null;
      else if (step !== undefined) this.at = this.snapped(step);
      const tile = this.tile();
      if (layer !== undefined && tile) this.layer = Math.min(tile.layers, Math.max(1, Math.round(layer)));
      this.invalidate("cursor");
      this.rest();
    }

    focusOn(id) {
      const run = this.run(id);
      if (!run || run.error || id === this.focus) return;
      const before = this.tile();
      this.focus = id;
      this.hidden.delete(id);
      this.zoomX = this.zoomY = null;
      if (before && this.tile()) this.layer = this.layerOf(this.tile(), before) + 1;
      if (this.at !== null && this.tile()) this.at = this.snapped(this.at);
      this.load();
      this.decorate();
      this.invalidate();
      this.rest();
    }

    show(id, on) {
      if (on) this.hidden.delete(id); else if (id !== this.focus) this.hidden.add(id);
      this.load();
      this.decorate();
      this.invalidate();
      this.rest();
    }

    // These runs and no others, the focus on one of them.
    drawOnly(ids) {
      if (!ids.length) return;
      this.hidden = new Set(this.readable().map((run) => run.id).filter((id) => !ids.includes(id)));
      if (ids.includes(this.focus)) this.show(this.focus, true); else this.focusOn(ids[0]);
    }

    setPanel(name) {
      if (name === this.panel || !this.settings.panels.some((panel) => panel.name === name)) return;
      this.panel = name;
      this.scene.drawLegend(this.panelOf());
      this.markPanel();
      this.load();
      this.invalidate();
      this.rest();
    }

    markPanel() {
      for (const button of document.querySelectorAll("[data-metric]")) button.setAttribute("aria-pressed", String(button.dataset.metric === this.panel));
    }

    moveToDepth(step, depth) {
      const tile = this.tile();
      this.moveTo({ step, layer: tile && depth !== undefined ? ks.layerAt(tile, depth) : undefined });
    }

    // Step by step through the run, a few seconds for all of it.
    play(on) {
      clearInterval(this.playing);
      this.playing = null;
      const tile = this.tile();
      if (on && tile && tile.bins > 1) {
        const last = tile.last[tile.bins - 1], stride = Math.max(1, Math.round(tile.bins / 80));
        if (this.step() >= last) this.moveTo({ step: tile.first[0] });
        this.playing = setInterval(() => {
          const own = this.tile(), bin = own ? Math.min(own.bins - 1, ks.binAt(own, this.step()) + stride) : 0;
          if (!own || this.step() >= own.last[own.bins - 1]) return this.play(false);
          this.moveTo({ step: own.first[bin] });
          return null;
        }, 110);
      }
      for (const button of document.querySelectorAll(".play")) {
        button.setAttribute("aria-pressed", String(Boolean(this.playing)));
        button.setAttribute("aria-label", this.playing ? "Stop" : "Play the steps");
      }
    }

    zoom(x, y) {
      this.zoomX = x;
      this.zoomY = y;
      this.invalidate();
      this.rest();
    }

    restyle() {
      this.scene.use();
      this.scene.drawLegend(this.panelOf());
      this.pages.restyle();
      this.invalidate();
    }

    // --- data

    onState(state, fresh) {
      if (fresh) {
        this.runs = state.runs;
        const before = this.focus;
        this.choose();
        if (this.focus !== before) this.decorate();
        this.load();
        if (state.digest !== this.digest) {
          this.digest = state.digest;
          window.dash_clientside.set_props("digest", { data: state.digest });
        }
        document.body.classList.toggle("no-runs", !this.runs.length);
        document.body.classList.toggle("no-charts", !this.readable().length);
        this.picker.update();
        this.invalidate("cursor");
      }
      ks.tell(this);
      document.body.dataset.ready = "true";
    }

    // The focused run and the shown ones, at first as the address says.
    choose() {
      if (this.hidden === null && this.runs.length) {
        const named = this.wish.runs;
        const keep = named ? (run) => named.includes(run.name) : (_, i) => i < SHOWN_AT_FIRST;
        this.hidden = new Set(this.readable().filter((run, i) => !keep(run, i)).map((run) => run.id));
      }
      this.hidden = this.hidden || new Set();
      if (this.run(this.focus) && !this.run(this.focus).error) return;
      const wished = this.readable().find((run) => run.name === this.wish.run);
      const first = wished || this.readable().find((run) => run.status === "live") || this.readable()[0];
      this.focus = first ? first.id : null;
      if (first) this.hidden.delete(first.id);
    }

    load() {
      const own = this.run(this.focus);
      if (own && this.pages.page.name !== "overview" && own.panels.length && !own.panels.includes(this.panel)) {
        this.panel = own.panels[0];
        this.scene.drawLegend(this.panelOf());
        this.markPanel();
      }
      const order = this.shown().sort((a, b) => (b.id === this.focus) - (a.id === this.focus));
      for (const run of order) this.data.want(run.id, this.panel, run.revision);
    }

    onTile(run, panel) {
      this.pages.onTile(run, panel);
      if (panel !== this.panel) return;
      if (run === this.focus) this.settle();
      this.rested.clear();
      this.invalidate();
      this.rest();
    }

    // First tile of the focused run: place the cursor as the address says, else at a third of the depth.
    settle() {
      const tile = this.tile();
      if (!tile || !tile.bins) return;
      if (this.layer === null) {
        const { step, layer, x, y } = this.wish;
        this.layer = layer === null ? Math.max(1, Math.round(tile.layers * 0.3)) : ks.layerAt(tile, layer);
        if (step !== null) this.at = this.snapped(step);
        this.zoomX = x;
        this.zoomY = y;
      }
      this.layer = Math.min(tile.layers, Math.max(1, this.layer));
      if (this.at !== null) this.at = this.snapped(this.at);
    }

    warn(sentence) {
      const banner = $("banner");
      banner.hidden = false;
      banner.textContent = sentence;
      setTimeout(() => { if (banner.textContent === sentence) banner.hidden = true; }, 6000);
    }

    onLost(times) {
      const banner = $("banner");
      if (!banner) return;
      banner.hidden = times < 2;
      banner.textContent = "Connection to keelscope lost. Retrying; what is shown stays.";
      if (times) ks.tell(this);
    }

    // Exact rows replace pooled ones once the cursor rests; only needed where a bin holds several steps.
    exact(kind, run) { return this.rested.get(`${kind}|${run.id}`) || null; }

    async refine() {
      const own = this.tile(), step = this.step(), layer = this.layer, panel = this.panel;
      if (!own || this.pages.page.name !== "overview") return;
      for (const run of this.shown()) {
        const tile = this.data.tile(run.id, panel);
        if (!tile || tile.rows === 1) continue;
        try {
          const profile = await this.data.rows("profile", run.id, panel, step, tile.revision);
          const history = await this.data.rows("history", run.id, panel, this.layerOf(tile, own), tile.revision);
          if (step !== this.step() || layer !== this.layer || panel !== this.panel) return;
          this.rested.set(`profile|${run.id}`, marked(profile.arrays));
          this.rested.set(`history|${run.id}`, history.arrays);
        } catch (error) {
          return;
        }
      }
      this.invalidate("cursor", true);
    }

    // --- drawing, at most once per frame

    invalidate(part, keep) {
      if (part === "cursor" && !keep) this.rested.clear();
      this.dirty[part || "all"] = true;
      if (this.framed) return;
      this.framed = true;
      requestAnimationFrame(() => this.paint());
    }

    paint() {
      this.framed = false;
      const { all } = this.dirty;
      this.dirty = { all: false, cursor: false };
      if (this.hidden === null) return;
      this.pages.paint();
      if (this.pages.page.name !== "overview") {
        ks.tell(this);
        return;
      }
      this.scene.mount();
      if (all || !this.tile()) {
        this.scene.draw();
        this.scene.drawThumbs();
      } else {
        this.scene.drawCursor();
      }
      this.slider.update(this);
      ks.tell(this);
    }

    rest() {
      clearTimeout(this.resting);
      clearTimeout(this.writing);
      this.resting = setTimeout(() => this.refine(), REST);
      this.writing = setTimeout(() => this.writeAddress(), ADDRESS_REST);
    }

    writeAddress(push) {
      clearTimeout(this.writing);
      history[push ? "pushState" : "replaceState"](null, "", ks.writeAddress(this));
    }

    // The browser's back and forward: take page, run, step and layer from the address.
    restore() {
      const wish = ks.readAddress(location.search), named = this.readable().find((run) => run.name === wish.run);
      this.wish = wish;
      if (named && named.id !== this.focus) this.focusOn(named.id);
      if (wish.metric) this.setPanel(wish.metric);
      if (wish.runs) this.hidden = new Set(this.readable().filter((run) => !wish.runs.includes(run.name) && run.id !== this.focus).map((run) => run.id));
      this.zoomX = wish.x;
      this.zoomY = wish.y;
      this.pages.open(ks.readPage(location.pathname, this.settings.pages), wish.rest);
      const tile = this.tile();
      if (tile && wish.layer !== null) this.layer = ks.layerAt(tile, wish.layer);
      this.at = wish.step === null ? null : this.snapped(wish.step);
      this.load();
      this.decorate();
      this.invalidate();
    }

    // Marks on elements that Dash has drawn: which run is focused, which are shown, thumbnails.
    decorate() {
      for (const element of document.querySelectorAll(".run[data-run], .card[data-run]")) {
        const on = element.dataset.run === this.focus;
        element.classList.toggle("focused", on);
        element.setAttribute("aria-current", on ? "true" : "false");
        if (on && this.focus !== this.revealed) element.scrollIntoView({ block: "nearest", inline: "nearest" });
      }
      this.revealed = this.focus;
      for (const eye of document.querySelectorAll("[data-show]")) {
        eye.setAttribute("aria-pressed", this.hidden && this.hidden.has(eye.dataset.show) ? "false" : "true");
      }
      this.picker.update();
      this.dealCards();
      this.scene.drawThumbs();
    }

    // Of hundreds of runs only those on show have a card.
    dealCards() {
      if (this.readable().length <= this.settings.cards) return;
      const ids = this.drawn().slice(0, this.settings.cards).map((run) => run.id), key = ids.join();
      if (key === this.dealt) return;
      this.dealt = key;
      window.dash_clientside.set_props("dealt", { data: ids });
    }
  };

  // Levels with the marks of their kinds.
  function marked({ levels, kinds }) {
    const out = Float64Array.from(levels);
    let nan = 0;
    kinds.forEach((kind, i) => {
      if (kind === ks.KIND.nan) nan += 1;
      if (kind === ks.KIND.zero) out[i] = -Infinity;
      else if (kind === ks.KIND.inf) out[i] = Infinity;
      else if (kind !== ks.KIND.value) out[i] = NaN;
    });
    return { levels: out, nan, kinds };
  }
})((window.keelscope = window.keelscope || {}));
