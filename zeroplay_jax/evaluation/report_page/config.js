// Configs: the fields in which runs differ, and all fields.
function* fieldsOf(value, path = '') {
  if (value === null || typeof value !== 'object' || Array.isArray(value)) {
    yield [path, JSON.stringify(value)];
    return;
  }
  for (const [name, child] of Object.entries(value)) yield* fieldsOf(child, path ? `${path}.${name}` : name);
}

function configTable(names, fieldsOfRuns) {
  const absent = () => el('span', { class: 'muted' }, 'not set');
  const rows = names.map((name) => {
    const cells = fieldsOfRuns.map((fields) => el('td', {}, fields.get(name) ?? absent()));
    return el('tr', {}, el('th', { scope: 'row' }, name), ...cells);
  });
  const runHeads = runs.map((run) => el('th', { scope: 'col' }, swatch(run.colour, run.name)));
  const head = el('thead', {}, el('tr', {}, el('th', { scope: 'col' }, 'Field'), ...runHeads));
  return el(
    'div',
    { class: 'card scroll config', tabindex: 0, role: 'group', 'aria-label': 'Fields of the config' },
    el('table', {}, comparing ? head : null, el('tbody', {}, ...rows)),
  );
}

function drawConfig() {
  const body = $('config-body');
  const fieldsOfRuns = runs.map((run) => new Map(fieldsOf(run.config)));
  const names = [...new Set(fieldsOfRuns.flatMap((fields) => [...fields.keys()]))].filter(Boolean);
  names.sort(naturalOrder);
  if (!names.length) {
    body.append(el('p', { class: 'muted' }, 'The config is unknown.'));
    return;
  }
  const differs = (name) => new Set(fieldsOfRuns.map((fields) => fields.get(name))).size > 1;
  const different = names.filter(differs);
  const equal = names.filter((name) => !differs(name));
  if (different.length) body.append(configTable(different, fieldsOfRuns));
  else if (comparing) body.append(el('p', { class: 'muted' }, 'All fields are equal.'));
  if (!equal.length) return;
  const title = count(equal.length, comparing ? 'equal field' : 'field');
  body.append(el('details', { class: 'group' }, el('summary', {}, title), configTable(equal, fieldsOfRuns)));
}

drawConfig();
