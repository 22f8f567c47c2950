// Which charts there are: one per metric family and phase; with several runs one per metric and phase, runs overlaid.
const NUMBERED = /(\/|\bhop)\d/; // metrics with a number in their name get the colours of a ramp
const NOT_METRICS = ['step', 'iteration', 'phase'];

// Metric name → set of phases in which the run logged a number.
function phasesOfMetrics(run) {
  const phasesOf = new Map();
  for (const row of run.metrics) {
    for (const [name, value] of Object.entries(row)) {
      if (NOT_METRICS.includes(name) || !isNumber(value)) continue;
      if (!phasesOf.has(name)) phasesOf.set(name, new Set());
      phasesOf.get(name).add(row.phase);
    }
  }
  return phasesOf;
}
const isLogged = (run, name, phase) => run.phasesOf.get(name)?.has(phase);

// Families with at least one logged metric, in the order of FAMILIES; a metric without a family is its own.
function loggedFamilies() {
  const families = new Map();
  for (const run of runs) run.phasesOf = phasesOfMetrics(run);
  const names = new Set(runs.flatMap((run) => [...run.phasesOf.keys()]));
  for (const name of names) {
    const family = familyOf(name);
    if (!families.has(family.title)) families.set(family.title, { ...family, metrics: [] });
    const phases = new Set(runs.flatMap((run) => [...(run.phasesOf.get(name) ?? [])]));
    families.get(family.title).metrics.push({ name, phases });
  }
  const logged = [...families.values()].filter((family) => family.metrics.length);
  // Roles beside each other, in the order of FAMILIES; what is its own family comes last.
  const rankOf = ({ base }) => FAMILIES.findIndex(({ title }) => title === base) + 1 || FAMILIES.length + 1;
  logged.sort((a, b) => rankOf(a) - rankOf(b));
  for (const family of logged) family.metrics.sort((a, b) => naturalOrder(a.name, b.name));
  return logged;
}

// Colour i of n of a ramp that differs in hue and in lightness, so that neighbours can be told apart.
function rampColour(i, n) {
  const place = n > 1 ? (3 * i) / (n - 1) : 1;
  const stop = Math.min(2, Math.floor(place));
  return `color-mix(in oklab, var(--ramp${stop + 1}) ${Math.round(100 * (place - stop))}%, var(--ramp${stop}))`;
}

function metricColour({ lead, metrics }, name, phase) {
  const names = metrics.map((metric) => metric.name);
  const numbered = names.filter((one) => NUMBERED.test(one));
  const [, role] = splitRole(name);
  if (numbered.includes(name)) return rampColour(numbered.indexOf(name), numbered.length);
  if (role && metricOf(name)) return phaseColour(role);
  if (splitRole(name)[0] === lead) return numbered.length ? 'var(--ink)' : phaseColour(phase);
  return `var(--c${names.indexOf(name) % 8})`;
}

function seriesOf(run, name, phase, label, colour) {
  const absentIsZero = ABSENT_IS_ZERO.test(splitRole(name)[0]);
  return { run, name, phase, label, colour, absentIsZero, help: metricOf(name)?.[2] };
}

// The line of a role in a phase, as one of a chart of all roles.
function roleSeries(name, phase, phases) {
  const [, role] = splitRole(name);
  const label = !role || role === phase ? phase : phases.length > 1 ? `${role} (${phase})` : role;
  return seriesOf(runs[0], name, phase, label, phaseColour(PHASES.includes(phase) || !role ? phase : role));
}

const JOINT = ' · ';
// A phase often has the name of its role.
const joinTitle = (...parts) => [...new Set(parts.filter(Boolean).flatMap((part) => part.split(JOINT)))].join(JOINT);

// Several runs: a card per metric and phase with a series per run.
function cardsByMetric(family, phases) {
  const cards = [];
  for (const { name, phases: phasesOfMetric } of family.metrics) {
    for (const phase of phases.filter((one) => phasesOfMetric.has(one))) {
      const label = family.metrics.length > 1 ? labelOf(name) : '';
      cards.push({
        ...family,
        title: joinTitle(family.title, label, phases.length > 1 ? phase : ''),
        group: family.lead && family.lead !== splitRole(name)[0] ? DETAIL : family.group,
        series: runs
          .filter((run) => isLogged(run, name, phase))
          .map((run) => seriesOf(run, name, phase, run.name, run.colour)),
      });
    }
  }
  return cards;
}

// One run, or stacks, which cannot be overlaid: a card per phase and run with a series per metric.
function cardsByPhase(family, phases) {
  const cards = [];
  for (const phase of phases) {
    for (const run of runs) {
      const logged = family.metrics.filter(({ name }) => isLogged(run, name, phase));
      if (!logged.length) continue;
      cards.push({
        ...family,
        title: joinTitle(family.title, phases.length > 1 ? phase : '', comparing ? run.name : ''),
        separable: true,
        series: logged.map(({ name }) =>
          seriesOf(run, name, phase, labelOf(name), metricColour(family, name, phase)),
        ),
      });
    }
  }
  return cards;
}

function cardsOf(family) {
  const phases = [...new Set(family.metrics.flatMap((metric) => [...metric.phases]))].sort(phaseOrder);
  if (comparing && family.kind !== 'stack') return cardsByMetric(family, phases);
  const isOneMetric = !comparing && family.metrics.every(({ name }) => metricOf(name));
  if (!isOneMetric && (comparing || family.metrics.length > 1 || family.kind === 'stack'))
    return cardsByPhase(family, phases);
  const series = family.metrics.flatMap((metric) =>
    phases.filter((phase) => metric.phases.has(phase)).map((phase) => roleSeries(metric.name, phase, phases)),
  );
  return [{ ...family, series }];
}

// Identical lines would hide one another: they become one series with all labels.
function mergeIdentical(card) {
  if (card.kind === 'stack') return card;
  const distinct = [];
  for (const series of card.series) {
    const twin = distinct.find(
      ({ phase, values }) => phase === series.phase && values.every((value, c) => value === series.values[c]),
    );
    if (twin) twin.label += ` = ${series.label}`;
    else distinct.push(series);
  }
  return { ...card, series: distinct };
}

// A chart whose lines all stand in another one is left out; the other names them.
function withoutRepetitions(cards) {
  const seen = new Map();
  return cards.filter(({ series, title, kind }) => {
    if (comparing || kind === 'stack') return true;
    const twins = series.map((one) => {
      const key = JSON.stringify([runs.indexOf(one.run), one.phase, one.values]);
      const twin = seen.get(key);
      if (!twin) seen.set(key, one);
      return twin;
    });
    if (!twins.every(Boolean)) return true;
    for (const twin of new Set(twins)) twin.label += ` = ${title.toLowerCase()}`;
    return false;
  });
}

function isConstant({ values, name }) {
  const numbers = values.filter(isNumber);
  const [low, high] = [Math.min(...numbers), Math.max(...numbers)];
  const tolerance = metricOf(name)?.[4] ?? 1e-9 * Math.max(Math.abs(low), Math.abs(high));
  return numbers.length > 1 && high - low <= tolerance;
}

// Separates constant series from the charts of folded groups: {card or null, constants: series listed as text}.
function separateConstants(card) {
  if (card.group === MAIN || card.group === QUESTIONS) return { card, constants: [] };
  const constants = card.series.filter(isConstant);
  const allConstant = constants.length === card.series.length;
  const separable = card.separable && card.kind !== 'stack';
  if (!constants.length || !(allConstant || separable)) return { card, constants: [] };
  const series = card.series.filter((one) => !constants.includes(one));
  return {
    card: allConstant ? null : { ...card, series },
    constants: constants.map((one) => ({ ...one, help: one.help ?? card.help })),
  };
}

function addNode(card) {
  card.heading = el('span', { class: 'at' });
  card.frame = el('div', { class: 'plot', role: 'img', tabindex: 0, 'aria-label': card.title });
  card.legend = el('div', { class: `plot-legend ${card.kind === 'stack' ? 'fixed' : ''}` });
  card.node = el(
    'figure',
    { class: 'card chart' },
    el('div', { class: 'heading' }, el('h3', {}, card.title), card.heading),
    el('p', { class: 'help' }, card.help ?? ''),
    card.frame,
    card.legend,
  );
}

// Adds a grid of charts; returns the function that draws them at the current width, which also runs on resize.
function addCards(box, cards) {
  cards.forEach(addNode);
  box.append(...cards.map(({ node }) => node));
  let drawnWidth = 0;
  const draw = () => {
    const width = cards[0]?.frame.clientWidth ?? 0; // 0 in a folded group
    if (!width || width === drawnWidth) return;
    cards.forEach((card) => drawChart(card, width));
    drawnWidth = width;
  };
  addEventListener('resize', draw);
  return draw;
}

// A list of constant metrics: one value where all runs and phases agree.
function constantsNode(constants) {
  if (!constants.length) return null;
  const metrics = new Map(); // title → {help, values: [[run and phase, value]]}
  for (const { name, phase, values, run, help } of constants) {
    const family = familyOf(name).title;
    const label = labelOf(name);
    const title = label === family || !name.includes('/') ? family : `${family}: ${label}`;
    if (!metrics.has(title)) metrics.set(title, { help, values: [] });
    const source = comparing ? `${run.name} ${phase}` : phase;
    metrics.get(title).values.push([source, format(values.findLast(isNumber))]);
  }
  const items = [...metrics.keys()].sort(naturalOrder).map((title) => {
    const { help, values } = metrics.get(title);
    const distinct = new Set(values.map(([, value]) => value));
    const text = distinct.size === 1 ? values[0][1] : values.map((pair) => pair.join(' ')).join(', ');
    return el('li', { title: help }, `${title} `, el('b', {}, text));
  });
  return el(
    'div',
    { class: 'constants' },
    el('p', { class: 'muted' }, 'Constant over all steps:'),
    el('ul', {}, ...items),
  );
}

function foldedGroup(title, cards, constants) {
  const box = el('div', { class: 'charts' });
  const contents = [];
  if (cards.length) contents.push(count(cards.length, 'chart'));
  if (constants.length) contents.push('constant values');
  const node = el(
    'details',
    { class: 'group' },
    el('summary', {}, title, el('small', {}, `  ${contents.join(', ')}`)),
    box,
    constantsNode(constants),
  );
  node.addEventListener('toggle', addCards(box, cards));
  return node;
}

function drawCurves() {
  const groups = new Map();
  for (const group of [MAIN, QUESTIONS, ...FOLDED]) groups.set(group, { cards: [], constants: [] });
  for (const layout of loggedFamilies().flatMap(cardsOf)) {
    const { card, constants } = separateConstants(mergeIdentical(tabulate(layout)));
    const group = groups.get(layout.group);
    if (card) group.cards.push(card);
    group.constants.push(...constants);
  }
  const main = groups.get(MAIN);
  main.cards = withoutRepetitions(main.cards);
  shareRanges([...groups.values()].flatMap(({ cards }) => cards));
  addCards($('charts'), main.cards)();
  addCards($('question-charts'), groups.get(QUESTIONS).cards)();
  for (const title of FOLDED) {
    const { cards, constants } = groups.get(title);
    if (cards.length || constants.length) $('groups').append(foldedGroup(title, cards, constants));
  }
  const phases = [...new Set(runs.flatMap((run) => run.metrics.map((row) => row.phase)))].sort(phaseOrder);
  if (comparing) $('colours').append(...runs.map((run) => swatch(run.colour, run.name)));
  else $('colours').append(...phases.map((phase) => swatch(phaseColour(phase), `${phase} phase`)));
  if (!phases.length) $('charts').append(el('p', { class: 'muted' }, 'No metrics have been written yet.'));
}

drawCurves();
