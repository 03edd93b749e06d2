"use strict";
// Functions of curves: x is an array of positions, which grow, and y of the values, which are NaN where there is a gap.
const curves = {
  // The numbers of an array of 64-bit floats in base64.
  decoded: (text) => new Float64Array(Uint8Array.from(atob(text), (character) => character.charCodeAt(0)).buffer),

  // Index of the first position that is at least `position`.
  first(x, position) {
    let low = 0, high = x.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (x[middle] < position) low = middle + 1; else high = middle;
    }
    return low;
  },

  nearest(x, position) {
    const after = Math.min(curves.first(x, position), x.length - 1);
    return after > 0 && position - x[after - 1] <= x[after] - position ? after - 1 : after;
  },

  // The value at a position between those of x, or NaN outside.
  interpolated(x, y, position) {
    const after = curves.first(x, position);
    if (x[after] === position) return y[after];
    if (after === 0 || after === x.length) return NaN;
    const share = (position - x[after - 1]) / (x[after] - x[after - 1]);
    return y[after - 1] + share * (y[after] - y[after - 1]);
  },

  // Smallest, largest and mean value of each of at most `count` groups of neighbours, at the last position of each group. Gaps do
  // not count.
  grouped(x, y, count) {
    const groups = Math.floor(Math.min(count, x.length)), found = { x: [], low: [], high: [], mean: [] };
    for (let group = 0, i = 0; group < groups; group++) {
      const end = Math.floor((group + 1) * x.length / groups);
      let low = Infinity, high = -Infinity, sum = 0, values = 0;
      for (; i < end; i++) {
        if (!Number.isFinite(y[i])) continue;
        low = Math.min(low, y[i]); high = Math.max(high, y[i]); sum += y[i]; values++;
      }
      found.x.push(x[end - 1]);
      found.low.push(values ? low : NaN); found.high.push(values ? high : NaN); found.mean.push(values ? sum / values : NaN);
    }
    return found;
  },

  // The records between two positions, and one more at each side.
  between({ x, y }, start, end) {
    const from = Math.max(0, curves.first(x, start) - 1), to = curves.first(x, end) + 1;
    return { x: x.slice(from, to), y: y.slice(from, to) };
  },

  // Mean of the values of the steps around each value, `width` steps in all. Gaps do not count, and stay.
  moving(steps, y, width) {
    const means = new Float64Array(y.length);
    let low = 0, high = 0, values = 0, sum = 0, lost = 0; // lost: what rounding has taken from the sum (Neumaier)
    const add = (value, sign) => {
      if (!Number.isFinite(value)) return;
      const next = sum + sign * value;
      lost += Math.abs(sum) >= Math.abs(value) ? sum - next + sign * value : sign * value - next + sum;
      sum = next;
      values += sign;
    };
    for (let i = 0; i < y.length; i++) {
      while (high < y.length && steps[high] <= steps[i] + width / 2) add(y[high++], 1);
      while (steps[low] <= steps[i] - width / 2) add(y[low++], -1);
      means[i] = Number.isFinite(y[i]) ? (sum + lost) / values : NaN;
    }
    return means;
  },

  // The values without single spikes: those that are above, or below, the medians of up to four values before and after them by
  // many times the usual distance. The ends of a line are no spikes, nor is the steep beginning of a loss.
  withoutSpikes(y) {
    const values = y.filter(Number.isFinite), reach = 4;
    const median = (part) => Float64Array.from(part).sort()[part.length >> 1];
    const distances = Float64Array.from(values, (value, i) => {
      if (i === 0 || i === values.length - 1) return 0;
      const before = value - median(values.slice(Math.max(0, i - reach), i));
      const after = value - median(values.slice(i + 1, i + 1 + reach));
      return before * after > 0 ? Math.min(Math.abs(before), Math.abs(after)) : 0;
    });
    const usual = distances.slice().sort()[Math.floor(0.9 * (distances.length - 1))];
    return values.filter((_, i) => distances[i] <= 8 * usual);
  },

  // Bokeh's format of the numbers of a horizontal axis, with as many decimals as their distance needs.
  tickFormat(axis, start, end) {
    if (axis === "steps") return "0,0";
    const unit = axis === "tokens" ? 1000 ** Math.max(0, Math.floor(Math.log10(Math.max(end, 1)) / 3)) : 1;
    const decimals = Math.min(6, Math.max(0, Math.ceil(Math.log10(unit / ((end - start) / 10)))));
    return `0,0${decimals ? `.${"0".repeat(decimals)}` : ""}${axis === "tokens" ? "a" : ""}`;
  },

  // The ends of a vertical axis for values. Equal values are in the middle of a range that does not change their sign.
  range(values, isLog) {
    let low = Infinity, high = -Infinity;
    for (const value of values) if (Number.isFinite(value)) { low = Math.min(low, value); high = Math.max(high, value); }
    if (low > high) return { start: 0, end: 1 };
    if (isLog) {
      const factor = low === high ? 2 : (high / low) ** 0.05;
      return { start: low / factor, end: high * factor };
    }
    const pad = low === high ? 0.1 * Math.abs(low) || 1 : 0.05 * (high - low);
    return { start: low >= 0 ? Math.max(0, low - pad) : low - pad, end: high < 0 ? Math.min(0, high + pad) : high + pad };
  },
};
