// Curves: small charts in SVG, one per family of metrics and phase.
// Metrics that belong on one chart; every other name is charted with those of the same prefix, or alone.
const FAMILIES = [
  ['Held-out exact match', /^em(\/|_|$)/, 'share'],
  ['Reward', /^reward(\/|_|$)/],
  ['Usable proposals and groups', /^(valid_rate|informative_share)$/, 'share'],
  ['Solves per question', /^k_histogram\//, 'stack'],
  ['Left out, by reason', /^drop\//, 'stack'],
];
const COLUMNS = 360; // a longer run is averaged into so many columns per chart

function families() {
  const found = new Map(FAMILIES.map(([title, , kind]) => [title, { title, kind, names: new Map() }]));
  for (const row of run.metrics) {
    for (const name of Object.keys(row)) {
      if (['step', 'iteration', 'phase'].includes(name) || !isNumber(row[name])) continue;
      const title = FAMILIES.find(([, pattern]) => pattern.test(name))?.[0] ?? human(name.split('/')[0]);
      if (!found.has(title)) found.set(title, { title, names: new Map() });
      const { names } = found.get(title);
      names.set(name, (names.get(name) ?? new Set()).add(row.phase));
    }
  }
  return [...found.values()].filter(({ names }) => names.size);
}

// One chart per family and phase; a lone metric keeps all its phases on one chart, told apart by colour.
function cards({ title, kind, names }) {
  const phases = [...new Set([...names.values()].flatMap((set) => [...set]))];
  if (names.size === 1 && kind !== 'stack') {
    const [name] = names.keys();
    return [
      {
        title,
        kind,
        phases,
        series: phases.map((phase) => ({ name, phase, label: phase, hue: phaseHue(phase) })),
      },
    ];
  }
  return phases.map((phase) => {
    const own = [...names.keys()]
      .filter((name) => names.get(name).has(phase))
      .sort((a, b) => a.localeCompare(b, 'en', { numeric: true }));
    const part = (i) => Math.round(20 + (80 * i) / Math.max(1, own.length - 1));
    const ramp = (i) => `color-mix(in oklab, var(--solver) ${part(i)}%, var(--card))`;
    const ordered = own.every((name) => /\/\d+$/.test(name)); // counts 0, 1, 2, …: one hue from pale to full
    const series = own.map((name, i) => ({
      name,
      phase,
      label: human(name.includes('/') ? name.slice(name.indexOf('/') + 1) : name),
      hue: kind === 'stack' && ordered ? ramp(i) : `var(--c${i % 8})`,
    }));
    return { title: phases.length > 1 ? `${title} · ${phase}` : title, kind, phases: [phase], series };
  });
}

// Columns (consecutive steps of one phase and iteration) and, aligned with them, the values of every series.
function tabulate(card) {
  const rows = run.metrics.filter((row) =>
    card.series.some(({ name, phase }) => phase === row.phase && isNumber(row[name])),
  );
  const width = Math.ceil(rows.length / COLUMNS);
  const columns = [];
  for (const row of rows) {
    const last = columns.at(-1);
    if (last && last.rows.length < width && last.phase === row.phase && last.iteration === row.iteration)
      last.rows.push(row);
    else columns.push({ phase: row.phase, iteration: row.iteration, rows: [row] });
  }
  const mean = (values) => (values.length ? values.reduce((a, b) => a + b, 0) / values.length : null);
  for (const series of card.series) {
    series.values = columns.map((column) =>
      column.phase === series.phase
        ? mean(column.rows.map((row) => row[series.name]).filter(isNumber))
        : null,
    );
  }
  card.columns = columns;
  return card;
}

function scale(card) {
  const tops =
    card.kind === 'stack'
      ? card.columns.map((_, c) => card.series.reduce((sum, { values }) => sum + (values[c] ?? 0), 0))
      : card.series.flatMap(({ values }) => values.filter(isNumber));
  let [low, high] = [Math.min(...tops), Math.max(...tops)];
  if (card.kind === 'share') [low, high] = [0, 1];
  else if (card.kind === 'stack' || (low >= 0 && low < 0.6 * high)) low = 0;
  if (high <= low) [low, high] = low === 0 ? [0, 1] : [low - Math.abs(low) / 2, low + Math.abs(low) / 2];
  const rough = (high - low) / 3;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((m) => m * power >= rough * 0.999);
  [low, high] = [Math.floor(low / step + 1e-9) * step, Math.ceil(high / step - 1e-9) * step];
  const ticks = Array.from({ length: Math.round((high - low) / step) + 1 }, (_, i) => low + i * step);
  return { low, high, ticks: ticks.map((tick) => Number(tick.toPrecision(12))) };
}

function drawChart(card, width) {
  const { columns, series } = card;
  const { low, high, ticks } = scale(card);
  const labels = ticks.map(format);
  const left = 10 + 6.4 * Math.max(...labels.map((text) => text.length));
  const box = { left, right: width - 6, top: 14, bottom: 150, slot: (width - 6 - left) / columns.length };
  const x = (c) => box.left + (c + 0.5) * box.slot;
  const y = (value) => box.bottom - ((box.bottom - box.top) * (value - low)) / (high - low);
  const grid = ticks.flatMap((tick, i) => [
    svg('line', { class: 'grid', x1: box.left, x2: box.right, y1: y(tick), y2: y(tick) }),
    svg('text', { class: 'axis', x: box.left - 6, y: y(tick) + 4, 'text-anchor': 'end' }, labels[i]),
  ]);
  const ends = series.map(({ label, values }) => {
    return `${label} ${format(values.find(isNumber))} to ${format(values.findLast(isNumber))}`;
  });
  const name = `${card.title}: ${ends.join(', ')}`;
  const picture = svg(
    'svg',
    { viewBox: `0 0 ${width} 170`, height: 170, role: 'img', tabindex: 0, 'aria-label': name },
    ...bands(columns, box, x),
    ...grid,
    ...(card.kind === 'stack'
      ? bars(card, x, y, box.slot)
      : series.flatMap((one) => line(one, columns, x, y))),
  );
  card.node.querySelector('svg')?.remove();
  card.node.querySelector('.heading').after(picture);
  addCursor(card, picture, box, x, width);
}

// A band per phase and iteration, with the step it starts at; few columns each tell their own step.
function bands(columns, box, x) {
  const stamp = (at, { rows }, anchor) => {
    const place = { x: at.toFixed(1), y: box.bottom + 15, 'text-anchor': anchor };
    return svg('text', { class: 'axis', ...place }, format(rows[0].step));
  };
  const nodes = columns.length <= 8 ? columns.map((column, c) => stamp(x(c), column, 'middle')) : [];
  let from = 0;
  columns.forEach(({ phase, iteration }, c) => {
    const next = columns[c + 1];
    if (next && next.phase === phase && next.iteration === iteration) return;
    const [left, span] = [box.left + from * box.slot, (c + 1 - from) * box.slot];
    const width = Math.max(1, span - (next ? 1.5 : 0)).toFixed(1);
    const place = { x: left.toFixed(1), width, hue: phaseHue(phase) };
    nodes.push(
      svg('rect', { class: 'shade', y: box.top, height: box.bottom - box.top, ...place }),
      svg('rect', { class: 'band', y: box.top - 8, height: 4, ...place }),
    );
    if (columns.length > 8 && (span > 26 || from === 0)) nodes.push(stamp(left, columns[from], 'start'));
    from = c + 1;
  });
  return nodes;
}

// Pointer or arrow keys choose a column; heading and legend tell its step and values, at rest the last ones.
function addCursor({ columns, series, at: heading }, picture, box, x, width) {
  const mark = svg('line', { class: 'cursor', y1: box.top, y2: box.bottom, visibility: 'hidden' });
  picture.append(mark);
  const end = columns.length - 1;
  let at = end;
  const show = (c, visible = true) => {
    at = Math.max(0, Math.min(end, c));
    const { rows, iteration } = columns[at];
    const steps = rows.length > 1 ? `steps ${rows[0].step}–${rows.at(-1).step}` : `step ${rows[0].step}`;
    heading.textContent = isNumber(iteration) ? `${steps}, iteration ${iteration}` : steps;
    mark.setAttribute('visibility', visible ? 'visible' : 'hidden');
    mark.setAttribute('x1', x(at));
    mark.setAttribute('x2', x(at));
    // the nearest earlier value: a series need not have one in every column
    for (const { values, readout } of series) {
      readout.textContent = format(values.slice(0, at + 1).findLast(isNumber));
    }
  };
  picture.addEventListener('pointermove', (event) => {
    const place = picture.getBoundingClientRect();
    show(Math.floor((((event.clientX - place.left) * width) / place.width - box.left) / box.slot));
  });
  picture.addEventListener('keydown', (event) => {
    const target = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: end }[event.key];
    if (target === undefined) return;
    event.preventDefault();
    show(target);
  });
  for (const name of ['pointerleave', 'blur']) picture.addEventListener(name, () => show(end, false));
  show(end, false);
}

function line({ values, hue }, columns, x, y) {
  const nodes = [];
  let previous = null;
  values.forEach((value, c) => {
    if (!isNumber(value)) return;
    const joined =
      previous !== null &&
      (columns[c].phase === 'evaluation' || columns[c].iteration === columns[previous].iteration);
    const point = `${x(c).toFixed(1)},${y(value).toFixed(1)}`;
    if (joined) nodes.at(-1).push(point);
    else {
      if (previous !== null)
        nodes.push({ bridge: `${x(previous).toFixed(1)},${y(values[previous]).toFixed(1)} ${point}` });
      nodes.push([point]);
    }
    previous = c;
  });
  const few = columns.length <= 24;
  return nodes.flatMap((part) => {
    if (part.bridge) return [svg('polyline', { class: 'bridge', points: part.bridge, hue })];
    const marks =
      few || part.length === 1
        ? part.map((point) =>
            svg('circle', { class: 'mark', cx: point.split(',')[0], cy: point.split(',')[1], r: 2.6, hue }),
          )
        : [];
    return [svg('polyline', { class: 'curve', points: part.join(' '), hue }), ...marks];
  });
}

function bars({ columns, series }, x, y, slot) {
  return columns.flatMap((_, c) => {
    let sum = 0;
    return series
      .map(({ values, hue }) => {
        const [base, top] = [y(sum), y((sum += values[c] ?? 0))];
        const width = Math.max(0.6, slot - (slot > 5 ? 1.5 : 0));
        return base - top < 0.05
          ? null
          : svg('rect', {
              class: 'bar',
              x: (x(c) - width / 2).toFixed(1),
              width: width.toFixed(1),
              y: top.toFixed(1),
              height: (base - top).toFixed(1),
              hue,
            });
      })
      .filter(Boolean);
  });
}

function drawCurves() {
  const all = families().flatMap(cards).map(tabulate);
  for (const card of all) {
    card.at = el('span', { class: 'at' });
    const legend = el('p', { class: 'legend' });
    for (const one of card.series) {
      one.readout = el('b');
      legend.append(
        el('span', { hue: one.hue }, el('span', { class: 'swatch' }), `${one.label} `, one.readout),
      );
    }
    card.node = el(
      'figure',
      { class: 'card chart' },
      el(
        'div',
        { class: 'heading' },
        el('h3', {}, card.title[0].toUpperCase() + card.title.slice(1)),
        card.at,
      ),
      legend,
    );
    card.node.style.margin = 0;
    $('charts').append(card.node);
  }
  const seen = new Set(run.metrics.map((row) => row.phase));
  $('phases').append(
    ...[...seen].map((phase) =>
      el('span', { hue: phaseHue(phase) }, el('span', { class: 'swatch' }), `${phase} phase`),
    ),
  );
  if (!all.length) $('charts').append(el('p', { class: 'muted' }, 'No metrics were written yet.'));
  let drawn = 0;
  const draw = () => {
    const width = Math.max(240, (all[0]?.node.clientWidth ?? 0) - 32);
    if (width !== drawn) all.forEach((card) => drawChart(card, width));
    drawn = width;
  };
  draw();
  addEventListener('resize', draw);
}

drawCurves();
