// Trajectories: filters kept in the address, a list that only draws what is in view, one opened trajectory.
const HEIGHT = 38; // pixels per row of the list, as in style.css
const filters = $('filters');
const list = $('list');
const all = run.trajectories;
const lower = run.texts.map((text) => text.toLowerCase());
let shown = []; // indices into `all` that pass the filters
let opened = null; // index into `all`

const answersOf = (info) => [info?.answers ?? info?.answer ?? []].flat().join('  |  ');
const textOf = (row) => row.segments.map(([source, i]) => ({ source, text: run.texts[i] }));
const asText = (value) => (typeof value === 'string' ? value : JSON.stringify(value, null, 1));
const keyOf = (row) => `${row.step}/${row.role}/${row.group}`;

// The search runs over distinct texts, of which there are far fewer than segments.
const infos = all.map((row) => JSON.stringify(row.info ?? {}).toLowerCase());
const groups = new Map();
all.forEach((row, i) => groups.set(keyOf(row), [...(groups.get(keyOf(row)) ?? []), i]));

function choices(name, values, extra = []) {
  const select = filters.elements[name];
  const options = [...new Set(values)].filter((value) => value !== null && value !== undefined);
  options.sort((a, b) => String(a).localeCompare(String(b), 'en', { numeric: true }));
  for (const [value, label] of [
    ['', 'any'],
    ...extra,
    ...options.map((option) => [option, human(String(option))]),
  ]) {
    select.append(el('option', { value }, label));
  }
}

function state() {
  const fields = [...new FormData(filters)].filter(([, value]) => value !== '');
  return new URLSearchParams(opened === null ? fields : [...fields, ['open', opened]]);
}

function readAddress() {
  const wanted = new URLSearchParams(location.hash.slice(1));
  for (const field of filters.elements) if (field.name) field.value = wanted.get(field.name) ?? '';
  const index = Number.parseInt(wanted.get('open') ?? '', 10);
  filter(false);
  open(all[index] ? index : (shown[0] ?? null), false);
}

function filter(write = true) {
  const { phase, role, iteration, drop, low, high, text } = Object.fromEntries(new FormData(filters));
  const words = text.trim().toLowerCase();
  const hits = words && lower.map((one) => one.includes(words));
  shown = all.flatMap((row, i) => {
    const passes =
      (!phase || row.phase === phase) &&
      (!role || row.role === role) &&
      (!iteration || String(row.iteration) === iteration) &&
      (!drop ||
        (drop === '(kept)' ? !row.drop : drop === '(dropped)' ? Boolean(row.drop) : row.drop === drop)) &&
      (low === '' || (isNumber(row.reward) && row.reward >= Number(low))) &&
      (high === '' || (isNumber(row.reward) && row.reward <= Number(high))) &&
      (!words || infos[i].includes(words) || row.segments.some(([, t]) => hits[t]));
    return passes ? [i] : [];
  });
  $('count').textContent =
    `${shown.length.toLocaleString('en')} of ${all.length.toLocaleString('en')} trajectories`;
  $('rows').style.height = `${shown.length * HEIGHT}px`;
  list.scrollTop = 0;
  drawRows();
  if (write) remember();
}

function remember() {
  history.replaceState(null, '', `#${state()}`);
}

function drawRows() {
  const first = Math.max(0, Math.floor(list.scrollTop / HEIGHT) - 8);
  const last = Math.min(shown.length, first + Math.ceil(list.clientHeight / HEIGHT) + 16);
  const nodes = shown.slice(first, last).map((index, i) => {
    const row = all[index];
    const node = el(
      'div',
      {
        class: 'row',
        role: 'option',
        id: `row-${index}`,
        'aria-selected': String(index === opened),
        'aria-setsize': shown.length,
        'aria-posinset': first + i + 1,
        onclick: () => open(index),
      },
      el('span', { class: 'num muted', title: 'step' }, format(row.step)),
      el('span', { class: 'role', hue: phaseHue(row.phase) }, row.role),
      el('span', { class: 'num', title: 'reward' }, format(row.reward)),
      el('span', {}, row.info?.question || '(no question)'),
      row.drop ? el('span', { class: 'chip', title: 'left out of training' }, human(row.drop)) : el('span'),
    );
    node.style.top = `${(first + i) * HEIGHT}px`;
    return node;
  });
  $('rows').replaceChildren(
    ...(nodes.length
      ? nodes
      : [
          el(
            'p',
            { class: 'empty' },
            all.length ? 'Nothing passes these filters.' : 'No trajectories were written yet.',
          ),
        ]),
  );
  list.setAttribute('aria-activedescendant', shown.includes(opened) ? `row-${opened}` : '');
}

function open(index, write = true) {
  opened = index;
  const place = shown.indexOf(index);
  if (place >= 0) {
    const [top, bottom] = [place * HEIGHT, (place + 1) * HEIGHT];
    if (top < list.scrollTop) list.scrollTop = top;
    else if (bottom > list.scrollTop + list.clientHeight) list.scrollTop = bottom - list.clientHeight;
  }
  drawRows();
  $('detail').replaceChildren(
    ...(index === null ? [el('p', { class: 'empty' }, 'Choose a trajectory to read it.')] : describe(index)),
  );
  $('detail').scrollTop = 0;
  if (write) remember();
}

function move(by) {
  if (!shown.length) return;
  const place = shown.indexOf(opened);
  open(shown[place < 0 ? 0 : Math.max(0, Math.min(shown.length - 1, place + by))]);
}

// ---------------------------------------------------------------------------- one trajectory
const BLOCKS = {
  think: 'thought',
  search: 'search',
  tool_call: 'search',
  function_calls: 'search',
  answer: 'answer',
  question: 'question',
};
const OPENING = new RegExp(`<(${Object.keys(BLOCKS).join('|')})>`);

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

function transcript(row) {
  const segments = textOf(row);
  return el(
    'div',
    { class: 'transcript' },
    ...segments.flatMap(({ source, text }) => {
      if (source === 'policy')
        return [...blocksOf(text)]
          .filter((one) => one.tag || one.text.trim())
          .map((one) => block(source, one));
      if (source === 'env') return [block(source, { label: 'passages', text: text.trim() })];
      const box = block('prompt', { label: 'prompt', text: text.trim() });
      if (text.length > 280) {
        const summary = el(
          'summary',
          {},
          `${text.length.toLocaleString('en')} characters of instructions and task`,
        );
        const frame = box.querySelector('.text');
        frame.append(el('details', {}, summary, ...frame.childNodes));
      }
      return [box];
    }),
  );
}

function pairs(entries) {
  return el(
    'dl',
    { class: 'pairs' },
    ...entries
      .filter(([, value]) => value !== '' && value !== null && value !== undefined)
      .flatMap(([name, value]) => [el('dt', {}, name), el('dd', {}, value)]),
  );
}

function siblings(row, index) {
  const group = groups.get(keyOf(row));
  if (group.length < 2) return null;
  return el(
    'span',
    { class: 'siblings' },
    ...group.slice(0, 40).map((other) =>
      el(
        'button',
        {
          type: 'button',
          title: 'reward; opens this rollout of the group',
          'aria-current': other === index ? 'true' : null,
          onclick: () => open(other),
        },
        format(all[other].reward),
      ),
    ),
  );
}

function describe(index) {
  const row = all[index];
  const info = row.info ?? {};
  const written = textOf(row)
    .filter(({ source }) => source === 'policy')
    .map(({ text }) => text)
    .join('\n');
  const given = [...written.matchAll(/<answer>([^]*?)<\/answer>/g)].at(-1)?.[1].trim();
  const parts = Object.entries(row.parts ?? {})
    .map(([name, value]) => `${human(name)} ${format(value)}`)
    .join(',  ');
  const rest = Object.entries(info).filter(([name]) => !['question', 'answers', 'answer'].includes(name));
  const place = shown.indexOf(index);
  const step = (by, label) =>
    el(
      'button',
      { type: 'button', disabled: shown[place + by] === undefined && 'disabled', onclick: () => move(by) },
      label,
    );
  return [
    el(
      'div',
      { class: 'bar-top' },
      el(
        'span',
        { class: 'muted num' },
        `step ${row.step}  ·  iteration ${format(row.iteration)}  ·  ${row.phase}  ·  `,
        el('span', { class: 'role', hue: phaseHue(row.phase) }, row.role),
      ),
      el('span', {}, step(-1, '← Previous'), ' ', step(1, 'Next →')),
    ),
    el('p', { class: 'question' }, info.question || '(no question)'),
    pairs([
      ['Answer wanted', answersOf(info)],
      ['Answer given', given ?? 'none'],
      ['Reward', `${format(row.reward)}${parts ? `   (${parts})` : ''}`],
      ['Advantage', format(row.advantage)],
      ['Left out', row.drop ? human(row.drop) : ''],
      ['Ended by', row.finish ? human(row.finish) : ''],
      ['Group', siblings(row, index) ?? format(row.group)],
    ]),
    el(
      'p',
      { class: 'legend', 'aria-label': 'Who wrote the text' },
      ...[
        ['policy', 'written by the policy (trained on)'],
        ['env', 'inserted by the search'],
        ['prompt', 'prompt'],
      ].map(([source, label]) => el('span', { class: source }, el('span', { class: 'swatch' }), label)),
    ),
    transcript(row),
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

// ---------------------------------------------------------------------------- events
let pending = 0;
filters.addEventListener('submit', (event) => event.preventDefault());
filters.addEventListener('input', () => {
  clearTimeout(pending);
  pending = setTimeout(filter, 90);
});
filters.addEventListener('reset', () => setTimeout(filter));
list.addEventListener('scroll', drawRows, { passive: true });
list.addEventListener('keydown', (event) => {
  const page = Math.max(1, Math.floor(list.clientHeight / HEIGHT) - 1);
  const by = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -all.length, End: all.length }[
    event.key
  ];
  if (event.key === 'Enter') $('detail').focus();
  if (by === undefined) return;
  event.preventDefault();
  move(by);
});
document.addEventListener('keydown', (event) => {
  if (event.target.closest('input, select') || event.ctrlKey || event.metaKey || event.altKey) return;
  const by = { j: 1, k: -1 }[event.key];
  if (by) move(by);
  if (event.key !== '/') return;
  event.preventDefault();
  filters.elements.text.focus();
});
addEventListener('hashchange', readAddress);
addEventListener('resize', drawRows);

choices(
  'phase',
  all.map((row) => row.phase),
);
choices(
  'role',
  all.map((row) => row.role),
);
choices(
  'iteration',
  all.map((row) => row.iteration),
);
choices(
  'drop',
  all.map((row) => row.drop),
  [
    ['(kept)', 'no: trained on'],
    ['(dropped)', 'yes, for any reason'],
  ],
);
readAddress();
