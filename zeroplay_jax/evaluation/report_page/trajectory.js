// One trajectory, opened: what was asked and earned, and the whole text by who wrote it.
const BLOCKS = {
  think: 'thought',
  search: 'search',
  tool_call: 'search',
  function_calls: 'search',
  answer: 'answer',
  question: 'question',
};
const OPENING = new RegExp(`<(${Object.keys(BLOCKS).join('|')})>`);

const textOf = (row) => row.segments.map(([source, i]) => ({ source, text: row.run.texts[i] }));
const asText = (value) => (typeof value === 'string' ? value : JSON.stringify(value, null, 1));
const reasonOf = (row) => row.drop ?? row.info?.rejected ?? null;

// Splits text the policy wrote at its own tags; only policy text, so a page that imitates a tag stays a page.
function* blocksOf(text) {
  for (let rest = text; rest;) {
    const start = rest.search(OPENING);
    if (start) yield { label: '', text: start < 0 ? rest : rest.slice(0, start) };
    if (start < 0) return;
    const [tag, name] = rest.slice(start).match(OPENING);
    const close = rest.indexOf(`</${name}>`, start);
    const end = close < 0 ? rest.length : close;
    yield {
      label: BLOCKS[name],
      tag,
      text: rest.slice(start + tag.length, end),
      end: close < 0 ? '' : `</${name}>`,
    };
    rest = rest.slice(close < 0 ? end : close + name.length + 3);
  }
}

function block(source, { label, tag = '', text, end = '' }) {
  const inner = [
    tag && el('span', { class: 'tag' }, tag),
    el('span', { class: 'inner' }, text),
    end && el('span', { class: 'tag' }, end),
  ];
  const kind = { answer: ' answer', question: ' question-block' }[label] ?? '';
  return el(
    'div',
    { class: `block ${source}${kind}` },
    el('div', { class: 'label' }, label),
    el('div', { class: 'text' }, ...inner.filter(Boolean)),
  );
}

function promptBlock(text) {
  const box = block('prompt', { label: 'prompt', text: text.trim() });
  if (text.length > 280) {
    const summary = el('summary', {}, `${count(text.length, 'character')} of instructions and task`);
    const frame = box.querySelector('.text');
    frame.append(el('details', {}, summary, ...frame.childNodes));
  }
  return box;
}

function transcript(row) {
  const blocks = textOf(row).flatMap(({ source, text }) => {
    if (source === 'env') return [block(source, { label: 'passages', text: text.trim() })];
    if (source !== 'policy') return [promptBlock(text)];
    return [...blocksOf(text)].filter((one) => one.tag || one.text.trim()).map((one) => block(source, one));
  });
  return el('div', { class: 'transcript' }, ...blocks);
}

function pairs(entries) {
  const told = entries.filter(([, value]) => value !== '' && value !== null && value !== undefined);
  return el(
    'dl',
    { class: 'pairs' },
    ...told.flatMap(([name, value]) => [el('dt', {}, name), el('dd', {}, value)]),
  );
}

// What became of the policy's text: steps with a loss learn, and leave some rollouts out.
const trained = ({ run, step, phase, role }) =>
  ['loss', `${role}/loss`].some((name) => run.trains.has(`${step}/${phase}/${name}`));

function useOf(row) {
  if (!row.run.trains.size) return '';
  if (!trained(row)) return ', not trained on in this step';
  if (row.drop) return `, not trained on: ${human(row.drop)}`;
  return row.advantage === 0 ? ', of advantage 0' : ', trained on';
}

function sourcesLegend(row) {
  const sources = [
    ['policy', `written by the policy${useOf(row)}`],
    ['env', 'inserted by the search'],
    ['prompt', 'prompt'],
  ];
  return el(
    'p',
    { class: 'legend', hue: hueOf(row), 'aria-label': 'Who wrote the text' },
    ...sources.map(([source, label]) =>
      el('span', { class: source }, el('span', { class: 'swatch' }), label),
    ),
  );
}

function siblings(row) {
  const group = groupOf(row);
  if (group.length < 2) return null;
  const buttons = group.slice(0, 40).map((other) =>
    el(
      'button',
      {
        type: 'button',
        title: 'reward; opens this rollout of the group',
        'aria-current': all[other] === row ? 'true' : null,
        onclick: () => open(other),
      },
      format(all[other].reward),
    ),
  );
  return el('span', { class: 'siblings' }, ...buttons);
}

function topBar(row, index) {
  const place = shown.indexOf(index);
  const step = (by, label) =>
    el(
      'button',
      { type: 'button', disabled: shown[place + by] === undefined && 'disabled', onclick: () => move(by) },
      label,
    );
  const where = [many ? row.run.name : '', `step ${row.step}`, `iteration ${format(row.iteration)}`];
  return el(
    'div',
    { class: 'bar-top' },
    el(
      'span',
      { class: 'muted num' },
      `${where.filter(Boolean).join('  ·  ')}  ·  `,
      el('span', { class: 'phase', hue: hueOf(row) }, `${row.phase} phase`),
      `  ·  ${row.role}`,
    ),
    el('span', {}, step(-1, '← Previous'), ' ', step(1, 'Next →')),
  );
}

function describe(index) {
  const row = all[index];
  const info = row.info ?? {};
  const tries = row.run.config.reward?.solves;
  const parts = Object.entries(row.parts ?? {})
    .map(([name, value]) => `${human(name)} ${format(value)}`)
    .join(',  ');
  const told = ['question', 'answers', 'answer', 'answer_given', 'hops', 'solved', 'document', 'rejected'];
  const rest = Object.entries(info).filter(([name]) => !told.includes(name));
  return [
    topBar(row, index),
    el('p', { class: 'question' }, info.question || '(no question)'),
    pairs([
      ['Answer wanted', [info.answers ?? info.answer ?? []].flat().join('  |  ')],
      ['Answer given', 'answer_given' in info ? (info.answer_given ?? 'none') : ''],
      ['Hops', isNumber(info.hops) ? format(info.hops) : ''],
      ['Document', info.document && asText(info.document)],
      [
        'Solved in',
        isNumber(info.solved) ? `${info.solved}${isNumber(tries) ? ` of ${tries}` : ''} tries` : '',
      ],
      ['Reward', `${format(row.reward)}${parts ? `   (${parts})` : ''}`],
      ['Advantage', trained(row) ? format(row.advantage) : ''],
      ['Left out', row.drop ? human(row.drop) : ''],
      ['Rejected', info.rejected ? human(info.rejected) : ''],
      ['Ended by', row.finish ? human(row.finish) : ''],
      ['Its group', siblings(row)],
    ]),
    sourcesLegend(row),
    el('div', { hue: hueOf(row) }, transcript(row)),
    rest.length
      ? el(
          'details',
          {},
          el('summary', {}, 'Details of the task'),
          pairs(rest.map(([name, value]) => [human(name), asText(value)])),
        )
      : null,
  ].filter(Boolean);
}
