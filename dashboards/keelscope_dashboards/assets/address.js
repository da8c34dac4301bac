// The address: what is on show as a link, and a link as what is to be shown.
(function (ks) {
  "use strict";

  // PAGE?run=&runs=&metric=&step=&layer=&x=a~b&y=a~b&CHOICE=a,b; layer is a depth as the report counts it

  const OWN = new Set(["run", "runs", "metric", "step", "layer", "x", "y"]);

  ks.readPage = function (path, pages) {
    const name = path.split("/").pop();
    return pages.find((page) => page.name === name) || pages[0];
  };

  ks.readAddress = function (search) {
    const query = new URLSearchParams(search);
    const number = (name) => {
      const value = query.has(name) ? Number(query.get(name)) : NaN;
      return Number.isFinite(value) ? value : null;
    };
    const range = (name) => {
      const ends = (query.get(name) || "").split("~").map(Number);
      return ends.length === 2 && ends.every(Number.isFinite) && ends[0] < ends[1] ? ends : null;
    };
    const runs = query.get("runs");
    return {
      run: query.get("run"), runs: runs ? runs.split(",") : null, metric: query.get("metric"),
      step: number("step"), layer: number("layer"), x: range("x"), y: range("y"),
      rest: Object.fromEntries([...query].filter(([name]) => !OWN.has(name)).map(([name, value]) => [name, value.split(",")])),
    };
  };

  ks.writeAddress = function (view) {
    const query = new URLSearchParams();
    const run = view.run(view.focus);
    if (run) query.set("run", run.name);
    const page = view.pages.page, overview = page.name === "overview";
    if (view.hidden && view.hidden.size) query.set("runs", view.drawn().map((one) => one.name).join(","));
    if (overview) query.set("metric", view.panel);
    if (view.at !== null) query.set("step", String(view.at));
    if (view.layer && view.tile()) query.set("layer", String(ks.depthOf(view.tile(), view.layer)));
    for (const [name, range] of [["x", view.zoomX], ["y", view.zoomY]]) {
      if (range && overview) query.set(name, range.map((end) => Number(end.toPrecision(6))).join("~"));
    }
    for (const [name, values] of Object.entries(view.pages.wished())) query.set(name, values.join(","));
    return `./${overview ? "" : page.name}?${String(query).replace(/%2C/g, ",").replace(/%2F/g, "/")}`;
  };
})((window.keelscope = window.keelscope || {}));
