"""The end of a run: trained weights, summary.json and the report."""

from __future__ import annotations

import pathlib
from typing import Any

from zeroplay_jax.evaluation import report_builder
from zeroplay_jax.learner.weights_view import weights_fingerprint
from zeroplay_jax.retrieval import progress
from zeroplay_jax.runtime import atomic, identity
from zeroplay_jax.selfplay.context import Role
from zeroplay_jax.selfplay.engine import Engine
from zeroplay_jax.selfplay.schedule import Step
from zeroplay_jax.training import branch, build, next_step, run_folder
from zeroplay_jax.training.export import write_policy
from zeroplay_jax.training.model_card import export_texts, model_card
from zeroplay_jax.training.outcome import current_stop, learning_summary, proposal_summary
from zeroplay_jax.training.summary import summarise_run, summary_json
from zeroplay_jax.types import Json


def finish(
    config,
    workdir: pathlib.Path,
    context: build.RunContext,
    engine: Engine,
    steps: list[Step],
    state: dict[str, Any],
    first_weights: dict[str, list[int]],
) -> dict[str, Any]:
    """Exports the trained weights and writes summary.json and the report; returns the summary."""
    hosts = context.rollouts.hosts
    summary, table = summarise_run(
        config, context.library, engine.external_items, state, len(steps)
    )
    origin = hosts.gather(branch.read_record(workdir))[0]
    unchanged = _unchanged_policies(engine, first_weights, origin)
    stopped = current_stop(config, state['stopped'])
    summary |= learning_summary(engine, steps, unchanged, stopped)
    summary |= proposal_summary(hosts, engine, context.library.training)
    summary['best'] = state.get('best')
    summary[identity.HASH_FIELD] = identity.hash_of(state[identity.STATE_FIELD])
    summary['from'] = None
    if origin is not None:
        summary['from'] = {'workdir': origin['workdir'], 'step': origin['step']}
    shows_progress = config.progress and hosts.is_first
    # Weights that another run trained are exported even if this one did not change them.
    left_out = [] if origin is not None else unchanged
    exporter = identity.export_texts(state[identity.STATE_FIELD])
    _export(config, workdir, context, engine, shows_progress, left_out, exporter)
    if hosts.is_first:
        atomic.write_text(workdir / 'summary.json', summary_json(summary))
        report_path = report_builder.write_report(workdir)
        atomic.write_text(workdir / run_folder.REPORTED_FILE, f'{state["cursor"]}\n')
        print(table)
        print(f'{summary["seconds"]:.0f} s; the report is {report_path}')
        print(next_step.advice(workdir, engine.recipe.evaluated_role))
    return summary


def _export(
    config,
    workdir: pathlib.Path,
    context: build.RunContext,
    engine: Engine,
    shows_progress: bool,
    unchanged: list[str],
    exporter: dict[str, str],
) -> None:
    """Writes the weights of each policy to the folder workdir/policy/<name>, if that does not exist.

    Args:
      unchanged: policies that are not exported, because their weights are those of the start.
      exporter: a file that names the run (`identity.export_texts`).
    """
    hosts = context.rollouts.hosts
    for name, learner in engine.learners.items():
        if name in unchanged:
            if hosts.is_first:
                print(f'policy {name} has the weights of the start and is not exported')
            continue
        folder = workdir / 'policy' / name
        # The first process decides for all, because `save` is a collective call. A folder that exists is complete
        # (`hf.save` renames it) and current (`run_folder.remove_exports`).
        exists = hosts.gather(folder.exists())[0]
        if exists:
            continue
        with progress.clock(f'export {name}', shows_progress):
            roles = _roles_of(context, engine, name)
            card_arguments = (config, context.folder, roles, context.rollouts.prompts, name)
            texts = export_texts(*card_arguments) | exporter
            card = model_card(*card_arguments, is_adapter=True)
            adapter_texts = {'README.md': card} | exporter
            write_policy(config, context, learner, texts, adapter_texts, folder)


def _unchanged_policies(
    engine: Engine, initial_weights: dict[str, list[int]], origin: Json | None
) -> list[str]:
    """Returns the names of the learners whose weights have the fingerprint of the initial weights.

    Args:
      initial_weights: their fingerprints before the first step of a run without an origin.
      origin: `branch.read_record`.
    """
    unchanged = []
    for name, learner in engine.learners.items():
        first_weights = origin['weights'][name] if origin else initial_weights[name]
        if weights_fingerprint(learner.params, learner.mesh) == first_weights:
            unchanged.append(name)
    return unchanged


def _roles_of(context: build.RunContext, engine: Engine, weights: str) -> list[Role]:
    """Returns the roles that train a policy, the evaluated one first."""
    roles: list[Role] = []
    for role, name in engine.weights_of.items():
        if name == weights:
            position = 0 if role == engine.recipe.evaluated_role else len(roles)
            roles.insert(position, context.rollouts.roles[role])
    return roles
