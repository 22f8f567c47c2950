// What the names in metrics.jsonl mean. A name that is not here gets a chart under "Other", in its own words.
const MAIN = 'main'; // always in view
const QUESTIONS = 'questions'; // in the section of that name
const [PROPOSALS, LEARNING, GROUPS, TEXT, SPEED, DETAIL, OTHER] = [
  'Proposals and the question pool',
  'Learning',
  'Groups and advantages',
  'Lengths and tools',
  'Speed',
  'Parts and hop counts',
  'Other',
];
const FEW = 12; // columns of charts by hops: a step logs only a handful of rollouts per hop count
const FOLDED = [DETAIL, PROPOSALS, LEARNING, GROUPS, TEXT, SPEED, OTHER];

// Metrics that share a chart per phase. kind: share (axis from 0 to 1), stack (parts of a whole); lead: the one
// that stays in view when runs are compared; columns: so many at most, steps are averaged.
const FAMILIES = [
  {
    title: 'Held-out exact match',
    group: MAIN,
    names: /^em\//,
    kind: 'share',
    lead: 'em/mean',
    about: 'Share of held-out questions answered exactly, decoded greedily, by hops.',
  },
  {
    title: 'Reward',
    group: MAIN,
    names: /^reward(_mean$|\/(?!format_))/,
    lead: 'reward_mean',
    about: 'Mean over the rollouts of a step, and its parts.',
  },
  {
    title: 'Solves per question',
    group: MAIN,
    names: /^k_histogram\//,
    kind: 'stack',
    about: 'How many solver tries got a proposed question right: never is too hard, always too easy.',
  },
  {
    title: 'Form of proposals',
    group: PROPOSALS,
    names: /^reward\/format_/,
    kind: 'share',
    about: 'Scores of the proposer’s form: thoughts, searches, question with answer, and all of it.',
  },
  {
    title: 'Rejected proposals',
    group: PROPOSALS,
    names: /^rejected\//,
    kind: 'stack',
    about: 'Share of proposals that cannot be asked, by reason.',
  },
  {
    title: 'Left out of the pool',
    group: PROPOSALS,
    names: /^drop\//,
    kind: 'stack',
    about: 'Items that gave no question, counted since the pool was last emptied, by reason.',
  },
  {
    title: 'Rows left out',
    group: GROUPS,
    names: /^row_drop\//,
    kind: 'stack',
    about: 'Share of rollouts that were played but must not be trained on, by reason.',
  },
  {
    title: 'Judge calls',
    group: TEXT,
    names: /^judge\//,
    about: 'Per step: asked, without a reply, with a reply that could not be read.',
  },
  {
    title: 'Share of groups by size',
    group: GROUPS,
    names: /^group_size\//,
    kind: 'stack',
    about: 'How many rollouts are compared with one another.',
  },
  {
    title: 'Seconds per step',
    group: SPEED,
    names: /^seconds\//,
    kind: 'stack',
    about: 'Wall time of playing and of learning.',
  },
  {
    title: 'Search time',
    group: SPEED,
    names: /^search_seconds\//,
    about: 'Seconds that a search call takes: median and 95th percentile.',
  },
  {
    title: 'Solves by hops',
    group: QUESTIONS,
    names: /^logged\/solves\//,
    columns: FEW,
    lead: 'logged/solves/all',
    about: 'How many solver tries got a proposed question right; mean of the logged rollouts.',
  },
  {
    title: 'Exact match by hops',
    group: QUESTIONS,
    names: /^logged\/exact_match\//,
    columns: FEW,
    kind: 'share',
    lead: 'logged/exact_match/all',
    about: 'Share of questions answered as the proposer answered them; logged rollouts.',
  },
  {
    title: 'Rubrics met',
    group: MAIN,
    names: /^rubrics\//,
    kind: 'share',
    lead: 'rubrics/mean',
    about: 'Share of the rubrics that answers to the held-out open tasks meet, and of answers without a verdict (0).',
  },
  {
    title: 'Searches by hops',
    group: QUESTIONS,
    names: /^logged\/searches\//,
    columns: FEW,
    lead: 'logged/searches/all',
    about: 'Search calls per rollout, mean of the logged ones.',
  },
];

// name: [group, label, meaning, kind, floor]; changes below the floor are rounding.
const METRICS = {
  valid_rate: [MAIN, 'Valid proposals', 'Share of proposals with a score for form above 0.', 'share'],
  informative_share: [
    MAIN,
    'Groups that teach',
    'Share of groups whose rewards differ; the others have no gradient.',
    'share',
  ],
  dropped_episodes: [
    PROPOSALS,
    'Dropped episodes',
    'Share of items that gave neither rows to learn from nor a question.',
  ],
  pool_size: [PROPOSALS, 'Questions in the pool', 'What the solver phase draws from.'],
  loss: [LEARNING, 'Loss', 'The policy-gradient objective; its level says little, only its gradient counts.'],
  entropy: [LEARNING, 'Entropy', 'Of the next-token distribution, in nats, mean over trained tokens.'],
  gradient_norm: [LEARNING, 'Gradient norm', 'Global norm before clipping.'],
  approx_kl: [
    LEARNING,
    'KL to the behaviour policy',
    'Estimate over trained tokens; about 0 as long as batches are on-policy.',
    '',
    1e-6,
  ],
  kl: [LEARNING, 'KL to the reference', 'Penalty for leaving the initial weights.', '', 1e-9],
  ratio: [
    LEARNING,
    'Importance ratio',
    'Probability of trained tokens now over then; 1 on-policy.',
    '',
    1e-6,
  ],
  prob_gap: [
    LEARNING,
    'Sampler against learner',
    'Difference of the two programs’ probabilities of the same tokens; rounding only.',
    '',
    1e-5,
  ],
  sequence_ratio: [
    LEARNING,
    'Sequence ratio',
    'Importance ratio of whole rollouts, length-normalised; 1 on-policy.',
    '',
    1e-6,
  ],
  distill_divergence: [
    LEARNING,
    'Distance to the teacher',
    'Divergence from the teacher over taught tokens.',
  ],
  clip_share: [LEARNING, 'Clipped tokens', 'Share of trained tokens whose ratio is clipped.'],
  dual_clip_share: [
    LEARNING,
    'Dual-clipped tokens',
    'Share of trained tokens whose loss meets the bound for negative advantages.',
  ],
  skipped_updates: [LEARNING, 'Skipped updates', 'Updates left out because the gradient was not finite.'],
  learning_rate: [LEARNING, 'Learning rate', 'Of the optimiser at this step.'],
  informative_groups: [
    GROUPS,
    'Informative groups',
    'Share of groups with different rewards among valid rows.',
    'share',
  ],
  group_size: [GROUPS, 'Group size', 'Rollouts per group, mean.'],
  singleton_groups: [
    GROUPS,
    'Groups of one',
    'Share of groups in which a row has nothing to be compared with.',
  ],
  invalid_rows: [GROUPS, 'Invalid rows', 'Share of rows that must not be trained on.'],
  'filter/kept': [GROUPS, 'Groups kept', 'Share of groups asked that had something to teach.', 'share'],
  'filter/full': [GROUPS, 'Batch filled', 'Share of the batch that informative groups filled.', 'share'],
  'filter/surplus': [GROUPS, 'Surplus groups', 'Informative groups beyond a full batch.'],
  'filter/age': [GROUPS, 'Age of rollouts', 'Updates between sampling and learning, mean over trained rows.'],
  turns: [TEXT, 'Turns', 'Assistant turns per rollout.'],
  tool_calls: [TEXT, 'Search calls', 'Well-formed calls per rollout.'],
  tool_error_rate: [TEXT, 'Failed calls', 'Share of calls that could not be read or failed.'],
  truncated_rate: [TEXT, 'Cut off', 'Share of rollouts ended by a limit of turns, tokens or context.'],
  policy_tokens: [TEXT, 'Tokens written', 'By the policy, per rollout.'],
  answer_words: [TEXT, 'Words per answer', 'Of the solver.'],
  same_ids_when_rendered_again: [
    TEXT,
    'Survive tokenising again',
    'Share of rollouts whose ids come out the same from their text; the rest would be changed by re-tokenising.',
  ],
  rollouts: [SPEED, 'Rollouts', 'All that was sampled in a step: proposals, attempts, checks and verdicts.'],
  tokens_per_second: [SPEED, 'Tokens per second', 'Sampled tokens over the time of playing.'],
};

const LABELS = {
  'em/mean': 'mean',
  reward_mean: 'mean reward',
  'reward/format': 'form',
  'reward/format_think': 'thoughts',
  'reward/format_tool': 'searches',
  'reward/format_answer': 'question and answer',
  'reward/format_raw': 'all of it',
  'seconds/rollout': 'playing',
  'seconds/update': 'learning',
  'search_seconds/p50': 'median',
  'search_seconds/p95': '95th percentile',
};
const LABEL_RULES = [
  [/^(?:em|logged\/\w+)\/hop(\d+)$/, '$1-hop'],
  [/^logged\/\w+\/all$/, 'all'],
  [/^k_histogram\/(\d+)$/, 'solved $1×'],
  [/^group_size\/(\d+)_up$/, '$1 or more'],
  [/^group_size\/(\d+)_(\d+)$/, '$1 to $2'],
];
// Counters that are only written when something was counted.
const ABSENT_IS_ZERO = /^(k_histogram|rejected|drop|row_drop|judge)\//;

// A step that trains several roles writes their metrics as role/name: [name, role].
const ROLES = new Set(runs.flatMap((run) => run.trajectories.map((row) => row.role)));
function baseOf(name) {
  const [role, ...rest] = name.split('/');
  return rest.length && ROLES.has(role) ? [rest.join('/'), role] : [name, ''];
}
const metricOf = (name) => METRICS[baseOf(name)[0]];

function familyOf(name) {
  const [base, role] = baseOf(name);
  const family = FAMILIES.find(({ names }) => names.test(base));
  if (family) return role ? { ...family, title: `${family.title} · ${role}` } : family;
  const [group, title, about, kind, floor] = METRICS[base] ?? [OTHER, human(base.split('/')[0])];
  return { group, title: title[0].toUpperCase() + title.slice(1), about, kind, floor };
}

function labelOf(name) {
  const [base, role] = baseOf(name);
  if (role && METRICS[base]) return role;
  const rule = LABEL_RULES.find(([pattern]) => pattern.test(base));
  if (rule) return base.replace(...rule);
  return LABELS[base] ?? METRICS[base]?.[1] ?? human(base.slice(base.indexOf('/') + 1));
}
