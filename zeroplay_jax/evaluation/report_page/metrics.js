// The meaning of the names in metrics.jsonl. A name that is not listed gets a chart of its own in the group "Other".
const MAIN = 'main'; // always visible
const QUESTIONS = 'questions'; // in the section of that name
const PROPOSALS = 'Proposals and question pool';
const UPDATES = 'Policy updates';
const GROUPS = 'Groups and advantages';
const ROLLOUTS = 'Rollout lengths and tool calls';
const SPEED = 'Speed';
const DETAIL = 'Reward components and hop counts';
const OTHER = 'Other';
const FOLDED = [DETAIL, PROPOSALS, UPDATES, GROUPS, ROLLOUTS, SPEED, OTHER];
const FEW_COLUMNS = 12; // of charts by hop count: a step logs only a few rollouts of each

// Metrics that share a chart per phase. kind: share (axis from 0 to 1) or stack (parts of a whole); lead: the metric
// that stays in the main view when runs are compared; columns: steps are averaged into at most so many.
const FAMILIES = [
  {
    title: 'Held-out exact match',
    group: MAIN,
    names: /^em\//,
    kind: 'share',
    lead: 'em/mean',
    help: 'Share of held-out questions answered correctly with greedy decoding, by hop count, and their mean up to 3 hops.',
  },
  {
    title: 'Reward',
    group: MAIN,
    names: /^reward(_mean$|\/(?!format_))/,
    lead: 'reward_mean',
    help: 'Mean over the rollouts of a step, and its components.',
  },
  {
    title: 'Solve count per question',
    group: MAIN,
    names: /^k_histogram\//,
    kind: 'stack',
    help: 'Number of correct solver attempts per proposed question: 0 is too hard, all attempts too easy.',
  },
  {
    title: 'Proposal format scores',
    group: PROPOSALS,
    names: /^reward\/format_/,
    kind: 'share',
    help: 'Format of proposer rollouts: thinking, tool calls, question with answer, and all of them.',
  },
  {
    title: 'Rejected proposals',
    group: PROPOSALS,
    names: /^rejected\//,
    kind: 'stack',
    help: 'Share of proposals without a valid question, by reason.',
  },
  {
    title: 'Excluded from the question pool',
    group: PROPOSALS,
    names: /^drop\//,
    kind: 'stack',
    help: 'Items that gave no question since the pool was last emptied, by reason.',
  },
  {
    title: 'Masked rollouts',
    group: GROUPS,
    names: /^row_drop\//,
    kind: 'stack',
    help: 'Share of rollouts that were sampled but are not trained on, by reason.',
  },
  {
    title: 'Judge calls',
    group: ROLLOUTS,
    names: /^judge\//,
    help: 'Calls per step, calls without a reply, and replies that could not be parsed.',
  },
  {
    title: 'Share of groups by size',
    group: GROUPS,
    names: /^group_size\//,
    kind: 'stack',
    help: 'Number of rollouts whose rewards are compared with each other.',
  },
  {
    title: 'Seconds per step',
    group: SPEED,
    names: /^seconds\//,
    kind: 'stack',
    help: 'Wall time by cause: rollouts, waits for tools and judges, updates, exchange between processes, and saving (of the step before).',
  },
  {
    title: 'Device memory in GiB',
    group: SPEED,
    names: /^memory\//,
    help: 'Of the fullest device of the first process: in use at the end of the step, and the peak since the start.',
  },
  {
    title: 'Evicted rollouts and recomputed tokens',
    group: SPEED,
    names: /^(evictions|refilled_tokens)$/,
    help: 'Rollouts that lost their pages while they waited for a tool, and the tokens that were computed again for them.',
  },
  {
    title: 'Numbers that are not finite',
    group: UPDATES,
    names: /^nonfinite_/,
    kind: 'share',
    help: 'Share of updates with such a gradient (they are skipped), and of trained policies with such a weight.',
  },
  {
    title: 'Tool latency',
    group: SPEED,
    names: /^(tool_seconds|search_seconds)\//,
    help: 'Seconds per tool call: median (p50) and 95th percentile (p95) of each tool; tool_seconds/<tool>/p50 and p95, in older logs search_seconds/p50 and p95.',
  },
  {
    title: 'Tool calls',
    group: ROLLOUTS,
    names: /^tool_calls(\/|$)/,
    lead: 'tool_calls',
    help: 'Well-formed calls per rollout, in total (tool_calls) and of each tool (tool_calls/<tool>).',
  },
  {
    title: 'Solve count by hops',
    group: QUESTIONS,
    names: /^(logged\/solves|solve_count)\//,
    columns: FEW_COLUMNS,
    lead: 'logged/solves/all',
    help: 'Correct solver attempts per proposed question; in older logs mean over the logged rollouts.',
  },
  {
    title: 'Score by hops',
    group: QUESTIONS,
    names: /^(logged\/exact_match|score)\//,
    columns: FEW_COLUMNS,
    kind: 'share',
    lead: 'logged/exact_match/all',
    help: 'Of answers to training questions with that many hops, before penalties; in older logs exact match of logged rollouts.',
  },
  {
    title: 'Rubrics met',
    group: MAIN,
    names: /^rubrics\//,
    kind: 'share',
    lead: 'rubrics/mean',
    help: 'Share of rubrics met by answers to the held-out open tasks; answers without a verdict count as 0.',
  },
  {
    title: 'Tool calls by hops',
    group: QUESTIONS,
    names: /^(logged\/tool_calls|calls)\//,
    columns: FEW_COLUMNS,
    lead: 'logged/tool_calls/all',
    help: 'Tool calls per rollout; in evaluations and older logs mean over the logged rollouts.',
  },
];

// name: [group, label, help, kind, tolerance]; changes within the tolerance are rounding errors.
const METRICS = {
  valid_rate: [MAIN, 'Valid proposals', 'Share of proposals with a format score above 0.', 'share'],
  informative_share: [
    MAIN,
    'Groups with reward variance',
    'Share of groups whose rewards differ; other groups have zero advantage.',
    'share',
  ],
  dropped_episodes: [
    PROPOSALS,
    'Dropped episodes',
    'Share of items without trainable rollouts and without a question.',
  ],
  dropped_share: [
    GROUPS,
    'Dropped share',
    'Share of items that are not used: dropped items, and of the others their masked rollouts.',
    'share',
  ],
  pool_size: [PROPOSALS, 'Question pool size', 'Questions that the solver phase samples from.'],
  loss: [
    UPDATES,
    'Loss',
    'Policy-gradient objective; not comparable between steps, only its gradient matters.',
  ],
  entropy: [UPDATES, 'Entropy', 'Of the next-token distribution, in nats; mean over trained tokens.'],
  gradient_norm: [UPDATES, 'Gradient norm', 'Global norm before clipping.'],
  approx_kl: [
    UPDATES,
    'KL from behaviour policy',
    'Estimated on trained tokens; about 0 for on-policy batches.',
    '',
    1e-6,
  ],
  kl: [UPDATES, 'KL from reference policy', 'Penalised divergence from the initial weights.', '', 1e-9],
  ratio: [
    UPDATES,
    'Importance ratio',
    'Token probability under the current policy over that under the behaviour policy; 1 on-policy.',
    '',
    1e-6,
  ],
  prob_gap: [
    UPDATES,
    'Sampler–learner probability gap',
    'Difference of the probabilities that sampler and learner compute for the same tokens.',
    '',
    1e-5,
  ],
  sequence_ratio: [
    UPDATES,
    'Sequence importance ratio',
    'Importance ratio of whole rollouts, normalised by length; 1 on-policy.',
    '',
    1e-6,
  ],
  distill_divergence: [UPDATES, 'Divergence from teacher', 'Mean over distilled tokens.'],
  clip_share: [UPDATES, 'Clipped tokens', 'Share of trained tokens whose importance ratio is clipped.'],
  dual_clip_share: [
    UPDATES,
    'Dual-clipped tokens',
    'Share of trained tokens at the loss bound for negative advantages (dual-clip PPO).',
  ],
  sampler_gap: [
    UPDATES,
    'Sampler–trainer gap before the update',
    'Mean difference of the probabilities that sampler and trainer compute for the same tokens.',
    '',
    1e-5,
  ],
  staleness: [UPDATES, 'Rollout age in training steps', 'With rollout.ahead: weights that are one step older.'],
  skipped_updates: [UPDATES, 'Skipped updates', 'Updates skipped because the gradient was not finite.'],
  learning_rate: [UPDATES, 'Learning rate', 'Of the optimiser at this step.'],
  'value_network/value': [
    UPDATES,
    'Value network: mean value',
    'Expected reward before a trained token; it starts at 0 and approaches the mean reward.',
  ],
  'value_network/explained_variance': [
    UPDATES,
    'Value network: explained variance',
    'Share of the variance of rewards that values explain. 1: all; below 0: a constant would be better. Large negative ' +
      'numbers where rewards hardly differ; none where they are equal.',
  ],
  'value_network/squared_error': [
    UPDATES,
    'Value network: squared error',
    'Mean over trained tokens, during the updates.',
  ],
  'value_network/loss': [UPDATES, 'Value network: loss', 'Half the squared error, clipped.'],
  'value_network/clip_share': [
    UPDATES,
    'Value network: clipped tokens',
    'Share of trained tokens whose value moved beyond value_network.value_clip in this step.',
    'share',
  ],
  'value_network/nonfinite_updates': [
    UPDATES,
    'Value network: skipped updates',
    'Updates skipped because the gradient was not finite.',
  ],
  'value_network/gradient_norm': [UPDATES, 'Value network: gradient norm', 'Global norm before clipping.'],
  informative_groups: [
    GROUPS,
    'Groups with reward variance, valid rollouts',
    'Share of groups whose valid rollouts have different rewards.',
    'share',
  ],
  group_size: [GROUPS, 'Group size', 'Mean number of rollouts per group.'],
  singleton_groups: [
    GROUPS,
    'Singleton groups',
    'Share of groups with a single rollout, which get zero advantage.',
  ],
  invalid_rows: [GROUPS, 'Invalid rollouts', 'Share of rollouts that are not trained on.'],
  'filter/kept': [GROUPS, 'Groups after filtering', 'Share of sampled groups with reward variance.', 'share'],
  'filter/full': [
    GROUPS,
    'Batch fill',
    'Share of the batch filled with groups with reward variance.',
    'share',
  ],
  'filter/surplus': [GROUPS, 'Surplus groups', 'Groups with reward variance beyond a full batch.'],
  'filter/age': [GROUPS, 'Rollout age', 'Updates between sampling and training; mean over trained rollouts.'],
  turns: [ROLLOUTS, 'Turns', 'Assistant turns per rollout.'],
  tool_calls: [ROLLOUTS, 'Tool calls', 'Well-formed calls of all tools per rollout.'],
  tool_error_rate: [ROLLOUTS, 'Tool error rate', 'Share of calls that could not be parsed or failed.'],
  call_error_share: [
    ROLLOUTS,
    'Failed calls',
    'Share of calls that failed, where at least a quarter of the rollouts call a tool.',
    'share',
  ],
  no_call_share: [ROLLOUTS, 'Answers without a call', 'Share of answers without any call.', 'share'],
  no_evidence_share: [
    ROLLOUTS,
    'Correct without evidence',
    'Share of correct answers that no result of the rollout’s calls contains.',
    'share',
  ],
  duplicate_share: [
    PROPOSALS,
    'Duplicate questions',
    'Share of proposed questions that another item of the step has, too.',
    'share',
  ],
  judge_agreement: [
    ROLLOUTS,
    'Judge agreement',
    'Share of verdicts that agree with the accepted answers.',
    'share',
  ],
  judge_lost_share: [
    ROLLOUTS,
    'Judgements without a verdict',
    'Share of judgements that failed or could not be read.',
    'share',
  ],
  truncated_rate: [
    ROLLOUTS,
    'Truncated rollouts',
    'Share of rollouts that ended at a limit of turns, tokens or context.',
  ],
  policy_tokens: [ROLLOUTS, 'Sampled tokens', 'Tokens sampled from the policy per rollout.'],
  prompt_tokens: [ROLLOUTS, 'Prompt tokens', 'Tokens of the prompt per rollout.'],
  response_tokens: [ROLLOUTS, 'Response tokens', 'Tokens behind the prompt, results of tools included.'],
  answer_words: [ROLLOUTS, 'Words per answer', 'Of the solver.'],
  answer_tokens: [ROLLOUTS, 'Tokens per answer', 'Of the answer alone, which the length factor reads (SCOPE).'],
  turn_rewards: [ROLLOUTS, 'Rewards of turns', 'Sum per rollout, beside the reward of the outcome.'],
  score: [MAIN, 'Score', 'Of answers, before penalties: exact match, or the share of rubrics met.', 'share'],
  hops_asked: [QUESTIONS, 'Hops asked', 'Hops that questions were to need.'],
  hops_read: [QUESTIONS, 'Hops read', 'Queries per rollout that found a passage which no earlier one found.'],
  teacher_share: [
    UPDATES,
    'Share of the teacher',
    'Operations of the teacher’s forward pass over those of the whole update.',
    'share',
  ],
  same_ids_when_rendered_again: [
    ROLLOUTS,
    'Stable under retokenisation',
    'Share of rollouts whose token ids do not change if their text is tokenised again.',
  ],
  rollouts: [SPEED, 'Rollouts', 'All rollouts of a step: proposals, solver attempts, checks and verdicts.'],
  mfu: [
    SPEED,
    'Model operations utilisation',
    'Operations of the updates over those that the devices could have made at their peak.',
    'share',
  ],
  tokens_per_second: [SPEED, 'Tokens per second', 'Sampled tokens over the wall time of rollouts.'],
};

const LABELS = {
  'em/mean': 'mean',
  reward_mean: 'mean reward',
  'reward/format': 'format',
  'reward/format_think': 'thinking',
  'reward/format_tool': 'tool calls',
  'reward/format_answer': 'question and answer',
  'reward/format_raw': 'all',
  'seconds/rollout': 'rollouts',
  'seconds/update': 'updates',
  'seconds/tools': 'waits for tools and judges',
  'seconds/exchange': 'exchange between processes',
  'seconds/save': 'saving',
  'memory/used_gib': 'in use',
  'memory/peak_gib': 'peak',
  nonfinite_updates: 'updates',
  nonfinite_weights: 'weights',
  'search_seconds/p50': 'search p50',
  'search_seconds/p95': 'search p95',
  tool_calls: 'all tools',
};
const LABEL_RULES = [
  [/^(?:em|logged\/\w+)\/hop(\d+)$/, '$1-hop'],
  [/^(?:solve_count|score|calls)\/hop(\d+)$/, '$1-hop'],
  [/^logged\/\w+\/all$/, 'all'],
  [/^k_histogram\/(\d+)$/, '$1 correct'],
  [/^group_size\/(\d+)_up$/, '$1 or more'],
  [/^group_size\/(\d+)_(\d+)$/, '$1 to $2'],
  [/^tool_seconds\/(.+)\/(p\d+)$/, '$1 $2'],
];
// Counters that are only logged if they are not zero.
const ABSENT_IS_ZERO = /^(k_histogram|rejected|drop|row_drop|judge|tool_calls)\//;

// Metrics of roles are logged as role/name; older runs named the role only in steps that train several. Returns
// [name, role or ''].
const ROLES = new Set(runs.flatMap((run) => run.trajectories.map((row) => row.role)));
for (const name of runs.flatMap((run) => run.metrics.flatMap(Object.keys)))
  if (name.endsWith('/turns')) ROLES.add(name.split('/')[0]);
function splitRole(fullName) {
  const [role, ...name] = fullName.split('/');
  return name.length && ROLES.has(role) ? [name.join('/'), role] : [fullName, ''];
}
const metricOf = (fullName) => METRICS[splitRole(fullName)[0]];

function familyOf(fullName) {
  const [name, role] = splitRole(fullName);
  const family = FAMILIES.find(({ names }) => names.test(name));
  if (family) return { ...family, base: family.title, title: role ? `${family.title} · ${role}` : family.title };
  const unknown = [OTHER, readable(name.split('/')[0])];
  const [group, title, help, kind, tolerance] = METRICS[name] ?? unknown;
  return { group, base: title, title: capitalised(title), help, kind, tolerance };
}

function labelOf(fullName) {
  const [name, role] = splitRole(fullName);
  if (LABELS[name]) return LABELS[name];
  if (role && METRICS[name]) return role;
  const rule = LABEL_RULES.find(([pattern]) => pattern.test(name));
  if (rule) return name.replace(...rule);
  return METRICS[name]?.[1] ?? readable(name.slice(name.indexOf('/') + 1));
}
