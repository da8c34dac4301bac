// The frame of a chart as SVG: axis lines, grid, ticks with their numbers, titles. Pure functions of ranges and colours.
(function (ks) {
  "use strict";

  const TICK = 4, SIZE = 12, DIGIT = 7; // px; the last is the usual width of a digit

  ks.escape = (text) => String(text).replace(/[&<>"']/g, (c) => `&#${c.charCodeAt(0)};`);

  // `box` is the plot area and its margins {left, top, width, height, right, bottom}; x and y are {range, ticks, title, grid}.
  ks.axesSvg = function (box, x, y, colours) {
    const { left, top, width, height, right, bottom } = box;
    const px = (value) => left + ((value - x.range[0]) / (x.range[1] - x.range[0])) * width;
    const py = (value) => top + (1 - (value - y.range[0]) / (y.range[1] - y.range[0])) * height;
    const marks = [], grid = [], words = [];
    within(x).forEach(([value, text]) => {
      const at = crisp(px(value)), half = wide(text) / 2;
      if (x.grid) grid.push(`M${at} ${top}v${height}`);
      marks.push(`M${at} ${top + height}v${TICK}`);
      const middle = Math.min(left + width + right - half - 1, Math.max(half + 1, at));
      words.push(label("xtick", middle, top + height + TICK + 13, "middle", text, SIZE));
    });
    within(y).forEach(([value, text]) => {
      const at = crisp(py(value)), room = left - TICK - 4 - (y.title ? 18 : 0);
      if (y.grid) grid.push(`M${left} ${at}h${width}`);
      marks.push(`M${left} ${at}h${-TICK}`);
      words.push(label("ytick", left - TICK - 3, at + 4, "end", text, Math.max(9, Math.min(SIZE, (SIZE * room) / wide(text)))));
    });
    if (x.title) words.push(label("xtitle", left + width / 2, top + height + bottom - 6, "middle", x.title, SIZE));
    if (y.title) words.push(`<g transform="translate(13 ${top + height / 2}) rotate(-90)">${label("ytitle", 0, 0, "middle", y.title, SIZE)}</g>`);
    const line = (path, colour) => `<path d="${path}" fill="none" stroke="${colour}" shape-rendering="crispEdges"/>`;
    const frame = `M${crisp(left)} ${top}V${crisp(top + height)}H${left + width}`;
    return `${line(grid.join(""), colours.grid)}${line(`${frame}${marks.join("")}`, colours.axis)}<g fill="${colours.muted}">${words.join("")}</g>`;
  };

  // Ticks for an axis that counts, of steps or of layers: whole numbers only.
  ks.countTicks = (range, most) => ks.plainTicks(range, Math.min(most, range[1] - range[0]));

  const crisp = (at) => Math.round(at) + 0.5;
  const plain = (text) => text.replace(/<\/?sup>/g, "");
  const wide = (text) => plain(text).length * DIGIT;

  // The ticks of an axis that lie on it, as value and text.
  function within({ range, ticks }) {
    const slack = (range[1] - range[0]) * 1e-9;
    return ticks.values.map((value, i) => [value, ticks.text[i]]).filter(([value]) => value >= range[0] - slack && value <= range[1] + slack);
  }

  // Text with powers set high: 10<sup>3</sup>.
  function label(kind, x, y, anchor, text, size) {
    const spans = text.split(/<\/?sup>/).map((part, i) => (i % 2 ? `<tspan dy="-4" font-size="${(size * 0.75).toFixed(1)}">${ks.escape(part)}</tspan>` : ks.escape(part)));
    return `<text class="${kind}" x="${round(x)}" y="${round(y)}" text-anchor="${anchor}" font-size="${round(size)}">${spans.join("")}</text>`;
  }
  const round = (value) => Number(value.toFixed(1));
})((window.keelscope = window.keelscope || {}));
