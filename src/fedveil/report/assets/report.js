(() => {
  "use strict";
  const root = document.documentElement;
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const off = new Set();
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const coarse = matchMedia("(pointer: coarse)");
  let paper = false;

  // Colours follow the theme: a probe resolves them, since light-dark() has no value of its own.
  const probe = document.createElement("span");
  probe.hidden = true;
  document.body.append(probe);
  const colour = (name) => {
    probe.style.color = `var(--${name})`;
    return getComputedStyle(probe).color;
  };
  const faint = (value, share) => value.replace(/^rgb\((.*)\)$/, `rgba($1, ${share})`);

  const axis = (given, line, grid) => ({
    automargin: true, zeroline: false, linecolor: line, tickcolor: line, gridcolor: grid, ticks: "outside", ticklen: 4,
    fixedrange: coarse.matches, ...given, title: { standoff: 10, ...given.title },
  });

  const dressed = (figure) => {
    const ink = colour("ink"), line = colour("soft"), grid = colour("grid"), page = colour("page");
    const data = figure.data.map((trace) => {
      const { slot, role, paint } = trace.meta;
      const series = paint ?? slot;
      const own = series === null ? line : colour(`series-${series % 8}`);
      const made = { ...trace, visible: !off.has(slot), line: { ...trace.line, color: own } };
      if (role === "band") made.fillcolor = faint(own, 0.16);
      if (trace.marker) made.marker = { ...trace.marker, color: own };
      if (trace.error_y) made.error_y = { ...trace.error_y, color: own };
      return made;
    });
    const layout = { ...figure.layout };
    for (const name of Object.keys(layout)) {
      if (/^[xy]axis/.test(name)) layout[name] = axis(layout[name], line, grid);
    }
    const wide = figure.layout.height;
    if (layout.annotations) layout.annotations = layout.annotations.filter((one) => !one.name || !off.has(Number(one.name)));
    Object.assign(layout, {
      autosize: true, height: wide ?? 340, margin: { l: 48, r: 12, t: 30, b: 44 }, showlegend: false,
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: getComputedStyle(document.body).fontFamily, size: 13, color: ink },
      hoverlabel: { bgcolor: page, bordercolor: line, font: { color: ink, size: 13 }, namelength: -1, align: "left" },
      modebar: { bgcolor: "rgba(0,0,0,0)", color: line, activecolor: ink },
      dragmode: coarse.matches ? false : "zoom",
    });
    if (paper) Object.assign(layout, { font: { ...layout.font, size: 9 }, autosize: false, width: wide ? 680 : 332, height: wide ? 460 : 230, margin: { l: 44, r: 6, t: 22, b: 38 } });
    return [data, layout];
  };

  const settings = {
    responsive: true, displaylogo: false, displayModeBar: true, modeBarButtons: [["zoom2d", "pan2d", "resetScale2d", "toImage"]],
  };
  const draw = () => {
    for (const [name, figure] of Object.entries(figures)) Plotly.react(name, ...dressed(figure), settings);
  };

  const button = document.getElementById("theme");
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : dark.matches);
  const tell = () => {
    button.textContent = isDark() ? "Light theme" : "Dark theme";
    button.setAttribute("aria-pressed", String(isDark()));
  };
  button.hidden = false;
  button.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    tell();
    draw();
  });
  dark.addEventListener("change", () => { tell(); draw(); });

  for (const box of document.querySelectorAll("#chips input")) {
    const heed = () => {
      if (box.checked) off.delete(Number(box.dataset.slot));
      else off.add(Number(box.dataset.slot));
    };
    heed(); // a reloaded page may come with boxes as they were left
    box.addEventListener("change", () => { heed(); draw(); });
  }

  // On paper: light, everything open, pictures as wide as the sheet.
  let before = null;
  const toPaper = () => {
    if (before) return;
    const closed = [...document.querySelectorAll("details:not([open])")];
    before = { theme: root.dataset.theme, closed };
    for (const one of closed) one.open = true;
    root.dataset.theme = "light";
    paper = true;
    draw();
  };
  const toScreen = () => {
    if (!before) return;
    for (const one of before.closed) one.open = false;
    if (before.theme) root.dataset.theme = before.theme;
    else delete root.dataset.theme;
    before = null;
    paper = false;
    draw();
  };
  addEventListener("beforeprint", toPaper);
  addEventListener("afterprint", toScreen);
  matchMedia("print").addEventListener("change", (event) => (event.matches ? toPaper() : toScreen()));

  // Tables that are wider than the page say so, and on which side there is more.
  for (const box of document.querySelectorAll(".scroll")) {
    const look = () => {
      const rest = box.scrollWidth - box.clientWidth;
      const sides = [box.scrollLeft > 1 && "left", rest - box.scrollLeft > 1 && "right"].filter(Boolean);
      if (rest > 1 && sides.length) box.dataset.more = sides.join(" ");
      else delete box.dataset.more;
    };
    box.addEventListener("scroll", look, { passive: true });
    new ResizeObserver(look).observe(box);
  }

  tell();
  draw();
  root.dataset.ready = "yes";
})();
