// Charts of lines, and of stacked areas.
const starts = []; // build the charts once all cards are in their places, which give the widths
const several = D.runs.length > 1;
function colour(chart, at) { // of several runs each has a colour, else each label has
  const s = chart.series[at];
  if (chart.stacked) return `--p${s.colour % 7}`;
  if (several && chart.run == null) return `--c${s.run % 8}`;
  return `--c${at % 8}`;
}
function dashes(chart, at) {
  const s = chart.series[at];
  if (!several || chart.run != null) return at > 7 ? [4, 4] : undefined;
  const labels = [...new Set(chart.series.map(other => other.label))], which = labels.indexOf(s.label);
  return which ? [[6, 4], [2, 3], [8, 3, 2, 3]][(which - 1) % 3] : s.run > 7 ? [10, 3] : undefined;
}
const labelOf = (chart, s) => [several && chart.run == null ? D.runs[s.run].name : "", s.label].filter(Boolean).join(" ") || chart.title.toLowerCase();

function yRange(chart) {
  return (u, low, high) => {
    if (low == null || !Number.isFinite(low)) return chart.isLog ? [0.1, 1] : [0, 1];
    if (chart.isLog) return [low / 1.1, high * 1.1 || 1];
    if (chart.zero) return [Math.min(0, low), high > 0 ? high * 1.06 : 1];
    const gap = high - low || Math.abs(high) * 0.1 || 1;
    return [low - gap * 0.06, high + gap * 0.08];
  };
}
// The table of uPlot, and for each series of the chart the numbers of its columns
function table(chart) {
  const byAxis = new Map();
  chart.series.forEach((s, at) => { if (!byAxis.has(s.step)) byAxis.set(s.step, []); byAxis.get(s.step).push(at); });
  const tables = [], columns = new Map();
  let next = 1;
  for (const members of byAxis.values()) {
    const rows = [Array.from(xs(chart.series[members[0]]))];
    let below = null;
    for (const at of members) {
      const s = chart.series[at], mean = nulls(array(s.mean)), at0 = {raw: next};
      if (chart.stacked) {
        below = mean.map((v, i) => (v == null ? below && below[i] : v + ((below && below[i]) || 0)));
        rows.push(below);
        next += 1;
      } else {
        rows.push(mean);
        next += 1;
        if (chart.smooth && s.label !== "held-out") {
          rows.push(state.smooth && mean.length > 4 ? smoothed(mean, Math.ceil((state.smooth / 200) * mean.length)) : mean);
          at0.smooth = next++;
        }
        if (s.low != null) {
          rows.push(nulls(array(s.high)), nulls(array(s.low)));
          at0.high = next++;
          at0.low = next++;
        }
      }
      columns.set(at, at0);
    }
    tables.push(rows);
  }
  return {data: tables.length > 1 ? uPlot.join(tables) : tables[0], columns};
}

function addChart(chart, parent) {
  chart.isLog = chart.log;
  const id = `chart-${D.charts.indexOf(chart)}`;
  const legend = make("div", {class: "legend"}), at = make("span", {class: "note push"});
  const log = make("button", {"aria-pressed": String(chart.isLog), title: "logarithmic values (l)"}, "log");
  const head = make("div", {class: "head"}, make("h3", {id}, chart.title), make("span", {class: "note"}, chart.note), at, ...(chart.stacked ? [] : [log]));
  const body = make("div", {});
  const card = make("div", {class: `card chart${chart.wide ? " wide" : ""}`, tabindex: "0", role: "group", "aria-labelledby": id,
    "aria-roledescription": "chart", "aria-describedby": "axis-label", "data-name": chart.name, ...(chart.run == null ? {} : {"data-run": chart.run})}, head, legend, body);
  parent.append(card);
  const hidden = new Set(), values = [];
  let u, columns, plot;

  function build() {
    u?.destroy();
    const found = table(chart), series = [{}], bands = [];
    columns = found.columns;
    const at0 = new Map(), edges = new Set(); // column -> options; columns without a point at the cursor
    for (const [i, c] of columns) {
      const s = chart.series[i], stroke = () => css(colour(chart, i)), isPoints = s.label === "held-out", show = !hidden.has(i);
      const base = {stroke, show, points: {show: isPoints ? true : (self, si, i0, i1) => i1 - i0 <= 30, size: isPoints ? 5 : 4, fill: stroke}, dash: dashes(chart, i)};
      if (chart.stacked) at0.set(c.raw, {...base, fill: stroke, width: 0, points: {show: false}});
      else {
        const isSmooth = c.smooth && state.smooth > 0;
        at0.set(c.raw, {...base, width: 1, alpha: isSmooth ? 0.35 : 1, ...(isSmooth ? {points: {show: false}} : {})});
        if (isSmooth) edges.add(c.raw);
        else at0.get(c.raw).width = 1.5;
        if (c.smooth) at0.set(c.smooth, {...base, show: show && isSmooth, width: 2, dash: dashes(chart, i)});
        if (c.high) {
          const edge = {stroke, show, width: 0.5, alpha: 0.25, points: {show: false}};
          edges.add(c.high).add(c.low);
          at0.set(c.high, edge);
          at0.set(c.low, {...edge});
          bands.push({series: [c.high, c.low], fill: () => css(colour(chart, i)) + "26"});
        }
      }
    }
    for (let i = 1; i < found.data.length; i++) series.push(at0.get(i));
    if (chart.stacked) { // the upper areas first: the lower ones are drawn over them
      const order = [...columns.keys()].reverse(), rows = [found.data[0]], drawn = [{}];
      order.forEach(i => { rows.push(found.data[columns.get(i).raw]); drawn.push(at0.get(columns.get(i).raw)); });
      order.forEach((i, n) => columns.set(i, {raw: n + 1}));
      found.data = rows;
      series.splice(0, series.length, ...drawn);
    }
    u = new uPlot({
      width: Math.max(200, body.clientWidth), height: chart.wide ? 300 : 220, padding: [18, 26, 0, 0], legend: {show: false}, series, bands,
      cursor: cursor({points: {size: (self, i) => (edges.has(i) ? 0 : 6)}}),
      scales: {x: {time: false, range: () => view()}, y: {distr: chart.isLog ? 3 : 1, range: yRange(chart)}},
      axes: [xAxis(), {...line(), size: 54, values: (self, list) => ticks(list, chart.isLog), ...(chart.isLog ? {filter: logTicks} : {})}],
      hooks: {setSelect: [select], setCursor: [readOut], draw: [self => { units(self, chart.unit); drawMarks(self, chart.run ?? state.run); }]},
    }, found.data, body);
    hoverMarks(u, () => chart.run ?? state.run);
    if (plot) plot.u = u;
    readOut(u);
    return u;
  }
  function readOut(self) {
    const isOn = self.cursor.idx != null && self.cursor.left >= 0;
    const limit = view()[1], x = self.data[0];
    let idx = isOn ? self.cursor.idx : x.length - 1;
    while (!isOn && idx > 0 && x[idx] > limit) idx--;
    at.textContent = isOn && x.length ? place(x[idx]) : "";
    for (const [i, c] of columns) values[i].textContent = text(self, i, c, idx);
  }
  function text(self, i, c, idx) {
    const known = column => { // joined tables and gaps: the nearest value
      for (let d = 0; d < 400; d++) for (const k of [idx - d, idx + d]) if (self.data[column]?.[k] != null) return k;
      return null;
    };
    if (chart.stacked) { // the series before it in the table is above it, that behind it below
      const own = self.data[c.raw][idx], below = self.data[c.raw + 1]?.[idx] ?? 0;
      return own == null ? "–" : short(own - below);
    }
    const k = known(c.raw);
    if (k == null) return "–";
    const low = c.low && self.data[c.low][k], high = c.low && self.data[c.high][k];
    return short(self.data[c.raw][k]) + (c.low && low !== high ? ` (${short(low)} to ${short(high)})` : "");
  }
  const order = chart.stacked ? [...chart.series.keys()].reverse() : [...chart.series.keys()];
  for (const i of order) {
    const mark = make("i", {class: chart.stacked ? "area" : dashes(chart, i) ? "dash" : "", style: chart.stacked ? `background:var(${colour(chart, i)})` : `border-color:var(${colour(chart, i)})`});
    values[i] = make("b", {});
    const button = make("button", {"aria-pressed": "true"}, mark, labelOf(chart, chart.series[i]), values[i]);
    if (!chart.stacked) button.onclick = () => {
      hidden[hidden.has(i) ? "delete" : "add"](i);
      button.setAttribute("aria-pressed", String(!hidden.has(i)));
      build();
    };
    else button.disabled = true;
    legend.append(button);
  }
  log.onclick = () => {
    const positive = chart.series.every(s => array(s.low ?? s.mean).every(v => !(v <= 0)));
    if (!positive) { log.title = "some values are not positive"; log.disabled = true; return; }
    chart.isLog = !chart.isLog;
    log.setAttribute("aria-pressed", String(chart.isLog));
    build();
  };
  plot = {u, card, run: chart.run, log: () => chart.stacked || log.onclick(), update: build, isShown: () => !card.hidden};
  starts.push(() => { build(); plots.push(plot); });
}
