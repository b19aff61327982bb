// The attention explorer: thumbnails of all heads, the map of one, and its tokens with lines between them.
// Python sends bytes (attention_explorer.py says which); everything else happens here, without any network.
// Tokens are a stranger's text: they reach the page through textContent and attributes alone.

const percent = (byte) => (byte === 0 ? "0 %" : byte < 3 ? "under 1 %" : `${Math.round(byte / 2.55)} %`);
const WEAKEST_LINE = 5; // of 255: 2 %

function element(tag, className, parent, attributes = {}) {
  const made = document.createElement(tag);
  made.className = className;
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  parent?.append(made);
  return made;
}

function bytes(view) {
  return view ? new Uint8Array(view.buffer, view.byteOffset, view.byteLength) : new Uint8Array();
}

// A square picture whose pixels are the ink's colour, as opaque as `strength` (0 to 255) says.
function paint(canvas, strength, ink) {
  const size = Math.round(Math.sqrt(strength.length));
  canvas.width = canvas.height = size;
  const image = canvas.getContext("2d").createImageData(size, size);
  for (let at = 0; at < strength.length; at++) {
    for (let part = 0; part < 3; part++) image.data[4 * at + part] = ink[part];
    image.data[4 * at + 3] = strength[at];
  }
  canvas.getContext("2d").putImageData(image, 0, 0);
}

function color(root, name) {
  return getComputedStyle(root).getPropertyValue(name).split(",").map(Number);
}

// Light text means a dark page: this holds in JupyterLab, Colab and VS Code alike.
function pageIsDark(el) {
  const [red, green, blue] = (getComputedStyle(el).color.match(/[\d.]+/g) ?? [0, 0, 0]).map(Number);
  return 0.3 * red + 0.6 * green + 0.1 * blue > 140;
}

// Move a choice with the keyboard: one tab stop, arrow keys inside. `moves` maps a key to a new index, or undefined.
function arrowKeys(box, moves, choose) {
  box.addEventListener("keydown", (event) => {
    if (event.altKey || event.ctrlKey || event.metaKey || !(event.key in moves)) return;
    event.preventDefault();
    event.stopPropagation();
    choose(...moves[event.key]());
  });
}

const clamp = (value, count) => Math.max(0, Math.min(count - 1, value));

function buildGrid(root, model, choose) {
  const layers = model.get("layers"), heads = model.get("heads");
  element("p", "", root).textContent =
    `Choose one of ${layers} × ${heads} heads: layers from left to right, heads from top to bottom.`;
  const grid = element("div", "grid", root, { role: "grid", "aria-label": "all heads; the arrow keys choose one" });
  grid.style.gridTemplateColumns = `20px repeat(${layers}, minmax(0, 24px))`;
  const top = element("div", "row", grid, { "aria-hidden": "true" });
  element("span", "number", top);
  for (let layer = 0; layer < layers; layer++) {
    element("span", "number", top).textContent = layer % 5 ? "" : layer;
  }
  const cells = [];
  for (let head = 0; head < heads; head++) {
    const row = element("div", "row", grid, { role: "row" });
    element("span", "number", row, { "aria-hidden": "true" }).textContent = head;
    for (let layer = 0; layer < layers; layer++) {
      const label = `layer ${layer}, head ${head}`;
      const cell = element("button", "head", row, { type: "button", role: "gridcell", "aria-label": label, title: label });
      element("canvas", "", cell);
      cell.addEventListener("click", () => choose(layer, head));
      cells[layer * heads + head] = cell;
    }
  }
  const layer = () => model.get("layer"), head = () => model.get("head");
  arrowKeys(grid, {
    ArrowLeft: () => [layer() - 1, head()], ArrowRight: () => [layer() + 1, head()],
    ArrowUp: () => [layer(), head() - 1], ArrowDown: () => [layer(), head() + 1],
    Home: () => [0, head()], End: () => [layers - 1, head()],
  }, choose);
  return cells;
}

function buildViews(root, model) {
  const views = element("div", "views", root);
  const map = element("div", "map", views);
  const canvas = element("canvas", "", map, { role: "img" });
  const bands = [element("div", "band", map), element("div", "band", map)];
  element("p", "", map).textContent =
    "Row: the token that looks. Column: the token it looks at. Strength of the colour: square root of the weight.";
  const side = element("div", "side", views);
  const legend = element("p", "", side);
  for (const [kind, words] of [["to", "where the framed token looks"], ["from", "which later tokens look at it"]]) {
    element("span", `swatch ${kind}`, legend);
    legend.append(words);
  }
  const words = element("div", "words", side, { role: "group", "aria-label": "tokens; the arrow keys choose one" });
  const buttons = model.get("tokens").map((token, at) => {
    const word = element("button", "word", words, { type: "button", "data-at": at, "aria-label": `token ${at}: ${token}` });
    word.textContent = token;
    return word;
  });
  const lines = element("canvas", "", words, { "aria-hidden": "true" });
  const readout = element("div", "readout", side, { "aria-live": "polite" });
  return { map, canvas, bands, words, buttons, lines, readout };
}

function render({ model, el }) {
  const tokens = model.get("tokens"), count = tokens.length;
  const layers = model.get("layers"), heads = model.get("heads");
  // JupyterLab listens for keys before the page does: inside the explorer they are the explorer's.
  const root = element("div", "llm-attention", el, {
    role: "group", "aria-label": "attention explorer", "data-lm-suppress-shortcuts": "true" });
  let weights = null; // [T, T] bytes of the chosen head, once they are here
  let shown = [0, null]; // row and column that are marked

  const cells = buildGrid(root, model, chooseHead);
  const title = element("div", "title", root);
  const view = buildViews(root, model);

  function chooseHead(layer, head) {
    model.set("layer", clamp(layer, layers));
    model.set("head", clamp(head, heads));
    model.save_changes();
    cells[model.get("layer") * heads + model.get("head")].focus();
  }

  function chooseToken(at) {
    model.set("token", clamp(at, count));
    model.save_changes();
    view.buttons[model.get("token")].focus({ preventScroll: true });
  }

  // Scroll the box of the tokens, and nothing else, to the chosen one.
  function reveal() {
    const { offsetTop: top, offsetHeight: height } = view.buttons[model.get("token")], box = view.words;
    box.scrollTop = Math.min(top - 10, Math.max(box.scrollTop, top + height + 10 - box.clientHeight));
  }

  function drawThumbnails() {
    root.classList.toggle("dark", pageIsDark(el));
    const all = bytes(model.get("thumbnails")), area = model.get("thumbnail_size") ** 2, ink = color(root, "--ink");
    cells.forEach((cell, at) => paint(cell.firstChild, all.subarray(at * area, (at + 1) * area), ink));
  }

  function drawHead() {
    const layer = model.get("layer"), head = model.get("head");
    const here = model.get("maps_layer") === layer;
    cells.forEach((cell, at) => {
      const chosen = at === layer * heads + head;
      cell.setAttribute("aria-selected", chosen);
      cell.tabIndex = chosen ? 0 : -1;
    });
    title.textContent = `Layer ${layer} · head ${head}` + (here ? "" : " · waiting for Python …");
    weights = here ? bytes(model.get("maps")).subarray(head * count * count, (head + 1) * count * count) : null;
    root.dataset.layer = here ? layer : "";
    root.dataset.head = here ? head : "";
    view.canvas.setAttribute("aria-label", `attention map of layer ${layer}, head ${head}, ${count} by ${count} tokens`);
    // Square roots, as in the thumbnails: a weight of 4 % is seen at a fifth of the full colour.
    if (here) paint(view.canvas, weights.map((byte) => Math.sqrt(byte / 255) * 255), color(root, "--ink"));
    show(model.get("token"));
  }

  // Mark a token: where it looks (itself and before), who looks at it (after). `column` adds one cell of the map.
  function show(row, column = null) {
    shown = [row, column];
    const weight = (i, j) => (weights ? weights[i * count + j] : 0);
    view.buttons.forEach((word, at) => {
      const seen = at <= row ? weight(row, at) : weight(at, row);
      word.className = `word ${at <= row ? "to" : "from"}${at === row ? " chosen" : ""}`;
      word.style.setProperty("--w", Math.sqrt(seen / 255) * (at <= row ? 1 : 0.6));
      word.setAttribute("aria-pressed", at === model.get("token"));
      word.tabIndex = at === model.get("token") ? 0 : -1;
    });
    const side = view.canvas.clientWidth;
    view.bands[0].style.cssText = `left:0;width:${side}px;top:${(row / count) * side}px;height:${side / count}px`;
    const at = column ?? row;
    view.bands[1].style.cssText = `top:0;height:${side}px;left:${(at / count) * side}px;width:${side / count}px`;
    root.dataset.token = row;
    drawLines(row, weight);
    describe(row, column, weight);
  }

  function drawLines(row, weight) {
    const { words, buttons, lines } = view, scale = window.devicePixelRatio || 1;
    const width = words.clientWidth, height = words.scrollHeight;
    lines.style.display = "none"; // or it would hold the box open when the tokens need fewer lines than before
    const boxes = buttons.map((word) => [word.offsetLeft + word.offsetWidth / 2, word.offsetTop + 2]);
    lines.style.display = "block";
    Object.assign(lines, { width: width * scale, height: height * scale });
    Object.assign(lines.style, { width: `${width}px`, height: `${height}px` });
    const draw = lines.getContext("2d");
    draw.scale(scale, scale);
    const [x, y] = boxes[row], back = color(root, "--ink"), later = color(root, "--others");
    boxes.forEach(([toX, toY], at) => {
      const seen = at <= row ? weight(row, at) : weight(at, row);
      if (at === row || seen < WEAKEST_LINE) return;
      draw.strokeStyle = `rgba(${at < row ? back : later}, ${0.25 + (0.6 * seen) / 255})`;
      draw.lineWidth = 0.75 + (3 * seen) / 255;
      draw.beginPath();
      draw.moveTo(x, y);
      draw.quadraticCurveTo((x + toX) / 2, Math.min(y, toY) - 14, toX, toY);
      draw.stroke();
    });
  }

  function describe(row, column, weight) {
    const { readout } = view;
    const strongest = (from, to, of) => Array.from({ length: Math.max(0, to - from) }, (_, n) => [from + n, of(from + n)])
      .filter(([, byte]) => byte >= 3).sort((a, b) => b[1] - a[1]).slice(0, 4);
    const token = (at) => { element("bdi", "", readout).textContent = tokens[at]; };
    const list = (pairs) => pairs.forEach(([at, byte], n) => {
      readout.append(n ? ", " : " ");
      token(at);
      readout.append(` ${percent(byte)}`);
    });
    readout.replaceChildren(`token ${row} `);
    token(row);
    if (!weights) return;
    if (column !== null) {
      readout.append(" looks at ");
      token(column);
      readout.append(column > row ? ": never, it comes later" : `: ${percent(weight(row, column))}`);
      return;
    }
    readout.append(" looks at");
    list(strongest(0, row + 1, (at) => weight(row, at)));
    element("br", "", readout);
    const later = strongest(row + 1, count, (at) => weight(at, row));
    readout.append(later.length ? "looked at by" : "no later token looks at it");
    list(later);
  }

  view.words.addEventListener("pointerover", (event) => {
    const at = event.target.dataset?.at;
    if (at !== undefined) show(Number(at));
  });
  view.words.addEventListener("pointerleave", () => show(model.get("token")));
  view.words.addEventListener("click", (event) => {
    const at = event.target.dataset?.at;
    if (at !== undefined) chooseToken(Number(at));
  });
  view.words.addEventListener("focusin", (event) => show(Number(event.target.dataset.at)));
  const at = () => model.get("token");
  arrowKeys(view.words, {
    ArrowLeft: () => [at() - 1], ArrowRight: () => [at() + 1], ArrowUp: () => [at() - 1], ArrowDown: () => [at() + 1],
    Home: () => [0], End: () => [count - 1],
  }, chooseToken);

  const cellUnder = (event) => {
    const box = view.canvas.getBoundingClientRect();
    return [(event.clientY - box.top) / box.height, (event.clientX - box.left) / box.width]
      .map((part) => clamp(Math.floor(part * count), count));
  };
  view.canvas.addEventListener("pointermove", (event) => show(...cellUnder(event)));
  view.canvas.addEventListener("pointerleave", () => show(model.get("token")));
  view.canvas.addEventListener("click", (event) => {
    model.set("token", cellUnder(event)[0]);
    model.save_changes();
  });

  const changes = { "change:layer": drawHead, "change:head": drawHead, "change:maps_layer": drawHead,
    "change:token": () => { show(model.get("token")); reveal(); } };
  for (const [name, react] of Object.entries(changes)) model.on(name, react);
  const repaint = () => { drawThumbnails(); drawHead(); };
  // The first call comes when the page has laid the explorer out; before that there are no sizes and no colours.
  let width = null;
  const resized = new ResizeObserver(() => {
    if (view.words.clientWidth === width) return;
    if (width === null) repaint();
    width = view.words.clientWidth;
    show(...shown);
    reveal();
  });
  resized.observe(view.words);
  const themed = new MutationObserver(() => requestAnimationFrame(repaint));
  for (const node of [document.documentElement, document.body]) themed.observe(node, { attributes: true });

  return () => {
    resized.disconnect();
    themed.disconnect();
    for (const [name, react] of Object.entries(changes)) model.off(name, react);
  };
}

export default { render };
