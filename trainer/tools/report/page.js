"use strict";
// Behaviour of the page: the figures, their controls, cursor and zoom.
class Page {
  constructor(data, arrays, plots, visible) {
    this.data = data;
    this.plots = plots;
    this.visible = visible; // the range of the horizontal axis, which all figures have
    this.arrays = arrays;
    this.controls = document.getElementById("controls");
    this.zoom = document.getElementById("zoom");
    this.cursor = null;
    this.whole = null;
    this.frame = 0;
  }

  get axis() { return this.controls.elements.axis.value; }
  get isSteps() { return this.axis === "steps"; }

  paint() {
    const style = getComputedStyle(document.documentElement);
    for (const plot of this.plots) plot.paint((name) => style.getPropertyValue(`--${name}`).trim());
  }

  // The positions of a run's steps on the horizontal axis.
  place(run, steps) {
    if (this.isSteps) return steps;
    const { steps: known, values } = this.data.axes[run][this.axis];
    return steps.map((step) => curves.interpolated(this.arrays[known], this.arrays[values], step));
  }

  setAxis() {
    for (const plot of this.plots) plot.setAxis(this.axis, (run, steps) => this.place(run, steps));
    const ends = this.plots.flatMap(({ extent }) => extent);
    const [low, high] = ends.length ? [Math.min(...ends), Math.max(...ends)] : [0, 1];
    const pad = Math.max(0.01 * (high - low), this.isSteps ? 0.5 : 0) || 0.5;
    this.whole = { start: low - pad, end: high + pad, low, high };
    this.visible.min_interval = this.isSteps ? 1 : null;
    for (const { model } of this.plots) model.below[0].ticker.min_interval = this.isSteps ? 1 : 0;
    document.getElementById("axis-label").textContent = this.data.axis_labels[this.axis];
  }

  reset() { if (this.whole) this.visible.setv({ start: this.whole.start, end: this.whole.end }); }

  draw() {
    const { smoothing, log, spikes } = this.controls.elements;
    const options = { smoothing: smoothing.value, log: log.checked, spikes: spikes.checked };
    for (const plot of this.plots) plot.draw(this.visible, options);
    if (this.cursor !== null) this.show(this.cursor);
  }

  redraw() {
    cancelAnimationFrame(this.frame);
    this.frame = requestAnimationFrame(() => this.draw());
  }

  // The zoom has changed.
  zoomed() {
    const { start, end } = this.visible, { low, high } = this.whole, { from, to } = this.zoom.elements;
    const digits = (value) => Number(value.toPrecision(6));
    from.value = this.isSteps ? Math.max(low, Math.ceil(start)) : digits(Math.max(low, start));
    to.value = this.isSteps ? Math.min(high, Math.floor(end)) : digits(Math.min(high, end));
    stored.set("zoom", start !== this.whole.start || end !== this.whole.end ? [start, end] : null);
    const format = curves.tickFormat(this.axis, start, end);
    for (const { model } of this.plots) model.below[0].formatter.format = format;
    this.redraw();
  }

  show(position) {
    this.cursor = position;
    const label = position === null ? "last value" : this.isSteps ? `at step ${position.toLocaleString("en")}`
      : `at ${position.toLocaleString("en", { maximumFractionDigits: this.axis === "hours" ? 3 : 0 })} ${this.data.axis_labels[this.axis]}`;
    for (const plot of this.plots) plot.show(position, label);
  }

  // Move the cursor with a key, or say what it shows.
  press(plot, event) {
    if (event.key === "Escape") { this.reset(); this.show(null); return; }
    const xs = plot.shown.find(({ x }) => x.length)?.x;
    if (!xs) return;
    const isMoving = this.cursor !== null, i = isMoving ? curves.nearest(xs, this.cursor) : xs.length - 1;
    const stride = isMoving * (event.shiftKey ? Math.max(1, Math.round(xs.length / 20)) : 1);
    const target = { ArrowLeft: i - stride, ArrowRight: i + stride, Home: 0, End: xs.length - 1 }[event.key];
    if (target === undefined) return;
    event.preventDefault();
    this.show(xs[Math.min(xs.length - 1, Math.max(0, target))]);
    const said = plot.shown.filter(({ output }) => output?.textContent).map(({ output }) => `${output.dataset.label} ${output.textContent}`);
    document.getElementById("spoken").textContent = `${plot.at?.textContent.slice(3)}: ${said.join(", ")}`;
  }

  followPointer(plot) {
    const { box, view } = plot;
    let pending = 0;
    box.addEventListener("pointermove", (event) => {
      const px = event.clientX - box.getBoundingClientRect().left;
      cancelAnimationFrame(pending);
      pending = requestAnimationFrame(() => this.show(plot.recordAt(view.frame.x_scale.invert(px))));
    });
    box.addEventListener("pointerleave", () => { cancelAnimationFrame(pending); this.show(null); });
    box.addEventListener("dblclick", () => this.reset());
    box.addEventListener("keydown", (event) => this.press(plot, event));
  }

  saveOnClick(plot) {
    const title = document.getElementById(`title-${plot.name}`).textContent;
    for (const button of plot.box.closest("figure").querySelectorAll("button[data-save]")) {
      button.addEventListener("click", async () => {
        const kind = button.dataset.save, link = document.createElement("a"), picture = pictures.forFile(plot);
        link.href = kind === "svg" ? pictures.address(picture) : await pictures.png(picture);
        link.download = `${title.replace(/[^\p{L}\p{N}]+/gu, "_").replace(/^_+|_+$/g, "")}.${kind}`;
        link.click();
      });
    }
  }

  startZoom() {
    this.setAxis();
    const kept = stored.get("zoom");
    if (Array.isArray(kept) && kept[0] < kept[1]) this.visible.setv({ start: kept[0], end: kept[1] }); else this.reset();
    for (const end of ["start", "end"]) this.visible.properties[end].change.connect(() => this.zoomed());
    this.zoom.addEventListener("submit", (event) => {
      event.preventDefault();
      const from = Number(this.zoom.elements.from.value), to = Number(this.zoom.elements.to.value);
      if (from < to) this.visible.setv({ start: from, end: to });
    });
    this.zoom.addEventListener("reset", (event) => { event.preventDefault(); this.reset(); });
    this.zoomed();
  }

  startControls() {
    this.controls.addEventListener("submit", (event) => event.preventDefault());
    this.controls.addEventListener("input", ({ target }) => {
      stored.set(target.name, target.type === "checkbox" ? target.checked : target.value);
      if (target.name === "filter") { showFigures(target.value); return; }
      if (!this.visible) return;
      if (target.name === "axis") { this.show(null); this.setAxis(); this.reset(); this.zoomed(); }
      this.redraw();
    });
    showFigures(this.controls.elements.filter.value);
  }

  startRuns() {
    const hidden = new Set(stored.get("hidden") ?? []);
    for (const box of document.querySelectorAll("input[data-run]")) {
      const apply = () => { for (const plot of this.plots) plot.showRun(Number(box.dataset.run), box.checked); };
      box.checked = !hidden.has(box.dataset.run);
      apply();
      box.addEventListener("change", () => {
        hidden[box.checked ? "delete" : "add"](box.dataset.run);
        stored.set("hidden", [...hidden]);
        apply();
        this.redraw();
      });
    }
  }

  start() {
    const scheme = matchMedia("(prefers-color-scheme: dark)");
    scheme.addEventListener("change", () => this.paint());
    this.paint();
    stored.restore(this.controls);
    for (const plot of this.plots) { this.followPointer(plot); this.saveOnClick(plot); }
    this.startRuns();
    if (this.visible) this.startZoom();
    this.startControls();
    // On a touch screen a finger scrolls the page; the form zooms.
    if (matchMedia("(pointer: coarse)").matches) for (const { model } of this.plots) model.toolbar.active_drag = null;
    // A figure has the width of the window; on paper it is a picture, which fits.
    addEventListener("beforeprint", () => {
      for (const plot of this.plots.filter(({ box }) => box.offsetWidth)) {
        plot.box.querySelector("svg.paper")?.remove();
        plot.box.append(pictures.inline(pictures.forPaper(plot)));
      }
    });
  }
}

(async () => {
  const data = JSON.parse(document.getElementById("figures").textContent);
  stored.runs = data.key;
  const roots = Object.fromEntries(Object.entries(data.roots).map(([name, id]) => [id, `plot-${name}`]));
  const item = { docid: "page", roots, root_ids: Object.keys(roots) };
  const [manager] = data.document.roots.length ? await Bokeh.embed.embed_items({ page: data.document }, [item]) : [];
  const views = manager ? [...manager].filter(({ model }) => model.name in data.roots) : []; // one more shows notifications
  const arrays = data.arrays.map(curves.decoded);
  const page = new Page(data, arrays, views.map((view) => new Plot(view, data, arrays)), Bokeh.documents.at(-1)?.get_model_by_name("x"));
  page.start();
  document.querySelectorAll("table.sorted").forEach(makeSortable);
  if (data.watch) watch(data.watch);
  document.documentElement.dataset.ready = "true";
})();
