"use strict";
// Behaviour of the page: colours of the scheme, what is drawn at a zoom, a cursor with the values of all figures, runs and figures
// that are shown or hidden, tables that can be sorted, figures that can be saved.
(async () => {
  const element = (id) => document.getElementById(id);
  const data = JSON.parse(element("figures").textContent);
  const roots = Object.fromEntries(Object.entries(data.roots).map(([name, id]) => [id, `plot-${name}`]));
  const item = { docid: "page", roots, root_ids: Object.keys(roots) };
  const [manager] = data.document.roots.length ? await Bokeh.embed.embed_items({ page: data.document }, [item]) : [];
  const views = manager ? [...manager].filter(({ model }) => model.name in data.roots) : []; // one more shows notifications
  const bokeh = Bokeh.documents.at(-1);
  const visible = bokeh?.get_model_by_name("x");

  const marks = (model) => model.center.filter(({ type }) => type === "Span");
  const arrays = data.arrays.map(curves.decoded);
  const clocks = data.clocks.map((clock) => Object.fromEntries(Object.entries(clock).map(([name, index]) => [name, arrays[index]])));
  // Glyphs have the tags colour, run and role.
  const figures = views.map((view) => {
    const { model } = view, { name } = model, box = element(`plot-${name}`);
    const outputs = [...document.querySelectorAll(`#legend-${name} output`)];
    const series = (data.series[name] ?? []).map(({ run, ...numbers }, i) => {
      const [steps, y, mean_steps, means] = ["steps", "y", "mean_steps", "means"].map((key) => arrays[numbers[key]]);
      const roles = Object.fromEntries(model.renderers.filter(({ glyph }) => glyph.tags[1] === `of-${i}`).map((renderer) => [renderer.glyph.tags[2], renderer]));
      return { run, steps, x: steps, y, mean_steps, means, roles, output: outputs[i], last: outputs[i]?.textContent, isShown: true };
    });
    const line = box.appendChild(document.createElement("div"));
    line.className = "cursor";
    const isStack = series.some(({ roles }) => roles.part);
    return { name, view, model, box, line, series, isStack, isTimeline: name === data.timeline, at: element(`at-${name}`) };
  });

  // ---- colours
  const scheme = matchMedia("(prefers-color-scheme: dark)");
  function paint() {
    const style = getComputedStyle(document.documentElement), color = (name) => style.getPropertyValue(`--${name}`).trim();
    for (const { model } of figures) {
      for (const axis of [...model.below, ...model.left]) {
        axis.setv({ axis_label_text_color: color("text"), major_label_text_color: color("text"), axis_line_color: color("muted"),
          major_tick_line_color: color("muted"), minor_tick_line_color: null });
      }
      for (const grid of model.center) if (grid.type === "Grid") grid.setv({ grid_line_color: color("line"), grid_line_alpha: 0.5 });
      for (const mark of marks(model)) mark.setv({ line_color: color(mark.tags[0]) });
      for (const { glyph } of model.renderers) {
        const own = color(glyph.tags[0]);
        if (glyph.type !== "VArea") glyph.setv({ line_color: own });
        if (glyph.type !== "Line") glyph.setv({ fill_color: own });
      }
    }
  }
  scheme.addEventListener("change", paint);
  paint();

  // ---- what is drawn
  const controls = element("controls");
  const stored = { get: (key) => { try { return JSON.parse(sessionStorage.getItem(key)); } catch { return null; } },
    set: (key, value) => { try { sessionStorage.setItem(key, JSON.stringify(value)); } catch { /* storage may be forbidden */ } } };
  for (const control of controls.elements) {
    const kept = stored.get(control.name);
    if (!control.name || kept === null) continue;
    if (control.type === "checkbox") control.checked = kept; else control.value = kept;
  }
  const unit = () => data.units[controls.elements.unit.value];
  // The position of a step in the chosen unit. Between two records it is interpolated.
  const positions = (run, steps) => (unit().clock === "steps" ? steps : steps.map((step) => curves.interpolated(clocks[run].steps, clocks[run][unit().clock], step)));
  const NOTHING = { x: [], y: [] };

  // Fill the glyphs of a line with what is visible. Many records are groups with a band of their values, and a line of means.
  function drawLine({ x, y, steps, means, mean_x, mean_steps, roles }, [start, end], smoothing) {
    const from = Math.max(0, curves.first(x, start) - 1), to = Math.min(x.length, curves.first(x, end) + 1);
    const seen = { x: x.slice(from, to), y: y.slice(from, to) };
    const isDense = smoothing !== "none" && (seen.x.length > data.noisy || means !== undefined);
    let line = seen, isSmoothed = isDense;
    if (smoothing === "none" || (smoothing === "auto" && !isDense)) isSmoothed = false;
    else {
      const of = means ? { x: mean_x, y: means, steps: mean_steps } : { x, y, steps };
      const first = Math.max(0, curves.first(of.x, start) - 1), last = Math.min(of.x.length, curves.first(of.x, end) + 1);
      const at = of.x.slice(first, last);
      if (smoothing === "auto") {
        const groups = curves.grouped(at, of.y.slice(first, last), data.means);
        line = { x: groups.x, y: groups.mean };
      } else {
        const window = Math.round(Number(smoothing) * of.y.length / (of.steps.at(-1) - of.steps[0] + 1));
        line = { x: at, y: curves.moving(of.y, Math.max(1, window)).slice(first, last) };
        isSmoothed = true;
      }
    }
    const band = curves.grouped(seen.x, seen.y, isDense ? Math.min(data.bands, means ? seen.x.length / 4 : Infinity) : 0);
    roles.band.data_source.data = { x: band.x, y1: band.low, y2: band.high };
    roles.pale.data_source.data = isSmoothed && !isDense ? seen : NOTHING;
    roles.line.data_source.data = line;
    roles.points.data_source.data = seen.x.length <= data.markers ? seen : NOTHING;
    if (roles.planned) roles.planned.data_source.data = { x: [start, end], y: roles.planned.data_source.data.y };
    const inside = y.filter((_, i) => x[i] >= start && x[i] <= end);
    return [...(inside.length ? inside : seen.y), ...(roles.planned ? roles.planned.data_source.data.y : [])];
  }
  function drawStack(series) {
    let low = series[0].y.map(() => 0);
    for (const { x, y, roles } of series) {
      const high = low.map((value, i) => value + (Number.isFinite(y[i]) ? y[i] : 0));
      roles.part.data_source.data = { x, y1: low, y2: high };
      low = high;
    }
    return [0, ...low];
  }
  function setScale(model, isLog) {
    const kind = isLog ? "Log" : "Linear", axis = model.left[0];
    if (model.y_scale.type === `${kind}Scale`) return;
    const models = (name) => new (Bokeh.Models.get(name))();
    const ticker = models(isLog ? "LogTicker" : "BasicTicker");
    model.y_scale = models(`${kind}Scale`);
    axis.setv({ ticker, formatter: models(isLog ? "LogTickFormatter" : "BasicTickFormatter") });
    for (const grid of model.center) if (grid.type === "Grid" && grid.dimension === 1) grid.ticker = ticker;
  }
  function draw(figure) {
    const { model, series, isStack, isTimeline } = figure;
    const smoothing = controls.elements.smoothing.value;
    const shown = series.filter(({ isShown }) => isShown);
    if (isTimeline) {
      for (const { x, y, roles } of series) roles.points.data_source.data = { x, y: [...y].map((offset) => [roles.points.glyph.tags[3], offset]) };
      return;
    }
    const values = isStack ? [drawStack(series)] : shown.map((one) => drawLine(one, [visible.start, visible.end], smoothing));
    let all = (controls.elements.spikes.checked && !isStack ? values.map(curves.withoutSpikes) : values).flat().filter(Number.isFinite);
    const isLog = controls.elements.log.checked && !isStack && all.length > 0 && all.every((value) => value > 0);
    setScale(model, isLog);
    const { start, end } = curves.range(all, isLog);
    model.y_range.setv({ start: isStack ? 0 : start, end });
  }
  let whole = null;
  function setUnit() {
    let low = Infinity, high = -Infinity;
    for (const { series, model } of figures) {
      for (const one of series) {
        one.x = positions(one.run, one.steps);
        if (one.means) one.mean_x = positions(one.run, one.mean_steps);
        for (const x of [one.x.find(Number.isFinite), one.x.findLast(Number.isFinite)]) if (x !== undefined) { low = Math.min(low, x); high = Math.max(high, x); }
      }
      for (const mark of marks(model)) mark.location = positions(Number(mark.tags[1].slice(3)), [mark.tags[2]])[0];
      const { format, least } = unit();
      model.below[0].formatter.format = format;
      model.below[0].ticker.min_interval = least;
    }
    if (low > high) { low = 0; high = 1; }
    const pad = Math.max(0.01 * (high - low), unit().least / 2) || 0.5;
    whole = { start: low - pad, end: high + pad, low, high };
    visible.min_interval = unit().least;
    for (const word of document.querySelectorAll("[data-unit]")) word.textContent = unit().label;
  }

  // ---- cursor
  // A value of a record as it is; the mean of a group of records with six digits.
  const written = (value, isMean) => (Number.isFinite(value) ? String(isMean ? Number(value.toPrecision(6)) : value) : "not finite");
  const amount = (value) => value.toLocaleString("en", { maximumFractionDigits: unit().clock === "hours" ? 3 : 0 });
  let cursor = null;
  function show(position) {
    cursor = position;
    for (const { view, line, series, at, isStack } of figures) {
      const { bbox } = view.frame, px = view.frame.x_scale.compute(position);
      const inside = position !== null && px >= bbox.left && px <= bbox.right;
      line.style.display = inside ? "block" : "none";
      if (inside) line.style.transform = `translateX(${Math.round(px)}px)`;
      for (const { output, last, x, y, steps } of series) {
        if (!output) continue;
        if (position === null || !x.length) { output.textContent = last; continue; }
        const i = curves.nearest(x, position), text = written(y[i], isStack);
        output.textContent = x[i] === position ? text : `${text} at step ${steps[i].toLocaleString("en")}`;
      }
      if (at) at.textContent = position === null ? "last value" : unit().clock === "steps" ? `at step ${amount(position)}` : `at ${amount(position)} ${unit().label}`;
    }
  }
  // The record of a figure that is nearest to a position, so that a value of metrics.jsonl is shown.
  function recordAt({ series }, position) {
    const candidates = series.filter(({ x, isShown }) => x.length && isShown).map(({ x }) => x[curves.nearest(x, position)]).filter(Number.isFinite);
    if (!candidates.length) return Math.round(position);
    return candidates.reduce((best, x) => (Math.abs(x - position) < Math.abs(best - position) ? x : best));
  }
  let pending = 0;
  for (const figure of figures) {
    const { box, view, series } = figure;
    box.addEventListener("pointermove", (event) => {
      const px = event.clientX - box.getBoundingClientRect().left;
      cancelAnimationFrame(pending);
      pending = requestAnimationFrame(() => show(recordAt(figure, view.frame.x_scale.invert(px))));
    });
    box.addEventListener("pointerleave", () => { cancelAnimationFrame(pending); show(null); });
    box.addEventListener("dblclick", reset);
    box.addEventListener("keydown", (event) => {
      const xs = series.find(({ x, isShown }) => x.length && isShown)?.x;
      if (event.key === "Escape") { reset(); show(null); return; }
      if (!xs) return;
      const i = cursor === null ? xs.length - 1 : curves.nearest(xs, cursor);
      const stride = event.shiftKey ? Math.max(1, Math.round(xs.length / 20)) : 1;
      const target = { ArrowLeft: i - (cursor !== null) * stride, ArrowRight: i + (cursor !== null) * stride, Home: 0, End: xs.length - 1 }[event.key];
      if (target === undefined) return;
      event.preventDefault();
      show(xs[Math.min(xs.length - 1, Math.max(0, target))]);
      const spoken = series.filter(({ output, isShown }) => output && isShown).map(({ output }) => `${output.dataset.label} ${output.textContent}`).join(", ");
      element("spoken").textContent = `${figure.at?.textContent.slice(3)}: ${spoken}`;
    });
  }

  // ---- zoom
  const form = element("zoom");
  function reset() { visible?.setv({ start: whole.start, end: whole.end }); }
  let drawing = 0;
  function redraw() {
    cancelAnimationFrame(drawing);
    drawing = requestAnimationFrame(() => { figures.forEach(draw); if (cursor !== null) show(cursor); });
  }
  function showZoom() {
    const isWhole = unit().least === 1, digits = (value) => (isWhole ? value : Number(value.toPrecision(6)));
    form.elements.from.value = digits(Math.max(whole.low, isWhole ? Math.ceil(visible.start) : visible.start));
    form.elements.to.value = digits(Math.min(whole.high, isWhole ? Math.floor(visible.end) : visible.end));
    const zoomed = visible.start !== whole.start || visible.end !== whole.end;
    stored.set("zoom", zoomed ? [visible.start, visible.end] : null);
    redraw();
  }
  if (visible) {
    setUnit();
    const zoom = stored.get("zoom");
    if (Array.isArray(zoom) && zoom[0] < zoom[1]) visible.setv({ start: zoom[0], end: zoom[1] }); else reset();
    visible.properties.start.change.connect(showZoom);
    visible.properties.end.change.connect(showZoom);
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      const from = Number(form.elements.from.value), to = Number(form.elements.to.value);
      if (from < to) visible.setv({ start: from, end: to });
    });
    form.addEventListener("reset", (event) => { event.preventDefault(); reset(); });
    showZoom();
    figures.forEach(draw);
  }
  // On a touch screen a finger scrolls the page; the form zooms.
  if (matchMedia("(pointer: coarse)").matches) for (const { model } of figures) model.toolbar.active_drag = null;

  // ---- figures that are shown
  function filter() {
    const words = controls.elements.filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    for (const part of document.querySelectorAll("section:has(figure)")) {
      const all = [...part.querySelectorAll("figure")];
      for (const one of all) one.hidden = !words.every((word) => one.querySelector("h3").textContent.toLowerCase().includes(word));
      part.hidden = words.length > 0 && all.every(({ hidden }) => hidden);
    }
  }
  controls.addEventListener("submit", (event) => event.preventDefault());
  controls.addEventListener("input", ({ target }) => {
    stored.set(target.name, target.type === "checkbox" ? target.checked : target.value);
    if (target.name === "filter") filter();
    else if (visible) { if (target.name === "unit") { show(null); setUnit(); reset(); showZoom(); } redraw(); }
  });
  filter();

  // ---- runs
  const hidden = new Set(stored.get("hidden") ?? []);
  for (const box of document.querySelectorAll("input[data-run]")) {
    const apply = () => {
      const run = Number(box.dataset.run);
      for (const { model, series } of figures) {
        for (const one of series) {
          if (one.run !== run || one.roles.part) continue;
          one.isShown = box.checked;
          for (const renderer of Object.values(one.roles)) renderer.visible = box.checked;
          if (one.output) one.output.closest("li").hidden = !box.checked;
        }
        for (const mark of marks(model)) if (mark.tags[1] === `of-${run}`) mark.visible = box.checked;
      }
    };
    box.checked = !hidden.has(box.dataset.run);
    if (!box.checked) apply();
    box.addEventListener("change", () => {
      hidden[box.checked ? "delete" : "add"](box.dataset.run);
      stored.set("hidden", [...hidden]);
      apply();
      redraw();
    });
  }

  // ---- the table of runs
  const compare = new Intl.Collator("en", { numeric: true }).compare;
  for (const table of document.querySelectorAll("table.sorted")) {
    const heads = [...table.tHead.rows[0].cells], body = table.tBodies[0];
    function sort(column, direction) {
      const key = (row) => row.cells[column].dataset.key ?? "", isNumber = [...body.rows].every((row) => !key(row) || Number.isFinite(Number(key(row))));
      const order = (a, b) => (isNumber ? Number(a) - Number(b) : compare(a, b));
      // A run without a value is last in both directions.
      body.append(...[...body.rows].sort((a, b) => !key(a) - !key(b) || direction * order(key(a), key(b))));
      heads.forEach((head, i) => { if (i === column) head.ariaSort = direction > 0 ? "ascending" : "descending"; else head.removeAttribute("aria-sort"); });
      stored.set("sort", [column, direction]);
    }
    heads.forEach((head, column) => head.querySelector("button")?.addEventListener("click", () => sort(column, head.ariaSort === "ascending" ? -1 : 1)));
    const kept = stored.get("sort");
    if (Array.isArray(kept) && heads[kept[0]]) sort(...kept);
  }

  // ---- figures as pictures
  for (const figure of figures) {
    const title = element(`title-${figure.name}`).textContent;
    for (const button of figure.box.closest("figure").querySelectorAll("button[data-save]")) {
      button.addEventListener("click", async () => {
        const kind = button.dataset.save, link = document.createElement("a");
        const picture = pictures.forFile(figure);
        link.href = kind === "svg" ? pictures.address(picture) : await pictures.png(picture);
        link.download = `${title.replace(/[^\p{L}\p{N}]+/gu, "_").replace(/^_+|_+$/g, "")}.${kind}`;
        link.click();
      });
    }
  }
  // A figure has the width of the window; on paper it is a picture, which fits.
  addEventListener("beforeprint", () => {
    for (const figure of figures.filter(({ box }) => box.offsetWidth)) {
      figure.box.querySelector("svg.paper")?.remove();
      figure.box.append(pictures.inline(pictures.forPaper(figure)));
    }
  });

  // ---- a page that is served loads itself again when its runs have new records
  if (data.watch) {
    const state = element("watch");
    scrollTo(0, stored.get("scroll") ?? 0);
    addEventListener("scroll", () => stored.set("scroll", scrollY));
    const details = [...document.querySelectorAll("details")], name = (one) => one.querySelector("summary").textContent;
    const open = new Set(stored.get("open") ?? []);
    for (const one of details) {
      one.open ||= open.has(name(one));
      one.addEventListener("toggle", () => stored.set("open", details.filter((each) => each.open).map(name)));
    }
    setInterval(async () => {
      try {
        const version = await (await fetch("version", { cache: "no-store" })).text();
        state.textContent = "Watching: the page follows the runs.";
        if (version !== data.watch.version) location.reload();
      } catch {
        state.textContent = "Not connected: scripts/report.py --watch has ended.";
      }
    }, 1000 * data.watch.interval_s);
  }
  document.documentElement.dataset.ready = "true";
})();
