// Exact match before and after; of several runs also each against the first on the same questions.
function interval(range, show = share) {
  return Array.isArray(range) ? el('small', {}, `[${show(range[0])}, ${show(range[1])}]`) : null;
}

const figure = (value, range, show = share) => el('td', { class: 'num' }, show(value), interval(range, show));

// Before and after on one rail from 0 to 1, each a dot with its interval.
function rail(sides, hue) {
  const picture = svg(
    'svg',
    { role: 'img', hue, 'aria-label': sides.map(([name, value]) => `${name} ${share(value)}`).join(', ') },
    svg('line', { class: 'rail', x1: '0%', x2: '100%', y1: 10, y2: 10 }),
  );
  for (const [name, value, range] of sides) {
    if (!isNumber(value)) continue;
    const group = svg('g', { class: name });
    const at = (x) => `${100 * x}%`;
    const y = name === 'before' ? 7 : 13;
    if (Array.isArray(range))
      group.append(svg('line', { class: 'whisker', x1: at(range[0]), x2: at(range[1]), y1: y, y2: y }));
    group.append(svg('circle', { class: 'dot', cx: at(value), cy: y, r: 4.5 }));
    picture.append(group);
  }
  return picture;
}

// The figures of one run for a hop count, or for the headline mean where hop is 'mean'.
function figures({ summary: s }, hop) {
  const one = hop !== 'mean';
  return {
    questions: one ? s.questions_by_hop?.[hop] : s.questions,
    sides: ['before', 'after'].map((side) =>
      one
        ? [side, s.em_by_hop?.[side]?.[hop], s.ci95_by_hop?.[side]?.[hop]]
        : [side, s[`em_${side}`], s.ci95?.[side]],
    ),
    change: (one ? s.difference_by_hop?.[hop] : s.difference) ?? [],
  };
}

function outcomeRow(run, hop, first) {
  const { questions, sides, change } = figures(run, hop);
  const [difference, ...range] = against[runs.indexOf(run)]?.[hop] ?? [];
  return el(
    'tr',
    { class: hop === 'mean' ? 'mean' : '' },
    el('td', {}, first ? (hop === 'mean' ? 'headline mean' : hop) : ''),
    many ? el('td', {}, swatch(run.hue, run.name)) : null,
    el('td', { class: 'num' }, format(questions)),
    sides.map(([, value, ci]) => figure(value, ci)),
    figure(change[0], change.length === 3 ? change.slice(1) : null, signed),
    many
      ? run === runs[0]
        ? el('td', { class: 'muted' }, 'first')
        : figure(difference, range.length ? range : null, signed)
      : null,
    el('td', { class: 'range' }, rail(sides, many ? run.hue : 'var(--evaluation)')),
  );
}

function outcomeTable(measured) {
  const hops = [...new Set(measured.flatMap(({ summary: s }) => Object.keys(s.em_by_hop?.after ?? {})))];
  const heads = [
    'Hops',
    many ? 'Run' : null,
    'Questions',
    'Before',
    'After',
    'Change',
    many ? `After, against ${runs[0].name}` : null,
    'From 0 to 1',
  ];
  const rows = (hop) => measured.map((run, i) => outcomeRow(run, hop, i === 0));
  const order = many ? ['mean', ...hops.sort(inOrder)] : [...hops.sort(inOrder), 'mean'];
  return el(
    'div',
    { class: 'card scroll', tabindex: 0, role: 'group', 'aria-label': 'Exact match by hop count' },
    el(
      'table',
      {},
      el('thead', {}, el('tr', {}, ...heads.filter(Boolean).map((text) => el('th', { scope: 'col' }, text)))),
      ...order.map((hop) => el('tbody', {}, ...rows(hop))),
    ),
  );
}

function headline(run) {
  const { questions, sides } = figures(run, 'mean');
  return el(
    'div',
    { class: 'card headline' },
    el(
      'div',
      { class: 'figures num' },
      el('span', { class: 'from' }, sides[0][1]?.toFixed(2) ?? '–'),
      el('span', { class: 'arrow', 'aria-label': 'to' }, '→'),
      el('span', { class: 'to' }, sides[1][1]?.toFixed(2) ?? '–'),
    ),
    el('p', {}, `exact match on ${format(questions)} held-out questions`),
    ...sides.map(([name, , range]) =>
      range ? el('p', { class: 'muted num' }, `${name} `, interval(range)) : null,
    ),
    el('p', { class: 'muted' }, 'Brackets are 95 % intervals.'),
  );
}

function factsOf({ summary: s, metrics }) {
  const facts = [
    ['seed', s.seed],
    ['steps', s.steps ?? metrics.at(-1)?.step],
    ['outside questions', s.outside_questions],
  ].flatMap(([name, value]) => (value === undefined ? [] : [`${name} ${format(value)}`]));
  if (s.rubrics) {
    const [before, after] = [s.rubrics.before[0], s.rubrics.after[0]].map((share) => share.toFixed(2));
    facts.push(`rubrics met ${before} → ${after} on ${format(s.rubrics.items)} open tasks`);
  }
  if (isNumber(s.seconds)) {
    const minutes = Math.floor(Math.round(s.seconds) / 60);
    facts.push(`${minutes} min ${Math.round(s.seconds) % 60} s with evaluations`);
  }
  return facts.join('  ·  ');
}

function drawOutcome() {
  const title = runs.map(({ name }) => name).join(', ');
  $('name').textContent = title;
  $('kind').textContent = many ? `${runs.length} self-play runs` : 'Self-play run';
  document.title = `${title} – run report`;
  $('facts').append(
    ...runs.map((run) =>
      many ? el('p', {}, swatch(run.hue, `${run.name}  ·  ${factsOf(run)}`)) : el('p', {}, factsOf(run)),
    ),
  );
  for (const { name, notes } of runs)
    $('notes').append(...notes.map((note) => el('p', { class: 'note' }, many ? `${name}: ${note}` : note)));
  const measured = runs.filter(({ summary: s }) => isNumber(s.em_before) || isNumber(s.em_after));
  if (!measured.length) {
    const sentence = 'The closing evaluation has not been written; see the curves.';
    $('outcome-body').replaceWith(el('p', { class: 'muted' }, sentence));
    return;
  }
  $('outcome-body').classList.toggle('wide', many);
  $('outcome-body').append(...(many ? [] : [headline(runs[0])]), outcomeTable(measured));
  if (many) {
    $('outcome-body').append(
      el(
        'p',
        { class: 'muted' },
        'Brackets are 95 % intervals; those of changes and differences are paired, question by question.',
      ),
    );
  }
}

drawOutcome();
