// Configs: how runs differ, and every field of them.
function* fieldsOf(value, path = '') {
  if (value === null || typeof value !== 'object' || Array.isArray(value))
    yield [path, JSON.stringify(value)];
  else
    for (const [name, inner] of Object.entries(value))
      yield* fieldsOf(inner, path ? `${path}.${name}` : name);
}

function configTable(names, fields) {
  const row = (name) =>
    el(
      'tr',
      {},
      el('th', { scope: 'row' }, name),
      ...fields.map((own) => el('td', {}, own.get(name) ?? el('span', { class: 'muted' }, 'not there'))),
    );
  const heads = many ? runs.map((run) => el('th', { scope: 'col' }, swatch(run.hue, run.name))) : [];
  return el(
    'div',
    { class: 'card scroll config', tabindex: 0, role: 'group', 'aria-label': 'Fields of the config' },
    el(
      'table',
      {},
      many ? el('thead', {}, el('tr', {}, el('th', { scope: 'col' }, 'Field'), ...heads)) : null,
      el('tbody', {}, ...names.map(row)),
    ),
  );
}

function drawConfig() {
  const fields = runs.map((run) => new Map(fieldsOf(run.config)));
  const names = [...new Set(fields.flatMap((own) => [...own.keys()]))].filter(Boolean).sort(inOrder);
  const differs = (name) => new Set(fields.map((own) => own.get(name))).size > 1;
  const [different, same] = [names.filter(differs), names.filter((name) => !differs(name))];
  const fold = (title, own) =>
    own.length ? el('details', { class: 'group' }, el('summary', {}, title), configTable(own, fields)) : null;
  if (!names.length) $('config-body').append(el('p', { class: 'muted' }, 'No config.json is there.'));
  else if (many) {
    const none = el('p', { class: 'muted' }, 'All fields agree.');
    $('config-body').append(different.length ? configTable(different, fields) : none);
    $('config-body').append(
      ...[fold(`${count(same.length, 'field')} in which the runs agree`, same)].filter(Boolean),
    );
  } else $('config-body').append(fold(count(same.length, 'field'), same));
}

drawConfig();
