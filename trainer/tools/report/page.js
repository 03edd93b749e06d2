"use strict";
// Behaviour of the page: colours of the scheme, a cursor with the values of all figures, zoom, runs that are shown or hidden.
(async () => {
  const element = (id) => document.getElementById(id);
  const data = JSON.parse(element("figures").textContent);
  const roots = Object.fromEntries(Object.entries(data.roots).map(([name, id]) => [id, `plot-${name}`]));
  const item = { docid: "page", roots, root_ids: Object.keys(roots) };
  const [manager] = data.document.roots.length ? await Bokeh.embed.embed_items({ page: data.document }, [item]) : [];
  const views = manager ? [...manager].filter(({ model }) => model.name in data.roots) : []; // one more shows notifications
  const bokeh = Bokeh.documents.at(-1);
  const steps = bokeh?.get_model_by_name("steps");
  const whole = steps && { start: steps.start, end: steps.end };

  const figures = views.map((view) => {
    const name = view.model.name, box = element(`plot-${name}`), series = [];
    for (const output of document.querySelectorAll(`#legend-${name} output`)) {
      const source = bokeh.get_model_by_name(`source-${name}-${series.length}`);
      series.push({ output, last: output.textContent, x: source.data.x, y: source.data.y, color: output.dataset.run });
    }
    const line = box.appendChild(document.createElement("div"));
    line.className = "cursor";
    return { name, view, model: view.model, box, line, series, at: element(`at-${name}`) };
  });

  const marks = (model) => model.center.filter(({ type }) => type === "Span");

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

  // ---- cursor
  function nearest(x, step) {
    let low = 0, high = x.length - 1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (x[middle] < step) low = middle + 1; else high = middle;
    }
    return low > 0 && step - x[low - 1] <= x[low] - step ? low - 1 : low;
  }
  // A value of a record as it is; the mean of a group of records with six digits.
  const written = (value, isMean) => (Number.isFinite(value) ? String(isMean ? Number(value.toPrecision(6)) : value) : "not finite");
  let cursor = null;
  function show(step) {
    cursor = step;
    for (const { view, line, series, at } of figures) {
      const { bbox } = view.frame, px = view.frame.x_scale.compute(step);
      const inside = step !== null && px >= bbox.left && px <= bbox.right;
      line.style.display = inside ? "block" : "none";
      if (inside) line.style.transform = `translateX(${Math.round(px)}px)`;
      let all = true;
      for (const { output, last, x, y, color } of series) {
        if (step === null || !x.length) { output.textContent = last; continue; }
        const i = nearest(x, step), same = x[i] === step;
        all &&= same;
        const text = written(y[i], color === undefined);
        output.textContent = same ? text : `${text} at ${x[i].toLocaleString("en")}`;
      }
      if (at) at.textContent = step === null ? "last value" : `at step ${step.toLocaleString("en")}`;
    }
  }
  // The step of a figure that is nearest to a position, so that a value of metrics.jsonl is shown.
  function stepAt(figure, position) {
    const candidates = figure.series.filter(({ x }) => x.length).map(({ x }) => x[nearest(x, position)]);
    if (!candidates.length) return Math.round(position);
    return candidates.reduce((best, x) => (Math.abs(x - position) < Math.abs(best - position) ? x : best));
  }
  let pending = 0;
  for (const figure of figures) {
    const { box, view, series } = figure;
    box.addEventListener("pointermove", (event) => {
      const px = event.clientX - box.getBoundingClientRect().left;
      cancelAnimationFrame(pending);
      pending = requestAnimationFrame(() => show(stepAt(figure, view.frame.x_scale.invert(px))));
    });
    box.addEventListener("pointerleave", () => { cancelAnimationFrame(pending); show(null); });
    box.addEventListener("dblclick", reset);
    box.addEventListener("keydown", (event) => {
      const xs = series.find(({ x }) => x.length)?.x;
      if (event.key === "Escape") { reset(); show(null); return; }
      if (!xs) return;
      const i = cursor === null ? xs.length - 1 : nearest(xs, cursor);
      const stride = event.shiftKey ? Math.max(1, Math.round(xs.length / 20)) : 1;
      const target = { ArrowLeft: i - (cursor !== null) * stride, ArrowRight: i + (cursor !== null) * stride, Home: 0, End: xs.length - 1 }[event.key];
      if (target === undefined) return;
      event.preventDefault();
      show(xs[Math.min(xs.length - 1, Math.max(0, target))]);
      const spoken = series.map(({ output }) => `${output.dataset.label} ${output.textContent}`).join(", ");
      element("spoken").textContent = `step ${cursor}: ${spoken}`;
    });
  }

  // ---- zoom
  const form = element("zoom");
  const stored = { get: (key) => { try { return JSON.parse(sessionStorage.getItem(key)); } catch { return null; } },
    set: (key, value) => { try { sessionStorage.setItem(key, JSON.stringify(value)); } catch { /* storage may be forbidden */ } } };
  function reset() {
    if (!steps) return;
    for (const { model } of figures) model.y_range.reset?.();
    steps.setv(whole);
  }
  function showZoom() {
    const [first, last] = data.steps;
    form.elements.from.value = Math.max(first, Math.ceil(steps.start));
    form.elements.to.value = Math.min(last, Math.floor(steps.end));
    const zoomed = steps.start !== whole.start || steps.end !== whole.end;
    stored.set("zoom", zoomed ? [steps.start, steps.end] : null);
    if (cursor !== null) show(cursor);
  }
  if (steps) {
    steps.properties.start.change.connect(showZoom);
    steps.properties.end.change.connect(showZoom);
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      const from = Number(form.elements.from.value), to = Number(form.elements.to.value);
      if (from < to) steps.setv({ start: from, end: to });
    });
    form.addEventListener("reset", (event) => { event.preventDefault(); reset(); });
    const zoom = stored.get("zoom");
    if (Array.isArray(zoom) && zoom[0] < zoom[1]) steps.setv({ start: zoom[0], end: zoom[1] });
    showZoom();
  }
  // On a touch screen a finger scrolls the page; the form zooms.
  if (matchMedia("(pointer: coarse)").matches) for (const { model } of figures) model.toolbar.active_drag = null;

  // ---- runs
  const hidden = new Set(stored.get("hidden") ?? []);
  for (const box of document.querySelectorAll("input[data-run]")) {
    const apply = () => {
      for (const { model, series } of figures) {
        for (const renderer of model.renderers) if (renderer.glyph.tags[1] === `of-${box.dataset.run}`) renderer.visible = box.checked;
        for (const mark of marks(model)) if (mark.tags[1] === `of-${box.dataset.run}`) mark.visible = box.checked;
        for (const { output, color } of series) if (color === box.dataset.run) output.closest("li").hidden = !box.checked;
      }
    };
    box.checked = !hidden.has(box.dataset.run);
    if (!box.checked) apply();
    box.addEventListener("change", () => {
      hidden[box.checked ? "delete" : "add"](box.dataset.run);
      stored.set("hidden", [...hidden]);
      apply();
    });
  }

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
