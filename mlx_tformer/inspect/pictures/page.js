"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const redraws = [];

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== null && value !== false) made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

function floats(packed) {
  const bytes = Uint8Array.from(atob(packed), (c) => c.charCodeAt(0));
  const view = new DataView(bytes.buffer), values = new Float32Array(bytes.length / 4);
  for (let i = 0; i < values.length; i++) values[i] = view.getFloat32(4 * i, true);
  return values;
}

function number(value) {
  if (!Number.isFinite(value)) return String(value);
  return value !== 0 && Math.abs(value) < 1e-4 ? value.toExponential(2) : value.toFixed(4);
}

// Colours

function dark() {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

function colour(value, [low, high]) {
  const at = Number.isFinite(value) ? Math.max(-1, Math.min(1, value >= 0 ? value / high : -value / low)) : 0;
  const stops = data.scales[(dark() ? "dark" : "light") + (at < 0 ? "Below" : "")];
  const place = Math.abs(at) * (stops.length - 1), first = Math.min(Math.floor(place), stops.length - 2);
  return stops[first].map((a, i) => Math.round(a + (stops[first + 1][i] - a) * (place - first)));
}

const css = (rgb) => `rgb(${rgb.join(",")})`;
const linear = (part) => (part <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
function ink(rgb) {
  const [r, g, b] = rgb.map((part) => linear(part / 255));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.179 ? "#000" : "#fff";
}

// A map of values as a canvas: hover or arrow keys choose a cell, and `seen(row, column)` is told.

class ValueMap {
  constructor({ label, rows, columns, bounds, seen, chosen }) {
    Object.assign(this, { rows, columns, bounds, seen, chosen, values: null, row: -1, column: -1 });
    this.canvas = element("canvas", { tabindex: "0", role: "img", "aria-label": label });
    this.canvas.addEventListener("mousemove", (event) => this.hover(event));
    this.canvas.addEventListener("click", () => this.row >= 0 && this.chosen && this.chosen(this.row, this.column));
    this.canvas.addEventListener("keydown", (event) => this.key(event));
    this.canvas.addEventListener("focus", () => this.row < 0 && this.move(0, 0));
    redraws.push(() => this.draw());
  }

  show(values) { this.values = values; this.draw(); if (this.row >= 0) this.seen(this.row, this.column); }

  value(row, column) { return this.values[row * this.columns.length + column]; }

  layout() {
    const [wide, high] = [this.columns.length, this.rows.length];
    const cell = Math.max(2, Math.min(24, Math.floor(640 / Math.max(wide, 0.6 * high))));
    const longest = (labels) => Math.min(12, Math.max(...labels.map((label) => [...label].length)));
    const font = Math.min(12, cell), labelled = cell >= 9;
    return { cell, font, labelled, left: labelled ? longest(this.rows) * font * 0.62 + 8 : 0,
      top: labelled ? longest(this.columns) * font * 0.62 + 8 : 0 };
  }

  draw() {
    if (!this.values) return;
    const { cell, font, labelled, left, top } = this.layout(), scale = window.devicePixelRatio || 1;
    const width = left + cell * this.columns.length, height = top + cell * this.rows.length;
    Object.assign(this.canvas, { width: Math.ceil(width * scale), height: Math.ceil(height * scale) });
    Object.assign(this.canvas.style, { width: `${width}px`, height: `${height}px` });
    const pen = this.canvas.getContext("2d");
    pen.scale(scale, scale);
    for (let r = 0; r < this.rows.length; r++) for (let c = 0; c < this.columns.length; c++) {
      pen.fillStyle = css(colour(this.value(r, c), this.bounds));
      pen.fillRect(left + c * cell, top + r * cell, cell, cell);
    }
    pen.strokeStyle = getComputedStyle(document.documentElement).getPropertyValue("--line");
    pen.strokeRect(left + 0.5, top + 0.5, width - left - 1, height - top - 1);
    if (labelled) this.labels(pen, cell, font, left, top);
    if (this.row >= 0) {
      pen.strokeStyle = getComputedStyle(document.documentElement).getPropertyValue("--mark");
      pen.lineWidth = 2;
      pen.strokeRect(left + this.column * cell + 1, top + this.row * cell + 1, cell - 2, cell - 2);
    }
  }

  labels(pen, cell, font, left, top) {
    const short = (label) => ([...label].length > 12 ? [...label].slice(0, 11).join("") + "…" : label);
    pen.fillStyle = getComputedStyle(document.documentElement).getPropertyValue("--ink");
    pen.font = `${font}px ui-monospace, monospace`;
    pen.textBaseline = "middle";
    pen.textAlign = "right";
    this.rows.forEach((label, r) => pen.fillText(short(label), left - 5, top + (r + 0.5) * cell));
    pen.textAlign = "left";
    this.columns.forEach((label, c) => {
      pen.save();
      pen.translate(left + (c + 0.5) * cell, top - 5);
      pen.rotate(-Math.PI / 2);
      pen.fillText(short(label), 0, 0);
      pen.restore();
    });
  }

  hover(event) {
    const box = this.canvas.getBoundingClientRect(), { cell, left, top } = this.layout();
    const column = Math.floor((event.clientX - box.left - left) / cell);
    const row = Math.floor((event.clientY - box.top - top) / cell);
    if (row >= 0 && row < this.rows.length && column >= 0 && column < this.columns.length) this.move(row, column);
  }

  key(event) {
    const steps = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
    if (event.key in steps) {
      event.preventDefault();
      const clamp = (at, count) => Math.max(0, Math.min(count - 1, at));
      const [down, right] = steps[event.key];
      this.move(clamp(this.row + down, this.rows.length), clamp(this.column + right, this.columns.length));
    } else if ((event.key === "Enter" || event.key === " ") && this.chosen && this.row >= 0) {
      event.preventDefault();
      this.chosen(this.row, this.column);
    }
  }

  move(row, column) {
    if (row === this.row && column === this.column) return;
    Object.assign(this, { row, column });
    this.draw();
    this.seen(row, column);
  }
}

function thumbnail(canvas, values, rows, columns) {
  const side = 72, down = Math.ceil(rows / side), across = Math.ceil(columns / side);
  canvas.width = Math.ceil(columns / across);
  canvas.height = Math.ceil(rows / down);
  const pen = canvas.getContext("2d"), image = pen.createImageData(canvas.width, canvas.height);
  for (let r = 0; r < canvas.height; r++) for (let c = 0; c < canvas.width; c++) {
    let most = 0;
    for (let i = r * down; i < Math.min(rows, (r + 1) * down); i++)
      for (let j = c * across; j < Math.min(columns, (c + 1) * across); j++) most = Math.max(most, values[i * columns + j]);
    image.data.set([...colour(most, [0, 1]), 255], 4 * (r * canvas.width + c));
  }
  pen.putImageData(image, 0, 0);
}

// What one number can say about a head: the mean over its queries.

const summaries = {
  "entropy (nats)": (row) => row.reduce((sum, p) => sum - (p > 0 ? p * Math.log(p) : 0), 0),
  "largest weight": (row) => Math.max(...row),
  "weight of the first key": (row) => row[0],
  "weight of the query's own place": (row, at) => row[at] || 0,
  "weight of the key before": (row, at) => (at > 0 ? row[at - 1] : 0),
  "mean distance (keys)": (row, at, seen) => {
    const weights = row.slice(0, seen), total = weights.reduce((sum, p) => sum + p, 0);
    return total ? weights.reduce((sum, p, key) => sum + p * Math.abs(at - key), 0) / total : 0;
  },
};
const placed = Object.keys(summaries).slice(3);  // which need the place of a query among its keys

function summary(name, values, rows, columns, picture) {
  let total = 0, count = 0;
  for (let r = 0; r < rows; r++) {
    const row = Array.from(values.subarray(r * columns, (r + 1) * columns));
    if (row.some((p) => p > 0)) { total += summaries[name](row, r + picture.first, picture.seen); count += 1; }
  }
  return count ? total / count : 0;
}

// The heads of some layers: overview, small maps, the map of one head, and its tokens.

function drawHeads(picture, place) {
  const { queries, keys, layers } = picture, size = queries.length * keys.length;
  layers.forEach((layer) => { layer.all = floats(layer.values); });
  const head = (layer, index) => layers[layer].all.subarray(index * size, (index + 1) * size);
  let layer = 0, index = 0, query = queries.length - 1;

  const readout = element("p", { class: "readout", role: "status", "aria-live": "polite" });
  const main = new ValueMap({ label: "attention, queries down and keys across", rows: queries, columns: keys,
    bounds: [0, 1], seen: (row, column) => { query = row; tokens(); tell(row, column); } });
  function tell(row, column) {
    const value = main.value(row, column);
    readout.dataset.value = value;
    readout.replaceChildren(`layer ${layers[layer].name}, head ${index}: “${queries[row]}” (${row}) → “${keys[column]}” `
      + `(${column}): `, element("b", {}, number(value)));
  }

  const from = element("div", { class: "tokens queries" }), to = element("div", { class: "tokens keys" });
  const best = element("ol", { class: "best" });
  queries.forEach((label, at) => from.append(element("button", { class: "token", type: "button",
    "aria-pressed": "false", onmouseenter: () => choose(at), onfocus: () => choose(at), onclick: () => choose(at) }, label)));
  keys.forEach((label, at) => to.append(element("span", { class: "token",
    onmouseenter: () => main.move(query, at) }, label)));
  function choose(at) { query = at; tokens(); }
  function tokens() {
    const weights = main.values.subarray(query * keys.length, (query + 1) * keys.length);
    [...from.children].forEach((node, at) => node.setAttribute("aria-pressed", at === query));
    [...to.children].forEach((node, at) => {
      const shade = colour(weights[at], [0, 1]);
      Object.assign(node.style, { background: css(shade), color: ink(shade) });
      node.dataset.value = weights[at];
      node.title = number(weights[at]);
    });
    const order = [...weights.keys()].sort((a, b) => weights[b] - weights[a]).slice(0, 5);
    best.replaceChildren(...order.map((at) => element("li", {},
      element("span", {}, number(weights[at])), element("span", {}, `${keys[at]} (${at})`))));
  }

  const thumbs = element("div", { class: "thumbs", role: "group", "aria-label": "heads of the layer" });
  function heads() {
    thumbs.replaceChildren(...Array.from({ length: layers[layer].heads }, (_, at) => {
      const canvas = element("canvas");
      thumbnail(canvas, head(layer, at), queries.length, keys.length);
      return element("button", { class: "thumb", type: "button", "aria-pressed": at === index,
        onclick: () => select(layer, at) }, canvas, `head ${at}`);
    }));
  }
  function select(newLayer, newIndex) {
    layer = newLayer;
    index = Math.min(newIndex, layers[layer].heads - 1);
    title.textContent = `Layer ${layers[layer].name}, head ${index}`;
    main.show(head(layer, index));
    tokens();
    heads();
  }
  redraws.push(() => { heads(); tokens(); });

  const title = element("h3");
  if (layers.length > 1 || layers[0].heads > 1) place.append(...overview(picture, head, select));
  place.append(element("h3", {}, "Heads"), thumbs, title, readout,
    element("div", { class: "row" }, element("div", { class: "scroll" }, main.canvas),
      element("div", {}, element("h3", {}, "Where the query looks"), best)),
    element("h3", {}, "Queries (choose one)"), from, element("h3", {}, "Keys, the darker the more weight"), to);
  select(0, 0);
}

function overview(picture, head, select) {
  const { queries, keys, layers } = picture, most = Math.max(...layers.map((layer) => layer.heads));
  const readout = element("p", { class: "readout" });
  const choice = element("select", { "aria-label": "what the overview shows", onchange: () => fill() },
    ...Object.keys(summaries).filter((name) => picture.first !== null || !placed.includes(name))
      .map((name) => element("option", {}, name)));
  const map = new ValueMap({ label: "overview, layers down and heads across", bounds: [0, 1],
    rows: layers.map((layer) => layer.name), columns: Array.from({ length: most }, (_, at) => String(at)),
    seen: (row, column) => readout.replaceChildren(`layer ${layers[row].name}, head ${column}: mean ${choice.value} `,
      element("b", {}, number(map.value(row, column)))),
    chosen: (row, column) => column < layers[row].heads && select(row, column) });
  function fill() {
    const values = new Float32Array(layers.length * most).fill(NaN);
    layers.forEach((layer, row) => { for (let at = 0; at < layer.heads; at++)
      values[row * most + at] = summary(choice.value, head(row, at), queries.length, keys.length, picture); });
    map.bounds = [0, Math.max(1e-9, ...values.filter(Number.isFinite))];
    map.show(values);
  }
  fill();
  return [element("h3", {}, "All heads: mean ", choice), element("div", { class: "scroll" }, map.canvas), readout];
}

// A grid: a table where there is something to read in the cells, else a map.

function drawGrid(picture, place) {
  const values = floats(picture.values), readout = element("p", { class: "readout", role: "status", "aria-live": "polite" });
  const at = (row, column) => values[row * picture.columns.length + column];
  const axis = (name, label) => (name ? `${name} ${label}` : label);
  function tell(row, column) {
    readout.dataset.value = at(row, column);
    readout.replaceChildren(`${axis(picture.down, picture.rows[row])}, ${axis(picture.across, picture.columns[column])}: `,
      ...(picture.text ? [`“${picture.text[row][column]}” `] : []), element("b", {}, number(at(row, column))));
  }
  if (!picture.text) {
    const map = new ValueMap({ label: picture.title, rows: picture.rows, columns: picture.columns,
      bounds: picture.bounds, seen: tell });
    place.append(readout, element("div", { class: "scroll" }, map.canvas));
    map.show(values);
    return;
  }
  place.append(readout, element("div", { class: "scroll" }, table(picture, at, tell)));
}

function table(picture, at, tell) {
  const cells = [];
  const rows = picture.rows.map((label, row) => element("tr", {}, element("th", { scope: "row" }, label),
    ...picture.columns.map((_, column) => {
      const cell = element("td", { class: "text", tabindex: row + column ? "-1" : "0",
        onmouseenter: () => mark(row, column), onfocus: () => mark(row, column) }, picture.text[row][column]);
      cells.push(cell);
      return cell;
    })));
  const width = picture.columns.length;
  function mark(row, column) {
    cells.forEach((cell, place) => cell.setAttribute("aria-selected", place === row * width + column));
    tell(row, column);
  }
  function paint() {
    cells.forEach((cell, place) => {
      const shade = colour(at(Math.floor(place / width), place % width), picture.bounds);
      Object.assign(cell.style, { background: css(shade), color: ink(shade) });
    });
  }
  paint();
  redraws.push(paint);
  const made = element("table", {}, element("thead", {}, element("tr", {}, element("th"),
    ...picture.columns.map((label) => element("th", { scope: "col" }, label)))), element("tbody", {}, ...rows));
  made.addEventListener("keydown", (event) => {
    const steps = { ArrowUp: -width, ArrowDown: width, ArrowLeft: -1, ArrowRight: 1 };
    const next = cells[cells.indexOf(event.target) + (steps[event.key] || 0)];
    if (event.key in steps && next) { event.preventDefault(); next.focus(); }
  });
  return made;
}

// The page

document.getElementById("title").textContent = data.title;
document.getElementById("theme").addEventListener("click", () => {
  document.documentElement.dataset.theme = dark() ? "light" : "dark";
  redraws.forEach((redraw) => redraw());
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => redraws.forEach((redraw) => redraw()));
data.pictures.forEach((picture, number) => {
  const place = element("section", { id: `picture-${number}` });
  if (picture.title) place.append(element("h2", {}, picture.title));
  (picture.notes || []).forEach((note) => place.append(element("p", { class: "note" }, note)));
  document.getElementById("main").append(place);
  (picture.kind === "heads" ? drawHeads : drawGrid)(picture, place);
});
