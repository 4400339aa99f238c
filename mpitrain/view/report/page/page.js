// The charts in their sections, the controls, and the keys.
const SECTIONS = ["Training", "Speed", "Ranks", "Memory", "Layers", "Other metrics"];
for (const section of SECTIONS) {
  const charts = D.charts.filter(chart => chart.section === section);
  const panels = D.panels.filter(panel => panel.title === section);
  if (!charts.length && !panels.length) continue;
  const grid = make("div", {class: "grid"});
  $("charts").append(make("section", {"aria-label": section}, make("h2", {}, section), grid));
  for (const chart of charts) addChart(chart, grid);
  for (const panel of panels) addPanel(panel, grid);
}
for (const card of document.querySelectorAll(".chart")) card.hidden = ![undefined, "0"].includes(card.dataset.run);
for (const start of starts) start();
markControls();
chooseRun(0);
if (!starts.length) $("charts").append(make("p", {class: "dim"}, "There are no steps to draw yet."));

function rebuild() { // with the widths of now; cards that are hidden have none
  extent = null;
  for (const plot of [...plots]) if (plot.isShown()) plot.update();
}
function chooseRun(run) { // the details of one run
  state.run = run;
  for (const plot of plots) plot.card.hidden = plot.run != null && plot.run !== run;
  for (const section of $("charts").children) section.hidden = ![...section.querySelectorAll(".card")].some(card => !card.hidden);
  rebuild();
}
function setAxis(axis) {
  if (axis === state.axis) return;
  const old = state.view && [toAxis(state.view[0], axis), toAxis(state.view[1], axis)];
  state.axis = axis;
  $("by-step").setAttribute("aria-pressed", String(axis === "step"));
  $("by-time").setAttribute("aria-pressed", String(axis === "seconds"));
  state.view = null;
  rebuild();
  if (old) setView(...old);
}
function toAxis(x, axis) { // the same place on the other axis, in the chosen run
  const s = D.charts.flatMap(chart => chart.series).find(series => series.run === state.run);
  if (!s) return x;
  const from = array(s[state.axis]), to = array(s[axis]), i = from.findIndex(v => v >= x);
  return to[i < 0 ? to.length - 1 : i];
}
function setSmooth(value) {
  state.smooth = value;
  $("smooth").value = value;
  $("smooth-words").textContent = value ? `${value / 2} %` : "none";
  rebuild();
}
function setTheme(theme) {
  document.documentElement.classList.toggle("dark", theme === "dark");
  for (const plot of plots) { plot.u.redraw(false); plot.card.repaint?.(); }
  $("theme").textContent = isDark() ? "light theme" : "dark theme";
}
function show(first, last) { // some steps, with their neighbours
  const margin = Math.max(20, (last - first) * 0.25), old = state.axis;
  let a = first - margin, b = last + margin;
  if (old === "seconds") { state.axis = "step"; [a, b] = [toAxis(a, "seconds"), toAxis(b, "seconds")]; state.axis = old; }
  setView(a, b);
  $("charts").scrollIntoView({behavior: matchMedia("(prefers-reduced-motion: reduce)").matches ? "auto" : "smooth"});
}

$("by-step").onclick = () => setAxis("step");
$("by-time").onclick = () => setAxis("seconds");
$("smooth").oninput = event => setSmooth(+event.target.value);
$("zoom-in").onclick = () => zoom(0.5);
$("zoom-out").onclick = () => zoom(2);
$("reset").onclick = () => { state.view = null; showView(); };
$("theme").onclick = () => setTheme(isDark() ? "light" : "dark");
$("help").onclick = () => $("keys").showModal();
if (several) {
  $("run-choice").hidden = false;
  $("run").append(...D.runs.map((run, i) => make("option", {value: i}, run.name)));
  $("run").onchange = event => chooseRun(+event.target.value);
}
for (const button of document.querySelectorAll("[data-from]"))
  button.onclick = () => {
    if (several) { $("run").value = button.dataset.run; chooseRun(+button.dataset.run); }
    show(+button.dataset.from, +button.dataset.to);
  };
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", event => setTheme(event.matches ? "dark" : "light"));
setTheme(matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
$("smooth-words").textContent = `${state.smooth / 2} %`;

addEventListener("keydown", event => {
  if (event.ctrlKey || event.metaKey || event.altKey || $("keys").open || /^(SELECT|TEXTAREA)$/.test(event.target.tagName)) return;
  const card = event.target.closest?.(".chart"), mine = plots.filter(plot => plot.card === card), key = event.key;
  if (event.target.tagName === "INPUT" && key.startsWith("Arrow")) return;
  const actions = {
    "+": () => zoom(0.5), "=": () => zoom(0.5), "-": () => zoom(2), "−": () => zoom(2), 0: $("reset").onclick,
    s: () => setSmooth([0, 2, 4, 8, 16].find(v => v > state.smooth) ?? 0), x: () => setAxis(state.axis === "step" ? "seconds" : "step"),
    t: $("theme").onclick, "?": $("help").onclick,
  };
  if (mine.length) {
    actions.l = () => mine[0].log();
    const by = key === "ArrowLeft" ? -1 : 1;
    if (event.shiftKey && mine[0]) actions.ArrowLeft = actions.ArrowRight = () => moveCursor(mine[0].u, by);
    else actions.ArrowLeft = actions.ArrowRight = () => pan(0.2 * by);
  }
  const action = actions[key];
  if (action) { event.preventDefault(); action(); }
});
function moveCursor(u, by) {
  const x = u.data[0], [a, b] = view();
  let idx = u.cursor.left >= 0 && u.cursor.idx != null ? u.cursor.idx + by : x.findIndex(v => v >= (a + b) / 2);
  idx = Math.max(0, Math.min(x.length - 1, idx));
  u.setCursor({left: u.valToPos(x[idx], "x"), top: u.over.clientHeight / 2});
}
let width = innerWidth;
addEventListener("resize", () => {
  if (innerWidth === width) return; // the height of a phone's window changes while one scrolls
  width = innerWidth;
  requestAnimationFrame(rebuild);
});
