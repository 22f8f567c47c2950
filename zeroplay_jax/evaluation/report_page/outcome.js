// Exact match before and after training; with several runs also each run against the first, on the same questions.
function interval(range, formatValue = formatShare) {
  if (!Array.isArray(range)) return null;
  return el('small', {}, `[${formatValue(range[0])}, ${formatValue(range[1])}]`);
}

const numberCell = (value, range, formatValue = formatShare) =>
  el('td', { class: 'num' }, formatValue(value), interval(range, formatValue));

// Before and after on an axis from 0 to 1, each as a dot with its interval.
function intervalPlot(sides, colour) {
  const label = sides.map(([name, value]) => `${name} ${formatShare(value)}`).join(', ');
  const axis = svg('line', { class: 'axis', x1: '0%', x2: '100%', y1: 10, y2: 10 });
  const node = svg('svg', { role: 'img', colour, 'aria-label': label }, axis);
  const percent = (x) => `${100 * x}%`;
  for (const [name, value, range] of sides) {
    if (!isNumber(value)) continue;
    const group = svg('g', { class: name });
    const y = name === 'before' ? 7 : 13;
    if (Array.isArray(range)) {
      const ends = { x1: percent(range[0]), x2: percent(range[1]), y1: y, y2: y };
      group.append(svg('line', { class: 'whisker', ...ends }));
    }
    group.append(svg('circle', { class: 'dot', cx: percent(value), cy: y, r: 4.5 }));
    node.append(group);
  }
  return node;
}

// The figures of a run for a hop count, or for the headline if hop is 'mean'.
function figuresOf({ summary }, hop) {
  if (hop === 'mean') {
    return {
      questions: summary.questions,
      sides: ['before', 'after'].map((side) => [side, summary[`em_${side}`], summary.ci95?.[side]]),
      change: summary.difference ?? [],
    };
  }
  return {
    questions: summary.questions_by_hop?.[hop],
    sides: ['before', 'after'].map((side) => [
      side,
      summary.em_by_hop?.[side]?.[hop],
      summary.ci95_by_hop?.[side]?.[hop],
    ]),
    change: summary.difference_by_hop?.[hop] ?? [],
  };
}

function comparisonCell(run, hop) {
  if (run === runs[0]) return el('td', { class: 'muted' }, 'reference');
  const [difference, ...range] = differences[runs.indexOf(run)]?.[hop] ?? [];
  return numberCell(difference, range.length ? range : null, formatSigned);
}

function outcomeRow(run, hop, isFirst) {
  const { questions, sides, change } = figuresOf(run, hop);
  const hopLabel = hop === 'mean' ? 'headline mean' : hop === '0' ? 'none' : hop;
  const remark = demonstrated(run, hop);
  return el(
    'tr',
    { class: hop === 'mean' ? 'mean' : remark && 'demonstrated' },
    el('td', {}, isFirst ? hopLabel : '', remark),
    comparing ? el('td', {}, swatch(run.colour, run.name)) : null,
    el('td', { class: 'num' }, format(questions)),
    sides.map(([, value, range]) => numberCell(value, range)),
    numberCell(change[0], change.length === 3 ? change.slice(1) : null, formatSigned),
    comparing ? comparisonCell(run, hop) : null,
    el('td', { class: 'range' }, intervalPlot(sides, comparing ? run.colour : 'var(--evaluation)')),
  );
}

function outcomeTable(evaluated) {
  const hops = [...new Set(evaluated.flatMap(({ summary }) => Object.keys(summary.em_by_hop?.after ?? {})))];
  hops.sort(naturalOrder);
  // Questions of a file may have no hop count: then the mean is the only line.
  const hasHops = hops.some((hop) => hop !== '0');
  const heads = [hasHops ? 'Hops' : '', 'Questions', 'Before', 'After', 'Change', '0 to 1'];
  if (!hasHops) hops.length = 0;
  if (comparing) {
    heads.splice(1, 0, 'Run');
    heads.splice(-1, 0, `After, difference from ${runs[0].name}`);
  }
  const order = comparing ? ['mean', ...hops] : [...hops, 'mean'];
  const bodies = order.map((hop) =>
    el('tbody', {}, ...evaluated.map((run, i) => outcomeRow(run, hop, i === 0))),
  );
  return el(
    'div',
    { class: 'card scroll', tabindex: 0, role: 'group', 'aria-label': 'Exact match by hop count' },
    el(
      'table',
      {},
      el('thead', {}, el('tr', {}, ...heads.map((text) => el('th', { scope: 'col' }, text)))),
      ...bodies,
    ),
  );
}

function headlineCard(run) {
  const { questions, sides } = figuresOf(run, 'mean');
  const [before, after] = sides.map(([, value]) => value?.toFixed(2) ?? '–');
  return el(
    'div',
    { class: 'card headline' },
    el(
      'div',
      { class: 'figures num' },
      el('span', { class: 'from' }, before),
      el('span', { class: 'arrow', 'aria-label': 'to' }, '→'),
      el('span', { class: 'to' }, after),
    ),
    el('p', {}, `exact match on ${format(questions)} held-out questions`),
    ...sides.map(([name, , range]) =>
      range ? el('p', { class: 'muted num' }, `${name} `, interval(range)) : null,
    ),
    el('p', { class: 'muted' }, 'Brackets: 95 % confidence intervals over the choice of questions, for this one run.'),
  );
}

function factsOf({ summary, metrics }) {
  const facts = [];
  const add = (name, value) => value !== undefined && facts.push(`${name} ${format(value)}`);
  add('seed', summary.seed);
  add('steps', summary.steps ?? metrics.at(-1)?.step);
  // Runs of earlier versions call them outside questions.
  add('outside questions', summary.outside_questions);
  if (isNumber(summary.readable)) facts.push(`readable proposals ${format(summary.readable)}`);
  if (isNumber(summary.answerable)) facts.push(`answerable proposals ${format(summary.answerable)}`);
  if (summary.rubrics) {
    const { before, after, items } = summary.rubrics;
    facts.push(`rubrics met ${before[0].toFixed(2)} → ${after[0].toFixed(2)} on ${format(items)} open tasks`);
  }
  if (isNumber(summary.seconds)) {
    const seconds = Math.round(summary.seconds);
    facts.push(`${Math.floor(seconds / 60)} min ${seconds % 60} s including evaluations`);
  }
  return facts.join('  ·  ');
}

function drawHeader() {
  const title = runs.map(({ name }) => name).join(', ');
  $('name').textContent = title;
  $('kind').textContent = comparing ? `${runs.length} self-play runs` : 'Self-play run';
  if (runs.every(({ documents }) => documents)) {
    $('kind').textContent = 'ATIF documents';
    for (const id of ['outcome', 'curves', 'config']) {
      $(id).hidden = true;
      document.querySelector(`nav a[href="#${id}"]`).hidden = true;
    }
  }
  document.title = `${title} – run report`;
  for (const run of runs) {
    const facts = factsOf(run);
    $('facts').append(el('p', {}, comparing ? swatch(run.colour, `${run.name}  ·  ${facts}`) : facts));
    // Written by runs that trained nothing, or that stopped because of that.
    if (run.summary.warning) {
      const warning = run.summary.warning;
      $('banner').append(el('p', { class: 'banner' }, comparing ? `${run.name}: ${warning}` : warning));
    }
    for (const alarm of run.alarms)
      $('notes').append(el('p', { class: 'note' }, comparing ? `${run.name}: ${alarm}` : alarm));
    for (const note of run.notes)
      $('notes').append(el('p', { class: 'note' }, comparing ? `${run.name}: ${note}` : note));
  }
}

function drawOutcome() {
  const body = $('outcome-body');
  const evaluated = runs.filter(({ summary }) => isNumber(summary.em_before) || isNumber(summary.em_after));
  if (!evaluated.length) {
    const sentence = 'The final evaluation has not been written yet; see the curves.';
    body.replaceWith(el('p', { class: 'muted' }, sentence));
    return;
  }
  body.classList.toggle('wide', comparing);
  if (!comparing) body.append(headlineCard(runs[0]));
  body.append(outcomeTable(evaluated));
  if (comparing) {
    const sentence =
      'Brackets: 95 % confidence intervals; those of changes and differences are paired by question. They cover the ' +
      'choice of questions only: two seeds of one config can differ by more. An interval over seeds needs several runs ' +
      'of each side (python -m zeroplay_jax.compare).';
    body.append(el('p', { class: 'muted' }, sentence));
  }
}

drawHeader();
drawOutcome();
