// Trajectories: filters kept in the address, and a list that only draws what is in view.
const HEIGHT = 38; // pixels per row of the list, as in reader.css
const filters = $('filters');
const list = $('list');
const all = runs.flatMap((run) => run.trajectories);
let shown = []; // indices into `all` that pass the filters
let opened = null; // index into `all`
let groups = null; // key → indices; made when first asked for

function groupOf(row) {
  const keyOf = ({ run, step, role, group }) => `${runs.indexOf(run)}/${step}/${role}/${group}`;
  if (!groups) {
    groups = new Map();
    all.forEach((one, i) => {
      if (!groups.has(keyOf(one))) groups.set(keyOf(one), []);
      groups.get(keyOf(one)).push(i);
    });
  }
  return groups.get(keyOf(row));
}

// Which rows hold the words. Distinct texts are searched, of which there are far fewer than segments.
function search(words) {
  for (const run of runs) {
    run.lower ??= run.texts.map((text) => text.toLowerCase());
    run.hits = run.lower.map((text) => text.includes(words));
  }
  return (row) => {
    row.lower ??= JSON.stringify(row.info ?? {}).toLowerCase();
    return row.lower.includes(words) || row.segments.some(([, i]) => row.run.hits[i]);
  };
}

function choices(name, values, extra = []) {
  const options = [...new Set(values)].filter((value) => value !== null && value !== undefined).sort(inOrder);
  const named = options.map((option) => [option, human(String(option))]);
  for (const [value, label] of [['', 'any'], ...extra, ...named])
    filters.elements[name].append(el('option', { value }, label));
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
  const { run, from, to, phase, role, low, high, drop, text } = Object.fromEntries(new FormData(filters));
  const within = (value, least, most) =>
    (least === '' || (isNumber(value) && value >= Number(least))) &&
    (most === '' || (isNumber(value) && value <= Number(most)));
  const fits =
    {
      '': () => true,
      '(none)': (reason) => reason === null,
      '(some)': (reason) => reason !== null,
    }[drop] ?? ((reason) => reason === drop);
  const words = text.trim().toLowerCase();
  const holds = words ? search(words) : () => true;
  shown = [];
  all.forEach((row, i) => {
    const passes =
      (!run || row.run.name === run) &&
      (!phase || row.phase === phase) &&
      (!role || row.role === role) &&
      within(row.step, from, to) &&
      within(row.reward, low, high) &&
      fits(reasonOf(row)) &&
      holds(row);
    if (passes) shown.push(i);
  });
  const [some, total] = [shown, all].map(({ length }) => length.toLocaleString('en'));
  $('count').textContent = `${some} of ${total} trajectories`;
  $('rows').style.height = `${shown.length * HEIGHT}px`;
  list.scrollTop = 0;
  drawRows();
  if (write) remember();
}

function remember() {
  history.replaceState(null, '', `#${state()}`);
}

// What a rollout was for: its phase, or its role where a phase has several.
const playOf = (row) => (PHASES.includes(row.phase) ? row.phase : row.role);
const hueOf = (row) => phaseHue(playOf(row));

function rowNode(index, place) {
  const row = all[index];
  const reason = reasonOf(row);
  const node = el(
    'div',
    {
      class: 'row',
      role: 'option',
      id: `row-${index}`,
      'aria-selected': String(index === opened),
      'aria-setsize': shown.length,
      'aria-posinset': place + 1,
      onclick: () => open(index),
    },
    many ? swatch(row.run.hue, '', row.run.name) : null,
    el('span', { class: 'num muted', title: 'step' }, format(row.step)),
    el(
      'span',
      { class: 'phase', hue: hueOf(row), title: `${row.role} in the ${row.phase} phase` },
      playOf(row),
    ),
    el('span', { class: 'num', title: 'reward' }, format(row.reward)),
    el('span', {}, row.info?.question || '(no question)'),
    reason ? el('span', { class: 'chip', title: 'why it was left out' }, human(reason)) : el('span'),
  );
  node.style.top = `${place * HEIGHT}px`;
  return node;
}

function drawRows() {
  const first = Math.max(0, Math.floor(list.scrollTop / HEIGHT) - 8);
  const last = Math.min(shown.length, first + Math.ceil(list.clientHeight / HEIGHT) + 16);
  const nodes = shown.slice(first, last).map((index, i) => rowNode(index, first + i));
  const sentence = all.length ? 'Nothing passes these filters.' : 'No trajectories were written yet.';
  $('rows').replaceChildren(...(nodes.length ? nodes : [el('p', { class: 'empty' }, sentence)]));
  list.setAttribute('aria-activedescendant', $(`row-${opened}`) ? `row-${opened}` : '');
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

function listen() {
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
    const keys = {
      ArrowDown: 1,
      ArrowUp: -1,
      PageDown: page,
      PageUp: -page,
      Home: -all.length,
      End: all.length,
    };
    if (event.key === 'Enter') $('detail').focus();
    if (!(event.key in keys)) return;
    event.preventDefault();
    move(keys[event.key]);
  });
  document.addEventListener('keydown', (event) => {
    if (event.target.closest('input, select') || event.ctrlKey || event.metaKey || event.altKey) return;
    const act = {
      j: () => move(1),
      k: () => move(-1),
      t: () => goTo('trajectories'),
      '/': () => filters.elements.text.focus(),
    }[event.key];
    if (!act) return;
    event.preventDefault();
    act();
  });
  addEventListener('hashchange', readAddress);
  addEventListener('resize', drawRows);
}

choices('run', many ? runs.map(({ name }) => name) : []);
filters.elements.run.parentElement.hidden = !many;
$('list').classList.toggle('many', many);
for (const name of ['phase', 'role'])
  choices(
    name,
    all.map((row) => row[name]),
  );
choices('drop', all.map(reasonOf), [
  ['(none)', 'no'],
  ['(some)', 'yes, for any reason'],
]);
listen();
readAddress();
