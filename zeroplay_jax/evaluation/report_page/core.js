'use strict';
// Data reaches the page only through textContent and setAttribute; nothing here parses text as HTML.
const $ = (id) => document.getElementById(id);
const { runs, against } = JSON.parse($('data').textContent);
const many = runs.length > 1; // then a colour stands for a run, else for a phase

const build = (node, attributes, children) => {
  for (const [name, value] of Object.entries(attributes)) {
    if (name === 'hue')
      node.style.setProperty('--hue', value); // by the CSSOM: the policy forbids style attributes
    else if (name.startsWith('on')) node.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
};
const el = (tag, attributes = {}, ...children) => build(document.createElement(tag), attributes, children);
const svg = (tag, attributes = {}, ...children) =>
  build(document.createElementNS('http://www.w3.org/2000/svg', tag), attributes, children);

const isNumber = (value) => typeof value === 'number' && Number.isFinite(value);
const human = (name) => name.replaceAll('_', ' ').replaceAll('/', ' · ');
const count = (n, noun) => `${n.toLocaleString('en')} ${noun}${n === 1 ? '' : 's'}`;
const inOrder = (a, b) => String(a).localeCompare(String(b), 'en', { numeric: true });
const sum = (values) => values.reduce((a, b) => a + b, 0);
const mean = (values) => (values.length ? sum(values) / values.length : null);

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

const PHASES = ['evaluation', 'proposer', 'generate', 'solver'];
const phaseHue = (phase) => (PHASES.includes(phase) ? `var(--${phase})` : 'var(--other)');
const byPhase = (a, b) => PHASES.indexOf(a) - PHASES.indexOf(b) || inOrder(a, b);
const swatch = (hue, label, title) => el('span', { hue, title }, el('span', { class: 'swatch' }), label);

runs.forEach((run, i) => {
  run.hue = `var(--c${i % 8})`;
  run.trains = new Set(); // steps with a loss, and the role where the metrics name it
  for (const row of run.metrics)
    for (const name of Object.keys(row))
      if (/(^|\/)loss$/.test(name)) run.trains.add(`${row.step}/${row.phase}/${name}`);
  for (const row of run.trajectories) row.run = run;
});

$('theme').addEventListener('click', () => {
  const root = document.documentElement.style;
  const now = root.colorScheme || (matchMedia('(prefers-color-scheme: dark)').matches ? 'dark' : 'light');
  root.colorScheme = now === 'dark' ? 'light' : 'dark';
});

// The address keeps the reader's filters, so the links scroll by themselves.
function goTo(id) {
  $(id).scrollIntoView();
  (id === 'trajectories' ? $('list') : $(id)).focus({ preventScroll: true });
}
for (const link of document.querySelectorAll('nav a')) {
  link.addEventListener('click', (event) => {
    event.preventDefault();
    goTo(link.hash.slice(1));
  });
}
