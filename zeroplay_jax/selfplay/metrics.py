"""Figures of a step: over scored rollouts, over requests and judgements, of health, and of time and devices."""

from __future__ import annotations

import collections
import math
import re
import time
from collections.abc import Container, Mapping, Sequence

import numpy as np
from jaxtyping import Bool, Float, Int

from zeroplay_jax.learner.batch import Batch
from zeroplay_jax.objectives.advantages import RewardTable, differ
from zeroplay_jax.objectives.answers import normalize_answer, sub_exact_match
from zeroplay_jax.objectives.types import Stats
from zeroplay_jax.policy import transformer
from zeroplay_jax.policy.transformer import ModelConfig
from zeroplay_jax.runtime import devices
from zeroplay_jax.runtime.hosts import Hosts, sums
from zeroplay_jax.selfplay.context import RolloutContext
from zeroplay_jax.selfplay.schedule import Step
from zeroplay_jax.types import ENV, Outcome, Row, Trajectory

# Endings that the policy did not choose.
TRUNCATED = ('context', 'response_tokens', 'turn_tokens', 'turns')


class _Accumulator:
    """Sums values and counts by name; `add` with weight 0 adds to the sum alone."""

    def __init__(self) -> None:
        self.sums: dict[str, float] = collections.defaultdict(float)
        self.counts: dict[str, float] = collections.defaultdict(float)

    def add(self, name: str, value: float, weight: float = 1.0) -> None:
        self.sums[name] += float(value)
        self.counts[name] += weight

    def add_known(self, name: str, value: float | None) -> None:
        if value is not None:
            self.add(name, value)

    def stats(self) -> Stats:
        return {name: (total, self.counts[name]) for name, total in self.sums.items()}


def rollout_stats(
    rows: Sequence[Row], outcomes: Sequence[Outcome], trained_roles: Sequence[str] = ()
) -> Stats:
    """Returns (sum, count) per metric: of the rollouts of each role as 'role/name', and of dropped tasks.

    Args:
      trained_roles: roles that the step trains; only theirs have 'reward_mean' and 'informative_share', because other
        rewards are not used (Dr. Zero's generation leaves them 0).
    """
    stats: Stats = {}
    for role in dict.fromkeys(row.role for row in rows):
        role_stats = _role_stats([row for row in rows if row.role == role], role in trained_roles)
        stats |= {f'{role}/{name}': value for name, value in role_stats.items()}
    accumulator = _Accumulator()
    dropped = sum(outcome.drop is not None for outcome in outcomes)
    accumulator.add('dropped_episodes', dropped, len(outcomes) or 1)
    # Per task, because a dropped task may have rows, too: they must not count twice.
    for outcome in outcomes:
        accumulator.add('dropped_share', _dropped_share(outcome))
    return stats | accumulator.stats()


def _role_stats(rows: Sequence[Row], is_trained: bool) -> Stats:
    """Returns (sum, count) per metric of the rollouts of one role."""
    accumulator = _Accumulator()
    for row in rows:
        if is_trained:
            accumulator.add('reward_mean', row.reward)
        _add_row(accumulator, row)
        _add_hops(accumulator, row)
    # `_add_row` leaves these counts 0. Solve counts are shares of the measured proposals, rejections, drops and failed
    # tools shares of all rows, and calls of a tool are averaged over all rows, with or without such a call.
    measured = sum(row.info.solve_count is not None for row in rows)
    for name in accumulator.sums:
        if name.startswith('k_histogram/'):
            accumulator.counts[name] = measured
        elif name.startswith(('rejected/', 'row_drop/', 'tool_calls/', 'tool_failed')):
            accumulator.counts[name] = len(rows)
    if is_trained:
        rewards_of_group = collections.defaultdict(list)
        for row in rows:
            rewards_of_group[row.group].append(row.reward)
        # The share of groups with reward variance is logged, because at 0 there is no policy gradient, which the
        # mean reward does not reveal.
        for rewards in rewards_of_group.values():
            accumulator.add('informative_share', differ(min(rewards), max(rewards)))
    return accumulator.stats()


def _dropped_share(outcome: Outcome) -> float:
    """Share of a task that is not used: 1 if the task is dropped, otherwise that of its dropped rows."""
    if outcome.drop is not None:
        return 1.0
    if not outcome.rows:
        return 0.0
    dropped_rows = [row for row in outcome.rows if row.drop is not None]
    return len(dropped_rows) / len(outcome.rows)


def _add_row(accumulator: _Accumulator, row: Row) -> None:
    """Adds the values of one row; those with weight 0 get their count in `_role_stats`."""
    trajectory = row.trajectory
    for name, value in row.parts.items():
        accumulator.add(f'reward/{name}', value)
    if row.turn_rewards is not None:
        accumulator.add('turn_rewards', np.nansum(row.turn_rewards))
    accumulator.add('turns', len(trajectory.turns))
    accumulator.add('truncated_rate', trajectory.finish in TRUNCATED)
    accumulator.add('policy_tokens', trajectory.policy_tokens)
    accumulator.add('prompt_tokens', trajectory.prompt_tokens)
    # Results of tools included, as papers give the length of a response.
    tool_tokens = int(np.sum(trajectory.source == ENV))
    accumulator.add('response_tokens', trajectory.policy_tokens + tool_tokens)
    _add_tool_calls(accumulator, row)
    info = row.info
    # Before penalties: SCOPE's rubric score without the length factor.
    accumulator.add_known('score', info.score)
    # `valid` is None for solvers, so the rate is over proposals.
    accumulator.add_known('valid_rate', info.valid)
    # Longer answers contain a gold answer more easily (subEM): their length shows that drift.
    if info.answer:
        accumulator.add('answer_words', len(info.answer.split()))
    accumulator.add_known('answer_tokens', info.answer_tokens)
    if info.rejected:
        accumulator.add(f'rejected/{info.rejected}', 1, weight=0)
    if trajectory.has_tool_failure:
        accumulator.add('tool_failed', 1, weight=0)
    if row.drop:
        accumulator.add(f'row_drop/{row.drop}', 1, weight=0)
    if info.solve_count is not None:
        accumulator.add(f'k_histogram/{info.solve_count}', 1, weight=0)
    accumulator.add_known('privileged_cut', info.privileged_cut)


def _add_hops(accumulator: _Accumulator, row: Row) -> None:
    """Adds the hops that were asked, those that were read, and by hop scores, solve counts and calls."""
    info = row.info
    hops = info.question.hops if info.question is not None else 0
    if not hops:
        return
    accumulator.add('hops_asked', hops)
    accumulator.add('hops_read', _hops_read(row.trajectory))
    accumulator.add(f'calls/hop{hops}', row.trajectory.valid_calls)
    accumulator.add_known(f'score/hop{hops}', info.score)
    accumulator.add_known(f'solve_count/hop{hops}', info.solve_count)


def _hops_read(trajectory: Trajectory) -> int:
    """Returns the number of queries that found a passage which no earlier one of the rollout found."""
    seen: set[tuple[str, str]] = set()
    count = 0
    for call in trajectory.calls:
        for passages in call.documents:
            texts = {(passage['title'], passage['text']) for passage in passages}
            count += not texts <= seen
            seen |= texts
    return count


def _add_tool_calls(accumulator: _Accumulator, row: Row) -> None:
    """Adds the number of valid calls of one row, in total and per tool, and its rate of failed calls."""
    trajectory = row.trajectory
    accumulator.add('tool_calls', trajectory.valid_calls)
    # The rate is over calls and not over rollouts, so that rollouts without a call do not lower it.
    accumulator.add('tool_error_rate', trajectory.failed_calls, weight=len(trajectory.calls))
    # Sorted, because this order decides that of the metrics.
    for tool in sorted({call.tool for call in trajectory.calls if call.is_valid}):
        accumulator.add(f'tool_calls/{tool}', len(trajectory.calls_of(tool)), weight=0)


def reward_columns(
    rows: Sequence[Row],
) -> tuple[Float[np.ndarray, ' rows'], Int[np.ndarray, ' rows'], Bool[np.ndarray, ' rows']]:
    """Returns rewards, group keys, and True for rows that are not dropped, as `objectives.advantages` takes them."""
    # float64, because a length factor makes the rewards of a group differ by little, and advantages are
    # divided by their deviation.
    rewards = np.zeros(len(rows), np.float64)
    groups = np.zeros(len(rows), np.int64)
    valid = np.zeros(len(rows), bool)
    for index, row in enumerate(rows):
        rewards[index] = row.reward
        groups[index] = row.group
        valid[index] = row.drop is None
    return rewards, groups, valid


def reward_table(rows: Sequence[Row]) -> RewardTable:
    """Returns what rows earned by turn; a row whose turns are not recorded has one, with all its tokens."""
    rewards, groups, valid = reward_columns(rows)
    tokens_of_row = []
    for row in rows:
        tokens = [turn.stop - turn.start for turn in row.trajectory.turns]
        is_recorded = sum(tokens) == row.trajectory.policy_tokens
        tokens_of_row.append(tokens if is_recorded else [row.trajectory.policy_tokens])
    shape = (len(rows), max(map(len, tokens_of_row), default=0))
    table = RewardTable(
        reward=rewards,
        turn_reward=np.full(shape, np.nan),
        turn_mask=np.zeros(shape, bool),
        tokens=np.zeros(shape, np.int64),
        group=groups,
        valid=valid,
    )
    for index, (row, tokens) in enumerate(zip(rows, tokens_of_row, strict=True)):
        turns = slice(len(tokens))
        table.turn_mask[index, turns] = True
        table.tokens[index, turns] = tokens
        if row.turn_rewards is not None and len(row.turn_rewards) == len(tokens):
            table.turn_reward[index, turns] = row.turn_rewards
    return table


def invalid_reason(row: Row, truncated: str, failed: str) -> str | None:
    """Returns the reason code ('nonfinite_reward', 'tool_failed', 'truncated') of an unusable row; None for others.

    Args:
      truncated: `config.rollout.truncated`; 'drop' excludes rollouts that ended at a limit.
      failed: `config.rollout.failed`; all but 'keep' exclude rollouts in which a tool failed.
    """
    # One NaN would spread to the whole group through its mean.
    has_infinite_turn = row.turn_rewards is not None and bool(np.isinf(row.turn_rewards).any())
    if not math.isfinite(row.reward) or has_infinite_turn:
        return 'nonfinite_reward'
    # The policy would learn from a reward that a broken server decided.
    if failed != 'keep' and row.trajectory.has_tool_failure:
        return 'tool_failed'
    if truncated == 'drop' and row.trajectory.finish in TRUNCATED:
        return 'truncated'
    return None


def ratios(stats: Stats) -> dict[str, float]:
    """Returns sums divided by their counts, without those of count 0."""
    metrics = {}
    for name, (total, count) in stats.items():
        # A metric of count 0 (no search, no valid proposal) is left out, because 0 would be misleading.
        if count:
            metrics[name] = total / count
    return metrics


def added(left: Stats, right: Stats) -> Stats:
    """Returns the sums of two sets of statistics, name by name."""
    result = dict(left)
    for name, (total, count) in right.items():
        previous_total, previous_count = result.get(name, (0.0, 0.0))
        result[name] = (previous_total + total, previous_count + count)
    return result


# ---- step metrics ----------------------------------------------------------------------------------
#
# Metrics of a step that are not sums over its rows: time by cause, throughput, memory, age, agreement of log-probs.


class StepClock:
    """Divides the wall time of this process in a step by cause; begins to count when it is made.

    The causes exclude each other: the time of a part, 'rollout' or 'update', is without the waits in it. 'tools' is the
    time in which no rollout decoded, because all of them waited for tools or judges. 'exchange' is that of exchanges
    between processes, in which a process also waits for slower ones.

    Attributes:
      seconds: cause → seconds of the parts that have ended.
      rollout_seconds: wall time of the part 'rollout' with the waits in it; 0 before it has ended.
    """

    def __init__(self, context: RolloutContext):
        self._context = context
        self.seconds: dict[str, float] = {}
        self._part_started = time.perf_counter()
        self._waits_before = self._waits()
        self.rollout_seconds = 0.0

    def _waits(self) -> dict[str, float]:
        """Returns the seconds of waits by cause, since the start of the process."""
        stats = self._context.scheduler.stats
        waits = {'tools': float(stats['tool_wait_seconds'])}
        if self._context.hosts.count > 1:
            waits['exchange'] = self._context.hosts.seconds + float(stats['peer_wait_seconds'])
        return waits

    def end_part(self, name: str) -> None:
        """Ends a part of the step, which is what follows the last call."""
        now = time.perf_counter()
        waits = self._waits()
        part_seconds = now - self._part_started
        if name == 'rollout':
            self.rollout_seconds = part_seconds
        for cause, seconds in waits.items():
            waited = seconds - self._waits_before[cause]
            self.seconds[cause] = self.seconds.get(cause, 0.0) + waited
            part_seconds -= waited
        self.seconds[name] = max(part_seconds, 0.0)
        self._part_started = now
        self._waits_before = waits

    def metrics(self) -> dict[str, float]:
        """Returns 'seconds/<cause>' for all causes."""
        return {f'seconds/{cause}': seconds for cause, seconds in self.seconds.items()}


def staleness(
    step: Step, rows: Sequence[Row], weights_of: Mapping[str, str], versions: Mapping[str, int]
) -> tuple[float, float]:
    """Returns sum and count of the training steps between the weights that sampled a row and those it updates.

    Args:
      step: the step, which trains roles.
      rows: its rows.
      weights_of: trained role → name of its weights.
      versions: name of weights → newest version, before the updates of the step.
    """
    total = 0.0
    count = 0
    for role in step.phase.trains:
        weights = weights_of[role]
        # Roles of the same weights update them one after the other in every step (SSP).
        updates = [weights_of[other] for other in step.phase.trains].count(weights)
        for row in rows:
            if row.role == role:
                total += (versions[weights] - row.trajectory.version) / updates
                count += 1
    return total, count


def throughput(
    context: RolloutContext, before: collections.Counter[str], rollouts: int, seconds: float
) -> dict[str, float]:
    """Returns the throughput of all processes since `before`, and the time of this process's tool calls.

    All processes must call it.

    Args:
      before: a copy of `Scheduler.stats`.
      rollouts: rollouts of the step, whenever they began.
      seconds: wall time since `before`.
    """
    scheduler = context.scheduler
    counters = ('generated_tokens', 'evictions', 'refilled_tokens')
    local = {
        'rollouts': rollouts,
        'scored_texts': context.run.scored_texts,
        'scored_tokens': context.run.scored_tokens,
        'replays': context.run.replays,
    }
    for name in counters:
        local[name] = scheduler.stats[name] - before[name]
    total = sums(context.hosts.gather(local))
    metrics = {
        # Counts proposals, attempts, checks and judgements alike: all of them are a cost of the step.
        'rollouts': float(total['rollouts']),
        'tokens_per_second': total['generated_tokens'] / max(seconds, 1e-9),
    }
    if total['scored_tokens']:
        metrics |= {name: float(total[name]) for name in ('scored_texts', 'scored_tokens')}
    if total['replays']:
        metrics['replayed_rollouts'] = float(total['replays'])
    # Wherever there are fewer pages than the slots can fill, whether a rollout was evicted or not.
    configs = [pool.sampler.config for pool in scheduler.pools.values()]
    if any(config.page_count < config.slots * config.pages_per_slot for config in configs):
        metrics |= {name: float(total[name]) for name in counters[1:]}
    # These are of this process only: percentiles of several processes cannot be merged.
    # A copy: tools of a step that was begun early are still running.
    for tool, tool_seconds in list(scheduler.workers.seconds.items()):
        metrics[f'tool_seconds/{tool}/p50'] = float(np.percentile(tool_seconds, 50))
        metrics[f'tool_seconds/{tool}/p95'] = float(np.percentile(tool_seconds, 95))
    return metrics | devices.memory()


def sampler_gap(batches: Sequence[Batch], hosts: Hosts) -> Stats:
    """Returns 'sampler_gap' of batches with recomputed log-probs; all processes must call it.

    Args:
      batches: micro-batches of one minibatch, from `Learner.recompute_old_logp`.

    Returns:
      Sum and count of |π_trainer − π_sampler| over the trained tokens; {} without any.
    """
    local = {'gap': 0.0, 'tokens': 0.0}
    for batch in batches:
        mask = np.asarray(batch.mask)
        gap = np.exp(batch.old_logp) - np.exp(batch.sampler_logp)
        local['gap'] += float(np.abs(gap[mask]).sum())
        local['tokens'] += float(mask.sum())
    total = sums(hosts.gather(local))
    if not total['tokens']:
        return {}
    return {'sampler_gap': (total['gap'], total['tokens'])}


def operations(model: ModelConfig, rows: Sequence[Row], is_frozen: bool) -> float:
    """Returns the model's operations of an update on these rows, of all processes: forward and backward.

    Neither recomputation (`policy.remat`) nor teacher or reference are counted.

    Args:
      is_frozen: whether the update trains adapters of a frozen base.
    """
    total = 0.0
    for row in rows:
        for context in row.trajectory.contexts:
            total += transformer.update_operations(
                model, len(context.tokens), context.policy_tokens, is_frozen
            )
    return total


def teacher_operations(model: ModelConfig, rows: Sequence[Row]) -> float:
    """Returns the operations of the teacher's forward pass over the distilled rows of an update (π-Play, table 10)."""
    total = 0.0
    for row in rows:
        if row.teacher_prompt is None:
            continue
        prompt_difference = row.teacher_tokens - row.trajectory.prompt_tokens
        for context in row.trajectory.contexts:
            tokens = len(context.tokens) + prompt_difference
            total += transformer.forward_operations(model, tokens, context.policy_tokens)
    return total


def value_operations(model: ModelConfig, rows: Sequence[Row]) -> float:
    """Returns the operations of a value network of this shape on these rows: values, and one update."""
    total = 0.0
    for row in rows:
        for context in row.trajectory.contexts:
            # An update has three passes, the values a fourth; there are no logits.
            operations_of_update = transformer.update_operations(
                model, len(context.tokens), logits=0
            )
            total += 4 / 3 * operations_of_update
    return total


def utilisation(update_operations: float, seconds: float) -> dict[str, float]:
    """Returns the metric 'mfu': operations of updates over those of all devices at their peak in bfloat16.

    {} if the peak of the devices is unknown.

    Args:
      update_operations: `operations` of all updates.
      seconds: wall time of the updates.
    """
    peak = devices.peak_operations()
    if peak is None or seconds <= 0:
        return {}
    return {'mfu': update_operations / (peak * seconds)}


# ---- health metrics --------------------------------------------------------------------------------
#
# Metrics of a step that show a run going wrong while its rewards look well; `training.outcome` watches them.
#
# They are computed once per step, on the host, from the rows. A figure that would rest on a few rows is left out.


# A share of fewer cases is no evidence: two malformed calls of two are no broken tool.
MIN_CASES = 8
# The same for searches if all of them find nothing.
_MIN_ALL_EMPTY = 2
# Calls are judged only if at least this share of the rollouts makes one: a proposer that needs no search and
# sometimes writes half a call has no broken tool either.
_MIN_CALLS_PER_ROLLOUT = 0.25
# Smallest score of an answer that counts as correct; graded metrics (F1) lie between 0 and 1.
_CORRECT = 0.5
# Name of the reward part that a judge's verdict sets.
_JUDGED_PART = 'judged_correct'
_EMPTY_SEARCHES = 'empty_search_share'


def health(
    rows: Sequence[Row], roles_with_tools: Container[str], judge_counts: Mapping[str, int]
) -> Stats:
    """Returns (sum, count) per metric; all processes get the same values.

    Args:
      rows: all scored rollouts of a step.
      roles_with_tools: roles that can call a tool.
      judge_counts: counts of the step in all processes, as in `Judge.stats`.

    Returns:
      'call_error_share': calls that could not be parsed, were refused, failed or timed out.
      'no_call_share': rollouts without a call, among those that end with an answer and could call a tool.
      'duplicate_share': proposed questions that another task of the step has, too.
      'judge_agreement': judged answers whose verdict is that of a comparison with the accepted answers: correct if one
        of them occurs in the answer.
      'no_evidence_share': correct answers that no result of their calls contains.
      'empty_search_share': answered queries that found no passage.
      'judge_lost_share': judgements that failed or could not be read.
    """
    lost_judgements = judge_counts.get('failed', 0) + judge_counts.get('unread', 0)
    counts = {
        'call_error_share': _failed_calls(rows),
        'no_call_share': _answers_without_call(rows, roles_with_tools),
        'duplicate_share': _duplicate_questions(rows),
        'judge_agreement': _agreeing_verdicts(rows),
        'no_evidence_share': _answers_without_evidence(rows),
        _EMPTY_SEARCHES: _empty_searches(rows),
        'judge_lost_share': (lost_judgements, judge_counts.get('asked', 0)),
    }
    stats: Stats = {}
    for name, (total, cases) in counts.items():
        # Searches of which all find nothing are an empty index, also in small steps.
        is_empty_index = name == _EMPTY_SEARCHES and total == cases >= _MIN_ALL_EMPTY
        if cases >= MIN_CASES or is_empty_index:
            stats[name] = (float(total), float(cases))
    return stats


def _failed_calls(rows: Sequence[Row]) -> tuple[int, int]:
    """Returns the numbers of failed calls and of calls; (0, 0) if few rollouts call."""
    failed = 0
    calls = 0
    for row in rows:
        failed += row.trajectory.failed_calls
        calls += len(row.trajectory.calls)
    if calls < _MIN_CALLS_PER_ROLLOUT * len(rows):
        return 0, 0
    return failed, calls


def _answers_without_call(rows: Sequence[Row], roles_with_tools: Container[str]) -> tuple[int, int]:
    """Returns the numbers of answers without a call, and of all answers by roles with tools."""
    without_call = 0
    answering = 0
    for row in rows:
        is_question = row.info.question is not None and not row.info.is_proposal
        # A rollout that was cut has no answer that could come from memory.
        is_answer = is_question and row.trajectory.finish == 'answer'
        if is_answer and row.role in roles_with_tools:
            answering += 1
            without_call += not row.trajectory.calls
    return without_call, answering


def _duplicate_questions(rows: Sequence[Row]) -> tuple[int, int]:
    """Returns the numbers of questions that several tasks propose, and of all questions, each once per task."""
    # Several proposals of one task are about the same document: equal ones are samples of one prompt.
    tasks_of_text: dict[str, set[tuple[int, ...]]] = collections.defaultdict(set)
    for row in rows:
        question = row.info.question
        if not row.info.is_proposal or question is None:
            continue
        text = normalize_answer(question.text)
        if text:
            tasks_of_text[text].add(tuple(row.trajectory.identity[:2]))
    duplicates = 0
    questions = 0
    for tasks in tasks_of_text.values():
        questions += len(tasks)
        if len(tasks) > 1:
            duplicates += len(tasks)
    return duplicates, questions


def _agreeing_verdicts(rows: Sequence[Row]) -> tuple[int, int]:
    """Returns the numbers of verdicts that agree with the comparison of texts, and of all verdicts on answers."""
    agreeing = 0
    verdicts = 0
    for row in rows:
        question = row.info.question
        score = row.info.score
        if _JUDGED_PART not in row.parts or question is None or score is None:
            continue
        verdicts += 1
        is_contained = sub_exact_match(row.info.answer, question.answers)
        agreeing += (score >= _CORRECT) == is_contained
    return agreeing, verdicts


def _answers_without_evidence(rows: Sequence[Row]) -> tuple[int, int]:
    """Returns the numbers of correct answers that no result of their calls contains, and of all correct answers."""
    correct = 0
    without_evidence = 0
    # Rollouts of a group find the same passages.
    normalised = {}
    for row in rows:
        if not _is_correct(row):
            continue
        assert row.info.question is not None
        correct += 1
        texts = []
        for text in _result_texts(row.trajectory):
            if text not in normalised:
                normalised[text] = normalize_answer(text)
            texts.append(normalised[text])
        without_evidence += not _is_found(row.info.question.answers, texts)
    return without_evidence, correct


def _empty_searches(rows: Sequence[Row]) -> tuple[int, int]:
    """Returns the numbers of answered queries that found no passage, and of all answered queries."""
    searches = 0
    empty = 0
    for row in rows:
        for call in row.trajectory.calls:
            if call.error is not None:
                continue
            # One entry per query; calls of tools that return no passages have none.
            for passages in call.documents:
                searches += 1
                empty += not passages
    return empty, searches


def _is_correct(row: Row) -> bool:
    """Whether a row is an answer to a question with accepted answers that was scored as correct."""
    info = row.info
    if info.question is None or info.is_proposal or not info.question.answers:
        return False
    return info.score is not None and info.score >= _CORRECT


def _result_texts(trajectory: Trajectory) -> list[str]:
    """Returns the texts that the calls of a rollout returned: of passages, or of results without passages."""
    texts = []
    for call in trajectory.calls:
        if call.error is not None:
            continue
        for passages in call.documents:
            for passage in passages:
                texts.append(f'{passage["title"]} {passage["text"]}')
        if not call.documents:
            texts.append(call.text)
    return texts


def _is_found(answers: Sequence[str], texts: Sequence[str]) -> bool:
    """Returns whether an accepted answer occurs, as whole words, in one of the normalised texts."""
    for answer in answers:
        words = normalize_answer(answer)
        # An answer of articles and punctuation alone has no word that could be looked for.
        if not words:
            return True
        # Scripts without blanks have no word boundaries, so only Latin letters and digits bound a word.
        pattern = re.compile(rf'(?<![a-z0-9]){re.escape(words)}(?![a-z0-9])')
        if any(pattern.search(text) for text in texts):
            return True
    return False
