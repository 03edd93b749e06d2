"use strict";
// Figures as pictures: with their titles and legends for files, without them for paper, always in the light scheme.
const pictures = (() => {
  const escaped = (text) => text.replace(/[&<>"]/g, (character) => `&#${character.codePointAt(0)};`);
  const TITLE = 34, ROW = 18;

  // Colours of page.css in the light scheme, by those of the scheme in which the page is shown.
  function lightColors() {
    const numbered = (name, length) => Array.from({ length }, (_, i) => `${name}-${i}`);
    const names = [...numbered("phase", 9), ...numbered("run", 8), "text", "muted", "line"]; // of equal colours, the last counts
    const [shown, light] = [document.documentElement, document.getElementById("paper")].map((place) => getComputedStyle(place));
    return new Map(names.map((name) => [shown.getPropertyValue(`--${name}`).trim(), light.getPropertyValue(`--${name}`).trim()]));
  }
  function inLight(svg) {
    const colors = lightColors(), hex = (channel) => Number(channel).toString(16).padStart(2, "0");
    return svg.replace(/#[0-9a-f]{6}|rgb\((\d+), *(\d+), *(\d+)\)/gi, (found, ...channels) => {
      const color = found.startsWith("#") ? found : `#${channels.slice(0, 3).map(hex).join("")}`;
      return colors.get(color) ?? color;
    });
  }

  function wrapped(inner, width, height) {
    const svg = `<svg xmlns="http://www.w3.org/2000/svg" width="${width}" height="${height}" viewBox="0 0 ${width} ${height}" font-family="sans-serif" font-size="13">${inner}</svg>`;
    return { svg, width, height };
  }
  const plotted = (view, top) => inLight(view.export("svg", false).ctx.get_serialized_svg(true)).replace(/^<\?xml[^>]*\?>/, "").replace("<svg ", `<svg y="${top}" `);

  function forPaper({ view }) {
    return wrapped(plotted(view, 0), view.bbox.width, view.bbox.height);
  }

  function forFile({ name, view, series }) {
    const light = getComputedStyle(document.getElementById("paper")), color = (key) => light.getPropertyValue(`--${key}`).trim();
    const { width, height } = view.bbox, below = TITLE + height + 12;
    const shown = series.filter(({ output, isShown }) => output && isShown);
    const legend = shown.map(({ output, roles }, i) => {
      const { tags, line_dash } = (roles.part ?? roles.line).glyph, y = below + ROW * i;
      const dashes = { dashed: "6 3", dotted: "2 3", dotdash: "2 3 6 3" }[line_dash?.value] ?? "none";
      return `<path d="M10 ${y}h22" stroke="${color(tags[0])}" stroke-width="3" stroke-dasharray="${dashes}"/><text x="40" y="${y + 5}">${escaped(output.dataset.label)}</text>`;
    }).join("");
    const total = below + ROW * shown.length, title = escaped(document.getElementById(`title-${name}`).textContent);
    const head = `<rect width="100%" height="100%" fill="${color("page")}"/><text x="10" y="22" font-size="15" font-weight="bold">${title}</text>`;
    return wrapped(`<g fill="${color("text")}">${head}${legend}</g>${plotted(view, TITLE)}`, width, total);
  }

  return {
    forFile,
    forPaper,
    address: ({ svg }) => `data:image/svg+xml;charset=utf-8,${encodeURIComponent(svg)}`,
    async png({ svg, width, height }) {
      const image = new Image(), canvas = document.createElement("canvas"), scale = 2;
      image.src = pictures.address({ svg });
      await image.decode();
      canvas.width = scale * width;
      canvas.height = scale * height;
      canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
      return canvas.toDataURL("image/png");
    },
    inline({ svg }) {
      const { documentElement } = new DOMParser().parseFromString(svg, "image/svg+xml");
      documentElement.classList.add("paper");
      documentElement.ariaHidden = "true";
      return document.importNode(documentElement, true);
    },
  };
})();
