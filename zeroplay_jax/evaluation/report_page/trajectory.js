// One trajectory: task, reward, and the whole text by source.
const TAG_LABELS = {
  think: 'thinking',
  search: 'search',
  tool_call: 'tool call',
  function_calls: 'tool call',
  answer: 'answer',
  question: 'question',
};
const OPENING_TAG = new RegExp(`<(${Object.keys(TAG_LABELS).join('|')})>`);
const LONG_PROMPT = 280; // characters; longer prompts are folded
let unfolds = false; // whether passages are shown; a reader who unfolded them wants the next ones, too

const segmentsOf = (row) => row.segments.map(([source, i]) => ({ source, text: row.run.texts[i] }));
const asText = (value) => (typeof value === 'string' ? value : JSON.stringify(value, null, 1));
const dropReason = (row) => row.drop ?? row.info?.rejected ?? null;

// Splits policy text at its tags into {label, openingTag, text, closingTag}. Text of the environment is never split,
// so a document that imitates a tag stays a document.
function* policyBlocks(text) {
  let remainder = text;
  while (remainder) {
    const start = remainder.search(OPENING_TAG);
    if (start) yield { label: '', text: start < 0 ? remainder : remainder.slice(0, start) };
    if (start < 0) return;
    const [openingTag, name] = remainder.slice(start).match(OPENING_TAG);
    const closingTag = `</${name}>`;
    const close = remainder.indexOf(closingTag, start);
    const isClosed = close >= 0;
    const end = isClosed ? close : remainder.length;
    yield {
      label: TAG_LABELS[name],
      openingTag,
      text: remainder.slice(start + openingTag.length, end),
      closingTag: isClosed ? closingTag : '',
    };
    remainder = isClosed ? remainder.slice(close + closingTag.length) : '';
  }
}

function textBlock(source, { label, openingTag = '', text, closingTag = '' }) {
  const parts = [
    openingTag && el('span', { class: 'tag' }, openingTag),
    el('span', { class: 'inner' }, text),
    closingTag && el('span', { class: 'tag' }, closingTag),
  ];
  const kind = { answer: ' answer', question: ' question-block' }[label] ?? '';
  return el(
    'div',
    { class: `block ${source}${kind}` },
    el('div', { class: 'label' }, label),
    el('div', { class: 'text' }, ...parts.filter(Boolean)),
  );
}

function promptBlock(text) {
  const block = textBlock('prompt', { label: 'prompt', text: text.trim() });
  if (text.length > LONG_PROMPT) {
    const summary = el('summary', {}, `${count(text.length, 'character')} of instructions and task`);
    const frame = block.querySelector('.text');
    frame.append(el('details', {}, summary, ...frame.childNodes));
  }
  return block;
}

// A folded text of the environment.
const passages = (summary, text) => el('details', { class: 'passages' }, el('summary', {}, summary), text.trim());

function resultBlock(text) {
  const block = textBlock('env', { label: 'tool result', text: '' });
  const folded = passages(count(text.trim().length, 'character'), text);
  const words = filters.elements.text.value.trim().toLowerCase();
  folded.open = unfolds || Boolean(words && text.toLowerCase().includes(words));
  block.querySelector('.text').append(folded);
  return block;
}

function toggleUnfolded() {
  unfolds = !unfolds;
  for (const node of $('detail').querySelectorAll('.passages')) node.open = unfolds;
}

// Name and arguments of a tool call, its error code, and the titles and scores of the returned documents.
function callBlock({ tool, arguments: values, error, documents }) {
  const named = values && typeof values === 'object' ? Object.entries(values) : [];
  const argumentText = named.map(([name, value]) => `${name}: ${JSON.stringify(value)}`).join(', ');
  const titles = documents.map(([title, score]) => (isNumber(score) ? `${title} (${format(score)})` : title));
  return el(
    'div',
    { class: 'block call' },
    el('div', { class: 'label' }, 'call'),
    el(
      'div',
      { class: 'text' },
      el('b', {}, tool),
      el('span', { class: 'arguments' }, `(${argumentText})`),
      error ? el('span', { class: 'error' }, `error: ${asText(error)}`) : null,
      titles.length ? el('div', { class: 'documents' }, `documents: ${titles.join(', ')}`) : null,
    ),
  );
}

// What turn k earned, and its advantage; null in a run without rewards per turn.
function turnBlock(row, turn) {
  const parts = [
    ['reward', row.turn_rewards?.[turn]],
    ['advantage', Array.isArray(row.advantage) ? row.advantage[turn] : null],
  ];
  const known = parts.filter(([, value]) => isNumber(value)).map(([name, value]) => `${name} ${format(value)}`);
  if (!known.length) return null;
  return el(
    'div',
    { class: 'block call' },
    el('div', { class: 'label' }, `turn ${turn + 1}`),
    el('div', { class: 'text earned' }, known.join(', ')),
  );
}

// Policy text of turn k is followed by the tool call of turn k and by what the turn earned, if there is any.
function transcript(row) {
  const blocks = [];
  let turn = 0;
  for (const { source, text } of segmentsOf(row)) {
    if (source === 'env') blocks.push(resultBlock(text));
    else if (source !== 'policy') blocks.push(promptBlock(text));
    else {
      for (const block of policyBlocks(text))
        if (block.openingTag || block.text.trim()) blocks.push(textBlock(source, block));
      if (row.turns[turn]) blocks.push(callBlock(row.turns[turn]));
      blocks.push(turnBlock(row, turn));
      turn += 1;
    }
  }
  return el('div', { class: 'transcript' }, ...blocks.filter(Boolean));
}

function definitionList(entries) {
  const list = el('dl', { class: 'pairs' });
  for (const [name, value] of entries) {
    if (value === '' || value === null || value === undefined) continue;
    list.append(el('dt', {}, name), el('dd', {}, value));
  }
  return list;
}

// Whether the step updated the policy of the rollout's role.
const isTrainingStep = ({ run, step, phase, role }) =>
  ['loss', `${role}/loss`].some((name) => run.updates.has(`${step}/${phase}/${name}`));

function trainingUse(row) {
  if (!row.run.updates.size) return '';
  if (!isTrainingStep(row)) return ', no update in this step';
  if (row.drop) return `, not trained on: ${readable(row.drop)}`;
  const isZero = row.advantage !== null && [row.advantage].flat().every((value) => value === 0);
  return isZero ? ', zero advantage' : ', trained on';
}

function advantageText(row) {
  // A value network gives every token an advantage of its own.
  if (row.advantage === null) return 'one per token (value network)';
  return Array.isArray(row.advantage) ? 'one per turn' : format(row.advantage);
}

function sourceLegend(row) {
  const sources = [
    ['policy', `sampled from the policy${trainingUse(row)}`],
    ['env', 'inserted by the environment'],
    ['prompt', 'prompt'],
  ];
  const items = sources.map(([source, label]) =>
    el('span', { class: source }, el('span', { class: 'swatch' }), label),
  );
  return el('p', { class: 'legend', colour: colourOf(row), 'aria-label': 'Sources of the text' }, ...items);
}

function groupButtons(row) {
  const group = groupOf(row);
  if (group.length < 2) return null;
  const labelOf = ({ step, reward }) => (isEvaluation(row) ? `step ${step}: ${format(reward)}` : format(reward));
  const buttons = group.slice(0, 40).map((member) =>
    el(
      'button',
      {
        type: 'button',
        title: 'reward; opens this rollout',
        'aria-current': trajectories[member] === row ? 'true' : null,
        onclick: () => open(member),
      },
      labelOf(trajectories[member]),
    ),
  );
  return el('span', { class: 'siblings' }, ...buttons);
}

function topBar(row, index) {
  const position = filtered.indexOf(index);
  const stepButton = (by, label) => {
    const disabled = filtered[position + by] === undefined && 'disabled';
    return el('button', { type: 'button', disabled, onclick: () => move(by) }, label);
  };
  const location = [comparing ? row.run.name : '', `step ${row.step}`, `iteration ${format(row.iteration + 1)}`];
  return el(
    'div',
    { class: 'bar-top' },
    el(
      'span',
      { class: 'muted num' },
      `${location.filter(Boolean).join('  ·  ')}  ·  `,
      el('span', { class: 'phase', colour: colourOf(row) }, `${row.phase} phase`),
      `  ·  ${row.role}`,
    ),
    el(
      'span',
      {},
      el('button', { type: 'button', onclick: toggleUnfolded }, 'Passages ', el('kbd', {}, 'x')),
      ' ',
      stepButton(-1, '← Previous'),
      ' ',
      stepButton(1, 'Next →'),
    ),
  );
}

function solvedText(row) {
  const { solved } = row.info ?? {};
  const attempts = row.run.config.reward?.solves;
  if (!isNumber(solved)) return '';
  return `${solved}${isNumber(attempts) ? ` of ${attempts}` : ''} attempts`;
}

const IN_LIST = ['question', 'answers', 'answer', 'answer_given', 'hops', 'solved', 'document', 'rejected'];

function describe(index) {
  const row = trajectories[index];
  const info = row.info ?? {};
  const components = Object.entries(row.parts ?? {})
    .map(([name, value]) => `${readable(name)} ${format(value)}`)
    .join(',  ');
  const further = Object.entries(info).filter(([name]) => !IN_LIST.includes(name));
  const nodes = [
    topBar(row, index),
    el('p', { class: 'question' }, info.question || '(no question)'),
    definitionList([
      ['Reference answer', [info.answers ?? info.answer ?? []].flat().join('  |  ')],
      ['Predicted answer', 'answer_given' in info ? (info.answer_given ?? 'none') : ''],
      ['Hops', isNumber(info.hops) ? format(info.hops) : ''],
      ['Document', info.document && asText(info.document)],
      ['Solved in', solvedText(row)],
      ['Reward', `${format(row.reward)}${components ? `   (${components})` : ''}`],
      ['Advantage', isTrainingStep(row) ? advantageText(row) : ''],
      ['Excluded', row.drop ? readable(row.drop) : ''],
      ['Rejected', info.rejected ? readable(info.rejected) : ''],
      ['Finish reason', row.finish ? readable(row.finish) : ''],
      [isEvaluation(row) ? 'Same question' : 'Group rewards', groupButtons(row)],
    ]),
    sourceLegend(row),
    el('div', { colour: colourOf(row) }, transcript(row)),
  ];
  if (further.length) {
    const list = definitionList(further.map(([name, value]) => [readable(name), asText(value)]));
    nodes.push(el('details', {}, el('summary', {}, 'Further fields of the task'), list));
  }
  return nodes;
}
