// Exact match before and after training; with several runs also each run against the first, on the same questions.
function interval(range, formatValue = formatShare) {
  if (!Array.isArray(range)) return null;
  return el('small', {}, `[${formatValue(range[0])}, ${formatValue(range[1])}]`);
}

const numberCell = (value, range, formatValue = formatShare) =>
  el('td', { class: 'num' }, formatValue(value), interval(range, formatValue));

// Before (a ring) and after (a dot) on an axis from 0 to 1, each on the band of its interval.
function intervalPlot(sides, colour) {
  const label = sides.map(([name, value]) => `${name} ${formatShare(value)}`).join(', ');
  const line = (attributes) => svg('line', { y1: 10, y2: 10, ...attributes });
  const node = svg('svg', { role: 'img', colour, 'aria-label': label });
  const percent = (x) => `${100 * x}%`;
  node.append(line({ class: 'axis', x1: '0%', x2: '100%' }));
  const known = sides.filter(([, value]) => isNumber(value));
  for (const [name, , range] of known)
    if (range) node.append(line({ class: `band ${name}`, x1: percent(range[0]), x2: percent(range[1]) }));
  for (const [name, value] of known)
    node.append(svg('circle', { class: `dot ${name}`, cx: percent(value), cy: 10, r: name === 'before' ? 6 : 4 }));
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

// The hop counts of the headline mean, '' without any; as in evaluation/statistics.py.
function headlineHops({ summary }) {
  const hops = Object.keys(summary.em_by_hop?.after ?? {}).sort(naturalOrder);
  const few = hops.filter((hop) => Number(hop) <= 3);
  return (few.length ? few : hops).filter((hop) => hop !== '0').join(', ');
}

function comparisonCell(run, hop) {
  if (run === runs[0]) return el('td', { class: 'muted' }, 'reference');
  const [difference, ...range] = differences[runs.indexOf(run)]?.[hop] ?? [];
  return numberCell(difference, range.length ? range : null, formatSigned);
}

function outcomeRow(run, hop, hasLabel) {
  const { questions, sides, change } = figuresOf(run, hop);
  const labels = { mean: `mean of ${headlineHops(run) || 'all'}`, 0: 'none' };
  const hopLabel = labels[hop] ?? hop;
  const remark = demonstrated(run, hop);
  return el(
    'tr',
    { class: hop === 'mean' ? 'mean' : remark && 'demonstrated' },
    el('td', {}, hasLabel ? [hopLabel, remark] : ''),
    comparing ? el('td', { class: 'run' }, swatch(run.colour, run.name)) : null,
    el('td', { class: 'num questions' }, format(questions)),
    sides.map(([, value, range]) => numberCell(value, range)),
    numberCell(change[0], change.length === 3 ? change.slice(1) : null, formatSigned),
    comparing ? comparisonCell(run, hop) : null,
    el('td', { class: 'range' }, intervalPlot(sides, comparing ? run.colour : 'var(--evaluation)')),
  );
}

const HEAD_CLASSES = { Run: 'run', Questions: 'questions' };

function outcomeTable(evaluated) {
  const hops = [...new Set(evaluated.flatMap(({ summary }) => Object.keys(summary.em_by_hop?.after ?? {})))];
  hops.sort(naturalOrder);
  // Questions of a file may have no hop count: then the mean is the only line.
  const hasHops = hops.some((hop) => hop !== '0');
  const marks = ['0', '0.5', '1'].map((at) => el('span', {}, at));
  const scale = el('span', { class: 'scale' }, ...marks);
  const heads = [hasHops ? 'Hops' : '', 'Questions', 'Before', 'After', 'Change', scale];
  if (!hasHops) hops.length = 0;
  if (comparing) {
    heads.splice(1, 0, 'Run');
    heads.splice(-1, 0, `After, from ${runs[0].name}`);
  }
  const headCells = heads.map((head) => el('th', { scope: 'col', class: HEAD_CLASSES[head] }, head));
  const order = comparing ? ['mean', ...hops] : [...hops, 'mean'];
  // The means of two runs may be of other hop counts.
  const isLabelled = (run, hop) =>
    run === evaluated[0] || (hop === 'mean' && headlineHops(run) !== headlineHops(evaluated[0]));
  const bodies = order.map((hop) =>
    el('tbody', {}, ...evaluated.map((run) => outcomeRow(run, hop, isLabelled(run, hop)))),
  );
  return el(
    'div',
    { class: 'card scroll', tabindex: 0, role: 'group', 'aria-label': 'Exact match by hop count' },
    el(
      'table',
      {},
      el('thead', {}, el('tr', {}, ...headCells)),
      ...bodies,
    ),
  );
}

// Hop counts of a run whose change excludes 0, by direction, and the others.
function changesOf(run) {
  const counted = Object.keys(run.summary.difference_by_hop ?? {}).filter((hop) => hop !== '0');
  const changes = { Better: [], Worse: [], 'No sure change': [] };
  for (const hop of counted.sort(naturalOrder)) {
    const [, low, high] = figuresOf(run, hop).change;
    changes[low > 0 ? 'Better' : high < 0 ? 'Worse' : 'No sure change'].push(hop);
  }
  return changes;
}

// The heading of the page, for one run: what it changed; '' without an evaluation by hops.
function verdictOf(run) {
  const parts = Object.entries(changesOf(run)).filter(([, hops]) => hops.length);
  const texts = parts.map(([word, hops]) => `${word} with ${hops.join(', ')} ${hops.at(-1) === '1' ? 'hop' : 'hops'}`);
  return texts.map((text, at) => (at ? text[0].toLowerCase() + text.slice(1) : text)).join('; ');
}

// What changed by more than its interval, in a sentence per direction.
function learntTexts(run) {
  const { Better, Worse, 'No sure change': unsure } = changesOf(run);
  const texts = [];
  for (const [word, sure] of Object.entries({ Better, Worse })) {
    const parts = sure.map((hop) => {
      const [before, after] = figuresOf(run, hop).sides.map(([, value]) => value?.toFixed(2));
      return `${count(Number(hop), 'hop')} (${before} → ${after})`;
    });
    if (parts.length) texts.push(`${word} with ${parts.join(', ')}.`);
  }
  if (unsure.length && !texts.length)
    texts.push('No hop count changed for sure: the interval of every change contains 0.');
  const { demonstrated_hops: shown } = run.summary;
  if (shown) texts.push(`Shown to the policy before this run: up to ${count(shown, 'hop')}.`);
  return texts;
}

// The first hop count that the start of a run was not shown; without one that was evaluated, the headline mean.
function leadOf({ summary }) {
  const shown = summary.demonstrated_hops || Infinity;
  const longer = Object.keys(summary.em_by_hop?.after ?? {}).filter((hop) => Number(hop) > shown);
  return longer.length ? String(Math.min(...longer)) : 'mean';
}

// What the intervals cover: statistics.mean_interval clusters questions that all have a document.
const choiceOf = (shown) =>
  shown.every(({ summary }) => summary.documents) ? 'the choice of documents and their questions' : 'the choice of questions';

function headlineCard(run) {
  const lead = leadOf(run);
  const { questions, sides, change } = figuresOf(run, lead);
  const [before, after] = sides.map(([, value]) => value?.toFixed(2) ?? '–');
  const [, low, high] = change;
  const hops = lead === 'mean' ? headlineHops(run) : lead;
  const of = hops && ` of ${hops} ${hops === '1' ? 'hop' : 'hops'}`;
  const why = lead === 'mean' ? '' : ', the fewest that the policy was not shown before this run';
  const trend = low > 0 ? 'better' : high < 0 ? 'worse' : '';
  return el(
    'div',
    { class: 'card headline' },
    el(
      'div',
      { class: 'figures num' },
      el('span', { class: 'from' }, before),
      el('span', { class: 'arrow', 'aria-label': 'to' }, '→'),
      el('span', { class: `to ${trend}` }, after),
    ),
    el('p', {}, `exact match on ${format(questions)} held-out questions${of}${why}`),
    run.summary.documents ? el('p', { class: 'muted' }, `about ${format(run.summary.documents)} documents`) : null,
    ...sides.map(([name, , range]) => range && el('p', { class: 'muted num' }, `${name} `, interval(range))),
    low === undefined ? null : el('p', { class: 'muted num' }, 'change ', interval([low, high], formatSigned)),
    ...learntTexts(run).map((text) => el('p', { class: 'learnt' }, text)),
    el('p', { class: 'muted' }, `Brackets: 95 % confidence intervals over ${choiceOf([run])}, for this one run.`),
  );
}

const lastParts = (path) => path.split('/').filter(Boolean).slice(-3).join('/');

// Recipe, policy, corpus and date, as far as the files say them.
function originOf({ config, written }) {
  const { path, url, kind } = config.retrieval ?? {};
  const corpora = { world: 'miniature encyclopedia', folder: path && lastParts(path), http: url };
  return [
    config.recipe,
    config.policy?.path && `policy ${lastParts(config.policy.path)}`,
    corpora[kind] && `corpus ${corpora[kind]}`,
    written,
  ].filter(Boolean);
}

function factsOf({ summary, metrics }) {
  const facts = [];
  const add = (name, value) => value !== undefined && facts.push(`${name} ${format(value)}`);
  add('seed', summary.seed);
  const trained = Object.entries(summary.policies ?? {}).map(([name, { steps }]) => `${name} ${steps}`);
  if (trained.length) facts.push(`training steps: ${trained.join(', ')}`);
  else add('steps', summary.steps ?? metrics.at(-1)?.step);
  if (summary.start) facts.push(summary.start);
  const outside = summary.outside_questions;
  if (isNumber(outside)) facts.push(`trained on ${outside ? format(outside) : 'no'} questions from outside`);
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
  const names = runs.map(({ name }) => name).join(', ');
  $('kind').textContent = comparing ? `${runs.length} self-play runs` : (runs[0].kind ?? 'Self-play run');
  for (const id of runs[0].hidden ?? []) {
    $(id).hidden = true;
    document.querySelector(`nav a[href="#${id}"]`).hidden = true;
  }
  const origins = runs.map(originOf);
  const shared = origins[0].filter((part) => origins.every((parts) => parts.includes(part)));
  // Several runs differ by their names; one is known by what it changed, or by what it trains.
  const lines = [names, shared.join(' · ')];
  if (!comparing && shared.length) lines.reverse();
  const verdict = comparing ? '' : verdictOf(runs[0]);
  $('name').textContent = verdict || lines[0];
  $('origin').textContent = verdict ? lines.filter(Boolean).join(' · ') : lines[1];
  document.title = [...lines.filter(Boolean), 'run report'].join(' – ');
  for (const run of runs) {
    const differing = originOf(run).filter((part) => !shared.includes(part));
    const facts = [...differing, factsOf(run)].join('  ·  ');
    $('facts').append(el('p', {}, comparing ? swatch(run.colour, `${run.name}  ·  ${facts}`) : facts));
    // Written by runs that trained nothing, or that stopped because of that.
    if (run.summary.warning) {
      const warning = run.summary.warning;
      const [, first, rest] = warning.match(/^(.*?\.(?=\s|$)|.*)(.*)$/s);
      $('banner').append(el('p', { class: 'banner' }, comparing ? `${run.name}: ` : '', el('b', {}, first), rest));
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
    $('outcome').querySelector('.help').textContent = sentence;
    return;
  }
  body.classList.toggle('wide', comparing);
  if (!comparing) body.append(headlineCard(runs[0]));
  body.append(outcomeTable(evaluated));
  if (comparing) {
    const sentence =
      'Brackets: 95 % confidence intervals; those of changes and differences are paired by question. They cover ' +
      `${choiceOf(evaluated)} only: two seeds of one config can differ by more. An interval over seeds needs several runs ` +
      'of each side (zeroplay compare).';
    body.append(el('p', { class: 'muted' }, sentence));
  }
}

drawHeader();
drawOutcome();
