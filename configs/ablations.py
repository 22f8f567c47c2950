"""The ablation rows of the five papers, and baselines that are only settings, by name.

    zeroplay train --config=configs/ablations.py:drzero/grpo --workdir=runs/grpo
    zeroplay train --config=configs/ablations.py:drzero/grpo:mini --workdir=runs/grpo_mini

A name is SYSTEM/ROW; `:mini` behind it shrinks the system as configs/SYSTEM.py:mini does. Every row below says which
fields differ from zeroplay_jax.configs/SYSTEM.py, and where it comes from.
"""

import importlib

from zeroplay_jax.configs.scope import TYPES
from zeroplay_jax.objectives.registry import did_you_mean

# Settings of a role by estimator, see `_of`.
_GRPO = {
    'baseline': 'mean',
    'scale': 'none',
    'samples': 5,
    'loss': 'token_pg',
    'aggregation': 'seq_mean_token_mean',
}
_REINFORCE = {'baseline': 'none', 'scale': 'none', 'samples': 1, 'loss': 'reinforce'}
# Mean over rollouts of the sum over tokens, in one update, without a KL term.
_SUM = {'aggregation': 'seq_mean_token_sum', 'minibatches': 1, 'kl_coef': 0.0}
# What the rows of SQLM and R-Zero have in common: questions without a document, in groups of a prompt, labelled by the
# solver's majority, and no reward for form. (A question without its form is not asked, and earns nothing.)
_MAJORITY = {
    'drzero.labels': 'majority',
    'drzero.group': 'prompt',
    'proposer.samples': 4,
    'schedule.initial_document': False,
    'reward.format_weight': 0.0,
}
# A ratio per token and a mean over tokens, as in DAPO, and what Search-R1 changes of it.
_TOKEN_RATIO = {'loss': 'token_pg', 'aggregation': 'token', 'clip_low': 0.2}
_SEARCH_R1 = _TOKEN_RATIO | {'filter_groups': False, 'clip_high': 0.2, 'kl_coef': 0.001}
_FROM_MEMORY = '''
[solver]
user = """
Think about the question inside <think> and </think>, then give only the short answer between <answer> and </answer>.

Question: {question}"""
'''
_JUDGE_CHECKER = {'ssp.checker': 'judge', 'judge.kind': 'endpoint'}
# Lengths for models that think, in slots as long as π-Play's student (table 6).
_LONG = {
    'rollout.turn_tokens': 1024,
    'sampler.context': 8192,
    'micro.tokens': 8192,
    'privileged.tokens': 12288,
}
# Qwen3-8B with its own call syntax; thoughts are cut after their turn.
_QWEN3 = {
    'policy.path': 'checkpoints/Qwen3-8B',
    'tools.syntax': 'qwen',
    'rollout.drop_thinking': True,
}


def _of(role, settings):
    """Returns the settings of a role as dotted fields of the config."""
    return {f'{role}.{name}': value for name, value in settings.items()}


def _judge(**models):
    """Returns the settings of a run of Qwen3-8B with a served judge; `models`: fields of config.judge that differ."""
    return {
        **_QWEN3,
        'judge.kind': 'endpoint',
        'judge.model': 'Qwen3-8B',
        'judge.timeout': 600.0,
        **_of('judge', models),
    }


ROWS = {
    # SSP: role ablation, estimators (proposer–solver), batch strategies, answerability check, penalty, released code.
    'ssp/solver_only': {
        'proposer.train_iterations': 0,
        'weights': 'separate',
    },  # the proposer stays as it was
    # Weights stay shared: the paper's "fixed" solver changes, too, by what the proposer learns (figure 3, table 2).
    'ssp/proposer_only': {'solver.train_iterations': 0},
    'ssp/reinforce_reinforce': _of('solver', _REINFORCE | _SUM),
    'ssp/grpo_reinforce': _of('proposer', _GRPO) | _of('solver', _REINFORCE | _SUM),
    'ssp/grpo_grpo': _of('proposer', _GRPO),
    'ssp/dummy_padding': {'ssp.fill': 'pad'},
    'ssp/dynamic_resampling': {'ssp.fill': 'resample'},
    'ssp/replay_full': {'ssp.fill': 'replay_full'},
    'ssp/no_check': {'ssp.answerability_check': False},
    'ssp/noise_0': {'ssp.noise': 0},
    'ssp/noise_1': {'ssp.noise': 1},
    'ssp/noise_7': {'ssp.noise': 7},
    'ssp/penalty': {'ssp.invalid_reward': -0.1, 'ssp.fill': 'replay_full'},
    'ssp/code': {
        'ssp.first_update': 'proposer',
        'ssp.code_gate': True,
        'ssp.strict_format': False,
        **_JUDGE_CHECKER,
        'solver.scale': 'std',
        'solver.aggregation': 'token',
        'proposer.loss': 'token_pg',
        'proposer.aggregation': 'token',
        'proposer.kl_coef': 0.01,
        'proposer.clip_low': 0.2,
        'proposer.clip_high': 0.285,
        'shared_optimizer': True,
    },
    # The code asks a server in the answerability check, algorithm 1 the policy.
    'ssp/judge_checker': _JUDGE_CHECKER,
    # The start from R-Search's checkpoint, which also writes <original_evidence>: its prompt (appendix D) goes into
    # config.prompts. From the other instruction-tuned starts policy.path alone changes; Qwen3 thinks.
    'ssp/r_search': {'tools.syntax': 'r_search'},
    'ssp/qwen3_8b': _QWEN3,
    # Dr. Zero: hop ratio, estimator; table 7, whose rows have one iteration and are compared with 'iterations_1';
    # iterations, baselines, released code.
    'drzero/hops_1111': {'schedule.hop_ratio': (1, 1, 1, 1)},
    'drzero/hops_2111': {'schedule.hop_ratio': (2, 1, 1, 1)},
    'drzero/grpo': {'drzero.group': 'prompt', 'proposer.samples': 4, 'reward.solves': 4},
    'drzero/steps_100': {'proposer.steps': 100, 'solver.steps': 100, 'schedule.iterations': 1},
    'drzero/no_format': {'reward.format_weight': 0.0, 'schedule.iterations': 1},
    'drzero/parabolic': {'reward.difficulty': 'parabolic', 'schedule.iterations': 1},
    'drzero/no_document': {'schedule.initial_document': False, 'schedule.iterations': 1},
    'drzero/iterations_1': {'schedule.iterations': 1},
    'drzero/iterations_2': {'schedule.iterations': 2},
    # The baselines SQLM* and R-Zero* of table 2, as read here: recipes/README.md says what is and what is not theirs.
    # One policy in both roles, because the paper says of R-Zero and Dr. Zero alone that they have two.
    'drzero/sqlm': {**_MAJORITY, 'reward.difficulty': 'solvable', 'weights': 'shared'},
    # 10 answers per question, trained on where 3 to 7 agree.
    'drzero/r_zero': {
        **_MAJORITY,
        'reward.difficulty': 'triangle',
        'reward.solves': 10,
        'pool.measure': 10,
        'pool.window': (0.3, 0.7),
    },
    'drzero/code': {
        'proposer.singleton': 'raw',
        'solver.singleton': 'raw',
        'drzero.separate_format': False,
    },
    # π-Play: what the teacher sees, the weight of distillation (alpha_qwen3: that of Qwen3-4B and Qwen3-8B; 0.0 is
    # no_distillation), K, direction (SDPO's code: jsd), teacher's rate.
    'piplay/privileged_none': {'privileged.kind': 'none'},
    'piplay/privileged_answer': {'privileged.kind': 'answer'},
    'piplay/privileged_answer_hop': {'privileged.kind': 'answer_hop'},
    'piplay/privileged_half': {'privileged.kind': 'qcp_partial'},
    'piplay/no_distillation': {'solver.distill_top_k': 0},
    **{f'piplay/alpha_{a}': {'solver.distill_coef': (a,)} for a in (0.1, 0.05, 0.03, 0.01, 0.005)},
    'piplay/alpha_qwen3': {
        'solver.distill_coef': (0.03, 0.003, 0.002),
        **_QWEN3,
        **_LONG,
        'policy.path': 'checkpoints/Qwen3-4B',
    },
    **{f'piplay/top_{k}': {'solver.distill_top_k': k} for k in (25, 50, 100, 200)},
    'piplay/jsd': {'solver.distill_kind': 'jsd'},
    'piplay/fixed_teacher': {'solver.distill_ema_rate': 0.0},
    'piplay/iterations_1': {'schedule.iterations': 1},
    'piplay/iterations_2': {'schedule.iterations': 2},
    # DSPO: without its filter it is GSPO, with a token ratio DAPO; Search-R1's GRPO and PPO have neither, and are
    # trained with DSPO's reward, as in the paper. PPO has the single rollout per question of Search-R1's script, whose
    # rates are the defaults.
    'dspo/gspo': {'solver.filter_groups': False},
    'dspo/dapo': _of('solver', _TOKEN_RATIO | {'kl_coef': 0.0, 'clip_high': 0.28}),
    'dspo/search_r1_grpo': _of('solver', _SEARCH_R1),
    'dspo/search_r1_ppo': {
        **_of('solver', _SEARCH_R1 | {'baseline': 'value', 'scale': 'batch', 'samples': 1}),
        'solver.batch': 512,
        'solver.minibatches': 2,
    },
    # R1, without search (Dr. Zero, table 1). That table's supervised fine-tuning is no part of this package.
    'dspo/r1_grpo': {
        **_of('solver', _SEARCH_R1),
        'tools.names': (),
        'prompts': _FROM_MEMORY,
        'reward.answer': 'em',
    },
    'dspo/gmpo': _of('solver', {'loss': 'geometric_pg', 'clip_low': 0.4, 'clip_high': 0.4}),
    'dspo/dense': {
        'retrieval.path': 'indexes/wiki18_e5'
    },  # in place of BM25; the size of the model is policy.path
    'dspo/drop_surplus': {'solver.surplus': 'drop'},
    'dspo/exact_match': {'reward.answer': 'em'},
    # SCOPE: types of task, gates, length factor, frozen challenger, iterations, window, released code.
    'scope/no_gates': {'scope.gates': False},
    # The gate before it read the source alone: tasks about the passages found pass.
    'scope/relevant_to_evidence': {'scope.relevant_to': 'evidence'},
    'scope/no_length_factor': {'scope.length_factor': False},
    'scope/frozen_challenger': {'proposer.train_iterations': 1},
    **{f'scope/iterations_{n}': {'schedule.iterations': n} for n in (4, 5, 6)},
    # Compared with scope/qwen3_8b, which has all four types.
    **{
        f'scope/without_{kind}': {**_QWEN3, 'inputs.types': tuple(k for k in TYPES if k != kind)}
        for kind in TYPES
    },
    'scope/olmo': {'tools.syntax': 'olmo'},
    # GRPO on given tasks and rubrics.
    'scope/given_tasks': {'inputs.tasks': 'data/tasks.jsonl'},
    # The paper's ablations are of Qwen3-8B, ours of the config's model: this row has the other one, which is its own
    # judge. It is also what the sizes of the judge (figure 4) are compared with.
    'scope/qwen3_8b': _QWEN3,
    'scope/grader_4b': _judge(grade_model='Qwen3-4B'),
    'scope/grader_32b': _judge(grade_model='Qwen3-32B'),
    'scope/rubric_writer_4b': _judge(rubric_model='Qwen3-4B'),
    'scope/rubric_writer_32b': _judge(rubric_model='Qwen3-32B'),
    'scope/per_turn': {'rollout.drop_thinking': True},
    'scope/no_window': {'pool.window': (0.0, 1.0)},
    'scope/code': {
        'scope.code_format': True,
        'solver.clip_high': 0.28,
        'judge.rubrics': (3, 10),
    },
}


def get_config(name=''):
    """Returns the config of a row, such as 'drzero/grpo' or 'drzero/grpo:mini'."""
    row, _, variant = name.partition(':')
    if row not in ROWS:
        system = row.split('/')[0] + '/'
        choices = [name for name in ROWS if name.startswith(system)] or list(ROWS)
        raise ValueError(
            f'no ablation {row!r}{did_you_mean(row, choices)}; there are {", ".join(choices)}'
        )
    config = importlib.import_module(f'zeroplay_jax.configs.{row.split("/")[0]}').get_config(
        variant
    )
    settings = dict(ROWS[row])
    if variant:
        # A small run keeps its numbers of steps, its batches, and its policy with syntax and prompts that it knows.
        kept = ['policy.path', 'tools.syntax', 'prompts']
        kept += [field for field in settings if field.endswith(('.batch', '.steps'))]
        if 'policy.path' in settings:
            kept += ['rollout.drop_thinking', *_LONG]
        settings = {field: value for field, value in settings.items() if field not in kept}
    config.update_from_flattened_dict(settings)
    return config
