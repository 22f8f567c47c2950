// Which charts there are: one per family of metrics and phase; of several runs, one per metric and phase, overlaid.
const COUNTED = /(\/|\bhop)\d/; // names that are numbered: shades of one hue
const present = (run, name, phase) => run.phasesOf.get(name)?.has(phase);

function families() {
  const found = new Map(FAMILIES.map((family) => [family.title, { ...family, members: [] }]));
  const members = new Map(); // name → phases
  for (const run of runs) {
    run.phasesOf = new Map();
    for (const row of run.metrics) {
      for (const name of Object.keys(row)) {
        if (['step', 'iteration', 'phase'].includes(name) || !isNumber(row[name])) continue;
        if (!run.phasesOf.has(name)) run.phasesOf.set(name, new Set());
        if (!members.has(name)) members.set(name, new Set());
        run.phasesOf.get(name).add(row.phase);
        members.get(name).add(row.phase);
      }
    }
  }
  for (const [name, phases] of members) {
    const family = familyOf(name);
    if (!found.has(family.title)) found.set(family.title, { ...family, members: [] });
    found.get(family.title).members.push({ name, phases });
  }
  return [...found.values()].filter((family) => family.members.length);
}

// The i-th of n shades of a hue, from pale over full to dark.
function ramp(hue, i, n) {
  const place = n > 1 ? i / (n - 1) : 0.6;
  return place <= 0.6
    ? `color-mix(in oklab, ${hue} ${Math.round(42 + (58 * place) / 0.6)}%, var(--card))`
    : `color-mix(in oklab, ${hue} ${Math.round(100 - (50 * (place - 0.6)) / 0.4)}%, var(--ink))`;
}

function seriesOf(run, name, phase, label, hue) {
  const zero = ABSENT_IS_ZERO.test(baseOf(name)[0]);
  return { run, name, phase, label, hue, zero, about: metricOf(name)?.[2] };
}

function cardsOf(family) {
  const members = family.members.sort((a, b) => inOrder(a.name, b.name));
  const phases = [...new Set(members.flatMap((member) => [...member.phases]))].sort(byPhase);
  const titled = (...parts) => parts.filter(Boolean).join(' · ');
  if (!many && members.length === 1 && family.kind !== 'stack') {
    const [{ name }] = members;
    return [
      { ...family, series: phases.map((phase) => seriesOf(runs[0], name, phase, phase, phaseHue(phase))) },
    ];
  }
  const ofPhase = (phase) => (phases.length > 1 ? phase : '');
  if (many && family.kind !== 'stack') {
    return members.flatMap(({ name, phases: own }) =>
      [...own].sort(byPhase).map((phase) => ({
        ...family,
        title: titled(family.title, members.length > 1 ? labelOf(name) : '', ofPhase(phase)),
        group: family.lead && family.lead !== name ? DETAIL : family.group,
        series: runs
          .filter((run) => present(run, name, phase))
          .map((run) => seriesOf(run, name, phase, run.name, run.hue)),
      })),
    );
  }
  const counted = members.map(({ name }) => name).filter((name) => COUNTED.test(name));
  const hue = (name, phase) => {
    if (counted.includes(name)) return ramp(phaseHue(phase), counted.indexOf(name), counted.length);
    if (metricOf(name) && baseOf(name)[1]) return phaseHue(baseOf(name)[1]);
    if (name === family.lead) return counted.length ? 'var(--ink)' : phaseHue(phase);
    return `var(--c${members.findIndex((member) => member.name === name) % 8})`;
  };
  const cards = phases.flatMap((phase) =>
    runs.map((run) => ({
      ...family,
      title: titled(family.title, ofPhase(phase), many ? run.name : ''),
      divisible: true,
      series: members
        .filter(({ name }) => present(run, name, phase))
        .map(({ name }) => seriesOf(run, name, phase, labelOf(name), hue(name, phase))),
    })),
  );
  return cards.filter(({ series }) => series.length);
}

// Equal lines hide one another: they become one with both names.
function merge(card) {
  if (card.kind === 'stack') return card;
  const kept = [];
  for (const one of card.series) {
    const twin = kept.find(
      ({ phase, values }) => phase === one.phase && values.every((value, c) => value === one.values[c]),
    );
    if (twin) twin.label += ` = ${one.label}`;
    else kept.push(one);
  }
  return { ...card, series: kept };
}

function isFlat({ values, name }) {
  const numbers = values.filter(isNumber);
  const [low, high] = [Math.min(...numbers), Math.max(...numbers)];
  const floor = metricOf(name)?.[4] ?? 1e-9 * Math.max(Math.abs(low), Math.abs(high));
  return numbers.length > 1 && high - low <= floor;
}

// Takes what never changes out of the folded charts: {card or null, flat: series to be told in words}.
function sift(card) {
  const flat = card.group === MAIN || card.group === QUESTIONS ? [] : card.series.filter(isFlat);
  const whole = flat.length === card.series.length;
  if (!flat.length || (!whole && (!card.divisible || card.kind === 'stack'))) return { card, flat: [] };
  const series = card.series.filter((one) => !flat.includes(one));
  return { card: whole ? null : { ...card, series }, flat: flat.map((one) => ({ card, ...one })) };
}

function addNode(card) {
  card.at = el('span', { class: 'at' });
  const legend = el('p', { class: 'legend' });
  for (const one of card.series) {
    one.readout = el('b');
    legend.append(
      el(
        'span',
        { hue: one.hue, title: one.about },
        el('span', { class: 'swatch' }),
        `${one.label} `,
        one.readout,
      ),
    );
  }
  card.node = el(
    'figure',
    { class: 'card chart' },
    el('div', { class: 'heading' }, el('h3', {}, card.title), card.at),
    card.about ? el('p', { class: 'about' }, card.about) : null,
    legend,
  );
  return card;
}

// A grid of charts that draws itself at the width it has, now and whenever the window changes.
function showCards(box, cards) {
  cards.forEach(addNode);
  box.append(...cards.map(({ node }) => node));
  let drawn = 0;
  const draw = () => {
    const width = Math.max(240, (cards[0]?.node.clientWidth ?? 0) - 32);
    if (!box.clientWidth || width === drawn) return;
    cards.forEach((card) => drawChart(card, width));
    drawn = width;
  };
  addEventListener('resize', draw);
  return draw;
}

// Series that never changed, by metric: one value where all agree.
function flatWords(flat) {
  const told = new Map();
  for (const { card, name, phase, values, run } of flat) {
    const family = familyOf(name).title;
    const title = labelOf(name) === family || !name.includes('/') ? family : `${family}: ${labelOf(name)}`;
    if (!told.has(title)) told.set(title, { about: card.about, seen: [] });
    told.get(title).seen.push([many ? `${run.name} ${phase}` : phase, format(values.findLast(isNumber))]);
  }
  if (!told.size) return null;
  const words = [...told]
    .sort(([a], [b]) => inOrder(a, b))
    .map(([title, { about, seen }]) => {
      const values = new Set(seen.map(([, value]) => value));
      const text = values.size === 1 ? [...values][0] : seen.map((pair) => pair.join(' ')).join(', ');
      return el('li', { title: about }, `${title} `, el('b', {}, text));
    });
  return el(
    'div',
    { class: 'flat' },
    el('p', { class: 'muted' }, 'The same at every step:'),
    el('ul', {}, ...words),
  );
}

function foldedGroup(title, cards, flat) {
  const box = el('div', { class: 'charts' });
  const facts = [cards.length && count(cards.length, 'chart'), flat.length && 'some values never changed'];
  const node = el(
    'details',
    { class: 'group' },
    el('summary', {}, title, el('small', {}, `  ${facts.filter(Boolean).join(', ')}`)),
    box,
    flatWords(flat),
  );
  const draw = showCards(box, cards);
  node.addEventListener('toggle', draw);
  return node;
}

function drawCurves() {
  const groups = new Map([MAIN, QUESTIONS, ...FOLDED].map((group) => [group, { cards: [], flat: [] }]));
  for (const one of families().flatMap(cardsOf)) {
    const { card, flat } = sift(merge(tabulate(one)));
    const group = groups.get(one.group);
    if (card) group.cards.push(card);
    group.flat.push(...flat);
  }
  for (const [group, id] of [
    [MAIN, 'charts'],
    [QUESTIONS, 'question-charts'],
  ])
    showCards($(id), groups.get(group).cards)();
  for (const title of FOLDED) {
    const { cards, flat } = groups.get(title);
    if (cards.length || flat.length) $('groups').append(foldedGroup(title, cards, flat));
  }
  const phases = new Set(runs.flatMap((run) => run.metrics.map((row) => row.phase)));
  $('colours').append(
    ...(many
      ? runs.map((run) => swatch(run.hue, run.name))
      : [...phases].sort(byPhase).map((phase) => swatch(phaseHue(phase), `${phase} phase`))),
  );
  if (!phases.size) $('charts').append(el('p', { class: 'muted' }, 'No metrics were written yet.'));
}

drawCurves();
