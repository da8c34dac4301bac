// One chart: axes as the frame, a canvas over the plot area for the marks, two lines for the cursor.
(function (ks) {
  "use strict";

  ks.Chart = class {
    constructor(box, frame, onResize) {
      this.box = box;
      this.margin = frame.margin;
      this.frame = this.add("div", "frame");
      this.canvas = this.add("canvas", "marks");
      this.vertical = this.add("div", "cursor vertical");
      this.horizontal = this.add("div", "cursor horizontal");
      this.notes = this.add("div", "notes");
      this.context = this.canvas.getContext("2d");
      this.x = [0, 1];
      this.y = [0, 1];
      this.drawn = "";
      this.measure();
      this.observer = new ResizeObserver(() => { if (this.measure()) onResize(); });
      this.observer.observe(box);
    }

    close() {
      this.observer.disconnect();
    }

    add(tag, name) {
      const element = document.createElement(tag);
      element.className = name;
      this.box.appendChild(element);
      return element;
    }

    // Plot area in CSS pixels; true if it has changed.
    measure() {
      const { l, r, t, b } = this.margin;
      const width = Math.max(1, this.box.clientWidth - l - r), height = Math.max(1, this.box.clientHeight - t - b);
      const ratio = window.devicePixelRatio || 1;
      const same = this.width === width && this.height === height && this.ratio === ratio;
      Object.assign(this, { left: l, top: t, width, height, ratio });
      if (same) return false;
      for (const element of [this.canvas, this.notes]) {
        Object.assign(element.style, { left: `${l}px`, top: `${t}px`, width: `${width}px`, height: `${height}px` });
      }
      this.canvas.width = Math.round(width * ratio);
      this.canvas.height = Math.round(height * ratio);
      this.drawn = "";
      return true;
    }

    // Redraw the axes if their range, ticks, size or colours differ from what is shown.
    axes(frame, x, y) {
      this.x = x.range;
      this.y = y.range;
      const colours = { grid: frame.xaxis.gridcolor, axis: frame.xaxis.linecolor, muted: frame.font.color };
      const axis = (given, { showgrid, title }, room) => ({ ...given, ticks: given.ticks || ks.plainTicks(given.range, room), grid: showgrid !== false, title: title.text });
      const parts = [axis(x, frame.xaxis, this.width / 90), axis(y, frame.yaxis, this.height / 42), colours];
      const key = JSON.stringify([parts, this.width, this.height]);
      if (key === this.drawn) return;
      this.drawn = key;
      this.parts = parts;
      const { width, height } = this.size();
      this.frame.innerHTML = `<svg width="${width}" height="${height}" aria-hidden="true">${this.axesSvg()}</svg>`;
    }

    size() { return { width: this.width + this.left + this.margin.r, height: this.height + this.top + this.margin.b }; }

    axesSvg() {
      const { left, top, width, height, margin } = this;
      return ks.axesSvg({ left, top, width, height, right: margin.r, bottom: margin.b }, ...this.parts);
    }

    px(value) { return ((value - this.x[0]) / (this.x[1] - this.x[0])) * this.width; }
    py(value) { return (1 - (value - this.y[0]) / (this.y[1] - this.y[0])) * this.height; }

    // Data coordinates of a pointer event, null outside the plot area unless clamped.
    at(event, clamp) {
      const box = this.box.getBoundingClientRect();
      let u = (event.clientX - box.left - this.left) / this.width, v = 1 - (event.clientY - box.top - this.top) / this.height;
      if (clamp) { u = Math.min(1, Math.max(0, u)); v = Math.min(1, Math.max(0, v)); }
      if (u < 0 || u > 1 || v < 0 || v > 1) return null;
      return [this.x[0] + u * (this.x[1] - this.x[0]), this.y[0] + v * (this.y[1] - this.y[0]), u, v];
    }

    clear() {
      const context = this.context;
      context.setTransform(1, 0, 0, 1, 0, 0);
      context.clearRect(0, 0, this.canvas.width, this.canvas.height);
      context.setTransform(this.ratio, 0, 0, this.ratio, 0, 0);
      return context;
    }

    // Cursor lines; null hides one.
    cross(x, y) {
      this.place(this.vertical, x === null ? null : this.px(x), this.width, (p) => `translate(${this.left + p}px, ${this.top}px)`, "height", this.height);
      this.place(this.horizontal, y === null ? null : this.py(y), this.height, (p) => `translate(${this.left}px, ${this.top + p}px)`, "width", this.width);
    }

    place(line, pixel, limit, transform, side, length) {
      const hidden = pixel === null || !(pixel >= -0.5 && pixel <= limit + 0.5);
      line.hidden = hidden;
      if (hidden) return;
      line.style.transform = transform(Math.round(pixel * this.ratio) / this.ratio);
      line.style[side] = `${length}px`;
    }

    say(lines) {
      const text = lines.join("\n");
      if (text === this.said) return;
      this.said = text;
      this.notes.replaceChildren(...lines.map((line) => {
        const element = document.createElement("div");
        element.textContent = line;
        return element;
      }));
    }
  };
})((window.keelscope = window.keelscope || {}));
