// Charts: preparation of the data and the options of uPlot. A card has a title, a kind ('', 'share' or 'stack') and
// series of {run, name, phase, label, colour}.
const MAX_COLUMNS = 360; // the steps of longer runs are averaged into at most so many columns
const CHART_HEIGHT = 176;
const MAX_BAR = 36; // pixels
const MAX_STRETCHES = 200; // shaded stretches of one phase
const STEP_INCREMENTS = [0, 1, 2, 3, 4, 5, 6].flatMap((power) => [1, 2, 5].map((m) => m * 10 ** power));
const plots = []; // all drawn charts

// A number, null for a logged value that is not finite, or undefined for a metric that was not logged.
function loggedValue(row, { name, absentIsZero }) {
  if (isNumber(row[name])) return row[name];
  if (absentIsZero) return 0;
  return name in row ? null : undefined;
}

function columnValue(values) {
  const numbers = values.filter(isNumber);
  if (numbers.length) return mean(numbers);
  return values.includes(null) ? null : undefined;
}

// The first row of every step, and stretches of consecutive steps of one phase: {phase, iteration, from, to}.
const firstRows = new Map();
for (const row of runs.flatMap((run) => run.metrics)) if (!firstRows.has(row.step)) firstRows.set(row.step, row);
const allSteps = [...firstRows.keys()].sort((a, b) => a - b);
const stretches = [];
for (const step of allSteps) {
  const { phase, iteration } = firstRows.get(step);
  const last = stretches.at(-1);
  if (last?.phase === phase && last.iteration === iteration) last.to = step;
  else stretches.push({ phase, iteration, from: step, to: step });
}

// Adds columns to a card (a step, or consecutive steps of one phase and iteration) and to each series its value per
// column. uPlot draws a gap at null and continues the line over undefined.
function tabulate(card) {
  const rowOfStep = new Map(); // of the first run that has the step
  for (const series of card.series) {
    series.valueOfStep = new Map();
    for (const row of series.run.metrics) {
      if (row.phase !== series.phase) continue;
      const value = loggedValue(row, series);
      if (value === undefined) continue;
      series.valueOfStep.set(row.step, value);
      if (!rowOfStep.has(row.step)) rowOfStep.set(row.step, row);
    }
  }
  const steps = [...rowOfStep.keys()].sort((a, b) => a - b);
  const width = Math.ceil(steps.length / (card.columns ?? MAX_COLUMNS));
  const columns = [];
  for (const step of steps) {
    const { phase, iteration } = rowOfStep.get(step);
    const last = columns.at(-1);
    if (last && last.steps.length < width && last.phase === phase && last.iteration === iteration)
      last.steps.push(step);
    else columns.push({ phase, iteration, steps: [step] });
  }
  for (const series of card.series)
    series.values = columns.map((column) =>
      columnValue(column.steps.map((step) => series.valueOfStep.get(step))),
    );
  return { ...card, columns };
}

// The data of uPlot: steps, then the values of each series; in a stack each series lies on the ones before it.
function plotData({ kind, columns, series }) {
  const steps = columns.map((column) => mean(column.steps));
  if (kind !== 'stack') return [steps, ...series.map(({ values }) => values)];
  const tops = columns.map(() => 0);
  const stacked = series.map(({ values }) => columns.map((_, c) => (tops[c] += values[c] ?? 0)));
  return [steps, ...stacked];
}

// The steps of the runs are the axis of every chart, so that neighbours agree. The margin keeps points and bars whole.
function stepRange() {
  const [first, last] = [allSteps[0] ?? 0, allSteps.at(-1) ?? 0];
  const margin = Math.max(0.5, 0.02 * (last - first));
  return [first - margin, last + margin];
}

// Only charts of details zoom in on values far from 0.
function valueRange(kind, group, low, high) {
  if (kind === 'share' || !Number.isFinite(low)) return [0, 1];
  if (kind === 'stack') return [0, high > 0 ? high : 1];
  const isDetail = FOLDED.includes(group);
  if (low < 0 || (isDetail && low >= 0.6 * high)) return uPlot.rangeNum(low, high, 0.1, true);
  return [0, uPlot.rangeNum(0, high, 0.05, true)[1]];
}

// Charts of one family have one axis of values.
function shareRanges(cards) {
  const rangeOf = new Map();
  for (const card of cards) {
    const key = `${card.base}/${card.kind}/${card.group}`;
    if (!rangeOf.has(key)) rangeOf.set(key, [Infinity, -Infinity]);
    card.range = rangeOf.get(key);
    for (const value of plotData(card).slice(1).flat()) {
      if (!isNumber(value)) continue;
      card.range[0] = Math.min(card.range[0], value);
      card.range[1] = Math.max(card.range[1], value);
    }
  }
}

// The canvas needs resolved colours: it knows neither var() nor light-dark().
const colourProbe = document.body.appendChild(el('span', { hidden: '' }));
function resolved(colour) {
  colourProbe.style.color = colour;
  return getComputedStyle(colourProbe).color;
}

// Where a series pauses while other phases go on: pairs of logged columns, more than twice the usual distance apart.
function pausesOf(values, steps) {
  const logged = values.flatMap((value, c) => (value === undefined ? [] : [c]));
  const pairs = logged.slice(1).map((c, i) => [logged[i], c]);
  const distance = ([a, b]) => steps[b] - steps[a];
  const sorted = pairs.map(distance).sort((a, b) => a - b);
  const usual = sorted[sorted.length >> 1];
  return pairs.filter((pair) => distance(pair) > 2 * usual);
}

// A point between two gaps has no line; without this it would be invisible in a dense chart.
function isolatedPoints(values, pauses) {
  const logged = values.flatMap((value, c) => (value === undefined ? [] : [c]));
  const ends = new Set(pauses.map(([a]) => a));
  const isJoined = (a, b) => isNumber(values[a]) && isNumber(values[b]) && !ends.has(a);
  return logged.filter(
    (c, i) => isNumber(values[c]) && !isJoined(logged[i - 1], c) && !isJoined(c, logged[i + 1]),
  );
}

function seriesOptions({ label, values, colour }, kind, steps) {
  const stroke = () => resolved(colour);
  // The cursor's index is null while no column is chosen: then the legend shows the last value.
  const value = (_, __, ___, index) => format(index === null ? values.findLast(isNumber) : values[index]);
  if (kind === 'stack') {
    const paths = uPlot.paths.bars({ size: [0.85, MAX_BAR] });
    return { label, value, fill: stroke, stroke, width: 0, paths, points: { show: false } };
  }
  const pauses = pausesOf(values, steps);
  const isolated = isolatedPoints(values, pauses);
  const filter = (_, __, show) => (show ? null : isolated);
  const gaps = (plot, _, __, ___, others) => {
    const positions = pauses.map((pair) => pair.map((c) => plot.valToPos(steps[c], 'x', true)));
    return [...others, ...positions].sort(([a], [b]) => a - b);
  };
  // An odd or fractional width would shift the line against its points by part of a pixel.
  return { label, value, stroke, width: 2, gaps, points: { size: 5, fill: stroke, stroke, width: 0, filter } };
}

// Shades the steps in which the phases of a card ran, with a strip of all phases on top. Runs have phases of their own.
function drawIterations(plot, { series }) {
  if (comparing || stretches.length > MAX_STRETCHES) return;
  const { ctx } = plot;
  const { left, top, width, height } = plot.bbox;
  const position = (step) => Math.min(left + width, Math.max(left, plot.valToPos(step, 'x', true)));
  const strip = 3 * devicePixelRatio;
  const shown = new Set(series.map(({ phase }) => phase));
  ctx.save();
  stretches.forEach(({ phase, from, to }, i) => {
    const [start, end] = [
      i ? position((stretches[i - 1].to + from) / 2) : left,
      i + 1 < stretches.length ? position((to + stretches[i + 1].from) / 2) - devicePixelRatio : left + width,
    ];
    ctx.fillStyle = resolved(phaseColour(phase));
    ctx.globalAlpha = 0.07;
    if (shown.has(phase)) ctx.fillRect(start, top, end - start, height);
    ctx.globalAlpha = shown.has(phase) ? 0.9 : 0.3;
    ctx.fillRect(start, top - 2 * strip, end - start, strip);
  });
  ctx.restore();
}

function columnTitle({ steps, iteration }) {
  const range = steps.length > 1 ? `steps ${steps[0]}–${steps.at(-1)}` : `step ${steps[0]}`;
  return isNumber(iteration) ? `${range}, iteration ${iteration + 1}` : range;
}

function plotOptions(card, width) {
  const { kind, group, columns, series } = card;
  const steps = plotData(card)[0];
  const axis = {
    font: '11px system-ui, sans-serif',
    stroke: () => resolved('var(--muted)'),
    grid: { stroke: () => resolved('var(--line)'), width: 1 },
    ticks: { show: false },
  };
  const colour = (_, i) => series[i - 1].colour;
  return {
    width,
    height: CHART_HEIGHT,
    padding: [12, 8, 0, 0],
    scales: {
      x: { time: false, range: stepRange },
      y: { range: () => valueRange(kind, group, ...card.range) },
    },
    axes: [
      { ...axis, grid: { show: false }, incrs: STEP_INCREMENTS, size: 24, gap: 4 },
      {
        ...axis,
        space: 36,
        gap: 4,
        size: (_, labels) => 10 + 6.4 * Math.max(1, ...(labels ?? []).map((label) => label.length)),
        values: (_, ticks) => ticks.map((tick) => format(Number(tick.toPrecision(12)))),
      },
    ],
    series: [{}, ...series.map((one) => seriesOptions(one, kind, steps))],
    bands: kind === 'stack' ? series.slice(1).map((_, i) => ({ series: [i + 2, i + 1] })) : [],
    cursor: {
      y: false,
      drag: { x: false, y: false },
      hover: { bias: -1, skip: [null] }, // a series need not have a value in each column: the nearest earlier one
      points: { show: kind !== 'stack', size: 8, fill: colour, stroke: colour },
    },
    legend: {
      mount: (_, table) => card.legend.replaceChildren(table),
      markers: { width: 0, fill: colour },
    },
    hooks: {
      drawClear: [(plot) => drawIterations(plot, card)],
      setLegend: [({ legend }) => (card.heading.textContent = columnTitle(columns.at(legend.idx ?? -1)))],
    },
  };
}

// Arrow keys choose a column, as the pointer does.
function moveCursor(event, plot) {
  const steps = plot.data[0];
  const end = steps.length - 1;
  const index = plot.cursor.idx ?? end;
  const target = { ArrowLeft: index - 1, ArrowRight: index + 1, Home: 0, End: end }[event.key];
  if (target === undefined) return;
  event.preventDefault();
  const step = steps[Math.max(0, Math.min(end, target))];
  plot.setCursor({ left: plot.valToPos(step, 'x'), top: 0 });
}

// Draws a card at a width, or fits its chart to a new width.
function drawChart(card, width) {
  if (card.plot) {
    card.plot.setSize({ width, height: CHART_HEIGHT });
    return;
  }
  const summaries = card.series.map(({ label, values }) => {
    const [first, last] = [values.find(isNumber), values.findLast(isNumber)];
    return `${label} ${format(first)} to ${format(last)}`;
  });
  card.frame.setAttribute('aria-label', `${card.title}: ${summaries.join(', ')}`);
  card.plot = new uPlot(plotOptions(card, width), plotData(card), card.frame);
  card.plot.setCursor({ left: -10, top: -10 });
  const [, ...legendRows] = card.legend.querySelectorAll('tr');
  legendRows.forEach((row, i) => (row.title = card.series[i].help ?? ''));
  card.frame.addEventListener('keydown', (event) => moveCursor(event, card.plot));
  card.frame.addEventListener('blur', () => card.plot.setCursor({ left: -10, top: -10 }));
  plots.push(card.plot);
}

// A canvas keeps the colours it was drawn with.
function redrawCharts() {
  for (const plot of plots) plot.redraw();
}
$('theme').addEventListener('click', redrawCharts);
darkScheme.addEventListener('change', redrawCharts);

let schemeOnScreen = '';
addEventListener('beforeprint', () => {
  schemeOnScreen = document.documentElement.style.colorScheme;
  document.documentElement.style.colorScheme = 'light';
  redrawCharts();
});
addEventListener('afterprint', () => {
  document.documentElement.style.colorScheme = schemeOnScreen;
  redrawCharts();
});
