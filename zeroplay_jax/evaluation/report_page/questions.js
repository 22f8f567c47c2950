// What the logged trajectories say about questions: how hard, how many searches, about what.
const FUNCTION_WORDS = new Set(
  (
    'a about after also an and any are as at be been before by can did do does each for from had has have he her ' +
    'his how if in into is it its many most much no not of on one or other our over she so some than that the ' +
    'their them then there these they this those to under up was we were what when where which while who whom ' +
    'whose why will with would you your'
  ).split(' '),
);
const BINS = 8; // columns of the table of topics
const TOPICS = 12; // words in it

// Means per step and hop count enter the run's metrics, so that the same charts draw them.
function deriveMetrics(run) {
  const steps = new Map(); // step and phase → name → values
  for (const row of run.trajectories) {
    const key = `${row.step}/${row.phase}`;
    if (!steps.has(key)) steps.set(key, new Map());
    const found = steps.get(key);
    const scopes = [
      ...(row.info?.hops === undefined ? [] : [`hop${row.info.hops}`]),
      ...(many ? ['all'] : []),
    ];
    const add = (name, value) => {
      if (!isNumber(value)) return;
      for (const full of scopes.map((scope) => `logged/${name}/${scope}`)) {
        if (!found.has(full)) found.set(full, []);
        found.get(full).push(value);
      }
    };
    add('solves', row.info?.solved);
    if (row.phase !== 'evaluation') add('exact_match', row.parts?.exact_match);
    add('searches', row.segments.filter(([source]) => source === 'env').length);
  }
  for (const row of run.metrics) {
    for (const [name, values] of steps.get(`${row.step}/${row.phase}`) ?? []) row[name] = mean(values);
  }
}

const wordsOf = (question) =>
  question
    .toLowerCase()
    .split(/[^\p{L}\p{N}]+/u)
    .filter((word) => word.length > 2 && !FUNCTION_WORDS.has(word));

// Consecutive steps of equal number, each with the questions proposed in them.
function binsOf(rows) {
  const steps = [...new Set(rows.map(({ step }) => step))].sort((a, b) => a - b);
  const width = Math.ceil(steps.length / BINS);
  const bins = [];
  for (let i = 0; i < steps.length; i += width) bins.push({ steps: steps.slice(i, i + width), rows: [] });
  const place = new Map(steps.map((step, i) => [step, bins[Math.floor(i / width)]]));
  for (const row of rows) place.get(row.step).rows.push(row);
  for (const bin of bins) {
    bin.words = new Map();
    for (const { info } of bin.rows) {
      for (const word of new Set(wordsOf(info.question)))
        bin.words.set(word, (bin.words.get(word) ?? 0) + 1 / bin.rows.length);
    }
  }
  return bins;
}

function topicTable(run) {
  const rows = run.trajectories.filter((row) => row.role === 'proposer' && row.info?.question);
  if (!rows.length) return null;
  const bins = binsOf(rows);
  const peak = new Map();
  for (const { words } of bins)
    for (const [word, part] of words) peak.set(word, Math.max(part, peak.get(word) ?? 0));
  const topics = [...peak.keys()].sort((a, b) => peak.get(b) - peak.get(a) || inOrder(a, b)).slice(0, TOPICS);
  const line = (label, cells, title) =>
    el('tr', {}, el('th', { scope: 'row', title }, label), ...bins.map((bin, i) => cells(bin, i)));
  const plain = (of) => (bin) => el('td', { class: 'num' }, format(of(bin)));
  const tinted = (word) => (bin) => {
    const part = bin.words.get(word) ?? 0;
    const cell = el('td', { class: 'num heat' }, part ? `${Math.round(100 * part)} %` : '·');
    cell.style.setProperty('--part', `${Math.round(50 * part)}%`);
    return cell;
  };
  const documents = (bin) => new Set(bin.rows.map(({ info }) => info.document).filter(Boolean)).size;
  const span = ({ steps }) => (steps.length > 1 ? `${steps[0]}–${steps.at(-1)}` : String(steps[0]));
  return el(
    'div',
    { class: 'card scroll topics', tabindex: 0, role: 'group', 'aria-label': `Topics of ${run.name}` },
    el('h3', {}, many ? swatch(run.hue, `Topics over time · ${run.name}`) : 'Topics over time'),
    el(
      'p',
      { class: 'about' },
      'Share of the logged questions that hold a word; columns are ranges of steps.',
    ),
    el(
      'table',
      {},
      el(
        'thead',
        {},
        line('Steps', (bin) => el('th', { scope: 'col', class: 'num' }, span(bin))),
      ),
      el(
        'tbody',
        {},
        line(
          'Questions logged',
          plain(({ rows: own }) => own.length),
        ),
        line('Different documents', plain(documents)),
        line(
          'Words per question',
          plain((bin) => mean(bin.rows.map(({ info }) => info.question.split(/\s+/).length))),
        ),
        line(
          'Hops asked for',
          plain((bin) => mean(bin.rows.map(({ info }) => info.hops).filter(isNumber))),
        ),
        ...topics.map((word) => line(word, tinted(word))),
      ),
    ),
  );
}

function drawTopics() {
  const tables = runs.map(topicTable).filter(Boolean);
  $('topics').append(
    ...(tables.length ? tables : [el('p', { class: 'muted' }, 'No question was logged yet.')]),
  );
}

runs.forEach(deriveMetrics);
drawTopics();
