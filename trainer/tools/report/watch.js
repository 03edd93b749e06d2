"use strict";
// A page that is served loads itself again when its runs have new records, and keeps where the reader is.
function watch({ version, interval_s }) {
  const state = document.getElementById("watch");
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
      const now = await (await fetch("version", { cache: "no-store" })).text();
      state.textContent = "Watching: the page follows the runs.";
      if (now !== version) location.reload();
    } catch {
      state.textContent = "Not connected: scripts/report.py --watch has ended.";
    }
  }, 1000 * interval_s);
}
