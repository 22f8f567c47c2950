// One held-out question, as it was answered before and after training; with several runs, by each at its end.
const MAX_SIDES = 4;

// Question → its first rollout in the evaluation of a step.
function answersOf(run, step) {
  const answers = new Map();
  for (const row of run.trajectories) {
    if (isEvaluation(row) && row.step === step && !answers.has(row.info.question)) answers.set(row.info.question, row);
  }
  return answers;
}

// Columns of the comparison: {label, answers}.
function sidesOfPairs() {
  const sides = [];
  for (const run of runs.slice(0, MAX_SIDES)) {
    const steps = run.trajectories.filter(isEvaluation).map(({ step }) => step);
    const [first, last] = [Math.min(...steps), Math.max(...steps)];
    if (!steps.length) continue;
    const ends = comparing ? [[run.name, last]] : [['Before', first], ['After', last]];
    for (const [label, step] of ends)
      sides.push({ label: `${label}, step ${step}`, step, answers: answersOf(run, step) });
  }
  const isPaired = sides.length > 1 && (comparing || sides[0].step < sides[1].step);
  return isPaired ? sides : [];
}

const OUTCOMES = ['Better', 'Worse', 'Equal, right', 'Equal'];

// Compares the last column with the first.
function outcomeOf(rows) {
  const [first, last] = [rows[0].reward, rows.at(-1).reward];
  if (last !== first) return last > first ? 'Better' : 'Worse';
  return last === 1 ? 'Equal, right' : 'Equal';
}

// A call and what it brought, on a line each. A call that repeats the one before it is counted there.
function lookups(row) {
  const results = segmentsOf(row).filter(({ source }) => source === 'env');
  const lines = [];
  row.turns.filter(Boolean).forEach(({ tool, arguments: values, error, documents }, i) => {
    const asked = Object.values(values ?? {}).flat().map(asText).join('; ');
    const titles = documents.map(([title]) => title).join(', ');
    const outcome = error ? `error: ${asText(error)}` : titles || 'no documents';
    const key = JSON.stringify([tool, asked, outcome]);
    if (lines.at(-1)?.key === key) lines.at(-1).times += 1;
    else lines.push({ key, tool, asked, outcome, result: results[i]?.text, times: 1 });
  });
  return lines.map(({ tool, asked, outcome, result, times }) =>
    el(
      'li',
      {},
      `${tool} `,
      el('b', {}, asked),
      times > 1 ? el('span', { class: 'muted' }, ` ${times} times`) : null,
      result ? passages(outcome, result) : el('p', { class: 'muted' }, outcome),
    ),
  );
}

function pairSide(label, row) {
  const given = row.info.answer_given ?? 'no answer';
  const verdict = row.reward === 1 ? 'right' : row.reward === 0 ? 'wrong' : `reward ${format(row.reward)}`;
  const show = () => {
    open(trajectories.indexOf(row));
    goTo('trajectories');
  };
  return el(
    'div',
    { class: 'card pair' },
    el('h3', { colour: row.run.colour }, comparing ? swatch(row.run.colour, label) : label),
    el('ol', {}, ...lookups(row)),
    el('p', { class: `verdict ${verdict}` }, el('b', {}, asText(given)), ` ${verdict}`),
    el('button', { type: 'button', onclick: show }, 'Whole rollout'),
  );
}

function drawPairs() {
  const sides = sidesOfPairs();
  const isShared = (question) => sides.every(({ answers }) => answers.has(question));
  const questions = [...(sides[0]?.answers.keys() ?? [])].filter(isShared);
  const rowsOf = (question) => sides.map(({ answers }) => answers.get(question));
  if (!questions.length) {
    for (const node of [$('pairs'), document.querySelector('nav a[href="#pairs"]')]) node.hidden = true;
    return;
  }
  const choice = $('pair');
  const hopsOf = (question) => rowsOf(question)[0].info.hops;
  // Within an outcome, what the start was not shown comes first.
  const wasShown = (question) => Number(demonstrated(runs[0], hopsOf(question)) !== null);
  questions.sort((a, b) => wasShown(a) - wasShown(b));
  const membersOf = (name) => questions.filter((question) => outcomeOf(rowsOf(question)) === name);
  const outcomes = new Map(OUTCOMES.map((name) => [name, membersOf(name)]));
  for (const [name, members] of outcomes) {
    const options = members.map((question) => {
      const hops = hopsOf(question);
      return el('option', { value: question }, isNumber(hops) ? `${count(hops, 'hop')}: ${question}` : question);
    });
    if (options.length) choice.append(el('optgroup', { label: `${name} (${options.length})` }, ...options));
  }
  const [better, worse] = OUTCOMES.map((name) => outcomes.get(name).length);
  // Open tasks are in the log too, and not among the questions by hop.
  const total = runs[0].summary.rubrics ? 0 : sum(Object.values(runs[0].summary.questions_by_hop ?? {}));
  const logged = total ? `${questions.length} of ${count(total, 'held-out question')}` : count(questions.length, 'question');
  $('pair-count').textContent = `Rollouts of ${logged} are in the log: ${better} better, ${worse} worse`;
  const draw = () => {
    const rows = rowsOf(choice.value);
    const answers = [rows[0].info.answers ?? rows[0].info.answer ?? []].flat().join('  |  ');
    $('pair-answer').textContent = answers ? `Reference answer: ${answers}` : '';
    $('pair-question').textContent = choice.value;
    $('pair-sides').replaceChildren(...rows.map((row, i) => pairSide(sides[i].label, row)));
    $('pair-previous').disabled = choice.selectedIndex === 0;
    $('pair-next').disabled = choice.selectedIndex + 1 === choice.length;
  };
  const step = (by) => {
    choice.selectedIndex += by;
    draw();
  };
  choice.addEventListener('change', draw);
  $('pair-previous').addEventListener('click', () => step(-1));
  $('pair-next').addEventListener('click', () => step(1));
  draw();
}

drawPairs();
