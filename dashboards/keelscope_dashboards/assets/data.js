// Everything that comes from the server: polling of the state, tiles by run and panel, exact rows on demand.
(function (ks) {
  "use strict";

  const POLL = 1000, POLL_OPENING = 100, POLL_IDLE = 5000, IDLE_AFTER = 120000, RETRY = 2000;
  const MAX_TILES = 32;

  ks.Data = class {
    constructor(onState, onTile, onLost) {
      this.onState = onState;
      this.onTile = onTile;
      this.onLost = onLost;
      this.tiles = new Map();
      this.busy = new Map();
      this.exact = new Map();
      this.moved = Date.now();
      this.lost = 0;
      this.etag = "";
      document.addEventListener("visibilitychange", () => { if (!document.hidden) this.poll(); });
      for (const kind of ["pointerdown", "keydown"]) document.addEventListener(kind, () => { this.moved = Date.now(); });
    }

    start() { this.poll(); }

    async poll() {
      clearTimeout(this.timer);
      if (this.polling) return;
      this.polling = true;
      try {
        const headers = this.etag ? { "If-None-Match": this.etag } : {};
        const first = await ks.early; // asked for by the head of the page
        ks.early = null;
        const answer = first || await fetch("api/v1/state", { headers, cache: "no-store" });
        if (answer.ok) {
          this.etag = answer.headers.get("ETag") || "";
          this.state = await answer.json();
        } else if (answer.status !== 304) {
          throw new Error(`state: ${answer.status}`);
        }
        this.lost = 0;
        this.onLost(0);
        this.onState(this.state, answer.status !== 304);
      } catch (error) {
        this.lost += 1;
        this.onLost(this.lost);
      }
      this.polling = false;
      const opening = this.state && this.state.runs.some((run) => run.status === "waiting");
      const wait = this.lost ? RETRY : opening ? POLL_OPENING : Date.now() - this.moved > IDLE_AFTER ? POLL_IDLE : POLL;
      if (!document.hidden) this.timer = setTimeout(() => this.poll(), wait);
    }

    tile(run, panel) { return this.tiles.get(`${run}|${panel}`) || null; }

    // Bring one tile up to a revision of its run: only the bins from the last, still filling one on are fetched.
    // A request that is under way is waited for, whoever made it.
    async want(run, panel, revision) {
      const key = `${run}|${panel}`, old = this.tiles.get(key);
      if (!this.busy.has(key) && old && old.revision === revision) return;
      if (!this.busy.has(key)) this.busy.set(key, this.fetched(key, run, panel, revision));
      await this.busy.get(key);
    }

    async fetched(key, run, panel, revision) {
      const old = this.tiles.get(key);
      try {
        let tile = old ? await this.tail(run, panel, old) : null;
        if (!tile) {
          const { header, arrays } = await this.binary(`runs/${run}/tile?panel=${panel}`);
          tile = ks.tileOf(header, arrays);
        }
        this.keep(key, tile);
        this.onTile(run, panel);
        if (tile.behind) setTimeout(() => this.want(run, panel, revision), 0); // a long run comes in parts
      } catch (error) {
        if (!(error instanceof ks.Refused)) this.onLost(this.lost + 1);
      } finally {
        this.busy.delete(key);
      }
    }

    async tail(run, panel, old) {
      try {
        const { header, arrays } = await this.binary(`runs/${run}/tile?panel=${panel}&from=${Math.max(0, old.bins - 1)}`);
        return ks.spliced(old, header, arrays);
      } catch (error) {
        if (error instanceof ks.Refused) return null;
        throw error;
      }
    }

    keep(key, tile) {
      this.tiles.delete(key);
      this.tiles.set(key, tile);
      if (this.tiles.size > MAX_TILES) this.tiles.delete(this.tiles.keys().next().value);
    }

    // Levels of one recorded step, or the band of one layer, when bins hold several steps.
    async rows(kind, run, panel, at, revision) {
      const key = `${kind}|${run}|${panel}|${at}|${revision}`;
      if (!this.exact.has(key)) {
        const query = kind === "profile" ? `step=${at}` : `layer=${at}&bins=1000`;
        if (this.exact.size > 200) this.exact.clear();
        this.exact.set(key, await this.binary(`runs/${run}/${kind}?panel=${panel}&${query}`));
      }
      return this.exact.get(key);
    }

    async text(path) {
      const answer = await fetch(`api/v1/${path}`);
      if (!answer.ok) throw new ks.Refused(`${path}: ${answer.status}`);
      return answer.text();
    }

    async binary(path) {
      const answer = await fetch(`api/v1/${path}`);
      if (!answer.ok) throw new ks.Refused(`${path}: ${answer.status}`);
      return ks.unpack(await answer.arrayBuffer());
    }
  };

  ks.Refused = class extends Error {};
})((window.keelscope = window.keelscope || {}));
