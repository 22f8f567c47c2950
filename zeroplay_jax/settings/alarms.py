"""Config fields of the alarms; `schema.Run` has them as a section. What they watch: `training.alarms`."""

from __future__ import annotations

from zeroplay_jax.settings.bounds import NonNegativeFloat, PositiveInt, Section


class Alarm(Section):
    """Levels of one watched figure."""

    warn: NonNegativeFloat = 0.0
    """Level from which a line warns; 0: never."""
    stop: NonNegativeFloat = 0.0
    """Level from which the run is saved and stopped with exit status 4; 0: never."""
    steps: PositiveInt = 3
    """Steps in a row that must reach a level."""


class Alarms(Section):
    """Figures that show a run going wrong. Each has three fields: `warn`, the level from which a line warns; `stop`,
    the level from which the run is saved and stopped with exit status 4; and `steps`, the number of steps in a row that
    must reach the level. 0 switches a level off. All of them may be changed when a run is resumed
    ([what they watch](learning-nothing.md#alarms))."""

    # The mean difference in float32 is below 1e-6, in bfloat16 of the order of 0.01; a few updates between sampling and
    # training add as much again.
    sampler_gap: Alarm = Alarm(warn=0.03, stop=0.2)
    """Mean difference between the probabilities that sampler and trainer compute for the sampled tokens."""
    # Small policies that have nearly solved their task are healthy at 0.03.
    entropy: Alarm = Alarm(warn=0.01)
    """Entropy of the next token, in nats, at most."""
    length: Alarm = Alarm(warn=3.0)
    """Sampled tokens per rollout as a multiple of the mean of the first three steps of the same phase."""
    # A policy may need some steps to learn how calls are written.
    tool_errors: Alarm = Alarm(warn=0.5, stop=0.9, steps=5)
    """Share of calls that could not be parsed, were refused, failed or timed out."""
    # A search that finds nothing at all is an empty index: no healthy policy writes only such queries.
    empty_searches: Alarm = Alarm(warn=0.5, stop=1.0, steps=2)
    """Share of searches that find no passage. The stop has exit status 3; with it an evaluation stops, too, if none of
    its searches finds a passage."""
    no_call: Alarm = Alarm(warn=0.8)
    """Share of answering rollouts without any call."""
    no_evidence: Alarm = Alarm(warn=0.9)
    """Share of correct answers that no result of the rollout's calls contains."""
    duplicates: Alarm = Alarm(warn=0.5)
    """Share of proposed questions that another task of the same step has, too."""
    judge_agreement: Alarm = Alarm(warn=0.5)
    """Share of a judge's verdicts that agree with the accepted answers, at most."""
    # `judge.max_failure_rate` stops a run whose judge is gone.
    judge_lost: Alarm = Alarm(warn=0.3)
    """Share of judgements that failed or could not be read."""
    staleness: Alarm = Alarm(warn=3.0)
    """Training steps between the sampling of a rollout and its update."""
    # A single update that is skipped does no harm: half of them, twice in a row, is no accident.
    nonfinite: Alarm = Alarm(warn=0.001, stop=0.5, steps=2)
    """Share of updates or rewards that are not finite. Weights that are not finite stop the run at once, whatever the
    levels are."""
