// The pages beside the overview: which one is open, its controls, and its blocks, asked for when something has changed.
(function (ks) {
  "use strict";

  const MAX_RUNS = 8;
  const $ = (id) => document.getElementById(id);
  const el = (...parts) => ks.element(...parts);

  ks.Pages = class {
    constructor(view) {
      this.view = view;
      this.all = view.settings.pages;
      this.page = this.all[0];
      this.chosen = {}; // by page, by choice: what the user has chosen
      this.blocks = [];
      this.shape = this.done = "";
    }

    // --- which page

    open(page, wished) {
      this.page = page;
      if (page.name !== "overview") this.chosen[page.name] = wished || this.chosen[page.name] || {};
      document.documentElement.dataset.page = page.name;
      document.title = page.name === "overview" ? "keelscope" : `${page.title} · keelscope`;
      this.clear();
      for (const link of document.querySelectorAll(".page-link[data-page]")) {
        link.setAttribute("aria-current", link.dataset.page === page.name ? "page" : "false");
      }
      if (page.name !== "overview") this.frame();
    }

    go(name) {
      const page = this.all.find((one) => one.name === name);
      if (!page || page === this.page) return;
      const { view } = this;
      view.writeAddress(false);
      this.open(page);
      view.writeAddress(true);
      view.load();
      view.invalidate();
      window.scrollTo(0, 0);
    }

    next(n) {
      const at = this.all.indexOf(this.page);
      this.go(this.all[(at + n + this.all.length) % this.all.length].name);
    }

    wished() { return this.chosen[this.page.name] || {}; }

    choose(name, values) {
      this.chosen[this.page.name] = { ...this.wished(), [name]: values };
      this.fresh = true;
      this.view.invalidate();
      this.view.rest();
    }

    // --- the frame of a page: title, controls, slider

    frame() {
      const { page, view } = this;
      this.controls = el("div", { class: "controls" });
      this.focused = el("span", { class: "chip mono" });
      const head = el("div", { class: "page-head" }, el("h1", {}, page.title), this.focused, el("p", { class: "quiet" }, page.question));
      this.body = el("div", { class: "blocks" });
      this.scrub = page.scrub ? this.makeScrub() : null;
      $("page").replaceChildren(head, this.controls, ...(this.scrub ? [this.scrub.element] : []), this.body);
      view.play(false);
    }

    makeScrub() {
      const { view } = this;
      const input = el("input", { type: "range", min: 0, max: 1, step: "any", value: 0, "aria-label": "Step", id: "scrub-step" });
      input.addEventListener("input", () => view.moveTo({ step: Number(input.value) }));
      const where = el("output", { class: "where mono" }), place = el("span", { class: "where mono" });
      const turn = (label, n, text) => {
        const button = el("button", { type: "button", class: "turn", "aria-label": label }, text);
        button.addEventListener("click", () => { const tile = view.tile(); if (tile) view.moveTo({ layer: view.layer + n }); });
        return button;
      };
      const layers = el("span", { class: "turns" }, turn("Layer towards the input", -1, "‹"), place, turn("Layer towards the output", 1, "›"));
      const follow = el("button", { type: "button", class: "soft follow" }, "Follow");
      return { element: el("div", { class: "scrub slider" }, ks.playButton(), input, where, layers, follow), input, where, place, follow };
    }

    drawScrub() {
      const { view, scrub } = this, tile = view.tile(), run = view.run(view.focus);
      this.focused.hidden = !run || !this.page.single;
      this.focused.textContent = run ? run.name : "";
      if (!scrub) return;
      scrub.element.hidden = !tile || tile.bins < 1;
      if (scrub.element.hidden) return;
      const step = view.step(), [low, high] = [tile.first[0], tile.last[tile.bins - 1]];
      [scrub.input.min, scrub.input.max] = [low, Math.max(high, low + 1)];
      scrub.input.value = step;
      scrub.input.setAttribute("aria-valuetext", `step ${ks.count(step)}`);
      scrub.input.style.setProperty("--done", `${(100 * (step - low)) / Math.max(1, high - low)}%`);
      scrub.where.textContent = `step ${ks.count(step)}`;
      scrub.place.textContent = ks.depthText(tile, view.layer || 1);
      const following = view.at === null;
      scrub.follow.hidden = following && run.status !== "live";
      scrub.follow.textContent = following ? "Following" : run.status === "live" ? "Follow" : "Last step";
      scrub.follow.classList.toggle("on", following);
    }

    drawControls(choices) {
      const key = JSON.stringify(choices);
      if (key === this.drawnControls) return;
      this.drawnControls = key;
      const held = document.activeElement && document.activeElement.dataset ? document.activeElement.dataset.control : null;
      this.controls.replaceChildren(...choices.filter((choice) => choice.options.length).map((choice) => this.control(choice)));
      const again = held && this.controls.querySelector(`[data-control="${CSS.escape(held)}"]`);
      if (again) again.focus();
    }

    control(choice) {
      if (choice.look === "select") return choice.most > 1 ? this.chips(choice) : this.select(choice);
      const buttons = choice.options.map((option) => {
        const on = choice.chosen.includes(option.value);
        const button = el("button", { type: "button", "aria-pressed": String(on), "data-control": `${choice.name}:${option.value}` }, option.label);
        button.addEventListener("click", () => this.choose(choice.name, toggled(choice, option.value)));
        return button;
      });
      return el("div", { class: "control", role: "group", "aria-label": choice.label }, el("span", { class: "label" }, choice.label), el("div", { class: "segments" }, ...buttons));
    }

    select(choice) {
      const box = this.options(choice, choice.chosen[0]);
      box.addEventListener("change", () => this.choose(choice.name, [box.value]));
      return el("label", { class: "control" }, el("span", { class: "label" }, choice.label), box);
    }

    options(choice, value, first) {
      const box = el("select", { "data-control": choice.name, "aria-label": choice.label });
      if (first) box.append(el("option", { value: "" }, first));
      const groups = new Map();
      for (const option of choice.options) {
        const group = option.group || "";
        if (!groups.has(group)) groups.set(group, group ? el("optgroup", { label: group.replaceAll("_", " ") }) : box);
        groups.get(group).append(el("option", { value: option.value, selected: option.value === value }, option.label));
      }
      box.append(...[...groups.values()].filter((group) => group !== box));
      return box;
    }

    chips(choice) {
      const chips = choice.chosen.map((value) => {
        const alone = choice.chosen.length === 1;
        const chip = el("button", { type: "button", class: "chip mono", disabled: alone, "aria-label": `Remove ${value}`, "data-control": `${choice.name}:${value}` }, value, alone ? "" : " ×");
        chip.addEventListener("click", () => this.choose(choice.name, choice.chosen.filter((one) => one !== value)));
        return chip;
      });
      const box = this.options(choice, "", "Add…");
      box.disabled = choice.chosen.length >= choice.most;
      box.addEventListener("change", () => { if (box.value) this.choose(choice.name, [...choice.chosen, box.value]); });
      return el("div", { class: "control", role: "group", "aria-label": choice.label }, el("span", { class: "label" }, choice.label), ...chips, box);
    }

    // --- asking

    query() {
      const { view, page } = this, query = new URLSearchParams();
      query.set("run", view.focus);
      query.set("runs", view.drawn().slice(0, MAX_RUNS).map((run) => run.id).join(","));
      if (page.follows.includes("step")) query.set("step", String(Math.round(view.step())));
      if (page.follows.includes("depth")) query.set("depth", String(view.depth()));
      for (const [name, values] of Object.entries(this.wished())) query.set(name, values.join(","));
      return String(query);
    }

    key() {
      const { view, page } = this;
      const revisions = view.drawn().map((run) => run.revision).join();
      return [page.name, this.query(), revisions, page.follows.includes("verdict") ? view.digest : ""].join("|");
    }

    paint() {
      if (this.page.name === "overview") return;
      const { view } = this, run = view.run(view.focus);
      this.drawScrub();
      for (const block of this.blocks) if (block.cross) block.cross();
      if (!run) return;
      if (run.rows === 0) return this.say("Waiting for the first recorded step", "The page fills as soon as it is written.");
      if (!view.tile() && run.panels.includes(view.panel)) return; // the cursor is not known yet
      this.refresh();
    }

    async refresh() {
      const key = this.key(), { page } = this;
      if (this.busy || key === this.done) return;
      this.busy = true;
      try {
        const { header, arrays } = await this.view.data.binary(`pages/${page.name}?${this.query()}`);
        if (page === this.page) {
          this.done = key;
          this.draw(header.choices, ks.revived(header.blocks, arrays));
        }
      } catch (error) {
        if (error instanceof ks.Refused && page === this.page) { this.done = key; this.say("This page could not be drawn", "The run may have been removed or replaced."); }
      } finally {
        this.busy = false;
      }
      if (this.page.name !== "overview" && this.key() !== this.done) this.view.invalidate("cursor", true);
    }

    say(title, sentence) { this.draw([], [{ kind: "notice", title, sentence, code: "", size: "wide" }]); }

    // --- drawing: charts of the same shape are kept and redrawn, everything else is made anew

    draw(choices, blocks) {
      this.drawControls(choices);
      const shape = JSON.stringify([this.page.name, blocks.map((block) => [block.kind, block.size, ALIVE.has(block.kind) ? block.title : block, Boolean(block.note)])]);
      if (shape === this.shape) {
        blocks.forEach((block, i) => { if (this.blocks[i].update) this.blocks[i].update(block, !this.fresh); });
      } else {
        this.close();
        this.shape = shape;
        this.blocks = blocks.map((block) => ks.BLOCKS[block.kind](block));
        this.body.replaceChildren(...this.blocks.map((block) => block.element));
        for (const block of this.blocks) if (block.ready) block.ready(this.view);
        this.view.decorate();
      }
      this.fresh = false;
      if (blocks.some((block) => block.pending)) setTimeout(() => { this.done = ""; this.view.invalidate("cursor", true); }, 100);
      document.body.dataset.drawn = this.page.name;
    }

    // The heatmaps of the page that show one series in one way, of whatever run.
    heats(panel) { return this.blocks.map((block) => block.heat && block.heat()).filter((chart) => chart && chart.panel() === panel); }

    onTile(run, name) { for (const chart of this.heats(name)) chart.draw(); }

    restyle() { for (const block of this.blocks) if (block.draw) block.draw(); }

    close() {
      for (const block of this.blocks) if (block.close) block.close();
      this.blocks = [];
    }

    clear() {
      this.close();
      this.shape = this.done = this.drawnControls = "";
      delete document.body.dataset.drawn;
      if ($("page")) $("page").replaceChildren();
    }
  };

  const ALIVE = new Set(["chart", "heat"]);

  // The values of a choice after a click on one of its buttons.
  function toggled(choice, value) {
    if (choice.most === 1) return [value];
    const rest = choice.chosen.filter((one) => one !== value);
    if (rest.length < choice.chosen.length) return rest.length ? rest : choice.chosen;
    return choice.options.map((option) => option.value).filter((one) => one === value || rest.includes(one)).slice(0, choice.most);
  }
  ks.toggled = toggled;
})((window.keelscope = window.keelscope || {}));
