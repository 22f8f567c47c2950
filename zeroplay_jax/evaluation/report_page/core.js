'use strict';
// Helpers of all scripts. Data enters the document only through textContent and setAttribute: no text is parsed as HTML.
const $ = (id) => document.getElementById(id);
const { runs, differences } = JSON.parse($('data').textContent);
const comparing = runs.length > 1; // with several runs a colour stands for a run, otherwise for a phase

function build(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === 'colour')
      node.style.setProperty('--colour', value); // the security policy forbids style attributes, not the CSSOM
    else if (name.startsWith('on')) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
}
const el = (tag, attributes = {}, ...children) => build(document.createElement(tag), attributes, children);
const svg = (tag, attributes = {}, ...children) =>
  build(document.createElementNS('http://www.w3.org/2000/svg', tag), attributes, children);

const isNumber = (value) => typeof value === 'number' && Number.isFinite(value);
const readable = (name) => name.replaceAll('_', ' ').replaceAll('/', ' · ');
const capitalised = (text) => text[0].toUpperCase() + text.slice(1);
const count = (n, noun) => `${n.toLocaleString('en')} ${noun}${n === 1 ? '' : 's'}`;
const naturalOrder = (a, b) => String(a).localeCompare(String(b), 'en', { numeric: true });
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
const formatShare = (value) => (isNumber(value) ? value.toFixed(3) : '–');
function formatSigned(value) {
  if (!isNumber(value)) return '–';
  return (value < 0 ? '−' : '+') + Math.abs(value).toFixed(3);
}

const PHASES = ['evaluation', 'proposer', 'generate', 'solver'];
const phaseColour = (phase) => (PHASES.includes(phase) ? `var(--${phase})` : 'var(--other)');
const phaseOrder = (a, b) => PHASES.indexOf(a) - PHASES.indexOf(b) || naturalOrder(a, b);
const isEvaluation = (row) => row.phase === 'evaluation' && row.info?.question;
// What stands below a hop count that the start of a run was shown; null: it was not, or that is not known.
const demonstrated = ({ summary }, hops) =>
  hops > 0 && hops <= summary.demonstrated_hops ? el('small', {}, 'demonstrated') : null;
const swatch = (colour, label, title) =>
  el('span', { colour, title }, el('span', { class: 'swatch' }), label);

// run.updates: 'step/phase/metric' of every logged loss, which is how the page knows which rollouts were trained on.
runs.forEach((run, i) => {
  run.colour = `var(--c${i % 8})`;
  run.updates = new Set();
  for (const row of run.metrics) {
    for (const name of Object.keys(row))
      if (/(^|\/)loss$/.test(name)) run.updates.add(`${row.step}/${row.phase}/${name}`);
  }
  for (const row of run.trajectories) row.run = run;
});

const darkScheme = matchMedia('(prefers-color-scheme: dark)');
$('theme').addEventListener('click', () => {
  const root = document.documentElement.style;
  const scheme = root.colorScheme || (darkScheme.matches ? 'dark' : 'light');
  root.colorScheme = scheme === 'dark' ? 'light' : 'dark';
});

// The fragment of the address holds the filters, so section links scroll by script instead of changing it.
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
