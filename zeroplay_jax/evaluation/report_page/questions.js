// Statistics of the logged trajectories: difficulty and tool calls by hop count; hops and topics of proposed questions.
const STOP_WORDS = new Set(
  (
    'a about after also an and any are as at be been before by can did do does each for from had has have he her ' +
    'his how if in into is it its many most much no not of on one or other our over she so some than that the ' +
    'their them then there these they this those to under up was we were what when where which while who whom ' +
    'whose why will with would you your'
  ).split(' '),
);
const TOPIC_COLUMNS = 8;
const TOPIC_ROWS = 12;

// Older logs have no turns; there each text of the environment is the result of a call.
function toolCallsOf(row) {
  if (row.turns.length) return row.turns.filter(Boolean).length;
  return row.segments.filter(([source]) => source === 'env').length;
}

// Adds means per step and hop count to the metrics of a run, under logged/, so that they get charts.
function deriveMetrics(run) {
  const valuesOf = new Map(); // 'step/phase' → metric name → values
  for (const row of run.trajectories) {
    const key = `${row.step}/${row.phase}`;
    if (!valuesOf.has(key)) valuesOf.set(key, new Map());
    const values = valuesOf.get(key);
    const scopes = comparing ? ['all'] : [];
    if (row.info?.hops !== undefined) scopes.push(`hop${row.info.hops}`);
    const add = (name, value) => {
      if (!isNumber(value)) return;
      for (const scope of scopes) {
        const metric = `logged/${name}/${scope}`;
        if (!values.has(metric)) values.set(metric, []);
        values.get(metric).push(value);
      }
    };
    add('solves', row.info?.solved);
    if (row.phase !== 'evaluation') add('exact_match', row.parts?.exact_match);
    add('tool_calls', toolCallsOf(row));
  }
  for (const row of run.metrics) {
    // These are the means over all rollouts; only evaluations and older runs lack them.
    if (Object.keys(row).some((name) => name.endsWith('/hops_asked'))) continue;
    for (const [name, values] of valuesOf.get(`${row.step}/${row.phase}`) ?? []) row[name] = mean(values);
  }
}

const wordsOf = (question) =>
  question
    .toLowerCase()
    .split(/[^\p{L}\p{N}]+/u)
    .filter((word) => word.length > 2 && !STOP_WORDS.has(word));

// Ranges of consecutive steps: {steps, rows}.
function stepRanges(rows) {
  const steps = [...new Set(rows.map(({ step }) => step))].sort((a, b) => a - b);
  const width = Math.ceil(steps.length / TOPIC_COLUMNS);
  const ranges = [];
  for (let i = 0; i < steps.length; i += width)
    ranges.push({ steps: steps.slice(i, i + width), rows: [] });
  const rangeOfStep = new Map(steps.map((step, i) => [step, ranges[Math.floor(i / width)]]));
  for (const row of rows) rangeOfStep.get(row.step).rows.push(row);
  return ranges;
}

// Adds to each range words: word → share of its questions that contain it.
function addWords(ranges) {
  for (const range of ranges) {
    range.words = new Map();
    for (const { info } of range.rows) {
      for (const word of new Set(wordsOf(info.question)))
        range.words.set(word, (range.words.get(word) ?? 0) + 1 / range.rows.length);
    }
  }
}

// The words with the largest share in any range.
function topWords(ranges) {
  const peak = new Map();
  for (const { words } of ranges) {
    for (const [word, part] of words) peak.set(word, Math.max(part, peak.get(word) ?? 0));
  }
  const words = [...peak.keys()].sort((a, b) => peak.get(b) - peak.get(a) || naturalOrder(a, b));
  return words.slice(0, TOPIC_ROWS);
}

function shareCell(part) {
  const cell = el('td', { class: 'num heat' }, part ? `${Math.round(100 * part)} %` : '·');
  cell.style.setProperty('--part', `${Math.round(50 * part)}%`);
  return cell;
}

const tableRow = (label, cells) => el('tr', {}, el('th', { scope: 'row' }, label), ...cells);

// A table with a column per range.
function rangeTable(run, title, help, ranges, rows) {
  const heads = ranges.map(({ steps }) => {
    const text = steps.length > 1 ? `${steps[0]}–${steps.at(-1)}` : String(steps[0]);
    return el('th', { scope: 'col', class: 'num' }, text);
  });
  return el(
    'div',
    { class: 'card scroll topics', tabindex: 0, role: 'group', 'aria-label': `${title}, ${run.name}` },
    el('h3', {}, comparing ? swatch(run.colour, `${title} · ${run.name}`) : title),
    el('p', { class: 'help' }, help),
    el('table', {}, el('thead', {}, tableRow('Steps', heads)), el('tbody', {}, ...rows)),
  );
}

function topicTable(run) {
  const ranges = stepRanges(run.trajectories.filter((row) => row.is_proposal && row.info?.question));
  if (!ranges.length) return null;
  addWords(ranges);
  const numberRow = (label, valueOf) =>
    tableRow(
      label,
      ranges.map((range) => el('td', { class: 'num' }, format(valueOf(range.rows.map(({ info }) => info))))),
    );
  const rows = [
    numberRow('Logged questions', (infos) => infos.length),
    numberRow(
      'Distinct documents',
      (infos) => new Set(infos.map(({ document }) => document).filter(Boolean)).size,
    ),
    numberRow('Words per question', (infos) =>
      mean(infos.map(({ question }) => question.split(/\s+/).length)),
    ),
    numberRow('Requested hops', (infos) => mean(infos.map(({ hops }) => hops).filter(isNumber))),
    ...topWords(ranges).map((word) =>
      tableRow(
        word,
        ranges.map(({ words }) => shareCell(words.get(word) ?? 0)),
      ),
    ),
  ];
  const help = 'Share of the logged questions that contain a word, by range of steps.';
  return rangeTable(run, 'Topics over steps', help, ranges, rows);
}

function drawTopics() {
  const tables = runs.map(topicTable).filter(Boolean);
  const isLogged = runs.some(({ trajectories }) => trajectories.length);
  const reason = isLogged ? 'None of these rollouts proposes a question.' : 'No rollout has been logged yet.';
  const empty = el('p', { class: 'muted' }, reason);
  $('topics').append(...(tables.length ? tables : [empty]));
}

runs.forEach(deriveMetrics);
drawTopics();
