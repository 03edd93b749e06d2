"use strict";
// One figure: the records of its lines, what is drawn of them, and the values under the cursor. Glyphs have the tags colour, line
// ("of-" and its index), role, and in the timeline the name of their row.
class Plot {
  // data: see Drawing.facts; arrays: its decoded arrays.
  constructor(view, data, arrays) {
    this.view = view;
    this.model = view.model;
    this.name = view.model.name;
    this.data = data;
    this.box = document.getElementById(`plot-${this.name}`);
    this.at = document.getElementById(`at-${this.name}`);
    this.spoken = this.box.getAttribute("aria-label");
    const outputs = [...document.querySelectorAll(`#legend-${this.name} output`)];
    this.series = data.series[this.name].map(({ run, ...numbers }, i) => {
      const [steps, y, mean_steps, means] = ["steps", "y", "mean_steps", "means"].map((key) => arrays[numbers[key]]);
      const glyphs = this.model.renderers.filter(({ glyph }) => glyph.tags[1] === `of-${i}`);
      const roles = Object.fromEntries(glyphs.map((renderer) => [renderer.glyph.tags[2], renderer]));
      return { run, records: { steps, y }, means: means && { steps: mean_steps, y: means }, roles, output: outputs[i], last: outputs[i]?.textContent, isShown: true };
    });
    this.isStack = this.series.some(({ roles }) => roles.part);
    this.isTimeline = this.name === data.timeline;
    const [axis] = this.model.left;
    this.linear = { ticker: axis.ticker, formatter: axis.formatter };
    this.line = this.box.appendChild(document.createElement("div"));
    this.line.className = "cursor";
  }

  get marks() { return this.model.center.filter(({ type }) => type === "Span"); }
  get grids() { return this.model.center.filter(({ type }) => type === "Grid"); }
  get shown() { return this.series.filter(({ isShown }) => isShown); }

  paint(color) {
    for (const axis of [...this.model.below, ...this.model.left]) {
      axis.setv({ axis_label_text_color: color("text"), major_label_text_color: color("text"), axis_line_color: color("muted"),
        major_tick_line_color: color("muted"), minor_tick_line_color: null });
    }
    for (const grid of this.grids) grid.setv({ grid_line_color: color("line"), grid_line_alpha: 0.5 });
    for (const mark of this.marks) mark.setv({ line_color: color(mark.tags[0]) });
    for (const { glyph } of this.model.renderers) {
      const own = color(glyph.tags[0]);
      if (glyph.type !== "VArea") glyph.setv({ line_color: own });
      if (glyph.type !== "Line") glyph.setv({ fill_color: own });
    }
  }

  // Use another horizontal axis. place: function (run, steps) -> positions, which are NaN where the run has none.
  setAxis(axis, place) {
    const placed = (run, { steps, y }) => {
      const x = place(run, steps), kept = (_, i) => Number.isFinite(x[i]);
      return { steps: steps.filter(kept), x: x.filter(Number.isFinite), y: y.filter(kept) };
    };
    for (const one of this.series) {
      Object.assign(one, placed(one.run, one.records));
      one.smooth = one.means && placed(one.run, one.means);
    }
    for (const mark of this.marks) mark.location = place(Number(mark.tags[1].slice(3)), [mark.tags[2]])[0];
    this.model.below[0].axis_label = this.data.axis_labels[axis];
    this.box.setAttribute("aria-label", this.spoken.replace("over the steps", `over the ${this.data.axis_labels[axis]}`));
  }

  get extent() {
    const ends = this.series.flatMap(({ x }) => (x.length ? [x[0], x.at(-1)] : []));
    return ends.length ? [Math.min(...ends), Math.max(...ends)] : [];
  }

  // Fill the glyphs with what is visible between two positions. options: smoothing, log, spikes.
  draw({ start, end }, options) {
    if (this.isTimeline) { this.#drawEvents(); return; }
    const drawn = this.isStack ? [this.#drawParts(start, end)] : this.shown.map((one) => this.#drawLine(one, start, end, options.smoothing));
    const values = (options.spikes && !this.isStack ? drawn.map(curves.withoutSpikes) : drawn).flatMap((some) => [...some]).filter(Number.isFinite);
    for (const { roles } of this.shown) if (roles.level) values.push(roles.level.data_source.data.y[0]);
    const isLog = options.log && !this.isStack && values.length > 0 && values.every((value) => value > 0);
    this.#setScale(isLog);
    this.model.y_range.setv(this.isStack ? { ...curves.range(values, false), start: 0 } : curves.range(values, isLog));
  }

  #drawEvents() {
    for (const { x, y, roles: { points } } of this.series) {
      points.data_source.data = { x, y: [...y].map((offset) => [points.glyph.tags[3], offset]) };
    }
  }

  // Many records are groups, with a band of their values and a line of means. Returns the visible values.
  #drawLine({ roles, smooth, ...records }, start, end, smoothing) {
    const { noisy, means, bands, markers } = this.data, nothing = { x: [], y: [] };
    const seen = curves.between(records, start, end);
    const isDense = smoothing !== "none" && (seen.x.length > noisy || smooth !== undefined);
    const isSmoothed = smoothing !== "none" && (smoothing !== "auto" || isDense);
    let line = seen;
    if (isSmoothed && smoothing === "auto") {
      const { x, y } = curves.between(smooth ?? records, start, end), groups = curves.grouped(x, y, means);
      line = { x: groups.x, y: groups.mean };
    } else if (isSmoothed) {
      const all = smooth ?? records;
      line = curves.between({ ...all, y: curves.moving(all.steps, all.y, Number(smoothing)) }, start, end);
    }
    const band = curves.grouped(seen.x, seen.y, isDense ? Math.min(bands, smooth ? seen.x.length / 4 : Infinity) : 0);
    roles.band.data_source.data = { x: band.x, y1: band.low, y2: band.high };
    roles.pale.data_source.data = isSmoothed && !isDense ? seen : nothing;
    roles.line.data_source.data = { x: line.x, y: line.y };
    roles.points.data_source.data = seen.x.length <= markers ? seen : nothing;
    if (roles.level) roles.level.data_source.data = { x: [start, end], y: roles.level.data_source.data.y };
    const inside = seen.y.filter((_, i) => seen.x[i] >= start && seen.x[i] <= end);
    return inside.length ? inside : seen.y;
  }

  // The parts of a sum upon each other. Returns the visible sums.
  #drawParts(start, end) {
    const { x } = this.series[0];
    let low = x.map(() => 0);
    for (const { y, roles } of this.series) {
      const high = low.map((value, i) => value + (Number.isFinite(y[i]) ? y[i] : 0));
      roles.part.data_source.data = { x, y1: low, y2: high };
      low = high;
    }
    return curves.between({ x, y: low }, start, end).y;
  }

  #setScale(isLog) {
    const kind = isLog ? "Log" : "Linear", [axis] = this.model.left;
    if (this.model.y_scale.type === `${kind}Scale`) return;
    const made = (type) => new (Bokeh.Models.get(type))();
    const { ticker, formatter } = isLog ? { ticker: made("LogTicker"), formatter: made("LogTickFormatter") } : this.linear;
    this.model.y_scale = made(`${kind}Scale`);
    axis.setv({ ticker, formatter });
    for (const grid of this.grids) if (grid.dimension === 1) grid.ticker = ticker;
  }

  // Show the values at a position, or the last ones. label: of the position.
  show(position, label) {
    const { bbox, x_scale } = this.view.frame, px = x_scale.compute(position);
    const isInside = position !== null && px >= bbox.left && px <= bbox.right;
    this.line.style.display = isInside ? "block" : "none";
    if (isInside) this.line.style.transform = `translateX(${Math.round(px)}px)`;
    for (const { output, last, x, y, steps } of this.series) {
      if (!output) continue;
      if (position === null) { output.textContent = last; continue; }
      if (!x.length) { output.textContent = ""; continue; }
      // A value of a record as it is; the mean of a group of records with six digits.
      const i = curves.nearest(x, position), value = this.isStack ? Number(y[i].toPrecision(6)) : y[i];
      const text = Number.isFinite(value) ? String(value) : "not finite";
      output.textContent = x[i] === position ? text : `${text} at step ${steps[i].toLocaleString("en")}`;
    }
    if (this.at) this.at.textContent = label;
  }

  // The position of the record that is nearest, so that a value of metrics.jsonl is shown.
  recordAt(position) {
    const nearest = this.shown.filter(({ x }) => x.length).map(({ x }) => x[curves.nearest(x, position)]);
    return nearest.length ? nearest.reduce((best, x) => (Math.abs(x - position) < Math.abs(best - position) ? x : best)) : null;
  }

  // Show or hide the lines of a run.
  showRun(run, isShown) {
    for (const one of this.series) {
      if (one.run !== run || this.isStack) continue;
      one.isShown = isShown;
      for (const renderer of Object.values(one.roles)) renderer.visible = isShown;
      if (one.output) one.output.closest("li").hidden = !isShown;
    }
    for (const mark of this.marks) if (mark.tags[1] === `of-${run}`) mark.visible = isShown;
  }
}
