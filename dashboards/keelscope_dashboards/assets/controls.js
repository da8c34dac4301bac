// Everything a person does: pointer, wheel, keyboard, slider, buttons; and the words that answer.
(function (ks) {
  "use strict";

  const $ = (id) => document.getElementById(id);

  // --- slider: a real range input over the step axis, its thumb centred on the cursor line

  ks.makeSlider = function (box, onStep) {
    const input = document.createElement("input");
    Object.assign(input, { type: "range", id: "step", min: 0, max: 1, value: 0, step: "any" });
    input.setAttribute("aria-label", "Step");
    box.append(ks.playButton(), input);
    input.addEventListener("input", () => onStep(Number(input.value)));
    return {
      input,
      update(view) {
        const chart = view.scene.heatmap, step = view.step();
        input.style.marginLeft = `${chart.left - 9 - 34}px`;
        input.style.width = `${chart.width + 18}px`;
        [input.min, input.max] = chart.x;
        input.value = step;
        const share = (step - chart.x[0]) / (chart.x[1] - chart.x[0]);
        input.style.setProperty("--done", `${100 * Math.min(1, Math.max(0, share))}%`);
        input.setAttribute("aria-valuetext", `step ${ks.count(step)}`);
      },
    };
  };

  ks.playButton = function () {
    const button = document.createElement("button");
    Object.assign(button, { type: "button", className: "play" });
    button.setAttribute("aria-label", "Play the steps");
    button.setAttribute("aria-pressed", "false");
    button.appendChild(Object.assign(document.createElement("span"), { className: "icon icon-play" }));
    return button;
  };

  // --- pointer and keyboard

  ks.listenToCharts = function (view) {
    const { heatmap, profile, history: steps } = view.scene;
    drag(heatmap, ([x, y]) => view.moveTo({ step: x, layer: y }));
    drag(profile, ([, y]) => view.moveTo({ layer: y }));
    drag(steps, ([x]) => view.moveTo({ step: x }));
    for (const chart of [heatmap, profile, steps]) {
      chart.box.addEventListener("wheel", (event) => wheel(view, chart, event), { passive: false });
      chart.box.addEventListener("dblclick", () => view.zoom(null, null));
    }
    hover(view, heatmap);
  };

  ks.listen = function (view) {
    window.addEventListener("popstate", () => view.restore());
    document.addEventListener("click", (event) => click(view, event));
    document.addEventListener("keydown", (event) => key(view, event));
    new MutationObserver(() => view.restyle()).observe(document.documentElement, { attributeFilter: ["data-scheme"] });
    keepFocus();
    const words = new MutationObserver(() => view.decorate());
    for (const id of ["run-list", "cards"]) words.observe($(id), { childList: true, subtree: true });
  };

  // Dash draws cards and run list anew when a verdict changes; the keyboard focus stays where it was.
  function keepFocus() {
    let held = null;
    document.addEventListener("focusin", (event) => { held = event.target.closest("#cards, #run-list") ? event.target.id : null; });
    const watch = new MutationObserver(() => {
      const again = held && document.activeElement === document.body && $(held);
      if (again) again.focus({ preventScroll: true });
    });
    for (const id of ["cards", "run-list"]) watch.observe($(id), { childList: true, subtree: true });
    document.addEventListener("pointerdown", (event) => { if (!event.target.closest("#cards, #run-list")) held = null; });
  }

  const drag = (ks.drag = function (chart, move, signal) {
    const { box } = chart, until = { signal };
    box.addEventListener("pointerdown", (event) => {
      if (event.button !== 0) return;
      const at = chart.at(event, false);
      if (!at) return;
      box.setPointerCapture(event.pointerId);
      box.dataset.dragging = "true";
      move(at);
    }, until);
    box.addEventListener("pointermove", (event) => { if (box.dataset.dragging) move(chart.at(event, true)); }, until);
    for (const end of ["pointerup", "pointercancel"]) box.addEventListener(end, () => { delete box.dataset.dragging; }, until);
  });

  // Ctrl or Cmd with the wheel (and a pinch) zooms about the pointer; the plain wheel scrolls the page.
  function wheel(view, chart, event) {
    const tile = view.tile();
    if (!(event.ctrlKey || event.metaKey) || !tile) return;
    event.preventDefault();
    const at = chart.at(event, true), about = (range, centre, least) => ks.zoomed(range, centre, event.deltaY, least);
    const { heatmap, profile, history: steps } = view.scene;
    const x = chart === profile ? view.zoomX : within(about(heatmap.x, at[0], (tile.edges[tile.bins] - tile.edges[0]) / tile.bins * 4), null);
    const y = chart === steps ? view.zoomY : within(about(heatmap.y, at[1], 4), [0.5, tile.layers + 0.5]);
    view.zoom(x, y);
  }

  ks.zoomed = function (range, centre, delta, least) {
    const scale = Math.exp(Math.max(-1, Math.min(1, delta * 0.004)));
    const span = Math.max(least, (range[1] - range[0]) * scale), share = (centre - range[0]) / (range[1] - range[0]);
    return [centre - share * span, centre + (1 - share) * span];
  };

  const within = (ks.within = (range, limits) => {
    if (!limits) return range;
    if (range[1] - range[0] >= limits[1] - limits[0]) return null;
    const shift = Math.max(0, limits[0] - range[0]) - Math.max(0, range[1] - limits[1]);
    return [range[0] + shift, range[1] + shift];
  });

  function hover(view, chart) {
    const tip = chart.add("div", "tip");
    tip.hidden = true;
    chart.box.addEventListener("pointerleave", () => { tip.hidden = true; });
    chart.box.addEventListener("pointermove", (event) => {
      const tile = view.tile(), at = tile && chart.at(event, false);
      tip.hidden = !at || !tile.bins || at[0] > tile.edges[tile.bins] || event.pointerType === "touch";
      if (tip.hidden) return;
      const bin = ks.binAt(tile, at[0]), layer = Math.min(tile.layers, Math.max(1, Math.round(at[1])));
      ks.showTip(chart, tip, at, ks.tipLines(tile, bin, layer));
    });
  }

  ks.showTip = function (chart, tip, at, lines) {
    tip.hidden = false;
    tip.replaceChildren(...lines.map((text, i) => {
      const line = document.createElement("div");
      line.textContent = text;
      if (i === 0) line.className = "strong";
      return line;
    }));
    const flip = at[2] > (chart.width > 500 ? 0.7 : 0.5);
    tip.style.left = `${chart.left + at[2] * chart.width + (flip ? -12 : 12)}px`;
    tip.style.top = `${chart.top + Math.min(0.9, Math.max(0.1, 1 - at[3])) * chart.height}px`;
    tip.classList.toggle("flip", flip);
  };

  ks.tipLines = function (tile, bin, layer) {
    const level = ks.levelAt(tile, bin, layer - 1), code = tile.codes[bin * tile.layers + layer - 1];
    const steps = tile.first[bin] === tile.last[bin] ? `step ${ks.count(tile.first[bin])}`
      : `steps ${ks.count(tile.first[bin])} to ${ks.count(tile.last[bin])}, farthest`;
    const name = tile.labels[layer - 1];
    const words = { [ks.ABSENT]: "not observed", [ks.NAN]: "NaN", [ks.INF]: "Inf", [ks.ZERO]: "exactly 0" };
    const number = tile.scale === "linear" ? ks.plain(level) : ks.value(level);
    const off = tile.reference === "none" ? [] : [`${ks.signed(code * tile.unit)} decades`];
    const about = code in words ? [words[code]] : [number, ...off];
    return [about.join(" · "), `${ks.depthText(tile, layer)}${name ? ` · ${name}` : ""}`, steps];
  };

  function click(view, event) {
    const hit = (selector) => event.target.closest && event.target.closest(selector);
    if (!hit(".more, .menu")) ks.shutMenu(false);
    const eye = hit("[data-show]"), finding = hit(".show"), run = hit("[data-run]"), link = hit("a.page-link");
    if (link && !event.ctrlKey && !event.metaKey && !event.shiftKey) {
      event.preventDefault();
      view.pages.go(link.dataset.page);
      menu(false);
    } else if (link) return;
    else if (hit(".play")) view.play(!view.playing);
    else if (eye) view.show(eye.dataset.show, eye.getAttribute("aria-pressed") !== "true");
    else if (finding) goTo(view, finding.dataset);
    else if (run) { view.focusOn(run.dataset.run); menu(false); }
    else if (hit("#menu")) menu(!document.body.classList.contains("menu-open"));
    else if (hit("#follow, .follow")) view.moveTo({ follow: true });
    else if (hit("#reset")) view.zoom(null, null);
    else if (hit(".more")) ks.openMenu(view, hit(".more"));
    else if (hit("#save")) ks.savePage(view);
    else if (hit("#copy")) copyLink(view, hit("#copy"));
    else if (hit("[data-metric]")) view.setPanel(hit("[data-metric]").dataset.metric);
    else if (hit("#theme")) ks.scheme(document.documentElement.dataset.scheme === "dark" ? "light" : "dark");
    else if (hit("#help")) $("keys").showModal();
    else if (hit("#close-keys")) { event.preventDefault(); $("keys").close(); }
    else if (!hit("#side")) menu(false);
  }

  function menu(open) {
    document.body.classList.toggle("menu-open", open);
    if ($("menu")) $("menu").setAttribute("aria-expanded", String(open));
  }

  // Move to the place a finding speaks of: its run, metric, last step and first layer.
  async function goTo(view, { run, site, step, panel, depth, to }) {
    if (to) view.pages.go(to);
    view.focusOn(run);
    if (panel) view.setPanel(panel);
    const one = view.run(run);
    if (one) await view.data.want(run, view.panel, one.revision);
    const tile = view.tile();
    if (!tile) return;
    const index = site ? tile.labels.findIndex((label) => label && (label === site || site.startsWith(`${label}.`))) : -1;
    const layer = index >= 0 ? index + 1 : Number(depth) > 0 ? ks.layerAt(tile, Number(depth)) : undefined;
    view.moveTo({ step: Number(step) >= 0 ? Number(step) : undefined, layer });
    if (view.pages.page.name === "overview") $("heatmap").scrollIntoView({ block: "nearest" });
  }

  async function copyLink(view, button) {
    const label = button.querySelector("span:last-child");
    try {
      await navigator.clipboard.writeText(new URL(ks.writeAddress(view), location.href).href);
      label.textContent = "Copied";
    } catch (error) {
      label.textContent = "Copy the address bar";
    }
    setTimeout(() => { label.textContent = "Copy link"; }, 1500);
  }

  function key(view, event) {
    const typing = event.target.closest && event.target.closest("input, textarea, select, [contenteditable], dialog[open]");
    if (typing || event.ctrlKey || event.metaKey || event.altKey) return;
    const act = KEYS[event.key] || (/^[1-9]$/.test(event.key) ? (v) => nthPanel(v, Number(event.key)) : null);
    if (!act || (!view.tile() && !["p", "P", "?", "/", "[", "]"].includes(event.key))) return;
    if (event.key === " " && event.target.closest && event.target.closest("button, a, summary")) return;
    const arrow = event.key.startsWith("Arrow") || event.key === "Home" || event.key === "End";
    if (arrow && !(event.target === document.body || event.target.closest(".chart, main"))) return;
    event.preventDefault();
    act(view, event.shiftKey ? 10 : 1);
    if (arrow) announce(view);
  }

  const KEYS = {
    ArrowLeft: (view, n) => stepBy(view, -n),
    ArrowRight: (view, n) => stepBy(view, n),
    ArrowUp: (view, n) => view.moveTo({ layer: view.layer + n }),
    ArrowDown: (view, n) => view.moveTo({ layer: view.layer - n }),
    Home: (view) => view.moveTo({ step: view.tile().first[0] }),
    End: (view) => view.moveTo({ step: view.tile().last[view.tile().bins - 1] }),
    f: (view) => view.moveTo({ follow: true }),
    " ": (view) => view.play(!view.playing),
    p: (view) => view.pages.next(1),
    P: (view) => view.pages.next(-1),
    r: (view) => view.zoom(null, null),
    "[": (view) => nextRun(view, -1),
    "]": (view) => nextRun(view, 1),
    "/": (view) => view.picker.focus(),
    "?": () => $("keys").showModal(),
  };

  function stepBy(view, n) {
    const tile = view.tile(), bin = Math.min(tile.bins - 1, Math.max(0, ks.binAt(tile, view.step()) + n));
    view.moveTo({ step: tile.first[bin] });
  }

  function nextRun(view, n) {
    const runs = view.readable(), at = runs.findIndex((run) => run.id === view.focus);
    view.focusOn(runs[(at + n + runs.length) % runs.length].id);
  }

  function nthPanel(view, n) {
    const panel = view.settings.panels[n - 1];
    if (panel && view.pages.page.name === "overview") view.setPanel(panel.name);
  }

  let spoken = 0;
  function announce(view) {
    if (Date.now() - spoken < 500) return;
    spoken = Date.now();
    $("announce").textContent = `${$("where").textContent}: ${$("value").textContent}`;
  }

  // --- words

  ks.tell = function (view) {
    const run = view.run(view.focus), tile = view.tile();
    pulse(view);
    if (!run) return;
    const set = (id, text) => { const element = $(id); if (element && element.textContent !== text) element.textContent = text; };
    set("focused", run.name);
    set("symbol", view.panelOf().symbol);
    $("symbol").title = view.panelOf().doc;
    if (!tile || !tile.bins || view.layer === null) {
      for (const id of ["pooled", "profile-step", "history-layer", "where", "value"]) set(id, "");
      return;
    }
    const step = view.step(), bin = ks.binAt(tile, step), exact = view.exact("profile", run);
    const level = exact ? exact.levels[view.layer - 1] : ks.levelAt(tile, bin, view.layer - 1);
    set("pooled", tile.behind ? `reading, ${ks.count(tile.behind)} recorded steps to go` : tile.rows > 1 ? `farthest of every ${ks.count(tile.rows)} recorded steps` : "");
    set("profile-step", `at step ${ks.count(step)}`);
    const path = tile.labels[view.layer - 1], depth = ks.depthText(tile, view.layer);
    set("history-layer", path ? `${depth} · ${path}` : depth);
    set("where", `${depth}, step ${ks.count(step)} · ${run.name}${path ? ` · ${path}` : ""}`);
    set("value", Number.isNaN(level) ? ks.absence(exact, tile, bin, view.layer - 1) : ks.value(level));
    buttons(view, run);
  };

  // Why a cell has no level.
  ks.absence = function (exact, tile, bin, layer) {
    const nan = exact ? exact.kinds[layer] === ks.KIND.nan : tile.codes[bin * tile.layers + layer] === ks.NAN;
    return nan ? "NaN" : "not observed";
  };

  function buttons(view, run) {
    const follow = $("follow"), following = view.at === null;
    follow.hidden = following && run.status !== "live";
    follow.textContent = following ? "Following" : run.status === "live" ? "Follow" : "Last step";
    follow.classList.toggle("on", following);
    follow.setAttribute("aria-pressed", String(following));
    $("reset").hidden = !view.zoomX && !view.zoomY;
  }

  function pulse(view) {
    const element = $("pulse");
    if (!element) return;
    const live = view.runs.filter((run) => run.status === "live");
    const run = live.find((one) => one.id === view.focus) || live[0];
    const kind = view.data && view.data.lost > 1 ? "lost" : run ? "live" : "idle";
    const text = kind === "lost" ? "Not connected" : run ? `Live · step ${ks.count(Math.max(0, run.head))}` : "";
    if (element.dataset.kind === kind && element.textContent === text) return;
    element.dataset.kind = kind;
    element.replaceChildren(text);
  }

  // --- Dash

  window.dash_clientside = Object.assign({}, window.dash_clientside, {
    keelscope: {
      boot(settings, digest) {
        const start = () => {
          if (ks.view) return;
          if (!$("page") || !$("main").clientWidth) { requestAnimationFrame(start); return; }
          if ($("skeleton")) $("skeleton").remove();
          ks.view = new ks.View(settings, digest);
        };
        start();
      },
    },
  });
})((window.keelscope = window.keelscope || {}));
