'use strict';
// Data reaches the page only through textContent and setAttribute; nothing here parses text as HTML.
const {
  runs: [run],
} = JSON.parse(document.getElementById('data').textContent);
const $ = (id) => document.getElementById(id);
const build = (node, attributes, children) => {
  for (const [name, value] of Object.entries(attributes)) {
    if (name === 'hue')
      node.style.setProperty('--hue', value); // by the CSSOM: the policy forbids style attributes
    else if (name.startsWith('on')) node.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
};
const el = (tag, attributes = {}, ...children) => build(document.createElement(tag), attributes, children);
const svg = (tag, attributes = {}, ...children) =>
  build(document.createElementNS('http://www.w3.org/2000/svg', tag), attributes, children);
const isNumber = (value) => typeof value === 'number' && Number.isFinite(value);
const human = (name) => name.replaceAll('_', ' ').replaceAll('/', ' · ');
const PHASES = ['proposer', 'generate', 'solver', 'evaluation'];
const phaseHue = (phase) => (PHASES.includes(phase) ? `var(--${phase})` : 'var(--c3)');

function format(value) {
  if (!isNumber(value)) return '–';
  const size = Math.abs(value);
  if (Number.isInteger(value) || size >= 1e3) return Math.round(value).toLocaleString('en');
  if (size >= 100) return value.toFixed(0);
  if (size >= 0.01) return String(Number(value.toFixed(3)));
  return value.toExponential(1);
}
const share = (value) => (isNumber(value) ? value.toFixed(3) : '–');
const signed = (value) => (isNumber(value) ? (value < 0 ? '−' : '+') + Math.abs(value).toFixed(3) : '–');

$('theme').addEventListener('click', () => {
  const root = document.documentElement.style;
  const now = root.colorScheme || (matchMedia('(prefers-color-scheme: dark)').matches ? 'dark' : 'light');
  root.colorScheme = now === 'dark' ? 'light' : 'dark';
});

function interval(range, show = share) {
  return Array.isArray(range) ? el('small', {}, `  [${show(range[0])}, ${show(range[1])}]`) : null;
}

// Before and after on one rail from 0 to 1, each a dot with its interval.
function rail(sides) {
  const picture = svg(
    'svg',
    { role: 'img', 'aria-label': sides.map(([name, mean]) => `${name} ${share(mean)}`).join(', ') },
    svg('line', { class: 'rail', x1: '0%', x2: '100%', y1: 10, y2: 10 }),
  );
  for (const [name, mean, range] of sides) {
    if (!isNumber(mean)) continue;
    const group = svg('g', { class: name });
    const at = (value) => `${100 * value}%`;
    const y = name === 'before' ? 7 : 13;
    if (Array.isArray(range))
      group.append(svg('line', { class: 'whisker', x1: at(range[0]), x2: at(range[1]), y1: y, y2: y }));
    group.append(svg('circle', { class: 'dot', cx: at(mean), cy: y, r: 4.5 }));
    picture.append(group);
  }
  return picture;
}

function outcomeRow(label, questions, sides, change, mean) {
  const cells = sides.map(([, value, range]) => el('td', { class: 'num' }, share(value), interval(range)));
  const gain = Array.isArray(change) ? change : [sides[1][1] - sides[0][1]];
  return el(
    'tr',
    { class: mean ? 'mean' : '' },
    el('td', {}, label),
    el('td', { class: 'num' }, format(questions)),
    ...cells,
    el('td', { class: 'num' }, signed(gain[0]), gain.length === 3 ? interval(gain.slice(1), signed) : null),
    el('td', { class: 'range' }, rail(sides)),
  );
}

function drawOutcome() {
  const s = run.summary;
  $('name').textContent = run.name;
  document.title = `${run.name} – run report`;
  const facts = [
    ['seed', s.seed],
    ['steps', s.steps ?? run.metrics.at(-1)?.step],
    ['outside questions', s.outside_questions],
  ]
    .filter(([, value]) => value !== undefined)
    .map(([name, value]) => `${name} ${format(value)}`);
  if (isNumber(s.seconds))
    facts.push(`${Math.floor(s.seconds / 60)} min ${Math.round(s.seconds % 60)} s with evaluations`);
  $('facts').textContent = facts.join('  ·  ');
  $('notes').append(...run.notes.map((note) => el('p', { class: 'note' }, note)));
  if (!isNumber(s.em_before) && !isNumber(s.em_after)) {
    $('outcome-body').replaceWith(
      el('p', { class: 'muted' }, 'The closing evaluation has not been written; see the curves.'),
    );
    return;
  }
  const sides = ['before', 'after'].map((side) => [side, s[`em_${side}`], s.ci95?.[side]]);
  const hops = Object.keys(s.em_by_hop?.after ?? s.em_by_hop?.before ?? {});
  const rows = hops.map((hop) =>
    outcomeRow(
      hop,
      s.questions_by_hop?.[hop],
      ['before', 'after'].map((side) => [side, s.em_by_hop[side]?.[hop], s.ci95_by_hop?.[side]?.[hop]]),
      s.difference_by_hop?.[hop],
    ),
  );
  const heads = ['Hops', 'Questions', 'Before', 'After', 'Change', 'On a scale from 0 to 1'].map((text) =>
    el('th', { scope: 'col' }, text),
  );
  $('outcome-body').append(
    el(
      'div',
      { class: 'card headline' },
      el(
        'div',
        { class: 'figures num' },
        el('span', { class: 'from' }, sides[0][1]?.toFixed(2) ?? '–'),
        el('span', { class: 'arrow', 'aria-label': 'to' }, '→'),
        el('span', { class: 'to' }, sides[1][1]?.toFixed(2) ?? '–'),
      ),
      el('p', {}, `exact match on ${format(s.questions)} held-out questions`),
      ...sides.map(([name, , range]) =>
        range ? el('p', { class: 'muted num' }, name, interval(range)) : null,
      ),
      el('p', { class: 'muted' }, 'Brackets are 95 % intervals.'),
    ),
    el(
      'div',
      { class: 'card scroll', tabindex: 0, role: 'group', 'aria-label': 'Exact match by hop count' },
      el(
        'table',
        {},
        el('thead', {}, el('tr', {}, ...heads)),
        el('tbody', {}, ...rows, outcomeRow('headline mean', s.questions, sides, s.difference, true)),
      ),
    ),
  );
}

drawOutcome();
