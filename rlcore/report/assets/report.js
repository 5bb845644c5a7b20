// ---- theme ----------------------------------------------------------------------------------

function wantedTheme() {
  const asked = location.hash.match(/theme=(dark|light)/);
  if (asked) return asked[1];
  return matchMedia('(prefers-color-scheme: dark)').matches ? 'dark' : 'light';
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  $('theme').textContent = theme === 'dark' ? 'Light' : 'Dark';
}

// ---- answers before and after ---------------------------------------------------------------

const changed = read('changes');
const KINDS = ['turned right', 'turned wrong', 'other answer', 'same'];
const PAIRS = 6;
const pairs = { shown: PAIRS, kind: null };

const verdictOf = (answer) => {
  if (answer.reward === null || answer.reward === undefined) return `not scored: ${answer.status || 'no reward'}`;
  return `reward ${short(answer.reward)}${answer.cut ? ', cut off' : ''}`;
};

function side(when, version, answer) {
  const head = el('header', {}, el('span', { className: 'when' }, when), el('span', { className: 'soft' }, `version ${version}`), el('b', {}, verdictOf(answer)));
  return el('div', { className: 'side' }, head, el('div', { className: 'text' }, answer.text || '(empty)'));
}

// The answer that the grader compares with, where the problem has one.
const referenceOf = (item) => item.reference ? [el('div', { className: 'reference' }, el('span', { className: 'soft' }, 'reference '), item.reference)] : [];

function pairCard(set, item) {
  const mark = el('span', { className: `mark ${item.change.split(' ').pop()}` }, item.change);
  const head = el('header', {}, mark, el('span', { className: 'soft' }, item.prompt_id));
  const both = el('div', { className: 'both' }, side('before', set.from, item.before), side('after', set.to, item.after));
  return el('article', { className: 'pair' }, head, el('div', { className: 'observed text' }, item.prompt), both, ...referenceOf(item));
}

function showPairs() {
  const set = changed[Number($('which').value)];
  const total = KINDS.reduce((sum, kind) => sum + set.counts[kind], 0);
  $('between').textContent = `The same ${total} held-out problems, answered by version ${set.from} and by version ${set.to}.`;
  $('kinds').replaceChildren(...KINDS.map((kind) => {
    const button = el('button', { type: 'button', className: kind.split(' ').pop() }, el('b', {}, String(set.counts[kind])), ` ${kind}`);
    button.setAttribute('aria-pressed', String(pairs.kind === kind));
    button.onclick = () => { pairs.kind = pairs.kind === kind ? null : kind; pairs.shown = PAIRS; showPairs(); };
    return button;
  }));
  const items = set.items.filter((item) => pairs.kind === null || item.change === pairs.kind);
  $('pairs').replaceChildren(...items.slice(0, pairs.shown).map((item) => pairCard(set, item)));
  $('morepairs').hidden = items.length <= pairs.shown;
}

function startPairs() {
  if (!$('pairs')) return;
  $('which').oninput = () => { pairs.shown = PAIRS; pairs.kind = null; showPairs(); };
  $('morepairs').onclick = () => { pairs.shown += PAIRS; showPairs(); };
  showPairs();
}

// ---- samples --------------------------------------------------------------------------------

const samples = read('records');
const PAGE = 6;
const view = { shown: PAGE };

const fixed = (v, digits = 3) => (v === null || v === undefined ? 'n/a' : Number(v.toPrecision(digits)).toString());

function colour(token, how, oldest) {
  if (how === 'ratio') {
    if (token.ratio === null || token.ratio === undefined) return '';
    const strength = Math.min(1, Math.abs(token.ratio) / Math.LN2);
    return `rgba(var(${token.ratio < 0 ? '--orange' : '--blue'}), ${(0.6 * strength).toFixed(3)})`;
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

function facts(sample) {
  return [
    ...Object.entries(sample.reward_parts || {}).map(([k, v]) => `${k} ${fixed(v)}`),
    sample.actor_kind ? `${sample.actor} (${sample.actor_kind})` : sample.actor,
    sample.tokens === undefined ? null : `${sample.tokens} tokens`,
    sample.worst === null ? null : `worst ratio ${fixed(Math.exp(sample.worst))}`,
    sample.finish_reason === 'length' ? 'cut off' : null,
  ].filter(Boolean).map((fact) => el('span', { className: 'soft' }, fact));
}

const rewardOf = (sample) => (sample.reward === null ? `not scored: ${sample.score_status}` : `reward ${fixed(sample.reward)}`);

// What was sampled, token by token; of several turns, with what was observed between them.
function answer(sample) {
  const how = $('colour').value, turns = tokensOf(sample);
  const oldest = Math.max(1, ...turns.flat().map((t) => t.age || 0));
  const info = el('div', { className: 'token' });
  const body = [];
  if (sample.turns) {
    sample.turns.forEach((turn, i) => {
      const reward = turn.reward === undefined ? '' : `, reward ${fixed(turn.reward)}`;
      const part = turn.part ? `, part ${turn.part + 1}` : '';
      body.push(el('div', { className: 'turn' }, `turn ${i + 1}${part}${reward}`));
      if (turn.observed) body.push(el('div', { className: 'observed text' }, turn.observed));
      body.push(saidBox(turn.said, turns[i], how, oldest, info));
    });
  } else body.push(saidBox(sample.response, turns[0], how, oldest, info));
  return [...body, info];
}

function card(sample) {
  const head = el('header', {}, el('b', {}, rewardOf(sample)));
  head.append(...[sample.prompt_id, sample.source].filter(Boolean).map((t) => el('span', { className: 'soft' }, t)), ...facts(sample));
  const prompt = sample.prompt ? [el('div', { className: 'observed text' }, sample.prompt)] : [];
  return el('article', { className: 'sample' }, head, ...prompt, ...answer(sample), ...referenceOf(sample));
}

// A bar to the right of the middle for an advantage above 0, to its left for one below.
function advantage(value, most) {
  if (value === undefined) return el('span', { className: 'advantage soft' }, 'not trained on');
  const bar = el('i', { className: value < 0 ? 'less' : 'more' });
  bar.style.width = `${(50 * Math.abs(value)) / (most || 1)}%`;
  return el('span', { className: 'advantage', title: `advantage ${value}` }, el('span', { className: 'track' }, bar), el('b', {}, `${value > 0 ? '+' : ''}${fixed(value)}`));
}

// The samples of one prompt, the highest reward first.
function groupCard(group) {
  const first = group[0], rewards = group.map((s) => s.reward).filter((r) => r !== null);
  const mean = rewards.reduce((a, b) => a + b, 0) / (rewards.length || 1);
  const head = el('header', {}, el('b', {}, `${group.length} samples, mean reward ${fixed(mean)}`));
  head.append(...[first.prompt_id, first.source].filter(Boolean).map((t) => el('span', { className: 'soft' }, t)));
  const most = Math.max(...group.map((s) => Math.abs(s.advantage || 0)));
  const rows = [...group].sort(ORDERS.best).map((sample) => {
    const line = el('div', { className: 'about' }, el('b', {}, rewardOf(sample)), advantage(sample.advantage, most), ...facts(sample));
    return el('li', {}, line, ...answer(sample));
  });
  const prompt = first.prompt ? [el('div', { className: 'observed text' }, first.prompt)] : [];
  return el('article', { className: 'sample group' }, head, ...prompt, ...referenceOf(first), el('ol', {}, ...rows));
}

function groupsOf(found) {
  const groups = new Map();
  for (const sample of found) {
    if (sample.group_id === undefined) continue;
    const key = `${sample.source} ${sample.group_id}`;
    groups.set(key, [...(groups.get(key) || []), sample]);
  }
  return [...groups.values()].filter((group) => group.length > 1);
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
  const grouped = $('view').value === 'groups';
  const found = grouped ? groupsOf(chosen()) : chosen();
  $('count').textContent = grouped ? `${found.length} groups` : `${found.length} of ${samples.length} samples`;
  $('cards').replaceChildren(...found.slice(0, view.shown).map(grouped ? groupCard : card));
  $('more').hidden = found.length <= view.shown;
  const how = $('colour').value;
  $('key').hidden = how === 'none';
  const orange = 'rgba(var(--orange), 0.6)', blue = 'rgba(var(--blue), 0.6)', amber = 'rgba(var(--amber), 0.75)';
  $('key').querySelector('.scale').style.background = how === 'age'
    ? `linear-gradient(90deg, transparent, ${amber})`
    : `linear-gradient(90deg, ${orange}, transparent, ${blue})`;
  $('low').textContent = how === 'age' ? 'fresh' : '½ or less';
  $('high').textContent = how === 'age' ? 'oldest of the sample' : '2 or more';
}

function startSamples() {
  if (!$('cards')) return;
  for (const kind of new Set(samples.map((s) => s.kind))) $('kind').append(el('option', { value: kind }, kind));
  if (!groupsOf(samples).length) $('view').value = 'single';
  for (const id of ['view', 'kind', 'order', 'colour', 'least', 'most']) {
    $(id).oninput = () => { view.shown = PAGE; showSamples(); };
  }
  $('more').onclick = () => { view.shown += PAGE; showSamples(); };
  showSamples();
}

// ---- start ----------------------------------------------------------------------------------

setTheme(wantedTheme());
figures.forEach((_, i) => { legend(i); listen(i); });
drawAll();
const sizes = new ResizeObserver((entries) => {
  for (const { target } of entries) {
    const drawn = target.querySelector('svg');
    if (target.clientWidth && (!drawn || Number(drawn.getAttribute('width')) !== target.clientWidth)) draw(Number(target.id.slice(5)));
  }
});
document.querySelectorAll('.plot').forEach((plot) => sizes.observe(plot));
$('theme').onclick = () => setTheme(document.documentElement.dataset.theme === 'dark' ? 'light' : 'dark');
$('smooth').oninput = () => { state.smooth = Number($('smooth').value); drawAll(); };
$('whole').onclick = () => zoom(null);
addEventListener('scroll', quiet, { passive: true });
startPairs();
startSamples();
document.documentElement.dataset.ready = 'yes';
