// Events and checkpoints as marks, in the charts and in a tooltip.
const GROUPS = {checkpoint: "--m-checkpoint", failure: "--m-failure", "spike or skip": "--m-spike", "slow rank": "--m-slow", "start or recovery": "--m-start", other: "--m-other"};
const markX = mark => (state.axis === "step" ? mark[1] : mark[2]);
const shownMarks = run => (D.runs[run]?.marks || []).filter(mark => !state.hidden.has(mark[0]));

function drawMarks(u, run) {
  const {ctx, bbox} = u, r = devicePixelRatio, [a, b] = view(), taken = new Set();
  ctx.save();
  ctx.lineWidth = r;
  for (const mark of shownMarks(run)) {
    const x = markX(mark);
    if (x < a || x > b) continue;
    const at = Math.round(u.valToPos(x, "x", true)), key = mark[0] + at;
    if (taken.has(key)) continue;
    taken.add(key);
    ctx.strokeStyle = ctx.fillStyle = css(GROUPS[mark[0]]);
    if (mark[0] === "checkpoint") { // a triangle on the axis
      const y = bbox.top + bbox.height;
      ctx.beginPath(); ctx.moveTo(at, y - 6 * r); ctx.lineTo(at + 4 * r, y); ctx.lineTo(at - 4 * r, y); ctx.fill();
      continue;
    }
    ctx.setLineDash([3 * r, 3 * r]);
    ctx.globalAlpha = 0.7;
    ctx.beginPath(); ctx.moveTo(at + 0.5, bbox.top); ctx.lineTo(at + 0.5, bbox.top + bbox.height); ctx.stroke();
    ctx.globalAlpha = 1;
    ctx.beginPath(); ctx.arc(at, bbox.top, 3 * r, 0, 7); ctx.fill();
  }
  ctx.restore();
}
function hoverMarks(u, run) {
  const hide = () => { $("tip").hidden = true; };
  u.over.addEventListener("mouseleave", hide);
  u.over.addEventListener("mousemove", event => {
    const left = event.clientX - u.over.getBoundingClientRect().left, of = run();
    const near = shownMarks(of).filter(mark => Math.abs(u.valToPos(markX(mark), "x") - left) < 6);
    if (!near.length) return hide();
    const tip = $("tip");
    tip.replaceChildren(...near.slice(0, 5).map(mark => make("div", {}, mark[3])), ...(near.length > 5 ? [make("div", {}, `and ${near.length - 5} more`)] : []));
    tip.hidden = false;
    const {width, height} = tip.getBoundingClientRect();
    tip.style.left = `${Math.max(4, Math.min(event.clientX + 12, innerWidth - width - 8))}px`;
    tip.style.top = `${event.clientY + 16 + height > innerHeight ? event.clientY - height - 10 : event.clientY + 16}px`;
  });
}
function markControls() {
  const used = new Set(D.runs.flatMap(run => run.marks.map(mark => mark[0])));
  for (const group of Object.keys(GROUPS)) {
    if (!used.has(group)) continue;
    const button = make("button", {"aria-pressed": "true", title: `show or hide marks: ${group}`}, make("span", {class: "swatch", style: `background:var(${GROUPS[group]})`}), group);
    button.onclick = () => {
      const isOn = state.hidden.has(group);
      state.hidden[isOn ? "delete" : "add"](group);
      button.setAttribute("aria-pressed", String(isOn));
      for (const plot of plots) plot.u.redraw(false);
    };
    $("marks").append(button);
  }
}
