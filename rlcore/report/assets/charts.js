'use strict';
const $ = (id) => document.getElementById(id);
const read = (id) => JSON.parse($(id).textContent);
const figures = read('figures');
const state = { smooth: 0.6, range: null };
const DASHES = ['', '6 3', '2 2', '7 2 2 2', '11 3', '11 2 2 2', '5 2 2 2 2 2', '1 4', '4 4', '9 2 1 2 1 2'];
const COLOURS = 10;
const SMOOTHED_FROM = 20; // points: a curve of fewer is drawn as it is, with its points

function el(tag, props, ...children) {
  const made = Object.assign(document.createElement(tag), props || {});
  made.append(...children);
  return made;
}

function svg(tag, attributes, ...children) {
  const made = document.createElementNS('http://www.w3.org/2000/svg', tag);
  for (const [name, value] of Object.entries(attributes || {})) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

const colourOf = (i) => `var(--c${i % COLOURS})`;

function short(value) {
  if (value === null || value === undefined) return 'n/a';
  const size = Math.abs(value);
  if (size !== 0 && (size >= 1e6 || size < 1e-3)) return Number(value.toPrecision(3)).toExponential().replace('e+', 'e');
  if (size >= 1000) return Math.round(value).toLocaleString('en');
  return String(Number(value.toPrecision(4)));
}

// ---- scales ---------------------------------------------------------------------------------

function steps(low, high, wanted) {
  const raw = (high - low) / wanted || 1;
  const power = 10 ** Math.floor(Math.log10(raw));
  const unit = [1, 2, 5, 10].find((n) => n * power >= raw) * power;
  const found = [];
  for (let n = Math.ceil(low / unit - 1e-9); n * unit <= high + unit * 1e-9; n++) found.push(n * unit);
  return found;
}

function linear(low, high, from, to) {
  const at = (v) => from + ((v - low) / (high - low || 1)) * (to - from);
  at.invert = (p) => low + ((p - from) / (to - from || 1)) * (high - low);
  at.ticks = (wanted) => steps(low, high, wanted).map((v) => Number(v.toPrecision(10)));
  return at;
}

function logarithmic(low, high, from, to) {
  const line = linear(Math.log10(low), Math.log10(high), from, to);
  const at = (v) => line(Math.log10(v));
  at.ticks = (wanted) => {
    const found = [];
    const first = Math.floor(Math.log10(low)), last = Math.ceil(Math.log10(high));
    const digits = last - first > 2 ? [1] : [1, 2, 5];
    const every = Math.max(1, Math.ceil((last - first) / wanted));
    for (let p = first; p <= last; p += every) for (const n of digits) found.push(n * 10 ** p);
    const within = found.filter((v) => v >= low * 0.999 && v <= high * 1.001);
    return within.length > 1 ? within : steps(low, high, wanted).filter((v) => v > 0);
  };
  return at;
}

// An exponential average whose first values are not pulled towards zero.
function smoothed(values, weight) {
  let sum = 0, norm = 0;
  return values.map((v) => {
    sum = weight * sum + (1 - weight) * v;
    norm = weight * norm + (1 - weight);
    return sum / norm;
  });
}

// ---- curves ---------------------------------------------------------------------------------

const hiddenOf = figures.map(() => new Set());
const drawnOf = figures.map(() => null); // what the pointer needs to know of a drawn chart

// The curves that are shown, cut to the chosen steps; stacked ones on top of each other.
function layers(figure, hidden) {
  const below = new Map();
  return figure.curves.filter((c) => !hidden.has(c.name)).map((curve) => {
    const smooth = state.smooth && curve.x.length >= SMOOTHED_FROM && !curve.band && !figure.stacked;
    const line = smooth ? smoothed(curve.y, state.smooth) : curve.y;
    const points = curve.x.map((x, i) => {
      const base = figure.stacked ? below.get(x) || 0 : 0;
      if (figure.stacked) below.set(x, base + curve.y[i]);
      return { x, raw: curve.y[i], y: base + line[i], base };
    }).filter((p) => !state.range || (p.x >= state.range[0] && p.x <= state.range[1]));
    const band = curve.band ? curve.band[0].map((x, i) => ({ x, low: curve.band[1][i], high: curve.band[2][i] })) : [];
    return { curve, points, smooth, band: band.filter((p) => !state.range || (p.x >= state.range[0] && p.x <= state.range[1])) };
  });
}

function extent(values, log, stacked) {
  let low = Math.min(...values), high = Math.max(...values);
  if (stacked) low = Math.min(0, low);
  if (low === high) {
    if (log) return [low / 2, high * 2];
    const room = Math.abs(low) * 0.1 || 0.5;
    return [low - room, high + room];
  }
  if (log) return [low / 1.1, high * 1.1];
  const room = (high - low) * 0.06;
  return [low >= 0 && low - room < 0 ? Math.min(0, low) : low - room, high + room];
}

const path = (points, x, y) => points.map((p, i) => `${i ? 'L' : 'M'}${x(p.x).toFixed(1)},${y(p.y).toFixed(1)}`).join('');

function area(points, x, top, bottom) {
  if (!points.length) return '';
  const there = points.map((p, i) => `${i ? 'L' : 'M'}${x(p.x).toFixed(1)},${top(p).toFixed(1)}`);
  const back = [...points].reverse().map((p) => `L${x(p.x).toFixed(1)},${bottom(p).toFixed(1)}`);
  return `${there.join('')}${back.join('')}Z`;
}

function drawCurves(i) {
  const figure = figures[i], plot = $('chart' + i);
  const width = plot.clientWidth, height = plot.clientHeight;
  const found = layers(figure, hiddenOf[i]);
  const ys = found.flatMap((l) => [...l.points.flatMap((p) => (l.smooth ? [p.raw, p.y] : [p.y])), ...l.band.flatMap((p) => [p.low, p.high])]);
  const xs = [...new Set(found.flatMap((l) => l.points.map((p) => p.x)))].sort((a, b) => a - b);
  const image = svg('svg', { class: 'drawn', width, height, viewBox: `0 0 ${width} ${height}`, 'aria-hidden': 'true' });
  plot.replaceChildren(image);
  drawnOf[i] = null;
  if (!xs.length) {
    image.append(svg('text', { x: width / 2, y: height / 2, 'text-anchor': 'middle', class: 'tick' }, 'No curve is shown'));
    return;
  }
  const [low, high] = extent(ys, figure.log, figure.stacked);
  const y = (figure.log ? logarithmic : linear)(low, high, height - 22, 8);
  const ticks = y.ticks(5).map((v) => [v, short(v)]);
  const left = 10 + 6.3 * Math.max(...ticks.map(([, text]) => text.length));
  const x = linear(xs[0], xs[xs.length - 1] === xs[0] ? xs[0] + 1 : xs[xs.length - 1], left, width - 10);
  for (const [value, text] of ticks) {
    image.append(svg('line', { x1: left, x2: width - 10, y1: y(value), y2: y(value), class: 'grid' }));
    image.append(svg('text', { x: left - 6, y: y(value) + 4, 'text-anchor': 'end', class: 'tick' }, text));
  }
  for (const value of x.ticks(Math.max(2, Math.floor(width / 90)))) {
    image.append(svg('text', { x: x(value), y: height - 6, 'text-anchor': x(value) > width - 20 ? 'end' : 'middle', class: 'tick' }, short(value)));
  }
  for (const layer of found) drawLayer(image, layer, figure, x, y);
  const cursor = svg('g', { class: 'cursor' });
  image.append(cursor);
  drawnOf[i] = { x, y, xs, found, cursor, height, left, width };
}

function drawLayer(image, { curve, points, smooth, band }, figure, x, y) {
  const stroke = colourOf(curve.color), dash = DASHES[curve.dash % DASHES.length];
  if (figure.stacked) {
    image.append(svg('path', { d: area(points, x, (p) => y(p.y), (p) => y(p.base)), style: `fill:${stroke}`, class: 'area' }));
    return;
  }
  if (band.length) image.append(svg('path', { d: area(band, x, (p) => y(p.high), (p) => y(p.low)), style: `fill:${stroke}`, class: 'band' }));
  if (smooth) image.append(svg('path', { d: path(points.map((p) => ({ x: p.x, y: p.raw })), x, y), style: `stroke:${stroke}`, class: 'line raw' }));
  image.append(svg('path', { d: path(points, x, y), style: `stroke:${stroke}`, 'stroke-dasharray': dash, class: 'line' }));
  if (points.length < SMOOTHED_FROM) {
    for (const p of points) image.append(svg('circle', { cx: x(p.x), cy: y(p.y), r: 2.5, style: `fill:${stroke}` }));
  }
}

// ---- the timeline ---------------------------------------------------------------------------

const LANE = 26;

function drawLanes(i) {
  const figure = figures[i], plot = $('chart' + i);
  const width = plot.clientWidth, narrow = width < 520;
  const row = narrow ? LANE + 16 : LANE;
  const height = figure.lanes.length * row + 26;
  plot.style.height = `${height}px`;
  const image = svg('svg', { class: 'drawn', width, height, viewBox: `0 0 ${width} ${height}`, 'aria-hidden': 'true' });
  plot.replaceChildren(image);
  const left = narrow ? 4 : 14 + 6.6 * Math.max(...figure.lanes.map((name) => name.length));
  const x = linear(...figure.range, left, width - 10);
  const top = (lane) => lane * row + (narrow ? 16 : 0);
  for (const value of x.ticks(Math.max(2, Math.floor(width / 110)))) {
    image.append(svg('line', { x1: x(value), x2: x(value), y1: 0, y2: height - 20, class: 'grid' }));
    image.append(svg('text', { x: x(value), y: height - 6, 'text-anchor': 'middle', class: 'tick' }, `${short(value)} s`));
  }
  figure.lanes.forEach((name, lane) => {
    const place = narrow ? { x: left, y: top(lane) - 4 } : { x: left - 8, y: top(lane) + 17, 'text-anchor': 'end' };
    image.append(svg('text', { ...place, class: 'lane' }, name));
  });
  for (const [lane, kind, text, start, end, share] of figure.bars) {
    const [name, colour] = figure.kinds[kind];
    if (hiddenOf[i].has(name)) continue;
    const from = Math.max(x(start), left);
    const bar = svg('rect', {
      x: from, y: top(lane) + 3, width: Math.max(x(end) - from, 0.6), height: LANE - 7, rx: 2,
      style: `fill:${colourOf(colour)};fill-opacity:${0.15 + 0.85 * share}`,
    });
    bar.onpointermove = (event) => tip(event.clientX, event.clientY, `${figure.lanes[lane]}: ${text}`, []);
    image.append(bar);
  }
  drawnOf[i] = {};
}

// ---- drawing, legends -----------------------------------------------------------------------

function draw(i) {
  const plot = $('chart' + i);
  if (!plot || !plot.clientWidth) return; // behind a fold: drawn when that is opened
  if (figures[i].lanes) drawLanes(i); else drawCurves(i);
}

const drawAll = () => figures.forEach((_, i) => draw(i));

function swatch(colour, dash) {
  const image = svg('svg', { width: 26, height: 10, 'aria-hidden': 'true' });
  if (dash === null) image.append(svg('rect', { width: 12, height: 10, x: 7, rx: 2, style: `fill:${colour}` }));
  else image.append(svg('line', { x1: 0, x2: 26, y1: 5, y2: 5, style: `stroke:${colour};stroke-width:2.5`, 'stroke-dasharray': DASHES[dash % DASHES.length] }));
  return image;
}

function legend(i) {
  const figure = figures[i], plot = $('chart' + i);
  if (!plot) return;
  const entries = figure.lanes
    ? figure.kinds.map(([name, colour]) => [name, colourOf(colour), null, name, ''])
    : figure.curves.map((c) => [c.name, colourOf(c.color), figure.stacked ? null : c.dash, [c.name, ...(c.also || [])].join(' = '), short(c.y[c.y.length - 1])]);
  for (const [key, colour, dash, text, last] of entries) {
    const button = el('button', { type: 'button' }, swatch(colour, dash), el('span', {}, text), el('b', {}, last));
    button.setAttribute('aria-pressed', 'true');
    button.onclick = () => {
      const off = !hiddenOf[i].delete(key);
      if (off) hiddenOf[i].add(key);
      button.setAttribute('aria-pressed', String(!off));
      draw(i);
    };
    plot.nextElementSibling.append(button);
  }
}

// ---- the pointer ----------------------------------------------------------------------------

function tip(x, y, title, rows) {
  const box = $('tip');
  box.replaceChildren(el('div', { className: 'title' }, title), ...rows.map(([colour, dash, name, value]) => el('div', { className: 'row' }, swatch(colour, dash), el('span', {}, name), el('b', {}, value))));
  box.hidden = false;
  const wide = document.documentElement.clientWidth, high = window.innerHeight;
  const left = x + 16 + box.offsetWidth > wide ? x - 16 - box.offsetWidth : x + 16;
  box.style.left = `${Math.max(8, Math.min(left, wide - box.offsetWidth - 8))}px`;
  box.style.top = `${Math.max(8, Math.min(y + 16, high - box.offsetHeight - 8))}px`;
}

function nearest(xs, value) {
  let low = 0, high = xs.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (xs[middle] < value) low = middle; else high = middle;
  }
  return value - xs[low] < xs[high] - value ? low : high;
}

// A line at this step in every chart, and the points of one.
function point(i, at) {
  const step = drawnOf[i].xs[at];
  drawnOf.forEach((drawn, other) => {
    if (!drawn || !drawn.cursor) return;
    drawn.cursor.replaceChildren();
    if (step < drawn.xs[0] || step > drawn.xs[drawn.xs.length - 1]) return;
    const x = drawn.x(step);
    drawn.cursor.append(svg('line', { x1: x, x2: x, y1: 8, y2: drawn.height - 22 }));
    if (other !== i) return;
    for (const { curve, points } of drawn.found) {
      const here = points.find((p) => p.x === step);
      if (here) drawn.cursor.append(svg('circle', { cx: x, cy: drawn.y(here.y), r: 3.5, style: `fill:${colourOf(curve.color)}` }));
    }
  });
  return step;
}

function tell(i, at, x, y) {
  const step = point(i, at), figure = figures[i];
  const rows = drawnOf[i].found.flatMap(({ curve, points }) => {
    const here = points.find((p) => p.x === step);
    return here ? [[colourOf(curve.color), figure.stacked ? null : curve.dash, [curve.name, ...(curve.also || [])].join(' = '), short(here.raw)]] : [];
  });
  tip(x, y, `step ${step}${figure.unit ? ` (${figure.unit})` : ''}`, rows);
}

function quiet() {
  $('tip').hidden = true;
  drawnOf.forEach((drawn) => drawn && drawn.cursor && drawn.cursor.replaceChildren());
}

function zoom(range) {
  state.range = range;
  $('whole').hidden = !range;
  quiet();
  drawAll();
}

function listen(i) {
  const plot = $('chart' + i);
  if (!plot) return;
  plot.onpointerleave = quiet;
  plot.onblur = quiet;
  if (figures[i].lanes) return;
  let from = null, at = 0;
  const inside = (event) => event.clientX - plot.getBoundingClientRect().left;
  plot.onpointerdown = (event) => { if (event.pointerType === 'mouse') from = inside(event); };
  plot.onpointermove = (event) => {
    const drawn = drawnOf[i];
    if (!drawn) return;
    at = nearest(drawn.xs, drawn.x.invert(inside(event)));
    tell(i, at, event.clientX, event.clientY);
    if (from !== null) drawn.cursor.append(svg('rect', { x: Math.min(from, inside(event)), width: Math.abs(inside(event) - from), y: 8, height: drawn.height - 30, class: 'chosen' }));
  };
  plot.onpointerup = (event) => {
    const drawn = drawnOf[i], to = inside(event);
    if (drawn && from !== null && Math.abs(to - from) > 8) zoom([drawn.x.invert(Math.min(from, to)), drawn.x.invert(Math.max(from, to))]);
    from = null;
  };
  plot.ondblclick = () => zoom(null);
  plot.onkeydown = (event) => {
    const drawn = drawnOf[i], way = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!drawn || !way) return;
    event.preventDefault();
    at = Math.max(0, Math.min(drawn.xs.length - 1, at + way));
    const box = plot.getBoundingClientRect();
    tell(i, at, box.left + drawn.x(drawn.xs[at]), box.top + 20);
  };
}
