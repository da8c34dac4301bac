// What the charts paint on a canvas, as SVG: a context that writes elements down, and charts put together from it.
(function (ks) {
  "use strict";

  const round = (value) => Math.round(value * 100) / 100;
  const { escape } = ks;

  // As much of a 2-D canvas context as paint.js, plot.js and scene.js use.
  ks.SvgContext = class {
    constructor() {
      this.parts = [];
      this.path = [];
      this.dash = [];
      Object.assign(this, { fillStyle: "#000", strokeStyle: "#000", lineWidth: 1, globalAlpha: 1, font: "", textAlign: "left", lineJoin: "miter" });
    }

    // The clearing of a chart before it is drawn: nothing was there.
    setTransform() {}
    clearRect() {}

    beginPath() { this.path = []; }
    moveTo(x, y) { this.path.push(`M${round(x)} ${round(y)}`); }
    lineTo(x, y) { this.path.push(`${this.path.length ? "L" : "M"}${round(x)} ${round(y)}`); }
    closePath() { this.path.push("Z"); }
    rect(x, y, w, h) { this.path.push(`M${round(x)} ${round(y)}h${round(w)}v${round(h)}h${round(-w)}Z`); }
    // Only whole circles are drawn.
    arc(x, y, r) { this.path.push(`M${round(x - r)} ${round(y)}a${r} ${r} 0 1 0 ${round(2 * r)} 0a${r} ${r} 0 1 0 ${round(-2 * r)} 0Z`); }
    setLineDash(dash) { this.dash = dash; }

    stroke() { if (this.path.length) this.parts.push(`<path d="${this.path.join("")}" fill="none" ${this.pen()}/>`); }
    fill() { if (this.path.length) this.parts.push(`<path d="${this.path.join("")}" ${this.ink()}/>`); }
    fillRect(x, y, w, h) { this.parts.push(`<rect x="${round(x)}" y="${round(y)}" width="${round(w)}" height="${round(h)}" ${this.ink()}/>`); }
    fillText(text, x, y) { this.parts.push(`<text x="${round(x)}" y="${round(y)}" ${this.type()} ${this.ink()}>${escape(text)}</text>`); }
    strokeText(text, x, y) { this.parts.push(`<text x="${round(x)}" y="${round(y)}" ${this.type()} fill="none" ${this.pen()}>${escape(text)}</text>`); }

    createImageData(width, height) { return new ImageData(width, height); }

    // Cells stay pixels; `scale` is how many of them one unit holds.
    putImageData(image) {
      const canvas = Object.assign(document.createElement("canvas"), { width: image.width, height: image.height });
      canvas.getContext("2d").putImageData(image, 0, 0);
      const scale = this.scale || 1;
      this.parts.push(`<image width="${round(image.width / scale)}" height="${round(image.height / scale)}" preserveAspectRatio="none" href="${canvas.toDataURL()}"/>`);
    }

    faint() { return this.globalAlpha < 1 ? ` opacity="${round(this.globalAlpha)}"` : ""; }
    ink() { return `fill="${escape(this.fillStyle)}"${this.faint()}`; }
    pen() {
      const dash = this.dash.length ? ` stroke-dasharray="${this.dash.join(" ")}"` : "";
      return `stroke="${escape(this.strokeStyle)}" stroke-width="${this.lineWidth}" stroke-linejoin="${this.lineJoin}"${dash}${this.faint()}`;
    }
    type() {
      const anchor = { left: "start", center: "middle", right: "end" }[this.textAlign];
      return `style="font:${escape(this.font)}" text-anchor="${anchor}"`;
    }
    toString() { return this.parts.join(""); }
  };

  // The marks that `draw` puts on a chart, as SVG.
  ks.marksOf = function (chart, draw) {
    const shown = chart.context, written = new ks.SvgContext();
    written.scale = chart.ratio;
    chart.context = written;
    try { draw(); } finally { chart.context = shown; }
    draw();
    return String(written);
  };

  const TEXT = "Inter, system-ui, -apple-system, 'Segoe UI', 'Liberation Sans', sans-serif";
  const LINE = 17, PAD = 12;

  // One chart as a picture: title, what it shows, its legend, axes and marks.
  ks.chartSvg = function (part, palette) {
    const { chart } = part, { width, height } = chart.size();
    const axes = chart.axesSvg(), marks = ks.marksOf(chart, part.draw);
    const legend = part.scale ? scaleLegend(part.scale, palette) : lineLegend(part.keys, width, palette);
    const head = heading(part, width, palette), top = head.height + legend.height + PAD;
    const clip = `clip-${Math.random().toString(36).slice(2, 9)}`;
    const area = `<clipPath id="${clip}"><rect width="${chart.width}" height="${chart.height}"/></clipPath>`;
    return {
      width, height: height + top,
      text: `<svg xmlns="http://www.w3.org/2000/svg" width="${width}" height="${height + top}" viewBox="0 0 ${width} ${height + top}" role="img" aria-label="${escape(part.title)}" font-family="${TEXT}">`
        + `<rect width="100%" height="100%" fill="${palette.paper}"/>${head.text}<g transform="translate(0 ${head.height})">${legend.text}</g>`
        + `<g transform="translate(0 ${top})">${axes}<g transform="translate(${chart.left} ${chart.top})">${area}<g clip-path="url(#${clip})">${marks}</g></g></g></svg>`,
    };
  };

  function heading(part, width, palette) {
    const lines = wrapped([part.title], 66).map((text, i) => `<text x="${PAD}" y="${24 + i * LINE}" font-size="14" font-weight="620" fill="${palette.text}">${escape(text)}</text>`);
    const said = wrapped(part.said.filter(Boolean), Math.floor(width / 6.2));
    const quiet = said.map((text, i) => `<text x="${PAD}" y="${24 + (lines.length + i) * LINE}" font-size="11.5" fill="${palette.muted}">${escape(text)}</text>`);
    return { text: [...lines, ...quiet].join(""), height: 16 + (lines.length + said.length) * LINE };
  }

  // Sentences broken into lines of at most `most` characters.
  function wrapped(texts, most) {
    const lines = [];
    for (const text of texts) {
      let line = "";
      for (const word of text.split(" ")) {
        if (line && line.length + word.length >= most) { lines.push(line); line = ""; }
        line += (line ? " " : "") + word;
      }
      if (line) lines.push(line);
    }
    return lines;
  }

  const DASH = { solid: "", dashed: "6 4", dotted: "2 3" };

  function lineLegend(keys, width, palette) {
    let x = PAD, y = 8;
    const parts = [];
    for (const key of keys) {
      const size = 34 + key.label.length * 6.3;
      if (x > PAD && x + size > width) { x = PAD; y += LINE; }
      const dash = DASH[key.dash || "solid"], mark = new ks.SvgContext();
      if (key.symbol) { mark.fillStyle = key.colour; ks.paintMarker(mark, key.symbol, x + 10, y, 4); }
      parts.push(`<path d="M${x} ${y}h20" stroke="${key.colour}" stroke-width="2"${dash ? ` stroke-dasharray="${dash}"` : ""}/>${mark}<text x="${x + 26}" y="${y + 4}" font-size="11.5" fill="${palette.muted}">${escape(key.label)}</text>`);
      x += size + 12;
    }
    return { text: parts.join(""), height: keys.length ? y + 8 : 0 };
  }

  function scaleLegend({ title, colours, ticks }, palette) {
    const stops = Array.from({ length: 33 }, (_, i) => `<stop offset="${i / 32}" stop-color="${ks.css(colours[Math.round((i / 32) * (colours.length - 1))])}"/>`);
    const anchor = (i) => (i === 0 ? "start" : i === ticks.length - 1 ? "end" : "middle");
    const words = ticks.map(([left, text], i) => `<text x="${PAD + 3 * left}" y="24" font-size="10.5" text-anchor="${anchor(i)}" fill="${palette.muted}">${escape(text)}</text>`);
    const id = `scale-${Math.random().toString(36).slice(2, 9)}`;
    return {
      text: `<linearGradient id="${id}">${stops.join("")}</linearGradient><rect x="${PAD}" width="300" height="9" rx="2" fill="url(#${id})"/>${words.join("")}<text x="${PAD + 314}" y="9" font-size="11.5" fill="${palette.muted}">${escape(title)}</text>`,
      height: 30,
    };
  }

  // Pixels of a picture, twice as many as on the screen.
  ks.pixels = async function ({ text, width, height }, scale) {
    const image = new Image();
    image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(text)}`;
    await image.decode();
    const canvas = Object.assign(document.createElement("canvas"), { width: Math.round(width * scale), height: Math.round(height * scale) });
    canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
    return new Promise((done) => { canvas.toBlob(done, "image/png"); });
  };
})((window.keelscope = window.keelscope || {}));
