// One chart: small, in SVG, with a cursor for pointer and arrow keys.
// A card has a title, a kind ('', 'share' or 'stack') and series of {run, name, phase, label, hue}.
const COLUMNS = 360; // a longer run is averaged into so many columns per chart

// Columns (a step, or consecutive ones of a phase and iteration) and, aligned with them, the values of every series.
function tabulate(card) {
  const places = new Map(); // step → its row, of the first run that has it
  for (const series of card.series) {
    series.rows = new Map();
    for (const row of series.run.metrics) {
      if (row.phase !== series.phase) continue;
      const value = isNumber(row[series.name]) ? row[series.name] : series.zero ? 0 : null;
      if (value === null) continue;
      series.rows.set(row.step, value);
      if (!places.has(row.step)) places.set(row.step, row);
    }
  }
  const steps = [...places.keys()].sort((a, b) => a - b);
  const width = Math.ceil(steps.length / (card.columns ?? COLUMNS));
  const columns = [];
  for (const step of steps) {
    const { phase, iteration } = places.get(step);
    const last = columns.at(-1);
    if (last && last.steps.length < width && last.phase === phase && last.iteration === iteration)
      last.steps.push(step);
    else columns.push({ phase, iteration, steps: [step] });
  }
  for (const series of card.series) {
    series.values = columns.map(({ steps: own }) =>
      mean(own.map((step) => series.rows.get(step)).filter(isNumber)),
    );
  }
  return { ...card, columns };
}

function scale({ kind, columns, series }) {
  const tops =
    kind === 'stack'
      ? columns.map((_, c) => sum(series.map(({ values }) => values[c] ?? 0)))
      : series.flatMap(({ values }) => values.filter(isNumber));
  let [low, high] = [Math.min(...tops), Math.max(...tops)];
  if (kind === 'share') [low, high] = [0, 1];
  else if (kind === 'stack' || (low >= 0 && low < 0.6 * high)) low = 0;
  if (high <= low) [low, high] = low === 0 ? [0, 1] : [low - Math.abs(low) / 2, low + Math.abs(low) / 2];
  const rough = (high - low) / 3;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((m) => m * power >= rough * 0.999);
  [low, high] = [Math.floor(low / step + 1e-9) * step, Math.ceil(high / step - 1e-9) * step];
  if (kind === 'share') high = Math.min(high, 1);
  const ticks = Array.from({ length: Math.floor((high - low) / step + 1e-9) + 1 }, (_, i) => low + i * step);
  return { low, high, ticks: ticks.map((tick) => Number(tick.toPrecision(12))) };
}

function drawChart(card, width) {
  const { columns, series, kind } = card;
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
  const ends = series.map(
    ({ label, values }) =>
      `${label} ${format(values.find(isNumber))} to ${format(values.findLast(isNumber))}`,
  );
  const picture = svg(
    'svg',
    {
      viewBox: `0 0 ${width} 170`,
      height: 170,
      role: 'img',
      tabindex: 0,
      'aria-label': `${card.title}: ${ends.join(', ')}`,
    },
    bands(columns, box, x),
    grid,
    kind === 'stack' ? bars(card, x, y, box.slot) : series.map((one) => line(one, columns, x, y)).flat(),
  );
  card.node.querySelector('svg')?.remove();
  card.node.querySelector('.legend').before(picture);
  addCursor(card, picture, box, x, width);
}

// A band per phase and iteration, with the step it starts at; few columns each tell their own step.
function bands(columns, box, x) {
  const stamp = (at, { steps }, anchor) => {
    const place = { x: at.toFixed(1), y: box.bottom + 15, 'text-anchor': anchor };
    return svg('text', { class: 'axis', ...place }, format(steps[0]));
  };
  const nodes = columns.length <= 8 ? columns.map((column, c) => stamp(x(c), column, 'middle')) : [];
  let from = 0;
  columns.forEach(({ phase, iteration }, c) => {
    const next = columns[c + 1];
    if (next && next.phase === phase && next.iteration === iteration) return;
    const [left, span] = [box.left + from * box.slot, (c + 1 - from) * box.slot];
    const width = Math.max(1, span - (next ? 1.5 : 0)).toFixed(1);
    const place = { x: left.toFixed(1), width, hue: many ? 'var(--muted)' : phaseHue(phase) };
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
    const { steps, iteration } = columns[at];
    const when = steps.length > 1 ? `steps ${steps[0]}–${steps.at(-1)}` : `step ${steps[0]}`;
    heading.textContent = isNumber(iteration) ? `${when}, iteration ${iteration}` : when;
    mark.setAttribute('visibility', visible ? 'visible' : 'hidden');
    mark.setAttribute('x1', x(at));
    mark.setAttribute('x2', x(at));
    // the nearest earlier value: a series need not have one in every column
    for (const { values, readout } of series)
      readout.textContent = format(values.slice(0, at + 1).findLast(isNumber));
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

// Strokes of one phase and iteration, joined over the pauses by a dotted bridge.
function line({ values, hue }, columns, x, y) {
  const strokes = [];
  const bridges = [];
  let previous = null;
  values.forEach((value, c) => {
    if (!isNumber(value)) return;
    const point = [x(c).toFixed(1), y(value).toFixed(1)];
    const joined =
      previous !== null &&
      (columns[c].phase === 'evaluation' || columns[c].iteration === columns[previous].iteration);
    if (joined) strokes.at(-1).push(point);
    else {
      if (previous !== null) bridges.push([strokes.at(-1).at(-1), point]);
      strokes.push([point]);
    }
    previous = c;
  });
  const path = (points, kind) => svg('polyline', { class: kind, points: points.join(' '), hue });
  const dotted = columns.length <= 24 ? strokes.flat() : strokes.filter(({ length }) => length === 1).flat();
  return [
    bridges.map((points) => path(points, 'bridge')),
    strokes.map((points) => path(points, 'curve')),
    dotted.map(([cx, cy]) => svg('circle', { class: 'mark', cx, cy, r: 2.6, hue })),
  ].flat();
}

function bars({ columns, series }, x, y, slot) {
  const width = Math.max(0.6, slot - (slot > 5 ? 1.5 : 0));
  return columns.flatMap((_, c) => {
    let height = 0;
    return series.flatMap(({ values, hue }) => {
      const [base, top] = [y(height), y((height += values[c] ?? 0))];
      if (base - top < 0.05) return [];
      const place = { x: (x(c) - width / 2).toFixed(1), y: top.toFixed(1) };
      return [
        svg('rect', {
          class: 'bar',
          ...place,
          width: width.toFixed(1),
          height: (base - top).toFixed(1),
          hue,
        }),
      ];
    });
  });
}
