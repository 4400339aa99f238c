// Panels of ranks or layers: a heat map, and for ranks lines of the least, the median and the largest value.
const SEQUENTIAL = [["#f3f6fa", "#c9dcec", "#8db8d9", "#4a88bd", "#1f5c96", "#0b2f5c"], ["#1b222b", "#1f3f5e", "#2c638f", "#4f93c4", "#8fc3ea", "#e4f2fd"]];
const DIVERGING = [["#1f5c96", "#8db8d9", "#f4f4f1", "#eeb184", "#b5480a"], ["#7cc0f5", "#2c638f", "#262624", "#9c4f1c", "#ffab73"]];
function palette(stops) {
  const rgb = stops.map(stop => [1, 3, 5].map(i => parseInt(stop.slice(i, i + 2), 16)));
  return Array.from({length: 256}, (_, i) => {
    const at = (i / 255) * (rgb.length - 1), k = Math.min(Math.floor(at), rgb.length - 2);
    return rgb[k].map((c, j) => Math.round(c + (rgb[k + 1][j] - c) * (at - k)));
  });
}
const median = list => { const s = list.filter(v => v != null).sort((a, b) => a - b); return s.length ? s[s.length >> 1] : null; };
const NONE = 255; // the byte for no value

function addPanel(panel, parent) {
  const id = `panel-${D.panels.indexOf(panel)}`, R = panel.rows.length;
  const choice = make("select", {"aria-label": "figure"}, ...panel.figures.map((f, i) => make("option", {value: i}, f.label)));
  const relative = make("button", {"aria-pressed": "false", title: `colours show each ${panel.word} relative to the median ${panel.word} of the same steps`}, "relative to the median");
  const at = make("span", {class: "note push"}), lines = make("div", {}), heat = make("div", {});
  const legend = make("div", {class: "legend"}), bar = make("canvas", {width: 90, height: 1, "aria-hidden": "true"});
  const low = make("span", {}), high = make("span", {}), scale = make("div", {class: "scale"}, low, bar, high, make("span", {}, `each row: a ${panel.word}`));
  const card = make("div", {class: "card chart wide", tabindex: "0", role: "group", "aria-labelledby": id, "aria-roledescription": "chart", "data-name": panel.name, "data-run": panel.run},
    make("div", {class: "head"}, make("h3", {id}, panel.title), make("span", {class: "note"}, panel.note), at),
    make("div", {class: "head"}, choice, ...(R > 1 ? [relative] : [])), legend, lines, scale, heat);
  parent.append(card);
  let top = null, map = null, isRelative = false;
  const here = [];
  const size = Math.min(150, Math.max(54, 16 + 6.2 * Math.max(...panel.rows.map(r => r.length)))) * (innerWidth < 640 ? 0.7 : 1);
  const cut = text => { const n = Math.floor((size - 14) / 6.2); return text.length > n ? `…${text.slice(1 - n)}` : text; };

  const value = (f, byte) => { // of a small map the cells are the values
    if (array(f.cells.data) instanceof Float32Array) return Number.isFinite(byte) ? byte : null;
    if (byte === NONE) return null;
    const {lo, hi} = f.cells, share = byte / 254;
    return f.log ? lo * (hi / lo) ** share : lo + share * (hi - lo);
  };
  function paint(f, height) { // the pixels: a column for each bucket; of more rows than pixels those that differ most
    const bytes = array(f.cells.data), C = bytes.length / R, rows = Math.min(R, Math.max(1, height)), colours = palette((isRelative ? DIVERGING : SEQUENTIAL)[+isDark()]);
    const off = new OffscreenCanvas(C, rows), ctx = off.getContext("2d"), image = ctx.createImageData(C, rows);
    for (let c = 0; c < C; c++) {
      const column = Array.from(bytes.subarray(c * R, (c + 1) * R), b => value(f, b)), middle = median(column);
      for (let y = 0; y < rows; y++) {
        let best = null;
        for (let r = Math.floor((y * R) / rows); r < Math.floor(((y + 1) * R) / rows); r++)
          if (column[r] != null && (best == null || Math.abs(column[r] - middle) > Math.abs(best - middle))) best = column[r];
        if (best == null) continue;
        const share = isRelative ? (middle ? (best / middle - 1) / 1 + 0.5 : 0.5) : f.log ? Math.log(best / f.cells.lo) / Math.log(f.cells.hi / f.cells.lo || 2) : (best - f.cells.lo) / (f.cells.hi - f.cells.lo || 1);
        const [red, green, blue] = colours[Math.max(0, Math.min(255, Math.round(share * 255)))];
        image.data.set([red, green, blue, 255], 4 * (y * C + c));
      }
    }
    ctx.putImageData(image, 0, 0);
    return {off, rows};
  }
  function edges(axis) {
    const x = xs(axis), first = x.length > 1 ? x[0] - (x[1] - x[0]) : x[0] - 1;
    return i => (i < 0 ? Math.max(first, Math.min(whole()[0], x[0] - 1e-9)) : x[i]);
  }
  function addMap(f) {
    const x = Array.from(xs(f.cells)), edge = edges(f.cells), height = Math.min(Math.max(R * 18, 48), 380);
    const least = R / Math.max(1, height / 15), every = STEPS.find(step => step >= least);
    let painted = null, key = "";
    map = new uPlot({
      width: Math.max(200, heat.clientWidth), height: height + 36, padding: [4, 26, 0, 0], legend: {show: false},
      cursor: cursor({points: {show: false}, y: true}), series: [{}, {show: true, width: 0, points: {show: false}, stroke: "transparent"}],
      scales: {x: {time: false, range: () => view()}, y: {range: [-0.5, R - 0.5], dir: -1}},
      axes: [{...xAxis(), grid: {show: false}}, {...line(), size, grid: {show: false}, splits: () => panel.rows.map((_, i) => i).filter(i => i % every === 0),
        values: (u, list) => list.map(i => cut(panel.rows[i] ?? ""))}],
      hooks: {
        setSelect: [select],
        setCursor: [u => {
          const {left, top: y} = u.cursor;
          if (left == null || left < 0) { at.textContent = ""; return; }
          const v = u.posToVal(left, "x"), row = Math.round(u.posToVal(y, "y"));
          let c = x.findIndex(end => end >= v);
          if (c < 0) c = x.length - 1;
          if (!(row >= 0 && row < R) || c < 0) return;
          const byte = array(f.cells.data)[c * R + row], its = value(f, byte);
          const beyond = byte === 254 && f.cells.clipped ? "at least " : "";
          at.textContent = `${panel.word} ${panel.rows[row]}, ${place(x[c])}: ${beyond}${short(its)} ${its == null ? "" : f.unit}`;
        }],
        draw: [u => {
          const {ctx, bbox} = u, now = `${isDark()}${isRelative}${bbox.height}`;
          if (now !== key) { painted = paint(f, Math.floor(bbox.height)); key = now; }
          ctx.save();
          ctx.beginPath(); ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height); ctx.clip();
          ctx.imageSmoothingEnabled = false;
          for (let c = 0; c < x.length; c++) {
            const from = Math.floor(u.valToPos(edge(c - 1), "x", true)), to = Math.max(from + 1, Math.floor(u.valToPos(edge(c), "x", true)));
            if (to >= bbox.left && from <= bbox.left + bbox.width) ctx.drawImage(painted.off, c, 0, 1, painted.rows, from, bbox.top, to - from, bbox.height);
          }
          ctx.restore();
          drawMarks(u, panel.run);
        }],
      },
    }, [x, x.map(() => 0)], heat);
    hoverMarks(map, () => panel.run);
    here.push(map);
  }
  function spreadOf(f) { // of a small map
    const cells = array(f.cells.data), found = {low: [], median: [], high: [], worst: []};
    for (let c = 0; c < cells.length; c += R) {
      const column = Array.from(cells.subarray(c, c + R)).filter(Number.isFinite), high = Math.max(...column);
      const s = [...column].sort((a, b) => a - b), m = s.length >> 1;
      found.high.push(high);
      found.low.push(Math.min(...column));
      found.median.push(s.length % 2 ? s[m] : (s[m - 1] + s[m]) / 2);
      found.worst.push(cells.subarray(c, c + R).indexOf(high));
    }
    return {...f.cells, ...found};
  }
  function addLines(f) {
    const s = f.spread || spreadOf(f), at = i => (Array.isArray(i) ? i : array(i)), x = Array.from(xs(s)), names = ["largest", "median", "least"], columns = [s.high, s.median, s.low].map(i => nulls(at(i))), worst = at(s.worst);
    const texts = names.map(() => make("b", {}));
    const strokes = ["--c1", "--c0", "--c2"];
    legend.replaceChildren(...names.map((name, i) => make("button", {disabled: ""}, make("i", {style: `border-color:var(${strokes[i]})`}), name, texts[i])));
    top = new uPlot({
      width: Math.max(200, lines.clientWidth), height: 170, padding: [18, 26, 0, 0], legend: {show: false}, cursor: cursor(),
      series: [{}, ...strokes.map((stroke, i) => ({stroke: () => css(stroke), width: i === 1 ? 2 : 1, points: {show: (u, si, i0, i1) => i1 - i0 <= 30, size: 4}}))],
      bands: [{series: [1, 3], fill: () => css("--c0") + "18"}],
      scales: {x: {time: false, range: () => view()}, y: {range: yRange({zero: !f.log})}},
      axes: [xAxis(), {...line(), size, values: (u, list) => ticks(list)}],
      hooks: {setSelect: [select], draw: [u => { units(u, f.unit); drawMarks(u, panel.run); }], setCursor: [u => {
        const idx = u.cursor.idx ?? x.length - 1;
        texts.forEach((text, i) => { text.textContent = short(columns[i][idx]) + (i === 0 && Number.isFinite(worst[idx]) ? ` (${panel.word} ${worst[idx]})` : ""); });
      }]},
    }, [x, ...columns], lines);
    hoverMarks(top, () => panel.run);
    here.push(top);
  }
  function build() {
    for (const u of here) { u.destroy(); plots.splice(plots.findIndex(p => p.u === u), 1); }
    here.length = 0;
    legend.replaceChildren();
    const f = panel.figures[+choice.value];
    if (f.spread || f.lines) addLines(f);
    scale.hidden = relative.hidden = !f.cells;
    if (f.cells) addMap(f);
    for (const u of here) plots.push({u, card, run: panel.run, log() {}, update: () => { if (u === here[0]) build(); }, isShown: () => !card.hidden});
    showScale(f);
  }
  function showScale(f) {
    if (!f.cells) return;
    const colours = palette((isRelative ? DIVERGING : SEQUENTIAL)[+isDark()]), ctx = bar.getContext("2d");
    for (let i = 0; i < 90; i++) { ctx.fillStyle = `rgb(${colours[Math.round((i * 255) / 89)]})`; ctx.fillRect(i, 0, 1, 1); }
    low.textContent = isRelative ? "−50 %" : `${short(f.cells.lo)} ${f.unit}`;
    high.textContent = isRelative ? "+50 %" : `${short(f.cells.hi)} ${f.unit}`;
  }
  choice.onchange = build;
  relative.onclick = () => {
    isRelative = !isRelative;
    relative.setAttribute("aria-pressed", String(isRelative));
    build();
  };
  starts.push(build);
  card.repaint = () => showScale(panel.figures[+choice.value]);
}
