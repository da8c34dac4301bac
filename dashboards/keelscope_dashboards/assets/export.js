// Saving: a chart as PNG, SVG or CSV, a table as CSV, a page as one HTML file. All of it is made here, nothing is sent away.
(function (ks) {
  "use strict";

  const el = (...parts) => ks.element(...parts);

  // --- texts

  // A table as CSV; a text that a spreadsheet would take for a formula gets an apostrophe in front.
  ks.csv = function (comments, head, rows) {
    const cell = (value) => {
      if (typeof value === "number") return number(value);
      const text = /^[=+\-@\t\r]/.test(value) ? `'${value}` : String(value);
      return /[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
    };
    const said = comments.filter(Boolean).map((line) => `# ${String(line).replace(/[\r\n]+/g, " ")}`);
    return [...said, head.map(cell).join(","), ...rows.map((row) => row.map(cell).join(","))].join("\n") + "\n";
  };

  // Nine digits bring a float32 back.
  const number = (value) => (Number.isNaN(value) ? "nan" : value === Infinity ? "inf" : value === -Infinity ? "-inf" : String(Number(value.toPrecision(9))));
  const real = (log, value) => (log ? 10 ** value : value); // an exact 0 is -inf on a logarithmic axis

  ks.lineRows = function (lines, log) {
    const banded = lines.some((line) => line.low && line.high), rows = [];
    for (const line of lines) {
      for (let i = 0; i < line.x.length; i++) {
        const ends = banded ? [line.low, line.high].map((edge) => (edge ? real(log, edge[i]) : NaN)) : [];
        rows.push([line.label, line.x[i], real(log, line.y[i]), ...ends]);
      }
    }
    return { head: ["line", "x", "value", ...(banded ? ["low", "high"] : [])], rows };
  };

  ks.fileName = (...parts) => parts.filter(Boolean).join("-").normalize("NFKD").replace(/[^\w.-]+/g, "-").replace(/^[-.]+|[-.]+$/g, "").slice(0, 100) || "keelscope";

  // --- what can be saved: title, chart, how it is drawn, legend, table

  const keysOf = (view, lines) => lines.map((line) => ({
    label: line.label, dash: line.dash, colour: view.scene.palette.runs[line.slot % view.scene.palette.runs.length],
    symbol: line.dash && line.dash !== "solid" ? "" : view.scene.settings.symbols[line.slot],
  }));

  ks.linePart = function (view, owner) {
    const { block } = owner, { head, rows } = ks.lineRows(block.lines, block.y.log), x = block.x.title.split(" (")[0] || block.x.kind;
    return {
      title: block.title, said: [block.note], chart: owner.chart, draw: () => owner.draw(), keys: keysOf(view, block.lines),
      csv: () => ks.csv([`${view.pages.page.title}: ${block.title}`, block.note], head.map((name) => (name === "x" ? x : name)), rows),
    };
  };

  ks.heatPart = function (view, owner) {
    const { block } = owner, panel = owner.panel();
    return {
      title: `${block.series}, ${block.title}`, said: [], chart: owner.chart, draw: () => owner.draw(), scale: owner.legend.scale,
      csv: () => view.data.text(`runs/${block.run}/table.csv?panel=${panel}`),
    };
  };

  // The three charts of the overview.
  ks.scenePart = function (view, name) {
    const { scene } = view, chart = scene[name], run = view.run(view.focus), panel = view.panelOf(), tile = view.tile();
    const what = `${panel.title}, ${panel.symbol}`;
    if (name === "heatmap") {
      return {
        title: `${panel.title} over steps, ${run.name}`, said: [document.getElementById("pooled").textContent], chart,
        draw: () => { scene.painted = ""; scene.drawCells(tile); },
        scale: { title: document.getElementById("legend-title").textContent, colours: scene.colours, ticks: scene.legendTicks() },
        csv: () => view.data.text(`runs/${run.id}/table.csv?panel=${view.panel}`),
      };
    }
    const profile = name === "profile", where = profile ? `at step ${ks.count(view.step())}` : `${ks.depthText(tile, view.layer)} over steps`;
    const lines = scene.stacked().map((one) => ({ ...(profile ? scene.profileLine(one) : scene.historyLine(one)), label: one.name, slot: one.slot })).filter((line) => line.x);
    const { head, rows } = ks.lineRows(lines, true);
    return {
      title: `${what} ${where}`, said: [], chart, draw: () => (profile ? scene.drawProfiles() : scene.drawHistories()), keys: keysOf(view, lines),
      csv: () => ks.csv([`${what} ${where}`], head.map((title) => (title === "x" ? (profile ? tile.depth : "step") : title)), rows),
    };
  };

  ks.tablePart = (block) => ({ title: block.title, csv: () => ks.csv([block.title, block.note], block.head, block.rows) });

  ks.findingsPart = function (block) {
    const names = [...new Set(block.items.flatMap((item) => item.evidence.map(([name]) => (/^\d/.test(name) ? "sites" : name.toLowerCase()))))];
    const rows = block.items.map((item) => {
      const held = Object.fromEntries(item.evidence.map(([name, value]) => [/^\d/.test(name) ? "sites" : name.toLowerCase(), value]));
      return [item.name, item.severity, item.statement, item.remedy, ...names.map((name) => held[name] || "")];
    });
    return { title: block.title, csv: () => ks.csv([block.title], ["run", "severity", "statement", "remedy", ...names], rows) };
  };

  // --- saving

  const FORMATS = {
    png: ["PNG picture", async (view, part) => ks.pixels(ks.chartSvg(part, view.scene.palette), 2)],
    svg: ["SVG picture", async (view, part) => new Blob([ks.chartSvg(part, view.scene.palette).text], { type: "image/svg+xml" })],
    csv: ["CSV data", async (view, part) => new Blob([await part.csv()], { type: "text/csv" })],
  };

  function download(blob, name) {
    const link = el("a", { href: URL.createObjectURL(blob), download: name });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 30000);
  }

  ks.save = async function (view, part, format) {
    const run = view.pages.page.single !== false || view.pages.page.name === "overview" ? view.run(view.focus) : null;
    try {
      download(await FORMATS[format][1](view, part), `${ks.fileName(run && !part.title.includes(run.name) && run.name, part.title)}.${format}`);
      document.getElementById("announce").textContent = `Saved ${part.title} as ${format.toUpperCase()}`;
    } catch (error) {
      document.getElementById("announce").textContent = "It could not be saved.";
      view.warn("It could not be saved: the server did not answer, or the run is gone.");
    }
  };

  // --- the menu of a panel: opened by its button, moved through with the arrow keys, closed by Escape

  ks.moreButton = (title, extra) => el("button", { type: "button", class: "more", "aria-label": `Save ${title}`, title: "Save", "aria-haspopup": "menu", "aria-expanded": "false", ...extra }, el("span", { class: "icon icon-dots", "aria-hidden": "true" }));

  function partOf(view, button) {
    if (button.dataset.save) return ks.scenePart(view, button.dataset.save);
    const block = view.pages.blocks.find((one) => one.element.contains(button));
    return block && block.part ? block.part(view) : null;
  }

  let open = null;
  const shut = (ks.shutMenu = function (refocus) {
    if (!open) return;
    const { menu, button } = open;
    open = null;
    menu.remove();
    button.setAttribute("aria-expanded", "false");
    if (refocus) button.focus();
  });

  ks.openMenu = function (view, button) {
    if (open && open.button === button) return shut(true);
    shut(false);
    const part = partOf(view, button);
    if (!part || (part.chart && !view.tile())) return;
    const items = Object.keys(FORMATS).filter((format) => part.chart || format === "csv").map((format) => {
      const item = el("button", { type: "button", role: "menuitem", tabindex: "-1", "data-format": format }, FORMATS[format][0]);
      item.addEventListener("click", (event) => { event.stopPropagation(); shut(true); ks.save(view, part, format); });
      return item;
    });
    const menu = el("div", { class: "menu", role: "menu", "aria-label": `Save ${part.title}` }, ...items);
    menu.addEventListener("keydown", (event) => {
      const at = items.indexOf(document.activeElement), to = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: items.length - 1 }[event.key];
      if (to !== undefined) items[(to + items.length) % items.length].focus();
      else if (event.key === "Escape") shut(true);
      else if (event.key === "Tab") shut(false);
      if (to !== undefined || event.key === "Escape") event.preventDefault();
      event.stopPropagation();
    });
    button.after(menu);
    button.setAttribute("aria-expanded", "true");
    open = { menu, button };
    items[0].focus();
  };

  // --- a page as one file: its words and pictures with their styles, without scripts

  ks.savePage = async function (view) {
    const { page } = view.pages, overview = page.name === "overview", run = view.run(view.focus);
    const source = document.getElementById(overview ? "overview" : "page");
    const charts = overview ? ["heatmap", "profile", "history"].map((name) => [document.getElementById(name), ks.scenePart(view, name)])
      : view.pages.blocks.filter((block) => block.mount && (block.mount(), block.part(view).chart)).map((block) => [block.element.querySelector(".chart"), block.part(view)]);
    const copy = source.cloneNode(true), boxes = [...copy.querySelectorAll(".chart")], shown = [...source.querySelectorAll(".chart")];
    for (const [box, part] of charts) {
      const place = boxes[shown.indexOf(box)], svg = ks.chartSvg(part, view.scene.palette);
      const picture = new DOMParser().parseFromString(svg.text, "image/svg+xml").documentElement;
      picture.removeAttribute("height");
      picture.setAttribute("width", "100%");
      place.closest(".panel").replaceChildren(picture);
    }
    const thumbs = [...source.querySelectorAll("canvas.thumb")];
    copy.querySelectorAll("canvas.thumb").forEach((canvas, i) => canvas.replaceWith(el("img", { class: "thumb", alt: "", src: thumbs[i].toDataURL() })));
    for (const gone of copy.querySelectorAll(".controls, .scrub, .slider, .toolbar, .more, .menu, .show, .soft, .readout")) gone.remove();
    for (const button of copy.querySelectorAll("button")) button.replaceWith(el("div", { class: button.className }, ...button.childNodes));
    const html = await standalone(copy, `${page.title}${run ? `, ${run.name}` : ""}`, overview);
    download(new Blob([html], { type: "text/html" }), `${ks.fileName(page.title, run && run.name)}.html`);
    document.getElementById("announce").textContent = `Saved ${page.title} as HTML`;
  };

  async function standalone(copy, title, overview) {
    const sheet = [...document.styleSheets].find((one) => one.href && one.href.includes("keelscope.css"));
    const rules = [...sheet.cssRules].filter((rule) => !(rule instanceof CSSFontFaceRule)).map((rule) => rule.cssText).join("\n");
    const scheme = document.documentElement.getAttribute("data-scheme");
    const variables = [...document.querySelectorAll("head style")].map((one) => one.textContent).find((text) => text.includes("--run-0"));
    const own = "body{margin:0 auto;max-width:1280px;padding:16px}.linked{display:grid;height:auto;grid-template-rows:none;gap:12px}.scroll{overflow:visible}.table-box{max-height:none}.block svg,.panel svg{display:block}.blocks{margin-top:12px}.cards{grid-auto-flow:row;grid-template-columns:repeat(auto-fit,minmax(284px,1fr));margin-bottom:12px}";
    return `<!doctype html>\n<html lang="en" data-scheme="${scheme}" data-page="${overview ? "overview" : "page"}"><head><meta charset="utf-8">`
      + `<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">`
      + `<meta name="viewport" content="width=device-width, initial-scale=1"><title>${ks.escape(title)} · keelscope</title>`
      + `<style>${variables}\n${rules}\n${own}</style></head><body><main style="margin:0">${copy.outerHTML}</main></body></html>\n`;
  }
})((window.keelscope = window.keelscope || {}));
