'use strict';
const $ = (id) => document.getElementById(id);
const read = (id) => JSON.parse($(id).textContent);
const figures = read('figures');
const state = { smooth: 0 };

function el(tag, props, ...children) {
  const made = Object.assign(document.createElement(tag), props || {});
  made.append(...children);
  return made;
}

// ---- theme ----------------------------------------------------------------------------------

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function wantedTheme() {
  const asked = location.hash.match(/theme=(dark|light)/);
  if (asked) return asked[1];
  return matchMedia('(prefers-color-scheme: dark)').matches ? 'dark' : 'light';
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  $('theme').textContent = theme === 'dark' ? 'Light' : 'Dark';
  figures.forEach((_, i) => draw(i));
}

// ---- charts ---------------------------------------------------------------------------------

// An exponential average whose first values are not pulled towards zero.
function smoothed(values, weight) {
  let sum = 0, norm = 0;
  return values.map((v) => {
    if (v === null) return null;
    sum = weight * sum + (1 - weight) * v;
    norm = weight * norm + (1 - weight);
    return sum / norm;
  });
}

function shownTraces(figure, hidden) {
  const traces = [];
  for (const trace of figure.data) {
    const visible = !hidden.has(trace.legendgroup || trace.name);
    if (trace.type !== 'scatter' || trace.stackgroup || trace.band || !state.smooth) {
      traces.push({ ...trace, visible });
      continue;
    }
    traces.push({ ...trace, visible, opacity: 0.25, mode: 'lines', hoverinfo: 'skip' });
    traces.push({ ...trace, visible, mode: 'lines', y: smoothed(trace.y, state.smooth) });
  }
  return traces;
}

function layoutOf(figure) {
  const axis = { gridcolor: css('--grid'), zerolinecolor: css('--grid'), linecolor: css('--line'), automargin: true };
  const given = figure.layout;
  return {
    ...given,
    title: undefined,
    showlegend: false,
    dragmode: matchMedia('(hover: hover)').matches ? 'zoom' : false,
    margin: { l: 10, r: 12, t: 8, b: 10 },
    paper_bgcolor: 'rgba(0,0,0,0)',
    plot_bgcolor: 'rgba(0,0,0,0)',
    font: { color: css('--soft'), size: 11 },
    hoverlabel: { font: { size: 11 } },
    xaxis: { ...axis, ...given.xaxis },
    yaxis: { ...axis, ...given.yaxis },
  };
}

const hiddenOf = figures.map(() => new Set());

function draw(i) {
  const plot = $('chart' + i);
  if (!plot || plot.closest('details:not([open])')) return; // drawn when that is opened
  const config = { responsive: true, displaylogo: false, modeBarButtonsToRemove: ['select2d', 'lasso2d'] };
  Plotly.react(plot, shownTraces(figures[i], hiddenOf[i]), layoutOf(figures[i]), config);
}

function legend(i) {
  const box = $('chart' + i).parentElement.querySelector('.legend');
  const seen = new Set();
  for (const trace of figures[i].data) {
    const name = trace.legendgroup || trace.name;
    if (trace.band || seen.has(name)) continue;
    seen.add(name);
    const mark = el('i');
    const line = trace.line || {};
    if (line.color) {
      mark.style.borderTopColor = line.color;
      mark.style.borderTopStyle = { solid: 'solid', dash: 'dashed', longdash: 'dashed' }[line.dash] || 'dotted';
    } else {
      mark.className = 'block';
      mark.style.background = trace.color;
    }
    const button = el('button', { type: 'button' }, mark, name);
    button.onclick = () => {
      const off = hiddenOf[i].has(name);
      if (off) hiddenOf[i].delete(name); else hiddenOf[i].add(name);
      button.classList.toggle('off', !off);
      draw(i);
    };
    box.append(button);
  }
}

// ---- samples --------------------------------------------------------------------------------

const samples = read('records');
const PAGE = 8;
const view = { shown: PAGE };

const fixed = (v, digits = 3) => (v === null || v === undefined ? 'n/a' : Number(v.toPrecision(digits)).toString());

function colour(token, how, oldest) {
  if (how === 'ratio') {
    if (token.ratio === null || token.ratio === undefined) return '';
    const strength = Math.min(1, Math.abs(token.ratio) / Math.LN2);
    return `rgba(var(${token.ratio < 0 ? '--red' : '--blue'}), ${(0.7 * strength).toFixed(3)})`;
  }
  if (how === 'age' && token.age) return `rgba(var(--amber), ${(0.15 + (0.6 * token.age) / oldest).toFixed(3)})`;
  return '';
}

function tokensOf(sample) {
  const versions = (sample.token_versions || []).flatMap(([v, n]) => Array(n).fill(v));
  let at = 0;
  return (sample.pieces || []).map((turn) => turn.map((text) => {
    const i = at++;
    const ratio = sample.log_ratio ? sample.log_ratio[i] : undefined;
    const age = sample.learner_version === undefined ? undefined : sample.learner_version - versions[i];
    return { text, ratio, age, version: versions[i] };
  }));
}

function about(token) {
  const parts = [JSON.stringify(token.text)];
  if (token.ratio !== undefined) {
    parts.push(token.ratio === null ? 'no ratio (outside the safe set, or not finite)'
      : `p_ref/p_inf ${fixed(Math.exp(token.ratio))} (log ${fixed(token.ratio)})`);
  }
  if (token.version !== undefined) parts.push(`sampled by version ${token.version}`);
  if (token.age !== undefined) parts.push(`${token.age} steps old`);
  return parts.join(', ');
}

function saidBox(text, tokens, how, oldest, info) {
  const box = el('div', { className: 'said text' });
  let length = 0;
  for (const token of tokens || []) {
    length += token.text.length;
    const bad = how === 'ratio' && token.ratio === null;
    const span = el('span', { className: bad ? 't none' : 't', title: about(token) }, token.text || '∎');
    span.style.background = colour(token, how, oldest);
    span.onclick = () => { info.textContent = about(token); };
    box.append(span);
  }
  box.append((text || '').slice(length)); // tokens beyond those that were written one by one
  return box;
}

function card(sample) {
  const how = $('colour').value;
  const turns = tokensOf(sample);
  const oldest = Math.max(1, ...turns.flat().map((t) => t.age || 0));
  const info = el('div', { className: 'token' }, turns.length ? 'Choose a token to see its ratio and version.' : '');
  const head = el('header', {}, el('b', {}, sample.reward === null ? `reward: ${sample.score_status}` : `reward ${fixed(sample.reward)}`));
  const facts = [
    sample.prompt_id, sample.source,
    ...Object.entries(sample.reward_parts || {}).map(([k, v]) => `${k} ${fixed(v)}`),
    sample.actor_kind ? `${sample.actor} (${sample.actor_kind})` : sample.actor,
    sample.tokens === undefined ? null : `${sample.tokens} tokens`,
    sample.worst === null ? null : `worst ratio ${fixed(Math.exp(sample.worst))}`,
    sample.finish_reason === 'length' ? 'cut off' : null,
  ];
  facts.filter(Boolean).forEach((fact) => head.append(el('span', { className: 'soft' }, fact)));
  const body = [head];
  if (sample.prompt) body.push(el('div', { className: 'observed text' }, sample.prompt));
  if (sample.turns) {
    sample.turns.forEach((turn, i) => {
      const reward = turn.reward === undefined ? '' : `, reward ${fixed(turn.reward)}`;
      const part = turn.part ? `, part ${turn.part + 1}` : '';
      body.push(el('div', { className: 'turn' }, `turn ${i + 1}${part}${reward}`));
      if (turn.observed) body.push(el('div', { className: 'observed text' }, turn.observed));
      body.push(saidBox(turn.said, turns[i], how, oldest, info));
    });
  } else body.push(saidBox(sample.response, turns[0], how, oldest, info));
  return el('article', { className: 'sample' }, ...body, info);
}

const ORDERS = {
  worst: (a, b) => Math.abs(b.worst || 0) - Math.abs(a.worst || 0),
  newest: (a, b) => b.at - a.at,
  best: (a, b) => (b.reward ?? -Infinity) - (a.reward ?? -Infinity),
  poorest: (a, b) => (a.reward ?? Infinity) - (b.reward ?? Infinity),
};

function chosen() {
  const least = parseFloat($('least').value), most = parseFloat($('most').value);
  const kind = $('kind').value;
  return samples.filter((s) => {
    if (kind !== 'all' && s.kind !== kind) return false;
    if (!Number.isNaN(least) && !(s.reward !== null && s.reward >= least)) return false;
    return Number.isNaN(most) || (s.reward !== null && s.reward <= most);
  }).sort(ORDERS[$('order').value]);
}

function showSamples() {
  const found = chosen();
  $('count').textContent = `${found.length} of ${samples.length} samples`;
  $('cards').replaceChildren(...found.slice(0, view.shown).map(card));
  $('more').hidden = found.length <= view.shown;
  const how = $('colour').value;
  $('key').hidden = how === 'none';
  const red = 'rgba(var(--red), 0.7)', blue = 'rgba(var(--blue), 0.7)', amber = 'rgba(var(--amber), 0.75)';
  $('key').querySelector('.scale').style.background = how === 'age'
    ? `linear-gradient(90deg, transparent, ${amber})`
    : `linear-gradient(90deg, ${red}, transparent, ${blue})`;
  $('low').textContent = how === 'age' ? 'fresh' : '½ or less';
  $('high').textContent = how === 'age' ? 'oldest of the sample' : '2 or more';
}

function startSamples() {
  if (!$('cards')) return;
  for (const kind of new Set(samples.map((s) => s.kind))) $('kind').append(el('option', { value: kind }, kind));
  for (const id of ['kind', 'order', 'colour', 'least', 'most']) {
    $(id).oninput = () => { view.shown = PAGE; showSamples(); };
  }
  $('more').onclick = () => { view.shown += PAGE; showSamples(); };
  showSamples();
}

// ---- start ----------------------------------------------------------------------------------

figures.forEach((_, i) => legend(i));
document.querySelectorAll('details').forEach((fold) => {
  fold.addEventListener('toggle', () => {
    if (fold.open) fold.querySelectorAll('.plot').forEach((plot) => draw(Number(plot.id.slice(5))));
  });
});
$('theme').onclick = () => setTheme(document.documentElement.dataset.theme === 'dark' ? 'light' : 'dark');
$('smooth').onchange = () => { state.smooth = Number($('smooth').value); figures.forEach((_, i) => draw(i)); };
setTheme(wantedTheme());
startSamples();
document.documentElement.dataset.ready = 'yes';
