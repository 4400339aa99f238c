// The data of the page, its state, and functions of all charts.
const D = window.report;
const $ = id => document.getElementById(id);
const make = (tag, attributes = {}, ...children) => {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
};
const css = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const isDark = () => document.documentElement.classList.contains("dark");

// "i": int32, "s": float32, "f": the upper three bytes of float32, first all lowest ones, "b": bytes
const decoded = new Map();
function array(index) {
  if (index == null) return null;
  if (!decoded.has(index)) {
    const text = D.arrays[index], bytes = Uint8Array.from(atob(text.slice(1)), c => c.charCodeAt(0));
    let values = bytes;
    if (text[0] === "f") {
      const wide = new Uint8Array((bytes.length / 3) * 4);
      for (let k = 0, n = bytes.length / 3; k < 3; k++) for (let i = 0; i < n; i++) wide[4 * i + 1 + k] = bytes[k * n + i];
      values = new Float32Array(wide.buffer);
    } else if (text[0] === "s") values = new Float32Array(bytes.buffer);
    else if (text[0] === "i") values = new Int32Array(bytes.buffer);
    decoded.set(index, values);
  }
  return decoded.get(index);
}
const nulls = values => Array.from(values, v => (Number.isFinite(v) ? v : null)); // uPlot leaves gaps at nulls

const state = {axis: "step", smooth: 4, view: null, run: 0, hidden: new Set()};
const plots = []; // {u, card, run, log(), update(), isShown()}

// The x values of an axis {step, seconds}. Where both are equal in a row, uPlot would find no place for a point.
const xs = axis => array(axis[state.axis]);
let extent = null;
function whole() {
  if (!extent) {
    let low = Infinity, high = -Infinity;
    for (const chart of D.charts) for (const s of chart.series) {
      const x = xs(s);
      if (x.length) { low = Math.min(low, x[0]); high = Math.max(high, x[x.length - 1]); }
    }
    if (state.axis === "seconds") low = 0;
    if (!(high > low)) { low = Number.isFinite(low) ? low - 1 : 0; high = low + 2; }
    extent = [low, high];
  }
  return extent;
}
const view = () => state.view || whole();
function setView(low, high) {
  const [first, last] = whole(), least = state.axis === "step" ? Math.min(2, last - first) : (last - first) / 1e5;
  const width = Math.min(Math.max(high - low, least), last - first);
  low = Math.min(Math.max(low, first), last - width);
  state.view = width >= last - first ? null : [low, low + width];
  showView();
}
function showView() {
  const [min, max] = view();
  for (const plot of plots) if (plot.isShown()) plot.u.setScale("x", {min, max});
}
const zoom = factor => { const [a, b] = view(), half = ((b - a) * factor) / 2; setView((a + b) / 2 - half, (a + b) / 2 + half); };
const pan = share => { const [a, b] = view(), by = (b - a) * share; setView(a + by, b + by); };

// Numbers
function short(value) {
  if (value == null || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(2).replace("e+", "e").replace("e-", "e−");
  return value.toLocaleString("en", {maximumSignificantDigits: size >= 1e4 ? 6 : 4});
}
// Ticks with as many digits as their distance needs; in a logarithmic scale there is no distance
function ticks(values, isLog = false) {
  const known = values.filter(v => v != null);
  if (isLog) return values.map(v => (v == null ? "" : v >= 1e6 || v < 1e-3 ? v.toExponential(0).replace("e+", "e").replace("e-", "e−") : v.toLocaleString("en", {maximumSignificantDigits: 2})));
  const gap = known.length > 1 ? Math.min(...known.slice(1).map((v, i) => v - known[i])) : 1;
  const most = Math.max(...known.map(Math.abs)), digits = Math.max(0, -Math.floor(Math.log10(gap) + 1e-9));
  return values.map(v => {
    if (v == null) return "";
    if (v === 0) return "0";
    if (most >= 1e6 || most < 1e-3) return v.toExponential(Math.max(0, Math.min(4, Math.floor(Math.log10(Math.abs(v))) - Math.floor(Math.log10(gap) + 1e-9)))).replace("e+", "e").replace("e-", "e−");
    return v.toLocaleString("en", {minimumFractionDigits: digits <= 6 ? digits : 0, maximumFractionDigits: 6});
  });
}
// Of a logarithmic axis the ticks 1, 2 and 5 of each power, and over many powers 1 alone
function logTicks(u, values) {
  const many = Math.log10(values[values.length - 1] / values[0]) > 3;
  const shown = values.map(v => {
    const lead = v / 10 ** Math.floor(Math.log10(v) + 1e-9);
    return (many ? [1] : [1, 2, 5]).some(d => Math.abs(lead - d) < 1e-6) ? v : null;
  });
  return shown.some(v => v != null) ? shown : values.map((v, i) => (i % Math.ceil(values.length / 5) ? null : v));
}
// Ticks of the time axis; all have the unit that its end asks for
const timeUnit = () => { const end = view()[1]; return end < 120 ? "s" : end < 3600 ? "min:s" : end < 172800 ? "h:min" : "days"; };
function clock(s) {
  const two = v => String(Math.floor(v)).padStart(2, "0"), unit = timeUnit();
  if (unit === "s") return String(+s.toFixed(2));
  if (unit === "min:s") return `${Math.floor(s / 60)}:${two(s % 60)}`;
  return unit === "h:min" ? `${Math.floor(s / 3600)}:${two((s / 60) % 60)}` : String(+(s / 86400).toFixed(2));
}
const place = x => (state.axis === "step" ? `step ${Math.round(x).toLocaleString("en")}` : `${clock(x)} ${timeUnit()}`);
function smoothed(values, half) { // the same as `smoothed` of reading/smoothing.py
  const total = [0], count = [0], n = values.length;
  for (let i = 0; i < n; i++) { total.push(total[i] + (values[i] ?? 0)); count.push(count[i] + (values[i] != null)); }
  return values.map((v, i) => {
    if (v == null) return null;
    const reach = Math.min(half, i, n - 1 - i);
    return (total[i + reach + 1] - total[i - reach]) / (count[i + reach + 1] - count[i - reach]);
  });
}

// Axes
const FONT = '11px system-ui,-apple-system,"Segoe UI",Roboto,"Noto Sans",sans-serif';
const line = () => ({stroke: () => css("--dim"), grid: {stroke: () => css("--grid"), width: 1}, ticks: {stroke: () => css("--line"), width: 1, size: 4}, font: FONT, gap: 4});
const SECONDS = [0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 432000, 864000, 2592000];
const STEPS = []; for (let e = 0; e < 10; e++) STEPS.push(10 ** e, 2 * 10 ** e, 5 * 10 ** e);
const xAxis = () => ({...line(), size: 30, space: 64, incrs: () => (state.axis === "step" ? STEPS : SECONDS),
  values: (u, list) => list.map(v => (state.axis === "step" ? v.toLocaleString("en") : clock(v)))});
const cursor = (more = {}) => ({
  drag: {x: true, y: false, setScale: false}, points: {size: 6},
  sync: {key: "all", setSeries: false, filters: {pub: type => type === "mousemove" || type === "mouseleave"}},
  bind: {dblclick: () => () => { state.view = null; showView(); }}, ...more,
});
function select(u) { // the end of a drag
  const {left, width} = u.select;
  if (width > 3) setView(u.posToVal(left, "x"), u.posToVal(left + width, "x"));
  if (width) u.setSelect({left: 0, width: 0, top: 0, height: 0}, false);
}
function units(u, unit) { // the units, at the ends of the axes
  const {ctx, bbox} = u, r = devicePixelRatio;
  ctx.save();
  ctx.font = FONT.replace("11px", `${11 * r}px`);
  ctx.fillStyle = css("--dim");
  ctx.textBaseline = "bottom";
  ctx.textAlign = "left";
  ctx.fillText(unit, 2 * r, bbox.top - 5 * r);
  ctx.fillText(state.axis === "step" ? "step" : timeUnit(), 2 * r, bbox.top + bbox.height + 19 * r);
  ctx.restore();
}
