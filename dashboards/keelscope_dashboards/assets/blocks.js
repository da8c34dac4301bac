// The blocks of a page as elements: panels with charts, tables, verdicts, findings, notices. Every text is a text node.
(function (ks) {
  "use strict";

  // An element with attributes and children; strings become text.
  // --- elements

  const el = (ks.element = function (tag, attributes, ...children) {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes || {})) {
      if (value === null || value === undefined || value === false) continue;
      if (name === "class") element.className = value;
      else element.setAttribute(name, value === true ? "" : String(value));
    }
    element.append(...children.filter((child) => child !== null && child !== undefined && child !== ""));
    return element;
  });
  const icon = (name) => el("span", { class: `icon icon-${name}`, "aria-hidden": "true" });
  const marker = (slot) => el("span", { class: `marker slot-${slot}`, "aria-hidden": "true" });

  const SEVERITIES = { error: ["bad", "alert", "Problem"], warning: ["warn", "alert", "Warning"], info: ["idle", "dot", "Note"] };

  function panel(block, head, ...body) {
    const title = el("h2", { title: block.doc || null }, block.title), more = SAVED.has(block.kind) ? ks.moreButton(block.title) : "";
    return el("section", { class: `panel block ${block.kind} ${block.size}`, role: "group", "aria-label": block.title }, el("div", { class: "panel-head" }, title, ...head, more), ...body);
  }

  const place = (where, extra) => ({
    "data-run": where.run, "data-site": where.site, "data-step": where.step, "data-depth": where.depth, "data-page": null, "data-to": where.page, ...extra,
  });

  // A chart in its panel. Its frame is made when it comes near the window and given up when it is far, so that a page of
  // hundreds of charts is no heavier than one of thirty; `mount` makes it whatever its place.
  function charted(element, body, make, told) {
    let chart = null, block = null, view = null, watch = null;
    const drop = () => { if (chart) { chart.close(); chart = null; body.replaceChildren(); } };
    return {
      element,
      ready(given, first) {
        view = given;
        block = first;
        watch = new IntersectionObserver(([entry]) => (entry.isIntersecting ? this.mount() : drop()), { rootMargin: `${NEAR}px 0px` });
        watch.observe(body);
        told(block, null);
        if (body.getBoundingClientRect().top < window.innerHeight + NEAR) this.mount();
      },
      mount() {
        if (chart || !view) return;
        chart = make(view, body, block);
        chart.update(block);
        this.cross();
      },
      update(now, keep) { block = now; told(block, chart); if (chart) chart.update(now, keep); this.cross(); },
      cross() { if (chart) chart.cross(); told(block, chart); },
      draw() { if (chart) chart.draw(); },
      close() { if (watch) watch.disconnect(); drop(); },
      chart() { return chart; },
    };
  }
  const NEAR = 2400; // px
  const SAVED = new Set(["chart", "heat", "table", "findings"]);

  // Each maker gives { element, ready(view), update(block, keep), cross(), draw(), close(), part(view) }; all but the element may be missing.
  ks.BLOCKS = {
    chart(block) {
      const body = el("div", { class: "chart", role: "img", tabindex: "0", "aria-label": `${block.title}. ${block.note || block.doc}` });
      const legend = el("div", { class: "keys" }), note = el("p", { class: "quiet note" });
      const element = panel(block, block.size === "small" ? [el("span", { class: "reading" })] : [legend], block.note ? note : "", body);
      let last = null;
      const words = (now) => {
        if (now === last) return;
        last = now;
        const empty = !now.lines.some((line) => line.y.some((y) => !Number.isNaN(y)) || (line.bad && line.bad.length));
        note.textContent = now.note;
        legend.replaceChildren(...(now.lines.length > 14 ? [] : now.lines).map(key));
        element.classList.toggle("void", empty);
        body.dataset.void = empty ? "Nothing is recorded here." : "";
      };
      const made = charted(element, body, (view, box, now) => new ks.LineChart(view, box, now), (now, chart) => {
        words(now);
        const reading = element.querySelector(".reading");
        if (reading && chart) reading.textContent = valueAt(chart);
      });
      return { ...made, ready(view) { made.ready.call(this, view, block); }, part(view) { this.mount(); return ks.linePart(view, this.chart()); } };
    },

    heat(block) {
      const body = el("div", { class: "chart", role: "img", tabindex: "0", "aria-label": `Heatmap of ${block.series} over steps, ${block.title}` });
      const legend = el("div", { class: "legend" });
      const chip = el("span", { class: "chip mono" }, block.series), element = panel(block, [chip, legend], body);
      const made = charted(element, body, (view, box, now) => new ks.HeatChart(view, box, now, legend), (now) => { chip.textContent = now.series; });
      return {
        ...made,
        ready(view) { made.ready.call(this, view, block); },
        heat() { return this.chart(); },
        part(view) { this.mount(); return ks.heatPart(view, this.chart()); },
      };
    },

    table(block) {
      const numeric = (i) => (block.numeric.includes(i) ? "number-cell" : null);
      const head = el("tr", {}, ...block.head.map((name, i) => el("th", { scope: "col", class: numeric(i) }, name)));
      const rows = block.rows.map((row, r) => el("tr", {}, ...row.map((text, i) => {
        const where = i === 0 && block.places[r];
        const cell = where ? el("button", place(where, { type: "button", class: "show" }), text) : text;
        return el(i === 0 ? "th" : "td", { class: numeric(i), scope: i === 0 ? "row" : null }, cell);
      })));
      const table = el("table", {}, el("thead", {}, head), el("tbody", {}, ...rows));
      const body = rows.length ? el("div", { class: "table-box", tabindex: "0", role: "region", "aria-label": block.title }, table) : el("p", { class: "quiet note" }, "Nothing.");
      return { element: panel(block, [el("span", { class: "quiet" }, block.note)], body), part: () => ks.tablePart(block) };
    },

    facts(block) {
      const pairs = block.pairs.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]);
      return { element: panel(block, [], el("dl", { class: "facts-list" }, ...pairs)) };
    },

    verdicts(block) {
      const cards = block.items.map((item) => {
        const [word, tone, symbol] = item.pill;
        const head = el("span", { class: "card-head" }, marker(item.slot), el("span", { class: "name mono" }, item.name), el("span", { class: `pill ${tone}` }, icon(symbol), word));
        const numbers = item.figures.map(([label, value]) => el("span", { class: "number" }, el("span", { class: "label" }, label), el("span", { class: "value" }, value)));
        return el("button", { class: "card", type: "button", "data-run": item.run }, head, el("span", { class: "sentence whole" }, item.sentence), el("span", { class: "evidence" }, el("span", { class: "numbers" }, ...numbers)));
      });
      return { element: el("div", { class: "verdicts block wide" }, ...cards) };
    },

    findings(block) {
      const items = block.items.map((item) => {
        const [tone, symbol, word] = SEVERITIES[item.severity];
        const what = el("div", { class: "what" }, el("strong", {}, item.rule), el("span", { class: `pill ${tone}` }, word), marker(item.slot), el("span", { class: "name mono" }, item.name));
        const evidence = el("dl", { class: "evidence-list" }, ...item.evidence.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))));
        const remedy = item.remedy ? el("p", { class: "remedy" }, el("span", { class: "quiet" }, "What helps: "), item.remedy) : "";
        const show = el("button", place(item.place, { type: "button", class: "show", "aria-label": `Show ${item.rule}` }), "Show");
        return el("li", {}, el("span", { class: `badge ${tone}` }, icon(symbol)), el("div", {}, what, el("p", {}, item.statement), remedy, evidence), show);
      });
      const body = items.length ? el("ul", { class: "findings full" }, ...items) : el("p", { class: "quiet note" }, block.note);
      return { element: panel(block, [el("span", { class: "quiet" }, items.length ? block.note : "")], body), part: () => ks.findingsPart(block) };
    },

    heading(block) {
      return { element: el("div", { class: "block wide heading" }, el("h2", {}, block.title), el("span", { class: "quiet" }, block.note)) };
    },

    notice(block) {
      const code = block.code ? el("pre", { class: "mono", tabindex: "0" }, block.code) : "";
      return { element: el("section", { class: "panel block wide notice" }, el("h2", {}, block.title), el("p", {}, block.sentence), code) };
    },
  };

  // One entry of a legend: the line as it is drawn, and whose it is.
  function key(line) {
    const dash = { solid: "", dashed: " dashed", dotted: " dotted" }[line.dash];
    return el("span", { class: "key" }, el("span", { class: `marker slot-${line.slot}${dash}${line.faint ? " faint" : ""}`, "aria-hidden": "true" }), line.label + edges(line));
  }

  // How much of a line has no place on its axis, in words.
  function edges(line) {
    const count = (mark) => line.y.reduce((n, y) => n + (y === mark), 0);
    const marks = [[count(-Infinity), "exactly 0"], [count(Infinity), "infinite"], [line.bad ? line.bad.length : 0, "NaN"]];
    const said = marks.filter(([n]) => n);
    return said.length ? ` (${said.map(([n, word]) => `${ks.count(n)} ${word}`).join(", ")})` : "";
  }

  // What a small chart shows at the cursor.
  function valueAt(chart) {
    const line = chart.block.lines[0], at = chart.place();
    if (!line || at === null) return "";
    const nearest = ks.nearest(line.x, at), value = line.y[nearest];
    if (line.bad && line.bad.includes(line.x[nearest])) return "NaN";
    return chart.block.y.log ? ks.value(value) : ks.plain(value);
  }
})((window.keelscope = window.keelscope || {}));
