// The run list where there are many: a filter over names, models and states, and one button that draws what it leaves.
(function (ks) {
  "use strict";

  const MANY = 8, MOST = 8; // runs from which there is a filter; runs that are drawn at once

  // Whether every word of a filter stands somewhere in a text.
  ks.matches = function (text, words) {
    const low = text.toLowerCase();
    return words.toLowerCase().split(/\s+/).every((word) => low.includes(word));
  };

  ks.makePicker = function (box, view) {
    const input = ks.element("input", { type: "search", id: "filter", placeholder: "Filter runs", "aria-label": "Filter runs", autocomplete: "off", spellcheck: "false" });
    const count = ks.element("span", { class: "quiet", role: "status" });
    const draw = ks.element("button", { type: "button", class: "soft", id: "draw-these" }, "Draw these");
    const head = ks.element("div", { class: "picked" }, count, draw);
    box.append(input, head);
    const rows = () => [...document.querySelectorAll("#run-list [data-row]")];
    const left = () => view.readable().filter((run) => ks.matches(`${run.name} ${run.model} ${run.status} ${run.headline}`, input.value));
    const update = () => {
      box.hidden = view.runs.length <= MANY;
      const kept = new Set(view.runs.filter((run) => ks.matches(`${run.name} ${run.model} ${run.status} ${run.headline}`, input.value)).map((run) => run.id));
      for (const row of rows()) row.classList.toggle("filtered", !kept.has(row.dataset.row));
      head.hidden = !input.value.trim();
      count.textContent = `${ks.count(kept.size)} of ${ks.count(view.runs.length)}`;
      draw.hidden = !left().length;
      draw.textContent = left().length > MOST ? `Draw the first ${MOST}` : "Draw these";
    };
    input.addEventListener("input", update);
    draw.addEventListener("click", () => view.drawOnly(left().slice(0, MOST).map((run) => run.id)));
    update();
    return { update, focus: () => { if (!box.hidden) input.focus(); } };
  };
})((window.keelscope = window.keelscope || {}));
