// The list of trajectories: filters are stored in the address, and only visible rows are in the document.
const ROW_HEIGHT = 38; // pixels, as in reader.css
const MARGIN_ROWS = 8; // rows drawn above and below the visible ones
const FILTER_DELAY = 90; // milliseconds after the last key
const filters = $('filters');
const list = $('list');
const trajectories = runs.flatMap((run) => run.trajectories);
let filtered = []; // indices of the trajectories that pass the filters
let opened = null; // index of the open trajectory
let groups = null; // group key → indices; built on first use

// In an evaluation, numbers of groups stand for hop counts: what belongs together is the question over the steps.
const groupKey = (row) => {
  const { run, step, role, group, info } = row;
  return [runs.indexOf(run), ...(isEvaluation(row) ? [info.question] : [step, role, group])].join('/');
};

function groupOf(row) {
  if (!groups) {
    groups = new Map();
    trajectories.forEach((member, i) => {
      const key = groupKey(member);
      if (!groups.has(key)) groups.set(key, []);
      groups.get(key).push(i);
    });
  }
  return groups.get(groupKey(row));
}

// Returns the test whether a row contains a text. Distinct texts are searched, which are far fewer than segments.
function containsText(text) {
  for (const run of runs) {
    run.lowerTexts ??= run.texts.map((one) => one.toLowerCase());
    run.matches = run.lowerTexts.map((one) => one.includes(text));
  }
  return (row) => {
    row.lowerFields ??= JSON.stringify([row.info ?? {}, row.turns]).toLowerCase();
    return row.lowerFields.includes(text) || row.segments.some(([, i]) => row.run.matches[i]);
  };
}

function addOptions(name, values, special = []) {
  const distinct = [...new Set(values)].filter((value) => value !== null && value !== undefined);
  const options = distinct.sort(naturalOrder).map((value) => [value, readable(String(value))]);
  for (const [value, label] of [['', 'any'], ...special, ...options])
    filters.elements[name].append(el('option', { value }, label));
}

function currentState() {
  const fields = [...new FormData(filters)].filter(([, value]) => value !== '');
  if (opened !== null) fields.push(['open', opened]);
  return new URLSearchParams(fields);
}

function readAddress() {
  const fields = new URLSearchParams(location.hash.slice(1));
  for (const field of filters.elements) if (field.name) field.value = fields.get(field.name) ?? '';
  const index = Number.parseInt(fields.get('open') ?? '', 10);
  filter(false);
  open(trajectories[index] ? index : (filtered[0] ?? null), false);
}

function writeAddress() {
  history.replaceState(null, '', `#${currentState()}`);
}

function isWithin(value, least, most) {
  if (least !== '' && !(isNumber(value) && value >= Number(least))) return false;
  return most === '' || (isNumber(value) && value <= Number(most));
}

// Why a rollout is excluded, how it ended without an answer, and what its calls failed with.
const failuresOf = (row) => [
  dropReason(row),
  row.finish && row.finish !== 'answer' ? `ended: ${row.finish}` : null,
  ...row.turns.map((turn) => (turn?.error ? `call: ${asText(turn.error)}` : null)),
];
const toolsOf = (row) => row.turns.map((turn) => turn?.tool);

function matchesFailure(row, choice) {
  if (choice === '') return true;
  if (choice === '(none)') return dropReason(row) === null;
  if (choice === '(some)') return dropReason(row) !== null;
  return failuresOf(row).includes(choice);
}

function filter(updateAddress = true) {
  const { run, from, to, phase, role, hops, tool, low, high, drop, text } = Object.fromEntries(new FormData(filters));
  const words = text.trim().toLowerCase();
  const contains = words ? containsText(words) : () => true;
  filtered = [];
  trajectories.forEach((row, i) => {
    const passes =
      (!run || row.run.name === run) &&
      (!phase || row.phase === phase) &&
      (!role || row.role === role) &&
      isWithin(row.step, from, to) &&
      isWithin(row.reward, low, high) &&
      (!hops || String(row.info?.hops) === hops) &&
      (!tool || toolsOf(row).includes(tool)) &&
      matchesFailure(row, drop) &&
      contains(row);
    if (passes) filtered.push(i);
  });
  const [part, total] = [filtered, trajectories].map(({ length }) => length.toLocaleString('en'));
  $('count').textContent = `${part} of ${total} trajectories`;
  $('rows').style.height = `${filtered.length * ROW_HEIGHT}px`;
  list.scrollTop = 0;
  drawRows();
  if (updateAddress) writeAddress();
}

// The phase of a rollout, or its role if a phase has several.
const phaseOrRole = (row) => (PHASES.includes(row.phase) ? row.phase : row.role);
const colourOf = (row) => phaseColour(phaseOrRole(row));

function rowNode(index, position) {
  const row = trajectories[index];
  const reason = dropReason(row);
  const phaseTitle = `${row.role} in the ${row.phase} phase`;
  const node = el(
    'div',
    {
      class: 'row',
      role: 'option',
      id: `row-${index}`,
      'aria-selected': String(index === opened),
      'aria-setsize': filtered.length,
      'aria-posinset': position + 1,
      onclick: () => open(index),
    },
    comparing ? swatch(row.run.colour, '', row.run.name) : null,
    el('span', { class: 'num muted', title: 'step' }, format(row.step)),
    el('span', { class: 'phase', colour: colourOf(row), title: phaseTitle }, phaseOrRole(row)),
    el('span', { class: 'num', title: 'reward' }, format(row.reward)),
    el('span', {}, row.info?.question || '(no question)'),
    reason ? el('span', { class: 'chip', title: 'reason of exclusion' }, readable(reason)) : el('span'),
  );
  node.style.top = `${position * ROW_HEIGHT}px`;
  return node;
}

function drawRows() {
  const first = Math.max(0, Math.floor(list.scrollTop / ROW_HEIGHT) - MARGIN_ROWS);
  const visible = Math.ceil(list.clientHeight / ROW_HEIGHT);
  const last = Math.min(filtered.length, first + visible + 2 * MARGIN_ROWS);
  const nodes = filtered.slice(first, last).map((index, i) => rowNode(index, first + i));
  $('trajectories').classList.toggle('unlogged', !trajectories.length);
  if (!nodes.length) {
    const sentence = trajectories.length
      ? 'No trajectory passes the filters.'
      : 'No trajectories have been logged yet.';
    nodes.push(el('p', { class: 'empty' }, sentence));
  }
  $('rows').replaceChildren(...nodes);
  list.setAttribute('aria-activedescendant', $(`row-${opened}`) ? `row-${opened}` : '');
}

function scrollToRow(position) {
  const [top, bottom] = [position * ROW_HEIGHT, (position + 1) * ROW_HEIGHT];
  if (top < list.scrollTop) list.scrollTop = top;
  else if (bottom > list.scrollTop + list.clientHeight) list.scrollTop = bottom - list.clientHeight;
}

function open(index, updateAddress = true) {
  opened = index;
  const position = filtered.indexOf(index);
  if (position >= 0) scrollToRow(position);
  drawRows();
  const nodes = index === null ? [el('p', { class: 'empty' }, 'Select a trajectory.')] : describe(index);
  $('detail').replaceChildren(...nodes);
  $('detail').scrollTop = 0;
  if (updateAddress) writeAddress();
}

function move(by) {
  if (!filtered.length) return;
  const position = filtered.indexOf(opened);
  const target = position < 0 ? 0 : Math.max(0, Math.min(filtered.length - 1, position + by));
  open(filtered[target]);
}

function onListKey(event) {
  const visible = Math.max(1, Math.floor(list.clientHeight / ROW_HEIGHT) - 1);
  const moves = {
    ArrowDown: 1,
    ArrowUp: -1,
    PageDown: visible,
    PageUp: -visible,
    Home: -trajectories.length,
    End: trajectories.length,
  };
  if (event.key === 'Enter') $('detail').focus();
  if (!(event.key in moves)) return;
  event.preventDefault();
  move(moves[event.key]);
}

function onShortcut(event) {
  if (event.target.closest('input, select') || event.ctrlKey || event.metaKey || event.altKey) return;
  const actions = {
    j: () => move(1),
    k: () => move(-1),
    t: () => goTo('trajectories'),
    x: toggleUnfolded,
    '/': () => filters.elements.text.focus(),
  };
  const action = actions[event.key];
  if (!action) return;
  event.preventDefault();
  action();
}

function addListeners() {
  let pending = 0;
  filters.addEventListener('submit', (event) => event.preventDefault());
  filters.addEventListener('input', () => {
    clearTimeout(pending);
    pending = setTimeout(filter, FILTER_DELAY);
  });
  filters.addEventListener('reset', () => setTimeout(filter)); // the fields are cleared after the event
  list.addEventListener('scroll', drawRows, { passive: true });
  list.addEventListener('keydown', onListKey);
  document.addEventListener('keydown', onShortcut);
  addEventListener('hashchange', readAddress);
  addEventListener('resize', drawRows);
}

addOptions('run', comparing ? runs.map(({ name }) => name) : []);
filters.elements.run.parentElement.hidden = !comparing;
list.classList.toggle('many', comparing);
for (const name of ['phase', 'role'])
  addOptions(
    name,
    trajectories.map((row) => row[name]),
  );
const hopsOf = ({ info }) => info?.hops;
for (const [name, valuesOf] of [
  ['hops', hopsOf],
  ['tool', toolsOf],
]) {
  addOptions(name, trajectories.flatMap(valuesOf));
  // One choice is none.
  filters.elements[name].parentElement.hidden = filters.elements[name].length < 3;
}
addOptions('drop', trajectories.flatMap(failuresOf), [
  ['(none)', 'not excluded'],
  ['(some)', 'excluded, any reason'],
]);
addListeners();
readAddress();
